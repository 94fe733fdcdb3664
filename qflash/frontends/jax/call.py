"""Call: the static part of a call of an operation; together with the arrays' shapes it determines a Plan.

vmap and partitioning change shapes after the user's arguments were checked, so a Call contains none: code that needs a
Plan (tracing, lowering) requests one for the current shapes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from qflash.call import cache
from qflash.call.array import Array
from qflash.call.op import Op, Plan

_INT32 = jnp.iinfo(jnp.int32)


@dataclass(frozen=True, slots=True, repr=False)
class Call:
    """Hashable: a primitive's parameter."""

    op: Op
    words: tuple[Any, ...]
    names: tuple[str, ...]  # of the given arrays, in the operation's order

    def __repr__(self) -> str:  # shown in jaxprs
        return f"{self.op.name}({', '.join(self.names)})"

    def plan(self, avals: Sequence[Any], platform: str) -> Plan:
        """The plan for arrays of these shapes, in the order of `names`; raises the errors of the operation's checks."""
        facts = [(aval.shape, aval.dtype) for aval in avals]
        key = ("jax", platform, self.op, self.names, *facts, *cache.words_key(self.words))
        found: Plan | None = cache.find(key)
        if found is None:
            found = self.plan_of([Array(aval.shape, None, aval.dtype.name, platform) for aval in avals])
            cache.keep(key, found)
        return found

    def plan_of(self, arrays: Sequence[Array]) -> Plan:
        """The plan for array descriptions."""
        by_name = dict(zip(self.names, arrays, strict=True))
        return self.op.plan(*(by_name.get(name) for name in self.op.arrays), *self.words)

    def read_as(self, arrays: Sequence[Any]) -> list[Any]:
        """The arrays in the dtypes that the kernel reads. Arrays that are only checked are not converted."""
        wanted = {operand.argument: operand.dtype for operand in self.plan(arrays, "cpu").operands}
        return [_converted(x, wanted.get(name)) for name, x in zip(self.names, arrays, strict=True)]

    def dims(self, ranks: Sequence[int]) -> Mapping[str, str] | None:
        """The dimensions of arrays of these ranks, and of results, as letters, if the operation specifies them."""
        return None if self.op.dims is None else self.op.dims(dict(zip(self.names, ranks, strict=True)))

    def words_by_name(self) -> dict[str, Any]:
        """The words by name, for checks and rules."""
        return dict(zip(self.op.words, self.words, strict=True))


def _converted(x: Any, dtype: str | None) -> Any:
    if dtype is None:
        return x
    if dtype == "int32" and x.dtype.itemsize > _INT32.dtype.itemsize:
        x = jnp.clip(x, _INT32.min, _INT32.max)
    return x.astype(dtype)


def dims_of(known: Mapping[str, str], name: str, rank: int) -> str:
    """The dimensions of an array of this rank: one shared by all sequences lacks the first of them, the batch."""
    return known[name][len(known[name]) - rank :]
