"""Lengths and positions as int32, as XLA programs need them, from lists, NumPy integers and arrays of int64."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from qflash.call.lengths import lengths
from qflash.frontends.jax.kernels import platform_of

_FORMS = "a jax.Array of int32, a numpy.ndarray of integers, or a list of ints"


def as_lengths(name: str, value: Any) -> Any:
    """An int32 array for argument `name`; invalid values that the checks of every array report well are passed through.

    Values on the host are checked and converted, and follow q to its device. Nothing waits for a device.
    """
    if isinstance(value, jax.Array):
        return _from_array(name, value)
    if isinstance(value, (list, tuple)) and any(isinstance(x, jax.Array) for x in jax.tree.leaves(value)):
        raise TypeError(
            f"{name} is a list of jax.Arrays, which is what a list becomes that is an argument of jax.jit or a part of "
            f"one; allowed: {_FORMS}. Make it an array before, with jnp.asarray({name}, jnp.int32)"
        )
    if not isinstance(value, (list, tuple, np.ndarray)):
        raise TypeError(f"{name} is {type(value).__module__}.{type(value).__qualname__}; allowed: {_FORMS}")
    return jnp.array(lengths(name, value))  # a copy, because users may modify their arrays; not committed to a device


def _from_array(name: str, value: jax.Array) -> jax.Array:
    if value.dtype == jnp.int32 or not jnp.issubdtype(value.dtype, jnp.integer):
        return value
    if np.can_cast(value.dtype, np.int32):
        return value.astype(jnp.int32)
    if isinstance(value, jax.core.Tracer):
        raise TypeError(f"{name} has dtype {value.dtype} and is traced; allowed: int32, cast it with {_cast(name)}")
    if not _on_host(value):
        raise TypeError(
            f"{name} has dtype {value.dtype} and is on a device, where nobody can look whether its values fit into "
            f"int32 without waiting; allowed: int32, cast it with {_cast(name)}"
        )
    converted = lengths(name, np.asarray(value))
    return jax.device_put(converted, value.sharding) if value.committed else jnp.array(converted)


def _cast(name: str) -> str:
    return f"{name}.astype(jnp.int32)"


def _on_host(value: jax.Array) -> bool:
    return value.is_fully_addressable and all(platform_of(device) == "cpu" for device in value.devices())
