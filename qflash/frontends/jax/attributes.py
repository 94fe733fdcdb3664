"""What a program passes to the XLA handler (csrc/bindings/xla_call.cc): the struct, and how to complete it.

The struct is packed when the program is lowered. The handler writes the addresses of operands and results into it, and
the sizes that were unknown at lowering.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np

from qflash import _native
from qflash.call.op import Extents, Plan
from qflash.frontends.jax.call import Call


def symbolic(aval: Any) -> bool:
    """Whether an array has a size that is not known yet (jax.export)."""
    return not all(isinstance(extent, int) for extent in aval.shape)


def attributes(call: Call, plan: Plan, operands: Sequence[Any], results: Sequence[Any]) -> dict[str, Any]:
    """All attributes except the kernel's key. `operands`, `results`: abstract arrays in the order of the plan; operands
    that are written are also results, the last ones."""
    fields = _native.op_layouts[plan.struct][1]
    _check_sizes(call, plan, operands)
    return {
        "takes": plan.struct,
        "params": np.frombuffer(plan.params(), np.int64),
        "pointers": _words(fields[name][0] for name in (*plan.pointers, *(one.field for one in plan.written))),
        "num_bytes": _words(map(_num_bytes, (*operands, *results))),
        "sizes": _words(_sizes(plan, fields)),
        "bounds": _words(_bounds(plan, fields)),
    }


def _words(numbers: Any) -> np.ndarray:
    return np.fromiter(numbers, np.int64)


def _num_bytes(aval: Any) -> int:
    return -1 if symbolic(aval) else math.prod(aval.shape) * aval.dtype.itemsize


def _sizes(plan: Plan, fields: dict[str, tuple[int, str]]) -> Any:
    """A tuple for each size that is a product of extents: offset, bytes, count, then (array, dimension) for each."""
    for name, value in plan.fields:
        if isinstance(value, Extents):
            offset, kind = fields[name]
            yield from (offset, struct.calcsize(kind), len(value.of))
            for argument, dim in value.of:
                yield from (_place(plan, argument), dim)


def _bounds(plan: Plan, fields: dict[str, tuple[int, str]]) -> Any:
    """A tuple for each field that is bounded by an extent: offset, array, dimension."""
    for name, argument, dim in plan.bounds:
        yield from (fields[name][0], _place(plan, argument), dim)


def _place(plan: Plan, argument: str) -> int:
    return [operand.argument for operand in plan.operands].index(argument)


def _check_sizes(call: Call, plan: Plan, operands: Sequence[Any]) -> None:
    """Reject symbolic sizes that the plan does not express as extents of operands."""
    read = {operand.argument for operand in plan.operands}
    values = dict(plan.fields).values()
    if all(
        {argument for argument, _ in value.of} <= read if isinstance(value, Extents) else isinstance(value, int | float)
        for value in values
    ):
        return
    for operand, aval in zip(plan.operands, operands, strict=True):
        if symbolic(aval):
            raise NotImplementedError(
                f"{operand.argument} has symbolic shape {aval.shape}; allowed in {call.op.spoken}: numbers, because "
                "the sizes are part of the program"
            )
