"""triton_linear: activation(x w + bias) + residual for a tile of the result, in 16 bits or in INT8 with scales.

    one program = one tile of M x N; the main loop loads slabs of k

      x [M, K] ---.
      w [K, N] ---'--> sums --> scales, bias --> activation --> residual --> out

SwiGLU has a second weight and a second tile of accumulators. Programs traverse the tiles in bands of 8 rows of tiles,
so that concurrent programs share slabs of x and of w in L2. Tiles come from a static table by the number of rows.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from qflash.call.spec import Spec
from qflash.triton.launches import TYPES, VECTOR_BYTES, Choice, Launches, Pass, Size, size
from qflash.triton.numbers import LOG2E
from qflash.triton.rows import has_hopper_memory

BAND = 8  # rows of tiles
# (maximum number of rows, tile: M, N, K, warps, stages); the bytes of x and w determine how much of K a slab has
HOPPER = ((16, (16, 64, 128, 4, 4)), (64, (64, 128, 64, 4, 4)), (None, (128, 256, 64, 8, 3)))
AMPERE = ((16, (16, 64, 64, 4, 4)), (64, (64, 64, 64, 4, 3)), (None, (128, 128, 32, 8, 3)))
ODD_ROWS = (32, 64, 32, 4, 1)  # rows that do not consist of whole vectors, and any other layout


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp2(-x * LOG2E))


@triton.jit
def activated(h, ACTIVATION: tl.constexpr):
    """The activation of h; also of SwiGLU's gate."""
    if ACTIVATION == "gelu":
        h = h * (0.5 + 0.5 * tl.erf(h * 0.70710678118654752))
    elif ACTIVATION == "gelu_tanh":  # (1 + tanh y) / 2 is the sigmoid of 2 y
        h = h * sigmoid(1.5957691216057307 * (h + 0.044715 * h * h * h))
    elif ACTIVATION != "":
        h = h * sigmoid(h)
    return h


@triton.jit
def load_weight(w, stride_k, stride_n, at_k, column, k, n, ALONG_K: tl.constexpr, WHOLE: tl.constexpr):
    """A slab [K, N] of a weight. WHOLE: one of its strides is 1, the one that ALONG_K specifies."""
    if WHOLE:
        stride_k = 1 if ALONG_K else stride_k
        stride_n = stride_n if ALONG_K else 1
    if ALONG_K:
        there = (at_k < k)[None, :] & (column < n)[:, None]
        slab = tl.load(w + column[:, None] * stride_n + at_k[None, :] * stride_k, mask=there, other=0)
        slab = tl.trans(slab)
    else:
        there = (at_k < k)[:, None] & (column < n)[None, :]
        slab = tl.load(w + at_k[:, None] * stride_k + column[None, :] * stride_n, mask=there, other=0)
    return slab


@triton.jit
def of_sums(
    sums, x_scale, w_scale, has_w_scale, w_scale_stride, bias, has_bias, column, n, INT8: tl.constexpr
):  # fmt: skip
    """The argument of the activation. Integers are scaled as in every engine: fma(sum x_scale, w_scale, bias)."""
    there = column < n
    added = tl.load(bias + column, mask=there & (has_bias != 0), other=0.0).to(tl.float32)[None, :]
    if INT8:
        scale = tl.load(w_scale + column * w_scale_stride, mask=there & (has_w_scale != 0), other=1.0)[None, :]
        scaled = sums.to(tl.float32) * x_scale
        shape: tl.constexpr = sums.shape
        h = tl.fma(scaled, tl.broadcast_to(scale, shape), tl.broadcast_to(added, shape))
    else:
        h = sums + added
    return h


@triton.jit
def half_of(sums, AT: tl.constexpr):
    """The left columns of a tile, or the right ones."""
    M: tl.constexpr = sums.shape[0]
    N: tl.constexpr = sums.shape[1]
    left, right = tl.split(tl.permute(tl.reshape(sums, [M, 2, N // 2]), [0, 2, 1]))
    return left if AT == 0 else right


@triton.jit
def part_of(sums, AT: tl.constexpr, PARTS: tl.constexpr):
    """One part of its columns, which are cut into 1 or 4 parts."""
    if PARTS == 4:
        sums = half_of(half_of(sums, AT // 2), AT % 2)
    return sums


@triton.jit
def store_tile(
    sums, sums_up, row, column, m, n,
    x_scale, has_x_scale, x_scale_stride, w_scale, has_w_scale, w_scale_stride, up_scale, has_up_scale, up_scale_stride,
    bias, has_bias, up_bias, has_up_bias, residual, has_residual, residual_stride_m,
    out, out_stride_m, pre, has_pre, pre_up, has_pre_up, INT8: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """The epilogue: from the accumulators of a tile to the result."""
    there = (row < m)[:, None] & (column < n)[None, :]
    at = row[:, None] * out_stride_m + column[None, :]
    if out.dtype.element_ty == tl.int32:
        tl.store(out + at, sums, mask=there)
    else:
        of_rows = tl.load(x_scale + row * x_scale_stride, mask=(row < m) & (has_x_scale != 0), other=1.0)[:, None]
        h = of_sums(sums, of_rows, w_scale, has_w_scale, w_scale_stride, bias, has_bias, column, n, INT8)
        if has_pre != 0:
            tl.store(pre + row[:, None] * n + column[None, :], h.to(out.dtype.element_ty), mask=there)
        h = activated(h, ACTIVATION)
        if ACTIVATION == "swiglu":
            u = of_sums(
                sums_up, of_rows, up_scale, has_up_scale, up_scale_stride, up_bias, has_up_bias, column, n, INT8
            )
            if has_pre_up != 0:
                tl.store(pre_up + row[:, None] * n + column[None, :], u.to(out.dtype.element_ty), mask=there)
            h = h * u
        if has_residual != 0:
            at_residual = row[:, None] * residual_stride_m + column[None, :]
            h += tl.load(residual + at_residual, mask=there, other=0.0).to(tl.float32)
        tl.store(out + at, h.to(out.dtype.element_ty), mask=there)


@triton.jit
def qf_triton_linear_kernel(
    x, x_stride_m, x_stride_k, w, w_stride_k, w_stride_n, up, up_stride_k, up_stride_n,
    x_scale, has_x_scale, x_scale_stride, w_scale, has_w_scale, w_scale_stride, up_scale, has_up_scale, up_scale_stride,
    bias, has_bias, up_bias, has_up_bias, residual, has_residual, residual_stride_m,
    out, out_stride_m, pre, has_pre, pre_up, has_pre_up, m, n, k,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BAND: tl.constexpr, PARTS: tl.constexpr,
    ALONG_K: tl.constexpr, WHOLE: tl.constexpr, INT8: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    GATED: tl.constexpr = ACTIVATION == "swiglu"
    SUM: tl.constexpr = tl.int32 if INT8 else tl.float32
    rows, columns = tl.cdiv(m, BLOCK_M), tl.cdiv(n, BLOCK_N)
    band = tl.program_id(0) // (BAND * columns)
    height = tl.minimum(rows - band * BAND, BAND)
    within = tl.program_id(0) - band * BAND * columns
    row = (band * BAND + within % height) * BLOCK_M + tl.arange(0, BLOCK_M)
    first_column = within // height * BLOCK_N
    column = first_column + tl.arange(0, BLOCK_N)
    if WHOLE:
        x_stride_k = 1
    sums = tl.zeros([BLOCK_M, BLOCK_N], SUM)
    sums_up = tl.zeros([BLOCK_M, BLOCK_N], SUM)
    for first in range(0, k, BLOCK_K):
        at_k = first + tl.arange(0, BLOCK_K)
        there = (row < m)[:, None] & (at_k < k)[None, :]
        x_slab = tl.load(x + row[:, None] * x_stride_m + at_k[None, :] * x_stride_k, mask=there, other=0)
        w_slab = load_weight(w, w_stride_k, w_stride_n, at_k, column, k, n, ALONG_K, WHOLE)
        sums = tl.dot(x_slab, w_slab, sums, out_dtype=SUM)
        if GATED:
            up_slab = load_weight(up, up_stride_k, up_stride_n, at_k, column, k, n, ALONG_K, WHOLE)
            sums_up = tl.dot(x_slab, up_slab, sums_up, out_dtype=SUM)

    # The epilogue of a large tile runs in parts, serially: it needs registers of its own.
    for at in tl.static_range(PARTS):
        store_tile(
            part_of(sums, at, PARTS), part_of(sums_up, at, PARTS), row,
            first_column + at * (BLOCK_N // PARTS) + tl.arange(0, BLOCK_N // PARTS), m, n,
            x_scale, has_x_scale, x_scale_stride, w_scale, has_w_scale, w_scale_stride,
            up_scale, has_up_scale, up_scale_stride, bias, has_bias, up_bias, has_up_bias,
            residual, has_residual, residual_stride_m, out, out_stride_m, pre, has_pre, pre_up, has_pre_up,
            INT8, ACTIVATION,
        )  # fmt: skip


def whole_vectors(spec: Spec, item: int) -> tuple[tuple[Size, ...], dict[str, int]]:
    """The requirements for vector loads: conditions, and multiples. item: bytes of an element of x."""
    elements = VECTOR_BYTES // item
    contiguous = (size("x_stride_k").up_to(1), size("w_stride_k" if spec.layout == "k" else "w_stride_n").up_to(1))
    line = "stride_n" if spec.layout == "k" else "stride_k"
    weights = ("w", "up") if spec.activation == "swiglu" else ("w",)
    pointers = ("x", *weights, "out", "residual", "pre", "pre_up", "bias", "up_bias")  # null is a multiple, too
    multiples = dict.fromkeys(pointers, VECTOR_BYTES)
    strides = ("x_stride_m", "out_stride_m", "residual_stride_m", *(f"{name}_{line}" for name in weights))
    return contiguous, multiples | dict.fromkeys((*strides, "n", "k"), elements)


def launches(spec: Spec) -> Launches:
    """What a call of `spec` launches. Results are float32 or of the type that Spec specifies, and so are biases."""
    int8, weights = spec.precision == "int8", 2 if spec.activation == "swiglu" else 1
    element = "i8" if int8 else TYPES[spec.dtype]
    types = {name: element for name in ("x", "w", "up")}
    types |= {name: "fp32" for name in ("x_scale", "w_scale", "up_scale")}
    contiguous, multiples = whole_vectors(spec, 1 if int8 else 2)
    results = [TYPES[spec.dtype]] if int8 else dict.fromkeys(("fp32", TYPES[spec.dtype]))

    def choices_of(limit: int | None, tile: tuple[int, int, int, int, int], whole: bool) -> list[Choice]:
        block_m, block_n, block_k, num_warps, num_stages = tile
        block_n = max(block_n // weights, 32)  # each weight has its own tile of accumulators
        constants: dict[str, Any] = {
            "BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_K": block_k * 2 if int8 else block_k, "BAND": BAND,
            "PARTS": 4 if block_m * block_n >= 128 * 256 // weights else 1,
            "ALONG_K": spec.layout == "k", "WHOLE": whole, "INT8": int8, "ACTIVATION": spec.activation,
        }  # fmt: skip
        grid = size("m").ceil_div(block_m) * size("n").ceil_div(block_n)
        one = Pass(qf_triton_linear_kernel, grid, constants, num_warps, num_stages)
        when = (*contiguous, *(() if limit is None else (size("m").up_to(limit),))) if whole else ()
        found = []
        for result in results:
            for bias in dict.fromkeys(("fp32", "fp32" if result == "i32" else TYPES[spec.dtype])):
                is_float = tuple(
                    size(name).up_to(0)
                    for name, kind in (("out_dtype", result), ("bias_dtype", bias))
                    if kind == "fp32"
                )
                told = {"out": result, "residual": result, "pre": result, "pre_up": result}
                told |= {"bias": bias, "up_bias": bias}
                found.append(Choice((one,), (*when, *is_float), multiples if whole else {}, told))
        return found

    table = HOPPER if has_hopper_memory(spec.arch) else AMPERE
    choices = [choice for limit, tile in table for choice in choices_of(limit, tile, True)]
    choices += choices_of(None, ODD_ROWS, False)
    return Launches("QfLinearParams", types, tuple(choices))
