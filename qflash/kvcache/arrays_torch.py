"""The pages of a cache as torch tensors, on the CPU or a CUDA GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch

from qflash.call.array import check_dtype, check_shape
from qflash.call.words import shown
from qflash.frontends.torch.arrays import describe
from qflash.kvcache.pages import Copy
from qflash.kvcache.storage import Shape, allocate
from qflash.ops.kv_write import paged_write
from qflash.ops.paged import PagedKV
from qflash.rotary import Rope


class TorchStorage:
    """Tensors that are written in place.

    Tensors that are written later are created outside inference mode; otherwise they could only be written in that
    mode.
    """

    in_place = True

    def __init__(self, shape: Shape, dtype: torch.dtype, device: Any) -> None:
        try:
            # With the GPU's index, which "cuda" omits and the device of every tensor has.
            self.device = torch.empty(0, device=device).device
        except (RuntimeError, TypeError, AssertionError) as error:
            reason = str(error).splitlines()[0]
            raise ValueError(f"device is {shown(device)}; allowed: one that torch has ({reason})") from None
        self.shape = shape
        self.dtype = dtype
        with torch.inference_mode(False):
            self._pools, self.layers = allocate(
                shape, lambda extents, name: torch.zeros(extents, dtype=getattr(torch, name), device=self.device)
            )

    def check_new(self, name: str, x: Any, shapes: tuple[tuple[int, ...], ...]) -> None:
        if type(x) is torch.Tensor and x.dtype is self.dtype and x.device == self.device and x.shape in shapes:
            return  # the usual case; otherwise the checks below find the error
        array = describe(name, x, "dtype")
        check_dtype(name, array, str(self.dtype).removeprefix("torch."))
        if x.device != self.device:
            raise ValueError(f"{name} is on {x.device}; allowed: the cache's device, {self.device}")
        check_shape(name, array, *shapes)

    def copy_pages(self, copies: Iterable[Copy]) -> None:
        for copy in copies:
            for pool in self._pools:  # without indices on the device, and without temporary memory
                pool[:, copy.target, :, : copy.tokens].copy_(pool[:, copy.source, :, : copy.tokens])

    def upload(self, old: Any, values: np.ndarray[Any, np.dtype[np.int32]]) -> Any:
        if old is None:
            with torch.inference_mode(False):
                old = torch.empty(values.shape, dtype=torch.int32, device=self.device)
        host = torch.from_numpy(values)
        # The copy does not wait for the GPU. PyTorch keeps pinned memory alive until such a copy is done, so `values`,
        # which the next step overwrites, is free immediately.
        old.copy_(host.pin_memory() if old.is_cuda else host, non_blocking=True)
        return old

    def set_mean(self, layer: int, compute: Callable[[], Any]) -> None:
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"the first write to layer {layer} is captured in a CUDA graph, and each replay would decide the mean "
                "of its keys again; allowed: a write of a prompt before the capture"
            )
        self.layers[layer].k_mean.copy_(compute())

    def write(self, layer: int, kv: PagedKV, k: Any, v: Any, rope: Rope | None, cu_seqlens: Any) -> PagedKV:
        return paged_write(kv, k, v, rope=rope, cu_seqlens=cu_seqlens)
