"""What a call of an operation comes down to: kernel-selecting words, struct fields, operands, results.

Each operation has one pure function from described arrays and the user's words to a `Plan`, or to an error that names
the argument. A Plan has no address and no array in it; front ends carry it out, each in its framework.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from qflash import _native, dispatch
from qflash.planning import entry_of
from qflash.problem import Array
from qflash.spec import DTYPES, OP_DTYPES, OpSpec


@dataclass(frozen=True, slots=True)
class Operand:
    """An array the kernel reads: which argument, where its address goes, and what becomes of it first."""

    argument: str
    field: str
    contiguous: bool = False  # the kernel reads it without gaps
    dtype: str | None = None  # None: as it is. int32 from int64 saturates, so that no bad value becomes a good one


@dataclass(frozen=True, slots=True)
class Result:
    """An array the kernel writes, contiguous."""

    field: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class Plan:
    """A checked call."""

    op: str
    device: str
    dtype: str  # OpSpec's
    kernel: str | None  # asked for by name
    struct: str  # the C struct, of csrc/include/qflash_ops.h
    fields: tuple[tuple[str, int | float], ...]  # all but pointers, and but what is 0
    operands: tuple[Operand, ...]
    results: tuple[Result, ...]
    layout: str = ""
    head_dim: int = 0
    precision: str = ""
    zeros: bool = False  # there is nothing to read, and every result is 0

    def spec(self, arch: int) -> OpSpec:
        """The kernel-selecting part, for a device of compute capability `arch`/10 (0: CPU)."""
        device = self.device.partition(":")[0]
        return OpSpec(self.op, device, arch, self.dtype, self.layout, self.head_dim, self.precision)

    @property
    def pointers(self) -> tuple[str, ...]:
        """The struct's pointers in the order calls take addresses: operands, then results."""
        return (*(operand.field for operand in self.operands), *(result.field for result in self.results))

    @property
    def nothing_to_do(self) -> bool:
        """No result has an element, or all are known to be 0."""
        return self.zeros or all(0 in result.shape for result in self.results)

    def params(self) -> bytes:
        """The struct with null pointers."""
        size, fields = _native.op_layouts[self.struct]
        packed = bytearray(size)
        for name, value in (("struct_bytes", size), *self.fields):
            offset, kind = fields[name]
            struct.pack_into(kind, packed, offset, value)
        return bytes(packed)


@dataclass(frozen=True, slots=True, eq=False)  # one object each, so that a look-up need not hash what is in it
class Op:
    """An operation as front ends know it: its arrays, its other words, and the function that plans a call."""

    name: str
    arrays: tuple[str, ...]  # in order; the first is never None
    words: tuple[str, ...]
    plan: Callable[..., Plan]  # (one Array or None for each of `arrays`, one value for each of `words`)
    # Whether a call with these arrays mapped by vmap is one call, in which they and all results have one dimension
    # more, the first. Given the names, the rank of each array in the eyes of one sample, and the words by name.
    folds: Callable[[Collection[str], dict[str, int], dict[str, Any]], bool] = lambda *_: False
    checked: tuple[str, ...] = ()  # arrays of which the CPU kernel refuses some values
    indices: tuple[str, ...] = ()  # lengths and positions, which may be given as ints on the host
    flops: Callable[[dict[str, Sequence[int]]], int] | None = None  # of the products of matrices, by arrays' shapes


@dataclass(frozen=True, slots=True)
class Prepared:
    """A plan with its kernel. `call` takes addresses only and may be shared by threads; None: results are 0."""

    plan: Plan
    kernel: dispatch.Kernel
    call: _native.Call | None
    workspace_bytes: int = 0


@lru_cache(maxsize=4096)
def prepare(plan: Plan, arch: int = 0) -> Prepared:
    """Choose the kernel, load or compile it, bind the call."""
    spec = plan.spec(arch)
    kernel = dispatch.plan(spec, plan.kernel)
    if plan.nothing_to_do:
        return Prepared(plan, kernel, None)
    entry = entry_of(kernel, spec)
    call = _native.Call(
        plan.struct, plan.params(), list(plan.pointers), entry.address, entry.status_text, entry.workspace
    )
    return Prepared(plan, kernel, call, call.workspace_bytes)


# Words every operation has.


def dtype_code(dtype: str) -> int:
    """QfDtype or QfOpDtype."""
    return OP_DTYPES.index(dtype)


def dtype_name(name: str, dtype: Any) -> str:
    """A dtype by its plain name, from a name or any framework's own dtype object."""
    if isinstance(dtype, str):
        return dtype
    text = str(dtype)
    if text.startswith("torch."):
        return text.removeprefix("torch.")
    try:
        import ml_dtypes  # noqa: F401  (teaches NumPy the name "bfloat16")

        found: str = np.dtype(dtype).name
        return found
    except TypeError:
        raise TypeError(f"{name} is {dtype!r}; allowed: a dtype, or its name") from None


def check_float(name: str, array: Array) -> None:
    """Refuse an array that is not of a floating-point type kernels know."""
    if array.dtype not in DTYPES:
        raise TypeError(f"{name} has dtype {array.dtype}; allowed: {', '.join(DTYPES)}")


def check_device(name: str, array: Array, first: str, device: str) -> None:
    """Refuse an array that is not where the first one is."""
    if array.device != device:
        raise ValueError(f"{name} is on {array.device}; allowed: {first}'s device, {device}")


def check_shape(name: str, array: Array, *shapes: Sequence[int]) -> None:
    """Refuse an array of any other shape."""
    if all(tuple(array.shape) != tuple(shape) for shape in shapes):
        allowed = " or ".join(str(list(shape)) for shape in shapes)
        raise ValueError(f"{name} has shape {list(array.shape)}; allowed: {allowed}")


def check_dtype(name: str, array: Array, *dtypes: str) -> None:
    """Refuse an array of any other dtype."""
    if array.dtype not in dtypes:
        raise TypeError(f"{name} has dtype {array.dtype}; allowed: {', '.join(dtypes)}")


def row_stride(array: Array) -> int | None:
    """Elements from one row of `[..., columns]` to the next, where one number says it; None: it takes a copy."""
    columns = array.shape[-1]
    if array.strides is None or 0 in array.shape:
        return columns
    if array.strides[-1] != 1 and columns != 1:
        return None
    rows, stride = 1, None  # of the dimensions seen so far, from the last
    for extent, step in zip(reversed(array.shape[:-1]), reversed(array.strides[:-1]), strict=True):
        if extent == 1:
            continue
        if stride is None:
            stride = step
        elif step != stride * rows:
            return None
        rows *= extent
    if stride is None:
        return columns
    return stride if stride >= 0 else None
