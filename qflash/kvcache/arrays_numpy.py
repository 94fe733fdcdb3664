"""The pages of a cache as NumPy arrays."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from qflash.call.array import check_dtype, check_shape
from qflash.call.words import shown
from qflash.frontends.numpy import describe
from qflash.kvcache.pages import Copy
from qflash.kvcache.storage import Shape, allocate
from qflash.ops.kv_write import paged_write
from qflash.ops.paged import PagedKV
from qflash.rotary import Rope


class NumpyStorage:
    """Arrays that are written in place."""

    in_place = True

    def __init__(self, shape: Shape, dtype: Any, device: Any) -> None:
        if device not in (None, "cpu"):
            raise ValueError(
                f"device is {shown(device)} and dtype is NumPy's; allowed: None, or a dtype of torch or jax.numpy"
            )
        self.device = "cpu"
        self.shape = shape
        self.dtype = np.dtype(dtype)
        self._pools, self.layers = allocate(
            shape, lambda extents, name: np.zeros(extents, self.dtype if name == shape.dtype else name)
        )

    def check_new(self, name: str, x: Any, shapes: tuple[tuple[int, ...], ...]) -> None:
        if type(x) is np.ndarray and x.dtype == self.dtype and x.shape in shapes:
            return  # the usual case; otherwise the checks below find the error
        array = describe(name, x, "dtype")
        check_dtype(name, array, self.dtype.name)
        check_shape(name, array, *shapes)

    def copy_pages(self, copies: Iterable[Copy]) -> None:
        for copy in copies:
            for pool in self._pools:
                pool[:, copy.target, :, : copy.tokens] = pool[:, copy.source, :, : copy.tokens]

    def upload(self, old: Any, values: np.ndarray[Any, np.dtype[np.int32]]) -> Any:
        if old is None:
            return values.copy()  # not the array itself, which the next step modifies before its checks are complete
        old[:] = values
        return old

    def set_mean(self, layer: int, compute: Callable[[], Any]) -> None:
        self.layers[layer].k_mean[:] = compute()

    def write(self, layer: int, kv: PagedKV, k: Any, v: Any, rope: Rope | None, cu_seqlens: Any) -> PagedKV:
        return paged_write(kv, k, v, rope=rope, cu_seqlens=cu_seqlens)
