"""Array descriptions: shape, strides, dtype and device without the data, and the checks that all operations share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from qflash.call.spec import DTYPES, OP_DTYPES
from qflash.call.words import shown


@dataclass(frozen=True, slots=True)
class Array:
    """The description of an array. Strides count elements; None means contiguous (JAX arrays have none)."""

    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    dtype: str
    device: str


def dtype_code(dtype: str) -> int:
    """QfDtype or QfOpDtype."""
    return OP_DTYPES.index(dtype)


def dtype_name(name: str, dtype: Any) -> str:
    """The plain name of a dtype, from a name or any framework's own dtype object."""
    if isinstance(dtype, str):
        return dtype
    if hasattr(dtype, "tolist") and not isinstance(dtype, type):  # an array, whose dtype NumPy would take
        raise TypeError(f"{name} is {shown(dtype)}; allowed: a dtype, or its name")
    text = str(dtype)
    if text.startswith("torch."):
        return text.removeprefix("torch.")
    try:
        import ml_dtypes  # noqa: F401  (registers the name "bfloat16" with NumPy)

        found: str = np.dtype(dtype).name
        return found
    except TypeError:
        raise TypeError(f"{name} is {shown(dtype)}; allowed: a dtype, or its name") from None


def check_float(name: str, array: Array) -> None:
    """Reject an array that does not have a floating-point type that kernels support."""
    if array.dtype not in DTYPES:
        raise TypeError(f"{name} has dtype {array.dtype}; allowed: {', '.join(DTYPES)}")


def check_device(name: str, array: Array, first: str, device: str) -> None:
    """Reject an array that is not on the device of the first one."""
    if array.device != device:
        raise ValueError(f"{name} is on {array.device}; allowed: {first}'s device, {device}")


def check_shape(name: str, array: Array, *shapes: Sequence[int]) -> None:
    """Reject an array of any other shape."""
    if all(tuple(array.shape) != tuple(shape) for shape in shapes):
        allowed = " or ".join(str(list(shape)) for shape in shapes)
        raise ValueError(f"{name} has shape {list(array.shape)}; allowed: {allowed}")


def check_dtype(name: str, array: Array, *dtypes: str) -> None:
    """Reject an array of any other dtype."""
    if array.dtype not in dtypes:
        raise TypeError(f"{name} has dtype {array.dtype}; allowed: {', '.join(dtypes)}")


def row_stride(array: Array) -> int | None:
    """Elements from one row of `[..., columns]` to the next, if a single stride fits; None: it must be copied."""
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


def takes_a_copy(x: Array) -> bool:
    """Whether an array must be copied, because its last dimension is not contiguous or a stride is negative."""
    if not x.strides or 0 in x.shape:
        return False
    return (x.strides[-1] != 1 and x.shape[-1] != 1) or any(stride < 0 for stride in x.strides)
