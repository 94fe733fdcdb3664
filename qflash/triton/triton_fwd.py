"""triton_fwd: FlashAttention in Triton. out = softmax(scale q k^T) v for a tile of rows of one head.

    one program = one tile of BLOCK_M rows of a head; the main loop loads keys in tiles of BLOCK_N

      q  [M, D] --- stays ---.
      k  [N, D] -------------'--> S = q k^T --> mask --> online softmax --> P ---.
      v  [N, D] -----------------------------------------------------------------'--> O += P v

Two loops: whole tiles without a mask, then those that are cut by an edge or by the end of the keys. Which threads load,
what is in shared memory and how far loads are prefetched is up to Triton: a pass specifies the number of warps and of
stages, from a static table, and nothing is tuned at run time. Programs of a head are neighbours, which share its keys
in L2, and start with the last rows, which see most keys if the mask is causal.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from qflash.call.spec import Spec
from qflash.triton import rope
from qflash.triton.launches import TYPES, Choice, Launches, Pass, size, vectors
from qflash.triton.mask import cut_keys, cut_tile, key_range, sees, tiles_of_rows
from qflash.triton.rows import has_hopper_memory, load_rows, padded, store_rows
from qflash.triton.sequence import fill_unserved_rows, read_sequence
from qflash.triton.softmax import scores_of, weigh
from qflash.triton.values import add_few, add_weighted, finite_of

Tile = tuple[int, int, int, int]  # rows, keys, warps, stages
# By the number of channels that heads are padded to, for Hopper and for earlier GPUs. With these tiles there are almost
# no spills: tests/compile/test_triton.py compiles them. float16, which also multiplies the remainder of weights in
# tiles that are cut, needs smaller ones. bench/triton_tiles.py times other tiles against them.
HOPPER: dict[str, dict[int, Tile]] = {
    "bfloat16": {
        16: (128, 64, 4, 3), 32: (128, 64, 4, 3), 64: (128, 64, 8, 3), 128: (128, 64, 8, 3), 256: (64, 32, 8, 3),
    },
    "float16": {
        16: (128, 64, 4, 3), 32: (128, 64, 4, 3), 64: (128, 64, 8, 3), 128: (128, 64, 8, 3), 256: (128, 16, 8, 2),
    },
}  # fmt: skip
AMPERE: dict[str, dict[int, Tile]] = {
    "bfloat16": {
        16: (64, 64, 4, 3), 32: (128, 64, 4, 3), 64: (128, 64, 8, 3), 128: (128, 32, 8, 3), 256: (64, 16, 8, 2),
    },
    "float16": {
        16: (64, 64, 4, 3), 32: (128, 64, 4, 3), 64: (128, 32, 8, 3), 128: (128, 16, 8, 3), 256: (64, 16, 8, 2),
    },
}  # fmt: skip
FLOATS: dict[int, Tile] = {
    16: (64, 32, 4, 2),
    32: (64, 32, 4, 1),
    64: (32, 16, 8, 1),
    128: (32, 16, 8, 1),
    256: (16, 16, 4, 1),
}
# Rows that do not consist of whole vectors are loaded element by element, each with an address in registers.
ODD_ROWS = {16: (64, 32, 4, 1), 32: (64, 32, 4, 1), 64: (64, 32, 8, 1), 128: (32, 32, 8, 1), 256: (16, 16, 8, 1)}


@triton.jit
def qf_triton_fwd_kernel(
    q, q_stride_b, q_stride_t, q_stride_h, rotated_q,
    kv_k, kv_k_stride_b, kv_k_stride_t, kv_k_stride_h, rotated_k,
    kv_v, kv_v_stride_b, kv_v_stride_t, kv_v_stride_h,
    out, out_stride_b, out_stride_t, out_stride_h,
    lse, has_lse, lse_stride_b, lse_stride_h,
    batch, q_len, k_len, q_heads, kv_heads, total_q, total_k, cu_seqlens_q, cu_seqlens_k, kv_lens,
    window_left, window_right, scale, softcap, sinks,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, ROW: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    PACKED: tl.constexpr, KV_LENS: tl.constexpr, WINDOW: tl.constexpr, PLAIN: tl.constexpr, SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr, ROPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    tiles = tl.maximum(tl.cdiv(q_len, BLOCK_M), 1)
    tile = tiles - 1 - tl.program_id(0) % tiles
    head = tl.program_id(0) // tiles % q_heads
    b = tl.program_id(0) // tiles // q_heads
    kv_head = head // (q_heads // kv_heads)
    b64 = b.to(tl.int64)
    out += b64 * out_stride_b + head * out_stride_h
    lse += b64 * lse_stride_b + head * lse_stride_h
    if ROPE:  # [batch, length, heads, ROW], contiguous
        q = rotated_q
        q_stride_h = tl.full([], ROW, tl.int64)
        q_stride_t = q_stride_h * q_heads
        q_stride_b = q_stride_t * (0 if PACKED else q_len)
        kv_k = rotated_k
        kv_k_stride_h = tl.full([], ROW, tl.int64)
        kv_k_stride_t = kv_k_stride_h * kv_heads
        kv_k_stride_b = kv_k_stride_t * (0 if PACKED else k_len)

    q0, k0, len_q, len_k, good = read_sequence(
        b, batch, q_len, k_len, total_q, total_k, cu_seqlens_q, cu_seqlens_k, kv_lens, PACKED, KV_LENS
    )
    if PACKED or KV_LENS:
        fill_unserved_rows(
            out, out_stride_t, lse, has_lse, q0, len_q, good, b, batch, total_q, cu_seqlens_q, tile, tiles,
            PACKED, HEAD_DIM, BLOCK_M, BLOCK_D,
        )  # fmt: skip
        if (good == 0) | (tile * BLOCK_M >= len_q):
            return

    row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    row_present = (row < len_q)[:, None]
    q_rows = q + b64 * q_stride_b + head * q_stride_h + (q0 + row)[:, None] * q_stride_t
    q_tile = load_rows(q_rows, row_present, HEAD_DIM, BLOCK_D, False)
    k_base = kv_k + b64 * kv_k_stride_b + kv_head * kv_k_stride_h + k0 * kv_k_stride_t
    v_base = kv_v + b64 * kv_v_stride_b + kv_head * kv_v_stride_h + k0 * kv_v_stride_t
    last = tl.minimum(tile * BLOCK_M + BLOCK_M, len_q) - 1
    begin, whole_begin, whole_end, end = tiles_of_rows(
        tile * BLOCK_M, last, len_q, len_k, window_left, window_right, 0, len_k, BLOCK_N, WINDOW
    )
    row_begin, row_end = key_range(row, len_q, len_k, window_left, window_right, WINDOW)

    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    factor = scores_of(l, scale, softcap, PLAIN, False)[1]
    for first in range(whole_begin, whole_end, BLOCK_N):
        key = first + tl.arange(0, BLOCK_N)
        k_tile = load_rows(k_base + key[:, None] * kv_k_stride_t, None, HEAD_DIM, BLOCK_D, True)
        s = scores_of(tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION), scale, softcap, PLAIN, SOFTCAP)[0]
        weight, rescale, m, l = weigh(s, factor, m, l)
        v_tile = load_rows(v_base + key[:, None] * kv_v_stride_t, None, HEAD_DIM, BLOCK_D, True)
        acc = add_weighted(acc, rescale, weight, v_tile, PRECISION)

    # Tiles that are cut, those of the first part and then those of the last: the loop skips the whole tiles.
    nonfinite = tl.zeros([BLOCK_N], tl.int32)
    for done in tl.range(0, cut_keys(begin, whole_begin, whole_end, end), BLOCK_N, num_stages=1):
        key = cut_tile(done, begin, whole_begin, whole_end) + tl.arange(0, BLOCK_N)
        key_present = (key < len_k)[:, None]
        k_tile = load_rows(k_base + key[:, None] * kv_k_stride_t, key_present, HEAD_DIM, BLOCK_D, False)
        s = scores_of(tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION), scale, softcap, PLAIN, SOFTCAP)[0]
        s = tl.where(sees(key, row_begin, row_end), s, float("-inf"))
        weight, rescale, m, l = weigh(s, factor, m, l)
        v_tile = load_rows(v_base + key[:, None] * kv_v_stride_t, key_present, HEAD_DIM, BLOCK_D, False)
        v_tile, found = finite_of(v_tile)
        nonfinite = tl.maximum(nonfinite, found)
        acc = add_few(acc * rescale[:, None], weight, v_tile, PRECISION)

    sink = tl.load(sinks + head) if SINKS else 0.0
    store_rows(
        acc, m * factor, l, 0.0, row, row_present, row_begin, row_end, sink,
        out + q0 * out_stride_t, out_stride_t, lse + q0, has_lse, v_base, kv_v_stride_t, len_k,
        nonfinite, begin, whole_begin, whole_end, end, HEAD_DIM, BLOCK_D, BLOCK_N, SINKS, PRECISION,
    )  # fmt: skip


def tile_of(spec: Spec) -> Tile:
    """The tile of calls whose rows consist of whole vectors."""
    table = FLOATS if spec.dtype == "float32" else (HOPPER if has_hopper_memory(spec.arch) else AMPERE)[spec.dtype]
    return table[padded(spec.head_dim)]


def attend(spec: Spec, tile: Tile) -> Pass:
    """The pass of attention itself, with such tiles."""
    block_m, block_n, num_warps, num_stages = tile
    constants: dict[str, Any] = {
        "HEAD_DIM": spec.head_dim, "BLOCK_D": padded(spec.head_dim), "ROW": rope.row_of(spec),
        "BLOCK_M": block_m, "BLOCK_N": block_n, "PACKED": spec.packed, "KV_LENS": spec.kv_lens,
        "WINDOW": spec.window, "PLAIN": spec.plain_scores, "SOFTCAP": spec.softcap, "SINKS": spec.sinks,
        "ROPE": spec.rope is not None, "PRECISION": "ieee",
    }  # fmt: skip
    grid = size("q_len").ceil_div(block_m).at_least(1) * size("q_heads") * size("batch")
    return Pass(qf_triton_fwd_kernel, grid, constants, num_warps, num_stages)


def launches(spec: Spec, tile: Tile | None = None) -> Launches:
    """What a call of `spec` launches. tile: replaces the table's."""
    block_d = padded(spec.head_dim)
    element = TYPES[spec.dtype]
    types = {"q": element, "kv_k": element, "kv_v": element, "out": element, "lse": "fp32", "sinks": "fp32"}
    types |= {"cu_seqlens_q": "i32", "cu_seqlens_k": "i32", "kv_lens": "i32", "rope_cos": "fp32", "rope_sin": "fp32"}
    types |= {"rope_positions_q": "i32", "rope_positions_k": "i32"}
    whole = vectors(spec.dtype, "q", "kv_k", "kv_v", "out")
    rotate = rope.passes(spec, block_d)
    choices = (
        Choice((*rotate, attend(spec, tile or tile_of(spec))), (), whole),
        Choice((*rotate, attend(spec, ODD_ROWS[block_d]))),
    )
    return Launches("QfAttnParams", types, choices, rope.regions(spec))
