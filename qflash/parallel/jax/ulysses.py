"""strategy="ulysses": every device gets all tokens of some heads, attends, and sends the results back.

The inner call is plain attention over the whole sequence, so every argument has its usual meaning, and the gradient is
that of attention.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from qflash.parallel.jax.call import Facts, Static
from qflash.parallel.jax.shards import by_rank, in_token_order
from qflash.parallel.parts import Sequences


def attend_ulysses(static: Static, q: Any, k: Any, v: Any, sinks: Any, facts: Facts) -> tuple[Any, Any]:
    """out and, if requested, lse of this device's queries."""
    of = static.sequences(q, facts)
    own_sinks = None if sinks is None else sinks.reshape(static.ranks, -1)[static.rank()]
    out, lse = of.attend(of.whole_part(), *_all_tokens(static, of, q, k, v), own_sinks)
    out = _own_tokens(static, out, of.token_dim, of.token_dim + 1)
    return out, _own_tokens(static, lse, lse.ndim - 1, lse.ndim - 2) if of.words.return_lse else None


def _exchange(static: Static, x: Any) -> Any:
    """Row `rank` of every device's x, `[ranks, ...]`."""
    return jax.lax.all_to_all(x, static.axis, 0, 0, tiled=True)


def _all_tokens(static: Static, of: Sequences, q: Any, k: Any, v: Any) -> list[Any]:
    """q, k and v of all tokens, with the heads of this device. A head of k that several devices need goes to each."""
    dim = of.token_dim + 1
    if k.shape[dim] < static.ranks:
        k, v = (jnp.repeat(x, static.ranks // k.shape[dim], dim) for x in (k, v))
    rows = [jnp.stack(jnp.split(x, static.ranks, dim)) for x in (q, k, v)]
    arrived = in_token_order(_exchange(static, jnp.concatenate(rows, dim + 1)), static.at, of.token_dim)
    q_heads, kv_heads = rows[0].shape[dim + 1], rows[1].shape[dim + 1]
    return jnp.split(arrived, [q_heads, q_heads + kv_heads], dim)


def _own_tokens(static: Static, x: Any, token_dim: int, head_dim: int) -> Any:
    """x of this device's tokens, with all heads."""
    return jnp.concatenate(list(_exchange(static, by_rank(x, static.at, token_dim))), head_dim)
