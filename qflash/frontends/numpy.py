"""NumPy arrays: always the CPU engine. bfloat16 comes from ml_dtypes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes  # noqa: F401  (registers the name "bfloat16" with NumPy)
import numpy as np

from qflash._native import plan_key
from qflash.call import cache
from qflash.call.array import Array
from qflash.call.lengths import lengths
from qflash.call.op import Op, Operand, Plan
from qflash.call.prepare import Prepared, prepare

_INT32 = np.iinfo(np.int32)
_PLAIN = (np.ndarray,)


def describe(name: str, x: Any, first: str = "q") -> Array:
    """Shape, element strides and dtype of an array, or TypeError. `first`: the argument that decided the framework."""
    if not isinstance(x, np.ndarray):
        kind = f"{type(x).__module__}.{type(x).__qualname__}"
        raise TypeError(f"{name} is {kind}; allowed: numpy.ndarray, as {first} is")
    if isinstance(x, np.ma.MaskedArray):  # its mask would be ignored
        instead = ", with kv_lens or window to mask keys" if first == "q" else ""
        raise TypeError(f"{name} is a masked array; allowed: a plain numpy.ndarray{instead}")
    if not x.dtype.isnative:  # the dtype's name does not show it
        raise TypeError(f"{name} has dtype {x.dtype.str}, a foreign byte order; allowed: the native one")
    size = max(x.itemsize, 1)  # a void dtype may have items of 0 bytes; `check` rejects it by name
    if any(stride % size for stride in x.strides):
        raise ValueError(f"{name} has byte strides {x.strides}; allowed: multiples of the item size, {size}")
    if not x.flags.aligned:
        raise ValueError(
            f"{name} starts at an address that is no multiple of the alignment of {x.dtype.name}, "
            f"{x.dtype.alignment} bytes; allowed: an aligned array, such as {name}.copy()"
        )
    return Array(x.shape, tuple(s // size for s in x.strides), x.dtype.name, "cpu")


@dataclass(slots=True)
class _Ready:
    """A prepared call with the facts that every run of it needs, computed once."""

    prepared: Prepared
    operands: tuple[int, ...]  # their indices among the arrays
    converted: tuple[tuple[int, Operand], ...]  # operands that the kernel cannot read as they are
    results: tuple[tuple[tuple[int, ...], np.dtype], ...]


def run(op: Op, arrays: Sequence[Any], words: Sequence[Any]) -> list[np.ndarray]:
    """Plan, allocate, call. Results are in the order of the plan."""
    ready: _Ready | None = cache.find(plan_key(op, arrays, words, _PLAIN, False))
    if ready is None:
        arrays = _as_arrays(op, arrays)
        hashable = [tuple(word) if type(word) is list else word for word in words]
        key = plan_key(op, arrays, hashable, _PLAIN, False)
        ready = cache.find(key) or _make_ready(op, arrays, words, key)
    results = [np.empty(shape, dtype) for shape, dtype in ready.results]
    prepared = ready.prepared
    if prepared.plan.nothing_to_do:
        return [np.zeros_like(x) for x in results]
    operands = [arrays[at] for at in ready.operands]  # a variable, so that converted copies outlive the call
    for i, operand in ready.converted:
        operands[i] = _converted(operand, operands[i])
    if prepared.launch is not None:
        prepared.launch(operands, results, 0)
    else:
        prepared.call(*[x.ctypes.data for x in operands], *[x.ctypes.data for x in results], 0, 0, 0)
    return results


def run_in_place(op: Op, arrays: Sequence[Any], words: Sequence[Any]) -> Sequence[np.ndarray]:
    """`run` of an operation that writes to its arrays; returns those."""
    written = op.written(arrays)
    if not all(isinstance(x, np.ndarray) and x.flags.writeable for x in written):
        _check_writeable(op, arrays)
    run(op, arrays, words)
    return written


def _check_writeable(op: Op, arrays: Sequence[Any]) -> None:
    for name, x in op.named(arrays).items():
        if name in op.writes and isinstance(x, np.ndarray) and not x.flags.writeable:
            raise ValueError(f"{name} is read-only; allowed: a numpy.ndarray that {op.spoken} can write to")


def _make_ready(op: Op, arrays: Sequence[Any], words: Sequence[Any], key: Any) -> _Ready:
    """Check a call and prepare it, for this and later calls."""
    prepared = prepare(plan_of(op, arrays, words))
    places = tuple(op.arrays.index(operand.argument) for operand in prepared.plan.operands)
    converted = tuple(
        (i, operand)
        for i, (operand, at) in enumerate(zip(prepared.plan.operands, places, strict=True))
        if operand.dtype not in (None, arrays[at].dtype.name)
        or (operand.contiguous and not arrays[at].flags.c_contiguous)
    )
    results = tuple((result.shape, np.dtype(result.dtype)) for result in prepared.plan.results)
    ready = _Ready(prepared, places, converted, results)
    cache.keep(key, ready)
    return ready


def plan_of(op: Op, arrays: Sequence[Any], words: Sequence[Any]) -> Plan:
    """The plan of a checked call, for `explain`."""
    arrays = _as_arrays(op, arrays)
    described = (
        None if x is None else describe(name, x, op.arrays[0]) for name, x in zip(op.arrays, arrays, strict=True)
    )
    return op.plan(*described, *words)


def arch_of(x: np.ndarray) -> int:
    """Compute capability times ten of the array's device: 0, the CPU."""
    return 0


def as_index(name: str, x: Any, like: np.ndarray) -> Any:
    """Lengths or positions as int32, on the device of `like`."""
    if x is None or (type(x) is np.ndarray and x.dtype == np.int32):
        return x
    return lengths(name, x)


def scalar(value: float, like: np.ndarray) -> np.ndarray:
    """A number as an array, on the device of `like`."""
    return np.array(value, np.float32)


def _as_arrays(op: Op, arrays: Sequence[Any]) -> list[Any]:
    """Accepts NumPy's own scalars, which arithmetic on one-number results returns, as arrays; lengths may be lists."""
    return [
        as_index(name, x, x) if name in op.indices else np.asarray(x) if isinstance(x, np.generic) else x
        for name, x in zip(op.arrays, arrays, strict=True)
    ]


def _converted(operand: Operand, x: np.ndarray) -> np.ndarray:
    if operand.dtype == "int32" and x.dtype.itemsize > _INT32.dtype.itemsize:
        x = np.clip(x, _INT32.min, _INT32.max)
    if operand.dtype is not None:
        x = x.astype(operand.dtype, copy=False)
    return np.ascontiguousarray(x) if operand.contiguous else x
