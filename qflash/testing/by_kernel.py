"""Operations on a kernel of one's choice where no word of a call names it: gradients, and what only their Op knows."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

from qflash.call.op import Op, Plan

# Made once and kept: plans are found again by the Op itself, which must not be another one at the same address.


@cache
def on_kernel(op: Op, kernel: str) -> Op:
    """The operation as that kernel computes it."""

    def plan(*given: Any) -> Plan:
        return replace(op.plan(*given), kernel=kernel)

    return replace(op, plan=plan)


@cache
def differentiated_by(op: Op, kernel: str) -> Op:
    """The operation, whose gradients that kernel computes. Eager calls differentiate it; the dispatcher does not know
    it."""
    assert op.gradient is not None and op.gradient.op is not None
    return replace(op, gradient=replace(op.gradient, op=on_kernel(op.gradient.op, kernel)))
