"""Context parallelism in JAX: attention over a sequence whose tokens are spread over an axis of a mesh.

`attention` is called inside shard_map, as collectives are. `shard` and `unshard` are called outside of it.

__init__  the call, its checks                      call     what is static, and branches for what is not
shards    arrays in the order of devices            maths    arithmetic on lengths and positions
ring      keys and values go round (ppermute)       gather   every device gets all keys (all_gather)
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
    """`qflash.attention` of a sequence whose tokens are spread over the devices of a mesh axis. Inside shard_map.

    Args:
        q: this device's queries, `[B, T, Hq, D]`, as `shard` orders them.
        k: this device's keys, `[B, T, Hkv, D]`, of the same tokens.
        v: this device's values, like k.
        axis_name: the axis of the mesh that tokens are spread over.
        strategy: what moves. "ring": keys and values, from device to device (ppermute). "all_gather": keys and values
            of all devices at once. "ulysses": heads for tokens, and back (all_to_all).
        placement: which tokens a device has, "zigzag" or "contiguous", as `shard` has it; None: zigzag where causal.
        causal: a query sees the keys up to its own token.
        window: `(left, right)`, how many keys a query sees on each side of its own; -1 is open.
        softcap: as in `qflash.attention`.
        scale: as in `qflash.attention`.
        sinks: float `[Hq]`, the same on all devices.
        kv_lens: int32 `[B]`, how many keys of each whole sequence exist, the same on all devices.
        cu_seqlens: int32 `[N + 1]`, where packed sequences begin and end among the tokens of all devices, the same on
            all of them; q, k and v are then `[T, H, D]`, and devices may cut sequences anywhere.
        max_seqlen: no packed sequence is longer; None: they may be as long as all of them together.
        rope: rotates q and k by the positions that tokens have in the whole sequence. `positions_q` and `positions_k`
            say others, of this device's tokens.
        precision: None, "int8" or "int8_fp8". In a ring keys and values travel as INT8. Forward only.
        return_lse: also return the log-sum-exp of each row of scores.

    Returns:
        This device's part of the result, like q. With `return_lse` a pair of it and lse, float32 `[B, Hq, T]` (packed:
        `[Hq, T]`). Reverse mode goes through both.

    Raises:
        TypeError, ValueError: an argument is not what is allowed, or the strategy cannot express it and the text names
            one that can.
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
    """The arrays that say something of tokens, those that are there."""
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
    """What `qflash.attention` refuses of this device's arrays. Returns whether rope is interleaved."""
    interleaved = tables_of(rope)[4]
    lens, offsets = facts.get("kv_lens"), facts.get("offsets")
    tables = (facts.get(name) for name in ("cos", "sin", "positions_q", "positions_k"))
    options = (False, words.edges, words.softcap, words.scale, words.precision, None, False)
    more = (True, interleaved, longest, longest, get_backward_memory())
    plan_of(ATTENTION, (q, k, v, lens, offsets, offsets, *tables, sinks), (*options, *more))
    return bool(interleaved)


def _check_values(kv_lens: Any, cu_seqlens: Any, length: int, longest: int) -> None:
    """Of numbers that are known before the program runs. A device that refused them would leave the others waiting."""
    if kv_lens is not None and not isinstance(kv_lens, jax.core.Tracer):
        check_length_values(np.asarray(kv_lens).tolist(), length)
    if cu_seqlens is not None and not isinstance(cu_seqlens, jax.core.Tracer):
        check_offset_values(np.asarray(cu_seqlens).tolist(), length, longest)


def _check_rope(rope: Any, reach: int) -> None:
    """Tables must reach as far as the tokens of all devices, not of this one."""
    if rope is None or (rope.positions_q is not None and rope.positions_k is not None):
        return
    rows = rope.cos.shape[0]
    if rows < reach:
        raise ValueError(f"rope.cos has {rows} rows; allowed: at least {reach}, one for each position in use")


def _all_vary(axis_name: str, arrays: tuple[Any, ...], facts: Facts) -> tuple[list[Any], Facts]:
    """All arrays as varying over the axis, and over every axis that one of them varies over.

    Done outside of the functions with gradients of their own, so that JAX sums the gradient of what devices share.
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
    """The positions of all devices' tokens, where the user gave some: they are int32, and few."""
    wanted = ["positions_k"] + (["positions_q"] if static.words.strategy == "ulysses" else [])
    return {f"{name}_of_all": jax.lax.all_gather(facts[name], static.axis) for name in wanted if name in facts}
