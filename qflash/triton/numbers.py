"""Numbers and small functions of them that several Triton kernels use."""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
LARGEST = tl.constexpr(3.402823466e38)  # of float32


@triton.jit
def rescale_of(m, m_new, factor):
    """The factor that makes a sum relative to the maximum m relative to m_new >= m, for base-2 scores of `factor`.
    Equality is tested first: both may be infinite."""
    return tl.where(m == m_new, 1.0, tl.exp2((m - m_new) * factor))
