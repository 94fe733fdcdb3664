"""Tiles of rows: loads from memory, and the epilogue that stores the results of attention."""

from __future__ import annotations

import triton
import triton.language as tl

from qflash.triton.mask import cut_keys, cut_tile, sees
from qflash.triton.softmax import finish
from qflash.triton.values import add_seen


def padded(head_dim: int, least: int = 16) -> int:
    """The channels of a tile: a power of two, at least 16 for tl.dot, 32 for int8."""
    channels = least
    while channels < head_dim:
        channels *= 2
    return channels


def has_hopper_memory(arch: int) -> bool:
    """Whether a block may use 227 KB of shared memory, as on Hopper and data-center Blackwell; otherwise it is 99."""
    return 90 <= arch < 120


@triton.jit
def load_rows(rows, present, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, ALL: tl.constexpr):
    """A tile of rows whose first channels are at `rows`, [n, 1]; 0 for rows that are not present. ALL: all are."""
    channel = tl.arange(0, BLOCK_D)[None, :]
    if ALL and HEAD_DIM == BLOCK_D:
        tile = tl.load(rows + channel)
    elif ALL:
        tile = tl.load(rows + channel, mask=channel < HEAD_DIM, other=0)
    elif HEAD_DIM == BLOCK_D:
        tile = tl.load(rows + channel, mask=present, other=0)
    else:
        tile = tl.load(rows + channel, mask=present & (channel < HEAD_DIM), other=0)
    return tile


@triton.jit
def store_rows(
    acc, m2, l, bias, row, row_present, row_begin, row_end, sink,
    out, out_stride_t, lse, has_lse, v, v_stride_t, len_k, nonfinite, begin, whole_begin, whole_end, end,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, SINKS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Divide and store the rows of a tile, and their lse; then add the nonfinite values of V that they see in tiles
    that were cut. m2, l: of the online softmax, in base 2; bias: added to lse. out, lse and v: the start of the head's
    rows of the sequence."""
    seen_any = row_begin < row_end
    inverse, row_lse = finish(m2, l, bias, seen_any, sink, SINKS)
    channel = tl.arange(0, BLOCK_D)[None, :]
    result = tl.where(seen_any[:, None], acc * inverse[:, None], 0.0).to(out.dtype.element_ty)
    rows = out + row[:, None] * out_stride_t
    tl.store(rows + channel, result, mask=row_present & (channel < HEAD_DIM))
    tl.store(lse + row[:, None], row_lse[:, None], mask=row_present & (has_lse != 0))
    if tl.max(nonfinite, 0) != 0:
        tl.debug_barrier()  # other threads than those that wrote out read it again
        for done in tl.range(0, cut_keys(begin, whole_begin, whole_end, end), BLOCK_N, num_stages=1):
            key = cut_tile(done, begin, whole_begin, whole_end) + tl.arange(0, BLOCK_N)
            values = v + key[:, None] * v_stride_t
            visible = sees(key, row_begin, row_end)
            add_seen(rows, values, row_present, (key < len_k)[:, None], visible, HEAD_DIM, PRECISION)
