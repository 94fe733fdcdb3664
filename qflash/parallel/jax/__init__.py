"""Context parallelism in JAX: attention over a sequence whose tokens are distributed over an axis of a mesh.

`attention` is called inside shard_map, like collectives. `shard` and `unshard` are called outside of it.

__init__  the call, its checks                      call     what is static, and branches for what is not
shards    arrays in the order of devices            maths    arithmetic on lengths and positions
ring      ring attention (ppermute)                 gather   every device gets all keys (all_gather)
ulysses   heads for tokens (all_to_all)
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from qflash.api import attention as attention_on_one_device
from qflash.api import attention_varlen
from qflash.call.words import INT32_MAX, check_int, shown
from qflash.frontends.jax import as_index, plan_of
from qflash.frontends.jax.derivatives import constant, reverse_only
from qflash.frontends.jax.describe import default_platform
from qflash.frontends.jax.varying import vary_alike
from qflash.ops.attention import ATTENTION
from qflash.ops.backward_memory import get_backward_memory
from qflash.ops.quantization import tables_of
from qflash.parallel.jax.call import Facts, Static
from qflash.parallel.jax.gather import attend_gathered
from qflash.parallel.jax.ring import attend_ring
from qflash.parallel.jax.shards import positions, shard, size_of, unshard
from qflash.parallel.jax.ulysses import attend_ulysses
from qflash.parallel.placement import Placement
from qflash.parallel.words import (
    check_length_values,
    check_offset_values,
    check_offsets,
    check_strategy,
    check_words,
)
from qflash.rotary import Rope

__all__ = ["attention", "positions", "shard", "unshard"]


def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    axis_name: str,
    strategy: str = "ring",
    placement: str | None = None,
    causal: bool = False,
    window: tuple[int, int] | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    sinks: Any = None,
    kv_lens: Any = None,
    cu_seqlens: Any = None,
    max_seqlen: int | None = None,
    rope: Rope | None = None,
    precision: str | None = None,
    return_lse: bool = False,
) -> Any:
    """`qflash.attention` on a sequence whose tokens are distributed over the devices of a mesh axis.

    Call it inside shard_map.

    Args:
        q: this device's queries, `[B, T, Hq, D]`, in the order of `shard`.
        k: this device's keys, `[B, T, Hkv, D]`, of the same tokens.
        v: this device's values, like k.
        axis_name: the axis of the mesh that tokens are distributed over.
        strategy: "ring": keys and values move from device to device (ppermute). "all_gather": every device gets all
            keys and values at once. "ulysses": devices exchange heads for tokens, and back (all_to_all).
        placement: which tokens a device has, "zigzag" or "contiguous", as in `shard`. None: zigzag if causal.
        causal: a query attends to the keys up to its own token.
        window: `(left, right)`, the number of keys visible on each side of a query's own; -1 means unlimited.
        softcap: as in `qflash.attention`.
        scale: as in `qflash.attention`.
        sinks: float `[Hq]`, the same on all devices.
        kv_lens: int32 `[B]`, the number of valid keys of each whole sequence, the same on all devices.
        cu_seqlens: int32 `[N + 1]`, cumulative lengths of packed sequences over the tokens of all devices, the same on
            all of them. q, k and v are then `[T, H, D]`, and device boundaries may be anywhere in a sequence.
        max_seqlen: upper bound on the length of a packed sequence. None: no bound.
        rope: rotates q and k by the positions of tokens in the whole sequence. `positions_q` and `positions_k` override
            those of this device's tokens.
        precision: None, "int8" or "int8_fp8". A ring then transfers keys and values as INT8. Forward only.
        return_lse: also return the log-sum-exp of each row of scores.

    Returns:
        This device's part of the result, like q. With `return_lse`, a tuple of it and lse, float32 `[B, Hq, T]`
        (packed: `[Hq, T]`). Reverse-mode differentiation supports both.

    Raises:
        TypeError, ValueError: an argument is invalid, or the strategy cannot express it; the message then names a
            strategy that can.
    """
    ranks = size_of(axis_name)
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, jax.Array):
            raise TypeError(f"{name} is {type(x).__module__}.{type(x).__qualname__}; allowed: jax.Array")
    words = check_words(
        strategy, placement, causal, window, softcap, scale, precision, return_lse, q.shape[-1] if q.ndim else 1
    )
    packed = cu_seqlens is not None
    if max_seqlen is not None and not packed:
        raise ValueError(f"max_seqlen is {shown(max_seqlen)} and cu_seqlens is None; allowed: None")
    token_dim = 0 if packed else 1
    if q.ndim != token_dim + 3:
        form = "[length, heads, head_dim] with cu_seqlens" if packed else "[batch, length, heads, head_dim]"
        raise ValueError(f"q has shape {q.shape}; allowed: rank {token_dim + 3}, {form}")
    at = Placement.of_part(words.placement, ranks, q.shape[token_dim], "q")
    longest = at.length if max_seqlen is None else min(check_int("max_seqlen", max_seqlen, 0, INT32_MAX), at.length)
    if ranks == 1:
        options = {
            "causal": causal, "window": window, "softcap": softcap, "scale": scale, "sinks": sinks, "kv_lens": kv_lens,
            "rope": rope, "precision": precision, "return_lse": return_lse,
        }  # fmt: skip
        if not packed:
            return attention_on_one_device(q, k, v, **options)
        return attention_varlen(q, k, v, cu_seqlens, cu_seqlens, longest, longest, **options)
    facts = _facts(q, kv_lens, cu_seqlens, rope)
    if packed:
        check_offsets(facts["offsets"])
    interleaved = _check_local(words, q, k, v, sinks, facts, longest, rope)
    _check_values(kv_lens, cu_seqlens, at.length, longest)
    if k.shape[token_dim] != q.shape[token_dim]:
        raise ValueError(
            f"k has {k.shape[token_dim]} tokens on this device; allowed: q's, {q.shape[token_dim]}, because both are "
            "of the same sequence"
        )
    check_strategy(words, ranks, q.shape[-2], k.shape[-2], kv_lens is not None, packed)
    _check_rope(rope, longest if packed else at.length)
    static = Static(at, words, axis_name, longest, interleaved, wide=default_platform() == "cpu")
    (q, k, v, sinks), facts = _all_vary(axis_name, (q, k, v, sinks), facts)
    facts |= _positions_of_all(static, facts)
    out, lse = _CARRIED_OUT_BY[words.strategy](static, q, k, v, sinks, facts)
    return (out, lse) if words.return_lse else out


_NO_FORWARD_MODE = (
    "qflash.parallel.jax.attention has no forward-mode derivative (jvp, jacfwd, linearize); allowed: reverse mode "
    "(grad, vjp, jacrev), or jax.lax.stop_gradient around q, k, v and sinks"
)
_CARRIED_OUT_BY = {"ring": attend_ring, "all_gather": attend_gathered, "ulysses": attend_ulysses}


def _facts(q: Any, kv_lens: Any, cu_seqlens: Any, rope: Any) -> Facts:
    """The arrays that describe tokens, those that are given."""
    cos, sin, positions_q, positions_k, _ = tables_of(rope)
    indices = (
        ("kv_lens", kv_lens),
        ("offsets", cu_seqlens),
        ("positions_q", positions_q),
        ("positions_k", positions_k),
    )
    spoken = {"offsets": "cu_seqlens", "positions_q": "rope.positions_q", "positions_k": "rope.positions_k"}
    found = {name: as_index(spoken.get(name, name), x, q) for name, x in indices if x is not None}
    return found | {name: x for name, x in (("cos", cos), ("sin", sin)) if x is not None}


def _check_local(words: Any, q: Any, k: Any, v: Any, sinks: Any, facts: Facts, longest: int, rope: Any) -> bool:
    """Raise what `qflash.attention` would raise for this device's arrays. Returns whether rope is interleaved."""
    interleaved = tables_of(rope)[4]
    lens, offsets = facts.get("kv_lens"), facts.get("offsets")
    tables = (facts.get(name) for name in ("cos", "sin", "positions_q", "positions_k"))
    options = (False, words.edges, words.softcap, words.scale, words.precision, None, False)
    more = (True, interleaved, longest, longest, get_backward_memory())
    plan_of(ATTENTION, (q, k, v, lens, offsets, offsets, *tables, sinks), (*options, *more))
    return bool(interleaved)


def _check_values(kv_lens: Any, cu_seqlens: Any, length: int, longest: int) -> None:
    """Check numbers that are known before the program runs. If one device raised later, the others would wait."""
    if kv_lens is not None and not isinstance(kv_lens, jax.core.Tracer):
        check_length_values(np.asarray(kv_lens).tolist(), length)
    if cu_seqlens is not None and not isinstance(cu_seqlens, jax.core.Tracer):
        check_offset_values(np.asarray(cu_seqlens).tolist(), length, longest)


def _check_rope(rope: Any, reach: int) -> None:
    """Tables must cover the tokens of all devices, not only of this one."""
    if rope is None or (rope.positions_q is not None and rope.positions_k is not None):
        return
    rows = rope.cos.shape[0]
    if rows < reach:
        raise ValueError(f"rope.cos has {rows} rows; allowed: at least {reach}, one for each position in use")


def _all_vary(axis_name: str, arrays: tuple[Any, ...], facts: Facts) -> tuple[list[Any], Facts]:
    """Make all arrays vary over the axis, and over every axis that one of them varies over.

    This happens outside of the functions with custom gradients, so JAX sums the gradients of arrays that devices share.
    """
    for name in ("cos", "sin"):
        if name in facts:
            text = f"rope.{name} has no gradient in qflash; put jax.lax.stop_gradient around it"
            facts[name] = constant(facts[name], text)
    given = [x for x in arrays if x is not None]
    varying = vary_alike([*given, *facts.values(), jax.lax.axis_index(axis_name)])
    some = iter(varying)
    of_arrays = [None if x is None else reverse_only(next(some), _NO_FORWARD_MODE) for x in arrays]
    return of_arrays, dict(zip(facts, some, strict=False))


def _positions_of_all(static: Static, facts: Facts) -> Facts:
    """The positions of all devices' tokens, if the user gave some: they are int32, and few."""
    wanted = ["positions_k"] + (["positions_q"] if static.words.strategy == "ulysses" else [])
    return {f"{name}_of_all": jax.lax.all_gather(facts[name], static.axis) for name in wanted if name in facts}
