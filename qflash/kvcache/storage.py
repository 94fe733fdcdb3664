"""What the cache needs from a framework: pools of pages, copies between pages, uploads of tables.

`make_storage` determines the framework from the dtype's class, without importing any.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from qflash.call.array import dtype_name
from qflash.call.spec import DTYPES
from qflash.kvcache.pages import Copy
from qflash.ops.paged import PagedKV
from qflash.rotary import Rope

EXAMPLES = "np.float32, torch.bfloat16, jnp.bfloat16"


@dataclass(frozen=True, slots=True)
class Shape:
    """The size of a cache, and its types: `dtype` is that of new tokens; pages are int8 if `is_int8`."""

    layers: int
    pages: int
    kv_heads: int
    page_size: int
    head_dim: int
    dtype: str
    is_int8: bool

    @property
    def of_pool(self) -> tuple[int, int, int, int]:
        """The shape of one layer's keys, or values: head-major, so that a head's tokens of a page are contiguous."""
        return self.pages, self.kv_heads, self.page_size, self.head_dim

    @property
    def elements(self) -> str:
        """The dtype of pages."""
        return "int8" if self.is_int8 else self.dtype

    @property
    def bytes_of_page(self) -> int:
        """Bytes of a page of one layer, keys and values: what attention reads."""
        element, scale = {"int8": (1, 4), "float32": (4, 0)}.get(self.elements, (2, 0))
        return 2 * self.kv_heads * self.page_size * (self.head_dim * element + scale)


@dataclass(slots=True)
class Layer:
    """The arrays of one layer. Only int8 pages have scales and k_mean."""

    k: Any
    v: Any
    k_scale: Any = None
    v_scale: Any = None
    k_mean: Any = None


def allocate(shape: Shape, zeros: Callable[[tuple[int, ...], str], Any]) -> tuple[list[Any], list[Layer]]:
    """Arrays for all layers together, so that a copy of a page is one assignment to each: returns those that have
    pages, and the layers, which are views of them. zeros(extents, name): an array of the dtype of that name."""
    pools = [zeros((shape.layers, *shape.of_pool), shape.elements) for _ in "kv"]
    means = []
    if shape.is_int8:
        pools += [zeros((shape.layers, *shape.of_pool[:-1]), "float32") for _ in "kv"]
        means = [zeros((shape.layers, shape.kv_heads, shape.head_dim), "float32")]
    return pools, [Layer(*parts) for parts in zip(*pools, *means, strict=True)]


class Storage(Protocol):
    """The arrays of a cache in one framework."""

    shape: Shape
    layers: list[Layer]
    device: Any
    in_place: bool  # whether a write modifies the arrays of `layers`; otherwise it replaces them

    def check_new(self, name: str, x: Any, shapes: tuple[tuple[int, ...], ...]) -> None:
        """Reject new tokens of another framework, dtype, device or shape."""

    def copy_pages(self, copies: Iterable[Copy]) -> None:
        """Execute copies in all layers."""

    def upload(self, old: Any, values: np.ndarray[Any, np.dtype[np.int32]]) -> Any:
        """An array of these values: `old`, written in place, if it is given and the framework supports that."""

    def set_mean(self, layer: int, compute: Callable[[], Any]) -> None:
        """Set the k_mean of a layer to the result of `compute`, float32 `[kv_heads, head_dim]`."""

    def write(self, layer: int, kv: PagedKV, k: Any, v: Any, rope: Rope | None, cu_seqlens: Any) -> PagedKV:
        """Write new tokens to the pages of `kv`; returns the PagedKV to read them."""


def make_storage(dtype: Any, device: Any, **sizes: Any) -> Storage:
    """The storage of the framework that `dtype` belongs to. `sizes`: the other fields of Shape."""
    if dtype is None or isinstance(dtype, str):
        raise TypeError(f"dtype is {dtype!r}, which names no framework; allowed: a framework's own, such as {EXAMPLES}")
    name = dtype_name("dtype", dtype)
    if name not in DTYPES:
        raise ValueError(f"dtype is {name}; allowed: {', '.join(DTYPES)} of a framework, such as {EXAMPLES}")
    shape = Shape(dtype=name, **sizes)
    framework = type(dtype).__module__.partition(".")[0]
    if framework == "torch":
        from qflash.kvcache.arrays_torch import TorchStorage

        return TorchStorage(shape, dtype, device)
    if framework in ("jax", "jaxlib"):
        from qflash.kvcache.arrays_jax import JaxStorage

        return JaxStorage(shape, dtype, device)
    from qflash.kvcache.arrays_numpy import NumpyStorage

    return NumpyStorage(shape, dtype, device)
