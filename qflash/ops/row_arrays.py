"""Arrays of rows, `[..., columns]`, as row operations and their gradients take them."""

from __future__ import annotations

import math

from qflash.call.array import Array, check_float, row_stride
from qflash.call.op import Operand


def check_rows(name: str, array: Array) -> int:
    """The number of rows."""
    check_float(name, array)
    if len(array.shape) < 1:
        raise ValueError(f"{name} has shape {array.shape}; allowed: rank 1 or more, [..., columns]")
    return math.prod(array.shape[:-1])


def rows_operand(name: str, array: Array) -> tuple[Operand, int]:
    """The operand of an array of rows, whose field has its name, and its row stride."""
    stride = row_stride(array)
    return Operand(name, name, contiguous=stride is None), array.shape[-1] if stride is None else stride
