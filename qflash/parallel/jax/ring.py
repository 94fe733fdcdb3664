"""strategy="ring": keys and values move by ppermute, unrolled, so XLA may overlap it with the computation.

The backward pass is custom. Differentiating the steps would keep every block of keys and every partial result, as much
as the whole sequence on each device. Here a device keeps only its own keys, and shares of gradients are computed from
the out and lse of all keys as blocks go around a second time.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from qflash.frontends.jax.varying import vary_alike
from qflash.ops.merge import merge
from qflash.parallel.jax.call import Facts, Static, add_rows, check_differentiable, for_each_kind, saved_again
from qflash.parallel.parts import Part, Sequences
from qflash.parallel.pieces import Piece, Span, ring_steps
from qflash.parallel.wire import from_wire, to_wire

Pieces = tuple[Piece, ...]
State = tuple[Any, Any]  # float32 out and lse


def attend_ring(static: Static, q: Any, k: Any, v: Any, sinks: Any, facts: Facts) -> tuple[Any, Any]:
    """out and lse of this device's queries."""
    out, lse = _ring(static, q, k, v, sinks, facts)
    return out, lse


def _steps(static: Static, packed: bool) -> list[list[Pieces]]:
    """For each hop, what every rank computes after it."""
    of_ranks = [ring_steps(static.at, rank, static.words.edges, packed) for rank in range(static.ranks)]
    return [[steps[hop] for steps in of_ranks] for hop in range(len(of_ranks[0]))]


def _parts(of: Sequences, static: Static, pieces: Pieces, hop: int) -> list[Part]:
    rank = static.rank()
    return [of.ring_part(piece, rank, (rank - hop) % static.ranks) for piece in pieces]


def _merged(of: Sequences, state: State | None, rows: Span, like: Any, out: Any, lse: Any) -> State:
    """The state merged with the result of some rows. None: there is no result yet."""
    whole = (0, like.shape[of.token_dim])
    if state is None and rows == whole:
        return out.astype(jnp.float32), lse
    total, total_lse = _empty(of, like) if state is None else state
    if rows == whole:
        return merge(total, total_lse, out, lse)
    place = (slice(None),) * of.token_dim + (slice(*rows),)
    some, some_lse = merge(total[place], total_lse[..., slice(*rows)], out, lse)
    return total.at[place].set(some), total_lse.at[..., slice(*rows)].set(some_lse)


def _empty(of: Sequences, like: Any) -> State:
    """The results of rows that see no keys."""
    of_lse = (*like.shape[: of.token_dim], like.shape[-2], like.shape[of.token_dim])
    out, lse, _ = vary_alike([jnp.zeros(like.shape, jnp.float32), jnp.full(of_lse, -jnp.inf, jnp.float32), like])
    return out, lse


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _ring(static: Static, q: Any, k: Any, v: Any, sinks: Any, facts: Facts) -> tuple[Any, Any]:
    of = static.sequences(q, facts)
    steps = _steps(static, of.offsets is not None)
    block = jnp.stack([k, v])
    wire = to_wire(of, block, static.rank()) if len(steps) > 1 else ()
    state: State | None = None
    for hop, kinds in enumerate(steps):
        coming = static.pass_on(wire) if hop + 1 < len(steps) else wire
        block = from_wire(wire, block) if hop else block

        def attend(pieces: Pieces, hop: int = hop, block: Any = block, found: State | None = state) -> State | None:
            for part in _parts(of, static, pieces, hop):
                found = _merged(of, found, part.q, q, *of.attend(part, q, block[0], block[1], sinks))
            return found

        state = for_each_kind(static, kinds, attend, q)
        wire = coming
    out, lse = _empty(of, q) if state is None else state
    return out.astype(q.dtype), lse


def _save(static: Static, q: Any, k: Any, v: Any, sinks: Any, facts: Facts) -> tuple[tuple[Any, Any], Any]:
    check_differentiable(static)
    out, lse = _ring(static, q, k, v, sinks, facts)
    return (out, lse), (q, k, v, sinks, facts, out, lse)


def _pull_back(static: Static, saved: Any, cotangents: tuple[Any, Any]) -> tuple[Any, ...]:
    q, k, v, sinks, facts, out, lse = saved
    dout, dlse = cotangents
    k, v, dout = saved_again(k, v, dout)
    of = static.sequences(q, facts)
    steps = _steps(static, of.offsets is not None)
    block = jnp.stack([k, v])
    zeros = [jnp.zeros(x.shape, jnp.float32) for x in (q, block)]
    zeros.append(jnp.zeros(q.shape[-2:-1], jnp.float32))
    dq, dblock, dsinks, _ = vary_alike([*zeros, q])
    for hop, kinds in enumerate(steps):
        coming = static.pass_on(block) if hop + 1 < len(steps) else block

        def add(pieces: Pieces, hop: int = hop, block: Any = block, totals: Any = (dq, dblock, dsinks)) -> Any:
            dq, dblock, dsinks = totals
            for part in _parts(of, static, pieces, hop):
                share = of.gradients(part, dout, dlse, q, block[0], block[1], sinks, out, lse)
                dq = add_rows(dq, share[0], of.token_dim, part.q)
                dblock = add_rows(dblock, jnp.stack(share[1:3]), of.token_dim + 1, part.k)
                dsinks = dsinks + share[3] if len(share) > 3 else dsinks
            return dq, dblock, dsinks

        dq, dblock, dsinks = for_each_kind(static, kinds, add, q)
        if hop + 1 < len(steps):  # the gradients of a block follow it, one hop behind
            dblock = static.pass_on(dblock)
        block = coming
    if len(steps) > 1:
        dblock = static.pass_on(dblock, 1 - len(steps))  # back to the device that owns the keys
    dk, dv = dblock.astype(k.dtype)
    of_sinks = None if sinks is None else dsinks.astype(sinks.dtype)
    return dq.astype(q.dtype), dk, dv, of_sinks, dict.fromkeys(facts)


_ring.defvjp(_save, _pull_back)
