"""Context parallelism on torch.distributed: attention over a sequence whose tokens are distributed over processes.

__init__  the call, its checks                      groups    process groups and mesh dimensions
shards    tensors sharded over ranks, positions     agree     the same call on all ranks, or an error on all
ring      ring attention                            exchange  communication between ranks
gather    every rank gets all keys                  maths     arithmetic on lengths and positions
ulysses   heads for tokens                          by_hand   custom backward passes
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from qflash import dispatch
from qflash.api import attention as attention_on_one_rank
from qflash.api import attention_varlen
from qflash.call.words import check_int, shown
from qflash.frontends.torch import arch_of, plan_of
from qflash.frontends.torch.arrays import as_index, describe
from qflash.frontends.torch.autograd import check as check_gradients
from qflash.frontends.torch.autograd import wanted as gradient_wanted
from qflash.frontends.torch.launch import check_differentiable
from qflash.frontends.torch.watch import autocast, is_autocast_anywhere
from qflash.ops.attention import ATTENTION
from qflash.ops.backward_memory import get_backward_memory
from qflash.ops.quantization import tables_of
from qflash.parallel.parts import Sequences
from qflash.parallel.placement import PLACEMENTS, Placement
from qflash.parallel.torch import maths
from qflash.parallel.torch.agree import agree, device_of, in_words
from qflash.parallel.torch.exchange import all_gather
from qflash.parallel.torch.gather import attend_gathered
from qflash.parallel.torch.groups import Ranks, group_of
from qflash.parallel.torch.ring import attend_ring
from qflash.parallel.torch.shards import own_tokens, positions, shard, unshard
from qflash.parallel.torch.ulysses import attend_ulysses
from qflash.parallel.words import (
    STRATEGIES,
    Words,
    check_length_values,
    check_offset_values,
    check_offsets,
    check_strategy,
    check_words,
)
from qflash.parallel.words import check_gradients as check_precision_gradients
from qflash.rotary import Rope

__all__ = ["attention", "positions", "shard", "unshard"]

Tensor = torch.Tensor


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: Any = None,
    strategy: str = "ring",
    placement: str | None = None,
    causal: bool = False,
    window: tuple[int, int] | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    sinks: Tensor | None = None,
    kv_lens: Any = None,
    cu_seqlens: Any = None,
    max_seqlen: int | None = None,
    rope: Rope | None = None,
    precision: str | None = None,
    return_lse: bool = False,
) -> Any:
    """`qflash.attention` on a sequence whose tokens are distributed over the ranks of a group.

    Args:
        q: this rank's queries, `[B, T, Hq, D]`, in the order of `shard`; T is the same on all ranks.
        k: this rank's keys, `[B, T, Hkv, D]`, of the same tokens.
        v: this rank's values, like k.
        group: a process group, or one dimension of a DeviceMesh. None: the default group.
        strategy: "ring": keys and values move from rank to rank, overlapped with the computation. "all_gather": every
            rank gets all keys and values at once. "ulysses": ranks exchange heads for tokens, and back.
        placement: which tokens a rank has, "zigzag" or "contiguous", as in `shard`. None: zigzag if causal.
        causal: a query attends to the keys up to its own token.
        window: `(left, right)`, the number of keys visible on each side of a query's own; -1 means unlimited.
        softcap: as in `qflash.attention`.
        scale: as in `qflash.attention`.
        sinks: float `[Hq]`, the same on all ranks. A rank's gradient of sinks is that of its own queries (its own heads
            with "ulysses"): sum it over the group, like that of any parameter.
        kv_lens: int32 `[B]`, the number of valid keys of each whole sequence, the same on all ranks.
        cu_seqlens: int32 `[N + 1]`, cumulative lengths of packed sequences over the tokens of all ranks, the same on
            all ranks. q, k and v are then `[T, H, D]`, and rank boundaries may be anywhere in a sequence.
        max_seqlen: upper bound on the length of a packed sequence. None: no bound.
        rope: rotates q and k by the positions of tokens in the whole sequence. `positions_q` and `positions_k` override
            those of this rank's tokens.
        precision: None, "int8" or "int8_fp8". A ring then transfers keys and values as INT8. Forward only.
        return_lse: also return the log-sum-exp of each row of scores.

    Returns:
        This rank's part of the result, like q. With `return_lse`, a tuple of it and lse, float32 `[B, Hq, T]` (packed:
        `[Hq, T]`). Both have gradients.

    Raises:
        TypeError, ValueError: an argument is invalid, or differs between ranks, or the strategy cannot express it; the
            message then names one that can. All ranks raise.
        RuntimeError: another rank does not answer within the group's timeout, or has failed.
    """
    process_group = group_of(group)
    if process_group.size() == 1:
        # The same program on one GPU: attention itself, which checks the other arguments.
        if strategy not in STRATEGIES or placement not in _KNOWN_PLACEMENTS:
            check_words(strategy, placement, causal, window, softcap, scale, precision, return_lse, 1)
        return _alone(
            q, k, v, cu_seqlens, max_seqlen, causal=causal, window=window, kv_lens=kv_lens, softcap=softcap,
            scale=scale, rope=rope, sinks=sinks, return_lse=return_lse, precision=precision,
        )  # fmt: skip
    words = (strategy, placement, causal, window, softcap, scale, precision, return_lse)
    described = (q, k, v, sinks, kv_lens, cu_seqlens, max_seqlen, rope)
    return _attend(process_group, words, *described)


def _attend(
    group: Any,
    words: tuple[Any, ...],
    q: Any,
    k: Any,
    v: Any,
    sinks: Any,
    kv_lens: Any,
    cu_seqlens: Any,
    max_seqlen: Any,
    rope: Any,
) -> Any:
    """The call on several ranks: each checks it, all agree on it, then it runs."""
    ranks = Ranks(group, group.rank(), group.size())
    if is_autocast_anywhere() and isinstance(q, Tensor):
        q, k, v = autocast(q, k, v)
    refusal: Exception | None = None
    of: Sequences | None = None
    try:
        _check_tensors(q, k, v)
        head_dim = q.shape[-1] if q.dim() else 1
        of = _sequences(ranks, check_words(*words, head_dim), q, k, v, sinks, kv_lens, cu_seqlens, max_seqlen, rope)
    except Exception as error:  # whatever the error is, the other ranks must not wait for this one
        if torch.compiler.is_compiling():
            raise
        refusal = error
    if not torch.compiler.is_compiling():
        agree(ranks, "" if of is None else _described(of, q, k, v, sinks), refusal, device_of(q))
    else:  # a compiler rejects a tensor passed twice, as in attention(x, x, x), to a function with a custom gradient
        q, k, v = (x.view_as(x) for x in (q, k, v))
    assert of is not None
    of = _with_positions(of, ranks)
    out, lse = _CARRIED_OUT_BY[of.words.strategy](q, k, v, sinks, of, ranks)
    return (out, lse) if of.words.return_lse else out


_CARRIED_OUT_BY = {"ring": attend_ring, "all_gather": attend_gathered, "ulysses": attend_ulysses}
_KNOWN_PLACEMENTS = (None, *PLACEMENTS)


def _alone(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Any, max_seqlen: Any, **words: Any) -> Any:
    """The call on a group of one rank."""
    _check_max_seqlen(cu_seqlens, max_seqlen)
    if cu_seqlens is None:
        return attention_on_one_rank(q, k, v, **words)
    longest = q.shape[0] if max_seqlen is None else max_seqlen
    return attention_varlen(q, k, v, cu_seqlens, cu_seqlens, longest, longest, **words)


# Checks ---------------------------------------------------------------------------------------------------------------


_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def _name_of(x: Tensor) -> str:
    return str(x.dtype).removeprefix("torch.")


def _check_tensors(q: Any, k: Any, v: Any) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} is {type(x).__module__}.{type(x).__qualname__}; allowed: torch.Tensor")
        if hasattr(x, "to_local"):  # of torch.distributed.tensor, which is slow to import
            raise TypeError(f"{name} is a DTensor; allowed: this rank's part of it, {name}.to_local()")
        if not torch.compiler.is_compiling():
            describe(name, x)  # other layouts have no shape to read
        elif x.dtype != q.dtype or x.dtype not in _FLOATS:  # a ring would first convert its parts to float32
            allowed = "float32, float16, bfloat16" if name == "q" else f"q's, {_name_of(q)}"
            raise TypeError(f"{name} has dtype {_name_of(x)}; allowed: {allowed}")


def _sequences(
    ranks: Ranks,
    words: Words,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Any,
    kv_lens: Any,
    cu_seqlens: Any,
    max_seqlen: Any,
    rope: Any,
) -> Sequences:
    """The checked call. Every error that one rank can detect is found here, before any transfer."""
    packed = cu_seqlens is not None
    _check_max_seqlen(cu_seqlens, max_seqlen)
    given_lens, given_offsets = kv_lens, cu_seqlens
    if kv_lens is not None:
        kv_lens = as_index("kv_lens", kv_lens, q)
    if packed:
        cu_seqlens = as_index("cu_seqlens", cu_seqlens, q)
        check_offsets(cu_seqlens)
    token_dim = 0 if packed else 1
    rank_of_arrays = token_dim + 3
    if q.dim() != rank_of_arrays:
        form = "[length, heads, head_dim] with cu_seqlens" if packed else "[batch, length, heads, head_dim]"
        raise ValueError(f"q has shape {tuple(q.shape)}; allowed: rank {rank_of_arrays}, {form}")
    at = Placement.of_part(words.placement, ranks.size, q.shape[token_dim], "q")
    longest = at.length if max_seqlen is None else check_int("max_seqlen", max_seqlen, 0, 2**31 - 1)
    _check_device(ranks, q.device.type)
    if torch.compiler.is_compiling():  # the traced operations check their arrays
        if gradient_wanted((q, k, v, sinks)):
            check_precision_gradients(words, "call it under torch.no_grad()")
    else:
        _check_local(words, q, k, v, sinks, kv_lens, cu_seqlens, longest, rope)
    if k.shape[token_dim] != q.shape[token_dim]:
        raise ValueError(
            f"k has {k.shape[token_dim]} tokens on this rank; allowed: q's, {q.shape[token_dim]}, because both are of "
            "the same sequence"
        )
    check_strategy(words, ranks.size, q.shape[-2], k.shape[-2], kv_lens is not None, packed)
    _check_values(at, given_lens, given_offsets, longest)
    if rope is not None:
        _check_rope(rope, at, longest if packed else at.length)
        indexed = {name: as_index(f"rope.{name}", getattr(rope, name), q)
                   for name in ("positions_q", "positions_k") if getattr(rope, name) is not None}  # fmt: skip
        rope = replace(rope, **indexed)
        _check_position_shapes(rope, q, packed)
        _check_positions(rope, at, ranks.rank, kv_lens, packed)
    longest = min(longest, at.length)
    wide = q.device.type == "cpu"
    known = packed and _is_on_host(given_offsets) and not torch.compiler.is_compiling()
    of = Sequences(at, words, maths, q, kv_lens, cu_seqlens, longest, rope, wide=wide, good_offsets=known)
    return of.cut_once() if packed and words.strategy != "ulysses" else of


def _is_on_host(x: Any) -> bool:
    return not isinstance(x, Tensor) or x.device.type == "cpu"


def _check_device(ranks: Ranks, device: str) -> None:
    if not torch.compiler.is_compiling() and ranks.backend(device) is None and ranks.backend("cpu") is None:
        raise ValueError(f"q is on {device}; allowed: cuda, because nothing moves other tensors in this group")


def _check_max_seqlen(cu_seqlens: Any, max_seqlen: Any) -> None:
    if cu_seqlens is None and max_seqlen is not None:
        raise ValueError(f"max_seqlen is {shown(max_seqlen)} and cu_seqlens is None; allowed: None")


def _check_local(
    words: Words, q: Any, k: Any, v: Any, sinks: Any, kv_lens: Any, offsets: Any, longest: int, rope: Any
) -> None:
    """Raise what `qflash.attention` would raise for this rank's arrays, and reject gradients that are not supported."""
    cos, sin, positions_q, positions_k, interleaved = tables_of(rope)
    arrays = (q, k, v, kv_lens, offsets, offsets, cos, sin, positions_q, positions_k, sinks)
    options = (False, words.edges, words.softcap, words.scale, words.precision, None, False)
    plan = plan_of(ATTENTION, arrays, (*options, True, interleaved, longest, longest, get_backward_memory()))
    dispatch.choose(plan.spec(arch_of(q)), None)
    if gradient_wanted(arrays):
        check_gradients(ATTENTION, arrays)
        check_differentiable(ATTENTION, plan, arch_of(q))


def _check_values(at: Placement, kv_lens: Any, offsets: Any, longest: int) -> None:
    """Check lengths whose values are on the host: the engine would reject them during the call, on one rank only."""
    if torch.compiler.is_compiling():
        return
    if kv_lens is not None and _is_on_host(kv_lens):
        check_length_values(_values(kv_lens), at.length)
    if offsets is not None and _is_on_host(offsets):
        check_offset_values(_values(offsets), at.length, longest)


def _values(x: Any) -> list[int]:
    return list(x) if isinstance(x, (list, tuple)) else x.tolist()


def _check_rope(rope: Rope, at: Placement, reach: int) -> None:
    """Tables must cover the tokens of all ranks, not only of this one; given positions are checked later."""
    given = (rope.positions_q is not None, rope.positions_k is not None)
    rows = rope.cos.shape[0]
    if not all(given) and rows < reach:
        raise ValueError(f"rope.cos has {rows} rows; allowed: at least {reach}, one for each position in use")


def _check_position_shapes(rope: Rope, q: Tensor, packed: bool) -> None:
    """Checked for traced code, too, where operations only see the positions of a part."""
    batch, tokens = (1, q.shape[0]) if packed else q.shape[:2]
    for name, x in (("positions_q", rope.positions_q), ("positions_k", rope.positions_k)):
        if x is not None and tuple(x.shape) not in ((tokens,), (batch, tokens)):
            allowed = f"[{tokens}] or [{batch}, {tokens}], of this rank's tokens"
            raise ValueError(f"rope.{name} has shape {list(x.shape)}; allowed: {allowed}")


def _check_positions(rope: Rope, at: Placement, rank: int, kv_lens: Any, packed: bool) -> None:
    """Check positions whose values are on the host, for the same reason. Keys that do not exist may have any."""
    if torch.compiler.is_compiling():
        return
    rows = rope.cos.shape[0]
    for name, x in (("positions_q", rope.positions_q), ("positions_k", rope.positions_k)):
        if x is None or x.device.type != "cpu":
            continue
        bad = (x <= -rows) | (x >= rows)
        if name == "positions_k" and kv_lens is not None:
            if packed:  # every rank has all keys, and finds the same errors
                continue
            bad = bad & (own_tokens(at, rank) < kv_lens[:, None])
        if bad.any():
            where = bad.nonzero()[0].tolist()[-x.dim() :]  # shared positions have no index of a sequence
            index, value = ", ".join(map(str, where)), x[tuple(where)].item()
            raise ValueError(
                f"rope.{name}[{index}] is {value} on this rank; allowed: {1 - rows} to {rows - 1}, the rows of rope.cos"
            )


def _described(of: Sequences, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> str:
    """What must be the same on all ranks, as facts separated by semicolons."""
    facts = [f"{name} {in_words(x)} on {x.device.type}" for name, x in (("q", q), ("k", k), ("v", v))]
    words = of.words
    facts.append(f"strategy={words.strategy!r}, placement={words.placement!r}, window={words.edges}")
    facts.append(f"softcap={words.softcap}, scale={words.scale}, precision={words.precision!r}")
    facts.append(f"return_lse={words.return_lse}, max_seqlen={of.longest}")
    cos, _, positions_q, positions_k, interleaved = tables_of(of.rope)
    facts.append("no rope" if cos is None else f"rope {in_words(cos)}, interleaved={bool(interleaved)}")
    for name, x in (
        ("kv_lens", of.kv_lens),
        ("cu_seqlens", of.offsets),
        ("sinks", sinks),
        ("rope.positions_q", positions_q),
        ("rope.positions_k", positions_k),
    ):
        facts.append(f"no {name}" if x is None else f"{name} {in_words(x)}{_values_in_words(name, x)}")
    facts.append("with gradients" if gradient_wanted((q, k, v, sinks)) else "without gradients")
    if words.strategy == "ulysses" and sinks is not None:  # exchanging tokens for heads has its own backward pass
        facts[-1] += f" of q, k or v: {gradient_wanted((q, k, v))}"
    return "; ".join(facts)


def _values_in_words(name: str, x: Tensor) -> str:
    """Lengths on the host must be the same on all ranks; a few values are shown, and all of them are compared."""
    if name not in ("kv_lens", "cu_seqlens") or x.device.type != "cpu":
        return ""
    values = x.tolist()
    few = ", ".join(map(str, values[:8])) + (", ..." if len(values) > 8 else "")
    return f" of {few} ({hash(tuple(values)) & 0xFFFFFFFF:08x})"


def _with_positions(of: Sequences, ranks: Ranks) -> Sequences:
    """The call with the positions of all ranks' tokens, if the user gave some: they are int32, and few."""
    if of.rope is None:
        return of
    given = {"positions_k": of.rope.positions_k}
    if of.words.strategy == "ulysses":
        given["positions_q"] = of.rope.positions_q
    gathered_positions = {name: all_gather(ranks, x, f"the gathering of {name}") for name, x in given.items()
                          if x is not None}  # fmt: skip
    return replace(of, **gathered_positions)
