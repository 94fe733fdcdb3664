"""The JAX functions that parts are computed with (qflash.parallel.parts.Maths)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp


def arange(count: int, like: Any) -> Any:
    return jnp.arange(count, dtype=jnp.int32)


def concatenate(arrays: Sequence[Any]) -> Any:
    return jnp.concatenate(list(arrays), -1)


def clip(x: Any, low: Any, high: Any) -> Any:
    return jnp.clip(x, low, high)


def where(condition: Any, x: Any, y: Any) -> Any:
    return jnp.where(condition, x, y)


def as_float32(x: Any) -> Any:
    return x.astype(jnp.float32)


def starts(offsets: Any, tokens: Any) -> Any:
    sequence = jnp.searchsorted(offsets, tokens, side="right").astype(jnp.int32)
    return offsets[jnp.clip(sequence - 1, 0, offsets.shape[0] - 2)]
