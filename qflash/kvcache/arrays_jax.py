"""The pages of a cache as JAX arrays. A write donates the arrays of a layer and keeps the results."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from qflash.call.array import check_dtype, check_shape
from qflash.call.words import shown
from qflash.frontends.jax.describe import describe, is_traced
from qflash.kvcache.pages import Copy
from qflash.kvcache.storage import Layer, Shape
from qflash.ops.kv_write import paged_write
from qflash.ops.paged import PagedKV
from qflash.rotary import Rope


class JaxStorage:
    """Separate arrays for each layer, because a write replaces them."""

    in_place = False

    def __init__(self, shape: Shape, dtype: Any, device: Any) -> None:
        if device is not None and not isinstance(device, jax.Device):
            raise TypeError(f"device is {shown(device)}; allowed: None or a jax.Device, such as jax.devices()[0]")
        self._placed = device  # None: arrays stay uncommitted, and follow those they are used with
        self.device = device or next(iter(jnp.zeros(0).devices()))
        self.shape = shape
        self.dtype = jnp.dtype(dtype)
        self.layers = []
        for _ in range(shape.layers):
            layer = Layer(*(jnp.zeros(shape.of_pool, shape.elements, device=device) for _ in "kv"))
            if shape.is_int8:
                layer.k_scale, layer.v_scale = (jnp.zeros(shape.of_pool[:-1], jnp.float32, device=device) for _ in "kv")
                layer.k_mean = jnp.zeros((shape.kv_heads, shape.head_dim), jnp.float32, device=device)
            self.layers.append(layer)

    def check_new(self, name: str, x: Any, shapes: tuple[tuple[int, ...], ...]) -> None:
        if is_traced([x]):
            raise TypeError(
                f"{name} is traced, and the cache is no part of a program; allowed: qflash.paged_write in jit"
            )
        (array,) = describe({name: x}, name)
        check_dtype(name, array, self.dtype.name)
        if x.committed and x.devices() != {self.device}:
            raise ValueError(f"{name} is on {', '.join(map(str, x.devices()))}; allowed: the cache's, {self.device}")
        check_shape(name, array, *shapes)

    def copy_pages(self, copies: Iterable[Copy]) -> None:
        for copy in copies:
            for layer in self.layers:
                pools = (layer.k, layer.v, layer.k_scale, layer.v_scale)
                # NumPy scalars are arguments of the program, so one program serves all pages.
                layer.k, layer.v, layer.k_scale, layer.v_scale = _copy_page(
                    pools, np.int32(copy.source), np.int32(copy.target)
                )

    def upload(self, old: Any, values: np.ndarray[Any, np.dtype[np.int32]]) -> Any:
        return jax.device_put(values.copy(), self._placed)  # a copy, because a CPU device may alias the memory

    def set_mean(self, layer: int, compute: Callable[[], Any]) -> None:
        self.layers[layer].k_mean = compute()

    def write(self, layer: int, kv: PagedKV, k: Any, v: Any, rope: Rope | None, cu_seqlens: Any) -> PagedKV:
        arrays = self.layers[layer]
        if self.device.platform == "cpu" and rope is not None and rope.positions_k is not None:
            # The CPU engine rejects bad positions at run time, when donated arrays are already lost. Everything else
            # that it checks was checked by the step.
            kv = paged_write(kv, k, v, rope=rope, cu_seqlens=cu_seqlens)
            arrays.k, arrays.v, arrays.k_scale, arrays.v_scale = kv.k_pages, kv.v_pages, kv.k_scale, kv.v_scale
            return kv
        pools = (arrays.k, arrays.v, arrays.k_scale, arrays.v_scale)
        pools = _write(pools, (kv.page_table, kv.lens, arrays.k_mean), k, v, rope, cu_seqlens)
        arrays.k, arrays.v, arrays.k_scale, arrays.v_scale = pools
        return replace(kv, k_pages=arrays.k, v_pages=arrays.v, k_scale=arrays.k_scale, v_scale=arrays.v_scale)


def _copied(pools: Any, source: Any, target: Any) -> Any:
    return jax.tree.map(lambda pool: pool.at[target].set(pool[source]), pools)


def _written(pools: Any, tables: Any, k: Any, v: Any, rope: Any, cu_seqlens: Any) -> Any:
    (k_pages, v_pages, k_scale, v_scale), (page_table, lens, k_mean) = pools, tables
    kv = PagedKV(k_pages, v_pages, page_table, lens, k_scale=k_scale, v_scale=v_scale, k_mean=k_mean)
    kv = paged_write(kv, k, v, rope=rope, cu_seqlens=cu_seqlens)
    return kv.k_pages, kv.v_pages, kv.k_scale, kv.v_scale


_copy_page = jax.jit(_copied, donate_argnums=0)
_write = jax.jit(_written, donate_argnums=0)
