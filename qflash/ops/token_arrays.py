"""Arrays of tokens, `[B, T, H, D]` or packed `[total, H, D]`, as merge and rope take them. Packed ones are a batch of
one."""

from __future__ import annotations

from qflash.call.array import Array, check_float, takes_a_copy
from qflash.call.op import Extents, Operand
from qflash.call.words import INT32_MAX

Fields = tuple[tuple[str, int | Extents], ...]


def check_tokens(name: str, x: Array) -> None:
    """Reject an array of another rank or dtype, or without channels."""
    if len(x.shape) not in (3, 4):
        form = "[batch, length, heads, head_dim], or packed [total, heads, head_dim]"
        raise ValueError(f"{name} has shape {list(x.shape)}; allowed: {form}")
    check_float(name, x)
    if any(isinstance(extent, int) and extent > INT32_MAX for extent in x.shape):
        raise ValueError(f"{name} has shape {list(x.shape)}; allowed: every extent below 2^31")
    if x.shape[-1] < 1:
        raise ValueError(f"{name} has head_dim {x.shape[-1]}; allowed: 1 or more")


def size_of(name: str, x: Array, *dims: int) -> int | Extents:
    """The product of some extents, or how to compute it while one of them is symbolic."""
    product = 1
    for dim in dims:
        product *= x.shape[dim]
    return product if isinstance(product, int) else Extents(tuple((name, dim) for dim in dims))


def sizes_of(name: str, x: Array) -> Fields:
    """The struct's sizes."""
    rank = len(x.shape)
    batch = size_of(name, x, 0) if rank == 4 else 1
    rest = (("length", rank - 3), ("heads", rank - 2), ("head_dim", rank - 1))
    return ("batch", batch), *((field, size_of(name, x, dim)) for field, dim in rest)


def tokens_operand(name: str, field: str, x: Array) -> tuple[Operand, Fields]:
    """The operand of an array whose QfTensor is `field`, copied if kernels cannot read it, and its strides."""
    copied = takes_a_copy(x)
    operand = Operand(name, f"{field}.data", contiguous=copied)
    if copied or x.strides is None or 0 in x.shape:
        return operand, strides_without_gaps(field, name, x)
    return operand, _strides(field, x.strides[:-1])


def strides_without_gaps(field: str, name: str, x: Array) -> Fields:
    """The strides of a contiguous QfTensor `field` with the shape of x, argument `name`."""
    rank = len(x.shape)
    return _strides(field, [size_of(name, x, *range(dim + 1, rank)) for dim in range(rank - 1)])


def _strides(field: str, strides: tuple[int, ...] | list[int | Extents]) -> Fields:
    names = ("stride_b", "stride_t", "stride_h")[3 - len(strides) :]
    return tuple((f"{field}.{name}", stride) for name, stride in zip(names, strides, strict=True))
