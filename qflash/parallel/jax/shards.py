"""Arrays in the order in which devices have their tokens, and the positions of a device's tokens in the sequence."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from qflash.call.words import INT32_MAX, check_int, shown
from qflash.parallel.placement import Placement, check_placement


def shard(x: Any, *, ranks: int, dim: int = 1, causal: bool = False, placement: str | None = None) -> Any:
    """Reorder an array of all tokens so that equal parts in sequence are the parts of the devices.

    Args:
        x: with all tokens in dimension `dim`: q, k, v, token ids, labels.
        ranks: the number of devices on the mesh axis.
        dim: the dimension of tokens.
        causal: selects the placement, as in `attention`.
        placement: "zigzag" (two chunks per device, from both ends) or "contiguous" (one). None: zigzag if causal.

    Returns:
        An array like x, or x itself if the placement is contiguous. A sharding that splits `dim` over the mesh axis
        gives each device its tokens.
    """
    at, dim = _placed(x, ranks, dim, causal, placement)
    if at.runs == 1:
        return x
    chunks = jnp.split(x, at.runs * at.ranks, dim)
    return jnp.concatenate([chunks[chunk] for rank in range(at.ranks) for chunk in at.chunks(rank)], dim)


def unshard(x: Any, *, ranks: int, dim: int = 1, causal: bool = False, placement: str | None = None) -> Any:
    """The inverse of `shard`, with the same arguments."""
    at, dim = _placed(x, ranks, dim, causal, placement)
    if at.runs == 1:
        return x
    chunks = jnp.split(x, at.runs * at.ranks, dim)
    return jnp.concatenate([chunks[at.runs * rank + run] for rank, run in at.holders()], dim)


def positions(length: int, *, axis_name: str, causal: bool = False, placement: str | None = None) -> Any:
    """Return the tokens of a sequence of `length` that this device has, int32 `[length / ranks]`. Inside shard_map."""
    length, ranks = check_int("length", length, 0, INT32_MAX), size_of(axis_name)
    at = Placement.of_whole(check_placement(placement, causal), ranks, length, "a sequence", 0)
    steps = jnp.arange(at.chunk, dtype=jnp.int32)
    return jnp.concatenate([steps + chunk * at.chunk for chunk in at.chunks(jax.lax.axis_index(axis_name))])


def size_of(axis_name: Any) -> int:
    """The number of devices on an axis."""
    if not isinstance(axis_name, str):
        raise TypeError(f"axis_name is {axis_name!r}; allowed: the name of one axis of the mesh")
    try:
        return int(jax.lax.axis_size(axis_name))
    except NameError:
        raise ValueError(
            f"axis_name is {axis_name!r}, and the call is not in a shard_map over an axis of that name; allowed: an "
            "axis of the mesh that jax.shard_map was given"
        ) from None


def in_token_order(parts: Any, at: Placement, dim: int) -> Any:
    """`[ranks, ...]`, each row a device's part, as one array in token order. dim: of a part."""
    chunk = at.chunk
    pieces = [jax.lax.slice_in_dim(parts[rank], run * chunk, (run + 1) * chunk, axis=dim) for rank, run in at.holders()]
    return jnp.concatenate(pieces, dim)


def by_rank(x: Any, at: Placement, dim: int) -> Any:
    """An array with all tokens as `[ranks, ...]`, each row a device's part."""
    chunks = jnp.split(x, at.runs * at.ranks, dim)
    return jnp.stack([jnp.concatenate([chunks[i] for i in at.chunks(rank)], dim) for rank in range(at.ranks)])


def _placed(x: Any, ranks: Any, dim: Any, causal: Any, placement: Any) -> tuple[Placement, int]:
    ranks = check_int("ranks", ranks, 1, INT32_MAX)
    if not isinstance(x, (jax.Array, np.ndarray)):
        raise TypeError(f"x is {type(x).__module__}.{type(x).__qualname__}; allowed: jax.Array or numpy.ndarray")
    if not x.ndim:
        raise ValueError(f"x has no dimension; allowed: an array with tokens in dimension {shown(dim)}")
    dim = check_int("dim", dim, -x.ndim, x.ndim - 1) % x.ndim
    return Placement.of_whole(check_placement(placement, causal), ranks, x.shape[dim], "x", dim), dim
