"""Lengths and positions on the host: lists, tuples and NumPy integer arrays become int32, checked."""

from __future__ import annotations

from numbers import Integral
from typing import Any

import numpy as np

_INT32 = np.iinfo(np.int32)
_FORMS = "a list or tuple of ints, or a numpy.ndarray of integers"


def lengths(name: str, value: Any) -> np.ndarray:
    """`value` as a contiguous int32 array of the same shape, or TypeError or ValueError about argument `name`."""
    if isinstance(value, (list, tuple)):
        shape = _shape_of(name, value)
        for x in _leaves(value):
            _require_int32(name, x)
        return np.array(value, np.int32).reshape(shape)
    if not isinstance(value, np.ndarray):
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        raise TypeError(f"{name} is {kind}; allowed: {_FORMS}")
    if isinstance(value, np.ma.MaskedArray):  # its mask would be ignored
        raise TypeError(f"{name} is a masked array; allowed: {_FORMS}")
    if not np.issubdtype(value.dtype, np.integer):  # np.bool_ is not an np.integer
        raise TypeError(f"{name} has dtype {value.dtype.name}; allowed: an integer dtype")
    if value.size and not np.can_cast(value.dtype, np.int32):
        for x in (value.min(), value.max()):
            _require_int32(name, x)
    # Not np.ascontiguousarray, which turns rank 0 into rank 1.
    return np.asarray(value, dtype=np.int32, order="C")


def _require_int32(name: str, x: Any) -> None:
    if isinstance(x, (bool, np.bool_)) or not isinstance(x, Integral):
        raise TypeError(f"{name} contains {x!r}; allowed: ints")
    if not _INT32.min <= int(x) <= _INT32.max:
        raise ValueError(f"{name} contains {x}; allowed: what int32 holds, {_INT32.min} to {_INT32.max}")


def _shape_of(name: str, value: Any) -> tuple[int, ...]:
    """The shape of nested lists; all lists at one level must have the same shape."""
    if not isinstance(value, (list, tuple)):
        return ()
    shapes = [_shape_of(name, x) for x in value]
    for shape in shapes[1:]:
        if shape != shapes[0]:
            parts = " beside ".join("a number" if not part else f"{list(part)}" for part in (shapes[0], shape))
            raise ValueError(
                f"{name} is a ragged list (its entries have shapes {parts}); allowed: entries of one shape"
            )
    return (len(value), *(shapes[0] if shapes else ()))


def _leaves(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        for x in value:
            yield from _leaves(x)
    else:
        yield value
