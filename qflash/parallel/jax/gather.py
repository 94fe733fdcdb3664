"""strategy="all_gather": every device gets all keys and values, and attends to them with its own queries.

Each chunk of queries is one call. The keys that it sees depend on the device, so lengths specify where they end. In the
backward pass keys are gathered again, which takes less memory than keeping them for every layer, and their gradients
are summed over the devices in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from qflash.parallel.jax.call import Facts, Static, check_differentiable, for_each_kind, saved_again
from qflash.parallel.jax.shards import by_rank, in_token_order
from qflash.parallel.parts import Part, Sequences
from qflash.parallel.pieces import chunk_call


def attend_gathered(static: Static, q: Any, k: Any, v: Any, sinks: Any, facts: Facts) -> tuple[Any, Any]:
    """out and lse of this device's queries."""
    out, lse = _gathered(static, q, k, v, sinks, facts)
    return out, lse


def _all_keys(static: Static, k: Any, v: Any, token_dim: int) -> Any:
    """k and v of all devices in token order, `[2, B, S, Hkv, D]`."""
    return in_token_order(jax.lax.all_gather(jnp.stack([k, v]), static.axis), static.at, token_dim + 1)


def _for_each_part(static: Static, of: Sequences, function: Callable[[Part], Any], like: Any) -> list[Any]:
    """function(part) of this device's parts. A window is static, so devices may need separate branches."""
    rank = static.rank()
    if static.words.open and of.offsets is None:
        return [function(part) for part in of.gathered_parts(rank)]
    found = []
    for run in range(static.at.runs):
        calls = [chunk_call(static.at, static.at.chunks(one)[run], static.words.edges) for one in range(static.ranks)]
        k_end = jnp.array([call.k_end for call in calls], jnp.int32)[rank]

        def of_window(window: tuple[int, int], run: int = run, k_end: Any = k_end) -> Any:
            return function(of.masked_part(run, rank, static.at.chunks(rank)[run], k_end, window))

        found.append(for_each_kind(static, [call.window for call in calls], of_window, like))
    return found


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gathered(static: Static, q: Any, k: Any, v: Any, sinks: Any, facts: Facts) -> tuple[Any, Any]:
    of = static.sequences(q, facts)
    keys = _all_keys(static, k, v, of.token_dim)
    results = _for_each_part(static, of, lambda part: of.attend(part, q, keys[0], keys[1], sinks), q)
    out = jnp.concatenate([out for out, _ in results], of.token_dim)
    return out, jnp.concatenate([lse for _, lse in results], -1)


def _save(static: Static, q: Any, k: Any, v: Any, sinks: Any, facts: Facts) -> tuple[tuple[Any, Any], Any]:
    check_differentiable(static)
    out, lse = _gathered(static, q, k, v, sinks, facts)
    return (out, lse), (q, k, v, sinks, facts, out, lse)


def _pull_back(static: Static, saved: Any, cotangents: tuple[Any, Any]) -> tuple[Any, ...]:
    q, k, v, sinks, facts, out, lse = saved
    dout, dlse = cotangents
    k, v, dout = saved_again(k, v, dout)
    of = static.sequences(q, facts)
    keys = _all_keys(static, k, v, of.token_dim)
    shares = _for_each_part(
        static, of, lambda part: of.gradients(part, dout, dlse, q, keys[0], keys[1], sinks, out, lse), q
    )
    dq = jnp.concatenate([share[0] for share in shares], of.token_dim)
    dkeys = sum(jnp.stack(share[1:3]).astype(jnp.float32) for share in shares)
    by_ranks = by_rank(dkeys, static.at, of.token_dim + 1)
    # tiled, because under vmap the other form scatters the wrong dimension (JAX 0.10)
    (own,) = jax.lax.psum_scatter(by_ranks, static.axis, scatter_dimension=0, tiled=True)
    dk, dv = own.astype(k.dtype)
    dsinks = None if sinks is None else sum(share[3] for share in shares).astype(sinks.dtype)
    return dq, dk, dv, dsinks, dict.fromkeys(facts)


_gathered.defvjp(_save, _pull_back)
