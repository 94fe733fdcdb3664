"""Arrays in the order in which devices have their tokens, and where a device's tokens stand in the whole sequence."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from qflash.call.words import INT32_MAX, check_int, shown
from qflash.parallel.placement import Placement, check_placement


def shard(x: Any, *, ranks: int, dim: int = 1, causal: bool = False, placement: str | None = None) -> Any:
    """An array of all tokens, put in the order of the devices that have them: cut it over them in equal parts.

    Args:
        x: with all tokens in dimension `dim`: q, k, v, token ids, labels.
        ranks: how many devices the axis of the mesh has.
        dim: which dimension the tokens are.
        causal: says the placement, as it does in `attention`.
        placement: "zigzag" (two chunks for each device, from both ends) or "contiguous" (one); None: zigzag where
            causal.

    Returns:
        An array like x. It is x itself where the placement is contiguous. A sharding that splits `dim` over the mesh
        axis gives each device its tokens.
    """
    at, dim = _placed(x, ranks, dim, causal, placement)
    if at.runs == 1:
        return x
    chunks = jnp.split(x, at.runs * at.ranks, dim)
    return jnp.concatenate([chunks[chunk] for rank in range(at.ranks) for chunk in at.chunks(rank)], dim)


def unshard(x: Any, *, ranks: int, dim: int = 1, causal: bool = False, placement: str | None = None) -> Any:
    """The inverse of `shard`, with the same words."""
    at, dim = _placed(x, ranks, dim, causal, placement)
    if at.runs == 1:
        return x
    chunks = jnp.split(x, at.runs * at.ranks, dim)
    return jnp.concatenate([chunks[at.runs * rank + run] for rank, run in at.holders()], dim)


def positions(length: int, *, axis_name: str, causal: bool = False, placement: str | None = None) -> Any:
    """Inside shard_map: int32 `[length / ranks]`, which tokens of a sequence of `length` this device has, in order."""
    length, ranks = check_int("length", length, 0, INT32_MAX), size_of(axis_name)
    at = Placement.of_whole(check_placement(placement, causal), ranks, length, "a sequence", 0)
    steps = jnp.arange(at.chunk, dtype=jnp.int32)
    return jnp.concatenate([steps + chunk * at.chunk for chunk in at.chunks(jax.lax.axis_index(axis_name))])


def size_of(axis_name: Any) -> int:
    """How many devices an axis has."""
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
    """`[ranks, ...]`, each row a device's part, as one array with all tokens. dim: of a part."""
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
