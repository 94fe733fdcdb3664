"""Weights times V, with additional work in tiles that are cut by an edge, where rows may see few and different keys.

float16 promises 1e-3: in these tiles the remainder of rounded weights is multiplied, too. With many keys the errors
average out.

Nonfinite values of V must not reach rows that do not see them: 0 times NaN would reach all rows.

In tiles that are cut, nonfinite values are excluded from the product. If there were any, the loop over these tiles runs
again when the result is stored and its registers are free: the product of the visibility mask, ones and zeros, with a
code for each kind of nonfinite value indicates what each row must receive.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Codes that 16-bit types can represent, and whose sums over a tile of up to 128 keys do not mix: multiples of 1 / 256
# stay below 1, multiples of 1 below 256.
SEES_ABOVE = tl.constexpr(1 / 256)
SEES_BELOW = tl.constexpr(1.0)
SEES_NAN = tl.constexpr(256.0)
SOME_CHANNELS = tl.constexpr(16)  # examined at a time: the case is rare, and must not cost registers


@triton.jit
def finite_of(v):
    """(v with 0 instead of nonfinite values, whether there were any in each row)."""
    finite = tl.abs(v) < float("inf")
    return tl.where(finite, v, 0.0), tl.max((finite == 0).to(tl.int32), 1)


@triton.jit
def add_weighted(acc, rescale, weight, v, PRECISION: tl.constexpr):
    """acc rescale + weight v. In float32 each tile has its own accumulators first: a single chain of additions over
    32768 keys would end with an error of 3e-6."""
    if v.dtype == tl.float32:
        # An FMA, because the compiler would start the accumulation of a plain sum with acc.
        acc = tl.fma(acc, rescale[:, None], tl.dot(weight, v, input_precision=PRECISION))
    else:
        acc = tl.dot(weight.to(v.dtype), v, acc * rescale[:, None], input_precision=PRECISION)
    return acc


@triton.jit
def add_few(acc, weight, v, PRECISION: tl.constexpr):
    """acc + weight v, with more than 16 bits of the weights if v is float16."""
    rounded = weight.to(v.dtype)
    acc = tl.dot(rounded, v, acc, input_precision=PRECISION)
    if v.dtype == tl.float16:
        rest = (weight - rounded.to(tl.float32)).to(v.dtype)
        acc = tl.dot(rest, v, acc, input_precision=PRECISION)
    return acc


@triton.jit
def codes_of(v):
    """The nonfinite values of v, as codes."""
    x = v.to(tl.float32)
    code = tl.where(x == float("inf"), SEES_ABOVE, tl.where(x == float("-inf"), SEES_BELOW, 0.0))
    return tl.where(x != x, SEES_NAN, code).to(v.dtype)


@triton.jit
def add_seen(out, v, row_present, key_present, visible, HEAD_DIM: tl.constexpr, PRECISION: tl.constexpr):
    """Add to rows at `out`, [M, 1], which are already in memory, the nonfinite values that they see of a tile of V at
    `v`, [N, 1]."""
    for some in tl.range(0, HEAD_DIM, SOME_CHANNELS, num_stages=1):
        channel = some + tl.arange(0, SOME_CHANNELS)[None, :]
        codes = codes_of(tl.load(v + channel, mask=key_present & (channel < HEAD_DIM), other=0.0))
        counts = tl.dot(visible.to(codes.dtype), codes, input_precision=PRECISION)
        whole = tl.floor(counts)
        seen = tl.where(counts > whole, float("inf"), 0.0)
        seen += tl.where(whole > 0, float("-inf"), 0.0)  # NaN with the other sign
        seen = tl.where(counts >= SEES_NAN, float("nan"), seen)
        there = row_present & (channel < HEAD_DIM) & (counts > 0)
        stored = tl.load(out + channel, mask=there, other=0.0).to(tl.float32)
        tl.store(out + channel, (stored + seen).to(out.dtype.element_ty), mask=there)
