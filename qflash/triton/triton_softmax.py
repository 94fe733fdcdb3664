"""triton_softmax: out[i] = softmax(scale x[i]) for every row of a matrix.

Rows of up to 16384 columns stay in registers: they are read once and written once. Longer ones are read twice, the
second time mostly from L2. Tiles come from a static table, without an autotuner; a call uses the first tile that its
rows fit in.
"""

from __future__ import annotations

import triton
import triton.language as tl

from qflash.call.spec import Spec
from qflash.triton.launches import TYPES, VECTOR_BYTES, Choice, Launches, Pass, size
from qflash.triton.numbers import LARGEST, LOG2E, rescale_of

# (columns of a tile, its rows, warps): 16 elements per thread, 32 in the widest
TILES = ((64, 32, 4), (256, 8, 4), (1024, 2, 4), (4096, 1, 8), (16384, 1, 16))
LONG_TILE = (8192, 8)  # columns per iteration over a longer row, warps


@triton.jit
def score_map(scale):
    """(x_factor, factor): weights are 2^((x_factor x - max) factor). The difference is computed first, so that no
    finite x overflows. If scale is 0, x becomes 0, or NaN if it was nonfinite; if scale is so small that a difference
    beyond the largest float would still matter, x is halved."""
    magnitude = tl.abs(scale)
    x_factor = tl.where(magnitude < 7.8886090522101181e-31, 0.5, 1.0)  # 2^-100
    factor = tl.minimum(magnitude * LOG2E / x_factor, LARGEST)
    x_factor = tl.where(scale < 0, -x_factor, x_factor)
    return tl.where(scale == 0, 0.0, x_factor), tl.where(scale == 0, 1.0, factor)


@triton.jit
def load_scores(x, columns, COLUMNS, x_factor):
    """The scores at `columns` of rows that begin at x, -inf past their end."""
    present = columns < COLUMNS
    return tl.where(present, tl.load(x + columns, mask=present, other=0.0).to(tl.float32) * x_factor, float("-inf"))


@triton.jit
def qf_triton_softmax_kernel(
    x, x_stride, out, out_stride, rows, columns, scale, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr
):
    x_factor, factor = score_map(scale)
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    column = tl.arange(0, BLOCK_COLUMNS)[None, :]
    present = (row < rows) & (column < columns)
    s = tl.load(x + row * x_stride + column, mask=present, other=0.0).to(tl.float32) * x_factor
    s = tl.where(column < columns, s, float("-inf"))
    weight = tl.exp2((s - tl.max(s, 1)[:, None]) * factor)
    weight = weight / tl.sum(weight, 1)[:, None]
    tl.store(out + row * out_stride + column, weight.to(out.dtype.element_ty), mask=present)


@triton.jit
def qf_triton_softmax_long_kernel(x, x_stride, out, out_stride, columns, scale, BLOCK_COLUMNS: tl.constexpr):
    x_factor, factor = score_map(scale)
    row = tl.program_id(0).to(tl.int64)
    x += row * x_stride
    out += row * out_stride
    column = tl.arange(0, BLOCK_COLUMNS)
    # Every column of the tile has its own maximum and sum: one reduction at the end, not one per iteration.
    m = tl.full([BLOCK_COLUMNS], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_COLUMNS], tl.float32)
    for first in range(0, columns, BLOCK_COLUMNS):
        s = load_scores(x, first + column, columns, x_factor)
        m_new = tl.maximum(m, s)
        reference = tl.where(m_new == float("-inf"), 0.0, m_new)
        l = l * rescale_of(m, m_new, factor) + tl.exp2((s - reference) * factor)
        m = m_new
    m_row = tl.max(m, 0)
    total = tl.sum(l * rescale_of(m, m_row, factor), 0)
    reference = tl.where(m_row == float("-inf"), 0.0, m_row)
    for first in range(0, columns, BLOCK_COLUMNS):
        s = load_scores(x, first + column, columns, x_factor)
        weight = tl.exp2((s - reference) * factor) / total
        tl.store(out + first + column, weight.to(out.dtype.element_ty), mask=first + column < columns)


def launches(spec: Spec) -> Launches:
    """What a call of `spec` launches."""
    element = TYPES[spec.dtype]
    vector = VECTOR_BYTES // (4 if spec.dtype == "float32" else 2)
    whole = {"x": VECTOR_BYTES, "out": VECTOR_BYTES, "x_stride": vector, "out_stride": vector, "columns": vector}
    choices = []
    for block_columns, block_rows, num_warps in TILES:
        constants = {"BLOCK_ROWS": block_rows, "BLOCK_COLUMNS": block_columns}
        one = Pass(qf_triton_softmax_kernel, size("rows").ceil_div(block_rows), constants, num_warps)
        fits = size("columns").up_to(block_columns)
        choices += [Choice((one,), (fits,), multiples) for multiples in (whole, {})]
    block_columns, num_warps = LONG_TILE
    long = Pass(qf_triton_softmax_long_kernel, size("rows"), {"BLOCK_COLUMNS": block_columns}, num_warps)
    choices += [Choice((long,), (), multiples) for multiples in (whole, {})]
    return Launches("QfRowsParams", {"x": element, "out": element}, tuple(choices))
