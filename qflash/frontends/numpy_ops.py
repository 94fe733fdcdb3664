"""Operations beside attention on NumPy arrays: always the CPU engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from qflash.frontends.numpy import describe, index
from qflash.ops.plan import Op, Operand, Prepared, prepare
from qflash.problem import Array
from qflash.spec import OpSpec

_CACHE_LIMIT = 4096
_INT32 = np.iinfo(np.int32)


def run_op(op: Op, arrays: Sequence[Any], words: Sequence[Any]) -> list[np.ndarray]:
    """Plan, allocate, call. NumPy's own scalars, which arithmetic on one-number results gives, count as arrays."""
    arrays = _as_arrays(op, arrays)
    prepared = _prepared(op, arrays, words)
    make = np.zeros if prepared.call is None else np.empty
    results = [make(result.shape, result.dtype) for result in prepared.plan.results]
    if prepared.call is not None:
        # A name, so that converted copies outlive the call.
        operands = [_ready(operand, arrays[op.arrays.index(operand.argument)]) for operand in prepared.plan.operands]
        prepared.call(*(x.ctypes.data for x in (*operands, *results)), 0, 0, 0)
    return results


def _as_arrays(op: Op, arrays: Sequence[Any]) -> list[Any]:
    arrays = [np.asarray(x) if isinstance(x, np.generic) else x for x in arrays]
    for name in op.indices:
        at = op.arrays.index(name)
        arrays[at] = index(name, arrays[at])
    return arrays


def spec_of(op: Op, arrays: Sequence[Any], words: Sequence[Any]) -> OpSpec:
    """What selects the kernel of a checked call, for `explain`."""
    return op.plan(*_described(op, _as_arrays(op, arrays)), *words).spec(0)


def as_index(name: str, x: Any, like: np.ndarray) -> Any:
    """Lengths as int32, where `like` is."""
    return index(name, x)


def scalar(value: float, like: np.ndarray) -> np.ndarray:
    """A number as an array where `like` is."""
    return np.array(value, np.float32)


_plans: dict[tuple, Prepared] = {}


def _prepared(op: Op, arrays: Sequence[Any], words: Sequence[Any]) -> Prepared:
    """The prepared call, looked up by everything it depends on."""
    try:
        key = (
            op.name,
            *((x.shape, x.strides, x.dtype, x.flags.aligned, type(x)) if x is not None else None for x in arrays),
            *words,
            *map(type, words),  # because to a dict True is 1 is 1.0, and to a plan they are not
        )
        return _plans[key]
    except KeyError:
        found = _plan(op, arrays, words)
    except (AttributeError, TypeError, ValueError):  # not an array, or words that do not hash
        return _plan(op, arrays, words)
    if len(_plans) >= _CACHE_LIMIT:
        _plans.clear()
    _plans[key] = found
    return found


def _plan(op: Op, arrays: Sequence[Any], words: Sequence[Any]) -> Prepared:
    return prepare(op.plan(*_described(op, arrays), *words))


def _described(op: Op, arrays: Sequence[Any]) -> list[Array | None]:
    return [None if x is None else describe(name, x, op.arrays[0]) for name, x in zip(op.arrays, arrays, strict=True)]


def _ready(operand: Operand, x: np.ndarray) -> np.ndarray:
    if operand.dtype == "int32" and x.dtype.itemsize > _INT32.dtype.itemsize:
        x = np.clip(x, _INT32.min, _INT32.max)
    if operand.dtype is not None:
        x = x.astype(operand.dtype, copy=False)
    return np.ascontiguousarray(x) if operand.contiguous else x
