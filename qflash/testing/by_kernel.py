"""Operations on a chosen kernel where no argument of a call names it: gradients, and what only an Op exposes."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

from qflash.call.op import Op, Plan

# Created once and kept: the Op itself is the key of cached plans, and must not be another one at the same address.


@cache
def on_kernel(op: Op, kernel: str) -> Op:
    """The operation as computed by that kernel."""

    def plan(*given: Any) -> Plan:
        return replace(op.plan(*given), kernel=kernel)

    return replace(op, plan=plan)


@cache
def differentiated_by(op: Op, kernel: str) -> Op:
    """The operation with gradients computed by that kernel. Eager calls differentiate it; the dispatcher lacks it."""
    assert op.gradient is not None and op.gradient.op is not None
    return replace(op, gradient=replace(op.gradient, op=on_kernel(op.gradient.op, kernel)))
