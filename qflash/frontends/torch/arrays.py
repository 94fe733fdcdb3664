"""Descriptions of torch tensors: shape, strides, dtype, device; lengths from the host; the architecture of a device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from qflash.backends.arch import arch_for
from qflash.call.array import Array
from qflash.call.lengths import lengths
from qflash.call.op import Op
from qflash.frontends.torch.watch import is_compiling, is_wrapped

Tensor = torch.Tensor
_INT32 = torch.iinfo(torch.int32)
_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int64)


def describe(name: str, x: Any, first: str = "q") -> Array:
    """Shape, strides, dtype and device of a strided tensor, or TypeError. `first` decided the framework.

    The strides of a tensor held by a transform of torch.func are None: a kernel gets another tensor, which the vmap
    rule makes of it, and that one is described separately.
    """
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} is {type(x).__module__}.{type(x).__qualname__}; allowed: torch.Tensor, as {first} is")
    if x.is_nested or x.layout is not torch.strided:
        layout = "nested" if x.is_nested else str(x.layout).removeprefix("torch.")
        raise TypeError(f"{name} is a {layout} tensor; allowed: a dense (strided) torch.Tensor")
    strides = None if is_wrapped(x) else x.stride()
    return Array(tuple(x.shape), strides, str(x.dtype).removeprefix("torch."), str(x.device))


def described(op: Op, arrays: Sequence[Any]) -> list[Array | None]:
    """Every array of a call, or TypeError."""
    return [None if x is None else describe(name, x, op.arrays[0]) for name, x in zip(op.arrays, arrays, strict=True)]


def as_index(name: str, x: Any, like: Tensor) -> Tensor:
    """Lengths or positions as an int32 tensor, if their values are on the host: ints that are not tensors, and tensors
    of other integers on the CPU. A tensor on a GPU is not converted; the plan checks it."""
    if isinstance(x, Tensor):
        if x.dtype is torch.int32 or x.dtype not in _INTEGERS or x.is_cuda:
            return x
        if x.dtype is torch.int64:  # saturated, so that no invalid value becomes valid
            x = x.clamp(_INT32.min, _INT32.max)
        return x.to(torch.int32)
    if not isinstance(x, (list, tuple, np.ndarray)):
        kind = f"{type(x).__module__}.{type(x).__qualname__}"
        raise TypeError(f"{name} is {kind}; allowed: torch.Tensor, or ints as a list, tuple or numpy.ndarray")
    if is_compiling():
        return torch.as_tensor(x, dtype=torch.int32, device=like.device)
    return torch.tensor(lengths(name, x), device=like.device)  # a copy, because users may modify their arrays


def with_indices(op: Op, arrays: Sequence[Any]) -> Sequence[Any]:
    """The arrays, with lengths and positions that are on the host as int32 tensors."""
    changed = None
    for name in op.indices:
        at = op.arrays.index(name)
        x = arrays[at]
        if x is not None and not (isinstance(x, Tensor) and x.dtype is torch.int32):
            changed = changed or list(arrays)
            changed[at] = as_index(name, x, arrays[0])
    return changed or arrays


def check_writeable(op: Op, arrays: Sequence[Any]) -> None:
    """Reject a lazily negated view among the tensors that an operation writes to: its memory has the opposite sign."""
    for x in op.written(arrays):
        if isinstance(x, Tensor) and x.is_neg():
            name = next(name for name, y in op.named(arrays).items() if y is x)
            raise ValueError(f"{name} is a lazily negated view; allowed: a tensor that {op.spoken} can write to")


def check_storage(op: Op, arrays: Sequence[Any]) -> None:
    """Reject a tensor with elements but no memory: a storage resized to 0, or a tensor without data."""
    for name, x in op.named(arrays).items():
        if x.numel() and not x.data_ptr():
            raise ValueError(f"{name} has no storage; allowed: a tensor that holds data")


_arch_of_index: dict[int, int] = {}


def arch_of_device(device: torch.device) -> int:
    """Compute capability times ten (or the value of QFLASH_CUDA_ARCH); 0 for anything but a CUDA device."""
    if device.type != "cuda":
        return 0
    index = device.index if device.index is not None else torch.cuda.current_device()
    arch = _arch_of_index.get(index)
    if arch is None:
        major, minor = torch.cuda.get_device_capability(index)
        arch = _arch_of_index[index] = arch_for(10 * major + minor)
    return arch
