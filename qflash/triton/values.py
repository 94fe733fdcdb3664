"""Sums of values: P times V, where V may hold what rows must not see."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def is_infinite(v, SIGN: tl.constexpr):
    """Where v is that infinity, or NaN, which counts as both."""
    x = v.to(tl.float32)
    return (x != x) | (x == float(SIGN))


@triton.jit
def add_visible(acc, weight, v, visible, PRECISION: tl.constexpr):
    """acc + weight V of a tile of which some rows do not see all keys: 0 times NaN must not reach them. Where V has
    nothing of the kind, which one vote tells, it is one product; else what is not finite is left out of it and counted
    in two more, which tell the rows that see an infinity of either sign."""
    above = is_infinite(v, "inf")
    below = is_infinite(v, "-inf")
    if tl.max(tl.max((above | below).to(tl.int32), 1), 0) != 0:
        finite = tl.where(above | below, 0.0, v.to(tl.float32)).to(v.dtype)
        acc = tl.dot(weight, finite, acc, input_precision=PRECISION)
        one = visible.to(v.dtype)
        sees_above = tl.dot(one, above.to(v.dtype), input_precision=PRECISION)
        sees_below = tl.dot(one, below.to(v.dtype), input_precision=PRECISION)
        acc += tl.where(sees_above > 0, float("inf"), 0.0)
        acc += tl.where(sees_below > 0, float("-inf"), 0.0)  # of both signs, NaN
    else:
        acc = tl.dot(weight, v, acc, input_precision=PRECISION)
    return acc
