"""Descriptions of JAX arrays: shape, dtype and platform, and the devices they must share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import jax

from qflash.call.array import Array
from qflash.frontends.jax.kernels import platform_of


def describe(arrays: Mapping[str, Any], decides: str) -> list[Array]:
    """Shape, dtype and platform of each array. Traced arrays have no platform yet, so the default one is used.

    `decides`: the argument that decided the framework.
    """
    for name, x in arrays.items():
        if not isinstance(x, jax.Array):
            kind = f"{type(x).__module__}.{type(x).__qualname__}"
            like = "" if name == decides else f", as {decides} is"
            raise TypeError(f"{name} is {kind}; allowed: jax.Array{like}")
    if is_traced(arrays.values()):
        default = default_platform()
        return [Array(x.shape, None, x.dtype.name, default) for x in arrays.values()]
    # An uncommitted array follows the committed ones, as in JAX itself.
    first = next((name for name, x in arrays.items() if x.committed), decides)
    anchor = arrays[first]
    platforms = {name: _platform(x if x.committed else anchor) for name, x in arrays.items()}
    for name, x in arrays.items():  # one platform, several devices: XLA's error would not name the argument
        if x.committed and platforms[name] == platforms[first] and x.devices() != anchor.devices():
            raise ValueError(f"{name} is on {_devices(x)}; allowed: {first}'s device, {_devices(anchor)}")
    return [Array(x.shape, None, x.dtype.name, platforms[name]) for name, x in arrays.items()]


def is_traced(arrays: Iterable[Any]) -> bool:
    """Whether any of these is traced."""
    return any(isinstance(x, jax.core.Tracer) for x in arrays)


def default_platform() -> str:
    """The platform of arrays that were not placed explicitly."""
    return "cuda" if jax.default_backend() == "gpu" else jax.default_backend()


def _platform(x: jax.Array) -> str:
    return platform_of(next(iter(x.devices())))


def _devices(x: jax.Array) -> str:
    return ", ".join(f"{platform_of(device)}:{device.id}" for device in sorted(x.devices(), key=lambda d: d.id))
