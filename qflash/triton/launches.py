"""What a call of a Triton kernel launches, in terms of its C struct.

A parameter of a Triton kernel that is not a constant has the name of a field of the struct, with `_` instead of dots
and without `.data`: `kv_k` is kv.k.data, `kv_k_stride_t` is kv.k.stride_t. `has_lse` is 1 if the pointer `lse` is not
null. A region of the workspace is a parameter with the region's name. So arguments are copied from the struct by
offset, by either launcher: csrc/bindings/cubins.cc on a GPU, qflash/testing/interpreted.py on the CPU.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from qflash import _native

HAS = "has_"
REGION_BYTES = 256  # regions of the workspace start at multiples of it
VECTOR_BYTES = 16  # the widest access of a thread
TYPES = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16", "int8": "i8", "int32": "i32"}  # Triton's names
_KINDS = {"i": "i32", "q": "i64", "Q": "u64", "f": "fp32"}  # of fields that are not pointers


@dataclass(frozen=True)
class Size:
    """An integer computed from fields of a struct, and so known when a kernel is called.

    code: (operation, operand) in postfix order; the operations are those of csrc/bindings/cubins.cc.
    """

    code: tuple[tuple[str, int | str], ...]

    def _with(self, other: Size | int, operation: str) -> Size:
        other = other if isinstance(other, Size) else constant(other)
        return Size((*self.code, *other.code, (operation, 0)))

    def __mul__(self, other: Size | int) -> Size:
        return self._with(other, "multiply")

    def __add__(self, other: Size | int) -> Size:
        return self._with(other, "add")

    def ceil_div(self, other: Size | int) -> Size:
        """The quotient, rounded up."""
        return self._with(other, "ceil_divide")

    def at_least(self, other: Size | int) -> Size:
        """The larger of the two."""
        return self._with(other, "maximum")

    def up_to(self, other: Size | int) -> Size:
        """1 if it is not larger, else 0."""
        return self._with(other, "up_to")

    def multiple_of(self, other: Size | int) -> Size:
        """1 if it is a multiple, else 0."""
        return self._with(other, "multiple_of")

    def value(self, fields: Mapping[str, Any]) -> int:
        """The number, given the struct's fields by name; pointers are addresses."""
        stack: list[int] = []
        for operation, operand in self.code:
            if operation == "constant":
                stack.append(int(operand))
            elif operation == "field":
                stack.append(int(fields[str(operand)]))
            else:
                right, left = stack.pop(), stack.pop()
                stack.append(_OPERATIONS[operation](left, right))
        return stack.pop()


_OPERATIONS: dict[str, Callable[[int, int], int]] = {
    "multiply": lambda left, right: left * right,
    "add": lambda left, right: left + right,
    "ceil_divide": lambda left, right: -(-left // right),
    "maximum": max,
    "up_to": lambda left, right: int(left <= right),
    "multiple_of": lambda left, right: int(left % right == 0),
}


def constant(value: int) -> Size:
    """A number that is already known."""
    return Size((("constant", value),))


def size(name: str) -> Size:
    """The value of the field named `name`."""
    return Size((("field", name),))


@dataclass(frozen=True)
class Pass:
    """One launch of a Triton kernel. Its grid has one dimension."""

    function: Any  # returned by @triton.jit
    grid: Size
    constants: Mapping[str, Any] = field(default_factory=dict)  # its tl.constexpr parameters
    num_warps: int = 4
    num_stages: int = 1
    fuses: bool = True  # False: no product is fused with a sum, for results that are defined bit for bit

    @property
    def parameters(self) -> tuple[str, ...]:
        """Those that are not constants, in order."""
        return tuple(name for name in inspect.signature(self.function.fn).parameters if name not in self.constants)


@dataclass(frozen=True)
class Region:
    """A part of the workspace: `count` elements."""

    name: str
    type: str  # Triton's name for an element's type
    count: Size


@dataclass(frozen=True)
class Choice:
    """The passes for calls in which every Size of `when` is 1 and every parameter of `multiples` is a multiple of its
    number (for a pointer: its address). Triton is given these multiples: they let it generate vector loads."""

    passes: tuple[Pass, ...]
    when: tuple[Size, ...] = ()
    multiples: Mapping[str, int] = field(default_factory=dict)
    types: Mapping[str, str] = field(default_factory=dict)  # of pointed-to elements, if not those of `Launches.types`


@dataclass(frozen=True)
class Launches:
    """A kernel for one Spec. The first choice that serves a call is launched; the last serves all."""

    struct: str
    types: Mapping[str, str]  # of pointed-to elements, by parameter
    choices: tuple[Choice, ...]
    regions: tuple[Region, ...] = ()

    def conditions(self, choice: Choice) -> tuple[Size, ...]:
        """What must be 1 for `choice` to serve a call."""
        aligned = (size(self.field(name)).multiple_of(step) for name, step in choice.multiples.items())
        return (*choice.when, *aligned)

    def field(self, parameter: str) -> str:
        """The struct's name for a parameter."""
        return parameters_of(self.struct)[parameter]

    def offsets(self) -> dict[str, Size]:
        """The start of each region in bytes, and the end of the workspace as ""."""
        at, found = constant(0), {}
        for region in self.regions:
            found[region.name] = at
            at = at + region_bytes(region).ceil_div(REGION_BYTES) * REGION_BYTES
        return found | {"": at}

    def type_of(self, parameter: str, choice: Choice) -> str:
        """Triton's name for a parameter's type."""
        for region in self.regions:
            if region.name == parameter:
                return f"*{region.type}"
        if parameter.startswith(HAS):
            return "i32"
        _, fields = _native.op_layouts[self.struct]
        kind = fields[self.field(parameter)][1]
        return f"*{choice.types.get(parameter) or self.types[parameter]}" if kind == "P" else _KINDS[kind]


def region_bytes(region: Region) -> Size:
    """The number of bytes of a region."""
    return region.count * ({"i8": 1, "fp16": 2, "bf16": 2}.get(region.type) or 4)


@lru_cache(maxsize=64)
def parameters_of(struct: str) -> dict[str, str]:
    """{parameter: field} of a struct."""
    _, fields = _native.op_layouts[struct]
    return {name.removesuffix(".data").replace(".", "_"): name for name in fields}


def vectors(dtype: str, *tensors: str, strides: tuple[str, ...] = ("b", "t", "h")) -> dict[str, int]:
    """`multiples` of tensors whose rows consist of whole vectors: of their addresses and their strides."""
    elements = VECTOR_BYTES // {"float32": 4, "float16": 2, "bfloat16": 2, "int8": 1}[dtype]
    found = {}
    for tensor in tensors:
        found[tensor] = VECTOR_BYTES
        found |= {f"{tensor}_stride_{dim}": elements for dim in strides}
    return found
