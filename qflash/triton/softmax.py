"""From scores to weights: softcap, the online softmax of a row, and its result in the epilogue.

Scores are in base 2, as factor times s: if a score is a positive number times q . k, that number is the factor and s is
the product itself, so that a single FMA precedes each exponential.
"""

from __future__ import annotations

import triton
import triton.language as tl

from qflash.triton.numbers import LN2, LOG2E

LEAST_FACTOR = tl.constexpr(1.1754944e-38)  # the smallest normal float32: -inf times it is -inf, not NaN


@triton.jit
def tanh(x):
    """tanh with a relative error of about 5e-7: by its series near 0, by the exponential elsewhere."""
    t = -x * x
    series = 0.053968254 + t * (0.021869489 + t * 0.0088632355)  # 17/315, 62/2835, 1382/155925
    near = x + x * t * (0.33333333 + t * (0.13333333 + t * series))
    far = 1.0 - 2.0 / (tl.exp2(x * (2.0 * LOG2E)) + 1.0)
    return tl.where(tl.abs(x) < 0.3, near, far)


@triton.jit
def scores_of(products, scale, softcap, PLAIN: tl.constexpr, SOFTCAP: tl.constexpr):
    """(s, factor) of products q . k. PLAIN: the scale is positive and there is no softcap."""
    if PLAIN:
        s = products
        factor = tl.maximum(scale * LOG2E, LEAST_FACTOR)
    else:
        s = products * scale
        if SOFTCAP:
            s = softcap * tanh(s / softcap)
        s = s * LOG2E
        factor = scale * 0.0 + 1.0
    return s, factor


@triton.jit
def weigh(s, factor, m, l, WHOLE: tl.constexpr = False):
    """(weights, rescale, m, l) after the scores s of one more tile: earlier sums must be multiplied by `rescale`. A
    score of -inf has weight 0, whatever m is. WHOLE: m is an integer, so that rescaling is exact."""
    m_new = tl.max(s, 1)
    if WHOLE:
        m_new = tl.ceil(m_new)
    m_new = tl.maximum(m, m_new)
    finite = tl.where(m_new == float("-inf"), 0.0, m_new)
    weight = tl.exp2(s * factor - (finite * factor)[:, None])
    # The difference first: an FMA of m * factor and a rounded reference would not cancel, and a sum that is multiplied
    # by 1 + 1e-7 in every tile is off by 1e-4 after 32768 keys.
    rescale = tl.exp2((m - finite) * factor)
    return weight, rescale, m_new, l * rescale + tl.sum(weight, 1)


@triton.jit
def finish(m2, l, bias, sees, sink, SINKS: tl.constexpr):
    """(the factor for the row's sum of values, lse). m2: the base-2 score that l is relative to; bias: the row bias, in
    natural units; sees: whether the row sees any key. A row that sees only scores of -inf is NaN; one that sees none is
    0."""
    if SINKS:
        sink2 = (sink - bias) * LOG2E
        top = tl.maximum(m2, sink2)
        reference = tl.where(top == float("-inf"), 0.0, top)
        share = tl.exp2(m2 - reference)
        total = l * share + tl.exp2(sink2 - reference)
    else:
        reference = tl.where(m2 == float("-inf"), 0.0, m2)
        share = 1.0
        total = l
    nothing = tl.where(sees, float("nan"), 0.0)
    factor = tl.where(total == 0, nothing, share / total)
    lse = tl.where(total == 0, nothing + float("-inf"), (reference + tl.log2(total)) * LN2 + bias)
    if SINKS:
        drowned = (sink == float("inf")) & (l == l)
        factor = tl.where(drowned, 0.0, factor)
        lse = tl.where(drowned, float("inf"), lse)
        # The lse of a row that sees no key is its sink, whatever q contains, and NaN if the sink is NaN.
        lse = tl.where(sees, lse, sink)
    return factor, lse
