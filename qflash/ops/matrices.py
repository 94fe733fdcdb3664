"""Matrices as kernels take them: the contiguous dimension, and the operands and fields that describe it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from qflash.call.array import Array, check_device, check_dtype, check_shape
from qflash.call.op import Operand

MOST_INT8_K = (2**31 - 1) // 128**2  # beyond this, a sum of int8 products may not fit into int32
Fields = list[tuple[str, int]]
_ROWS = "ABCDEFIJKLMOPQRSTUVWXYZ"  # letters of leading dimensions: those without another meaning in `Op.dims`


def layout_of(matrix: Array) -> tuple[str, int, int] | None:
    """(contiguous dimension, stride of k, stride of n) of a matrix [k, n]; None: neither is, and it must be copied.

    If both are, as in overlapping windows, it is k: kernels then need only the stride of k.
    """
    k, n = matrix.shape
    if matrix.strides is None or 0 in matrix.shape:
        return "n", n, 1
    stride_k, stride_n = matrix.strides
    # The stride of a dimension of one element has no meaning, so it is chosen to fit the other.
    if k == 1:
        stride_k = n if stride_n == 1 or n == 1 else 1
    if n == 1:
        stride_n = k if stride_k == 1 and k != 1 else 1
    if stride_k == 1 and stride_n >= 0:
        return "k", 1, stride_n
    if stride_n == 1 and stride_k >= 0:
        return "n", stride_k, 1
    return None


def dims_with_rows(letters: Mapping[str, str]) -> Callable[[Mapping[str, int]], Mapping[str, str] | None]:
    """`Op.dims` of a matrix product. `letters`: of each array and result, "*" for the leading dimensions, which are
    rows; the first array is "*k"."""
    first = next(iter(letters))

    def dims(ranks: Mapping[str, int]) -> Mapping[str, str] | None:
        leading = ranks[first] - 1
        rows = _ROWS[:leading]
        return {name: of.replace("*", rows) for name, of in letters.items()} if leading <= len(_ROWS) else None

    return dims


def transposed(matrix: Array) -> Array:
    """The same elements as [columns, rows]."""
    rows, columns = matrix.shape
    strides = (1, columns) if matrix.strides is None else (matrix.strides[1], matrix.strides[0])
    return Array((columns, rows), strides, matrix.dtype, matrix.device)


def scale_operand(
    name: str, field: str, array: Array | None, each: Sequence[int], device: str, first: str
) -> tuple[list[Operand], Fields]:
    """The operand and the stride of float32 scales: one for all, or one for `each`. Empty if there are none."""
    if array is None:
        return [], []
    check_dtype(name, array, "float32")
    check_shape(name, array, (), (1,), tuple(each))
    check_device(name, array, first, device)
    return [Operand(name, field, contiguous=True)], [(f"{field}_stride", int(array.shape not in ((), (1,))))]
