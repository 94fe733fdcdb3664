"""strategy="ulysses": heads for tokens. Every rank gets all tokens of some heads, attends, and gives them back.

The call in the middle is plain attention over the whole sequence, so every word means what it does there.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from qflash.api import attention, attention_varlen
from qflash.frontends.torch.autograd import wanted as gradient_wanted
from qflash.parallel.parts import Sequences
from qflash.parallel.torch.exchange import all_to_all
from qflash.parallel.torch.groups import Ranks
from qflash.parallel.torch.shards import by_rank, in_token_order
from qflash.rotary import Rope

Tensor = torch.Tensor


def attend_ulysses(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, of: Sequences, ranks: Ranks
) -> tuple[Tensor, Tensor | None]:
    """out and, where it is wanted, lse of this rank's queries."""
    words = {
        "window": of.words.edges,
        "softcap": of.words.softcap,
        "scale": of.words.scale,
        "kv_lens": of.kv_lens,
        "rope": _rope(of),
        "sinks": None if sinks is None else sinks.chunk(ranks.size)[ranks.rank],
        "precision": of.words.precision,
        "return_lse": of.words.return_lse,
    }
    heads = _all_tokens(q, k, v, of, ranks)
    if of.offsets is None:
        results = attention(*heads, **words)
    else:
        results = attention_varlen(*heads, of.offsets, of.offsets, of.longest, of.longest, **words)
    out, lse = results if of.words.return_lse else (results, None)
    # out: tokens stand before heads. lse: after them.
    places = [(out, of.token_dim, of.token_dim + 1)] + ([] if lse is None else [(lse, lse.dim() - 1, lse.dim() - 2)])
    sent = (by_rank(x, of.at, token_dim) for x, token_dim, _ in places)
    arrived = _exchanged(ranks, "the exchange of heads for tokens", *sent)
    own = [x.movedim(0, head_dim).flatten(head_dim, head_dim + 1)
           for x, (_, _, head_dim) in zip(arrived, places, strict=True)]  # fmt: skip
    return own[0], None if lse is None else own[1]


def _all_tokens(q: Tensor, k: Tensor, v: Tensor, of: Sequences, ranks: Ranks) -> tuple[Tensor, ...]:
    """q, k and v of all tokens, with the heads of this rank. A head of k that several ranks need goes to each."""
    dim = of.token_dim + 1
    if k.shape[dim] < ranks.size:
        k, v = (x.repeat_interleave(ranks.size // k.shape[dim], dim) for x in (k, v))
    by_ranks = [x.unflatten(dim, (ranks.size, -1)).movedim(dim, 0) for x in (q, k, v)]
    sent = torch.cat(by_ranks, dim + 1)  # one exchange for all three
    (arrived,) = _exchanged(ranks, "the exchange of tokens for heads", sent)
    return in_token_order(arrived, of.at, of.token_dim).split([x.shape[dim + 1] for x in by_ranks], dim)


def _rope(of: Sequences) -> Rope | None:
    """Positions that were given, of all tokens; else attention's own, which are those of the whole sequence."""
    if of.rope is None or (of.positions_q is None and of.positions_k is None):
        return of.rope
    positions = (None if x is None else in_token_order(x, of.at, x.dim() - 2) for x in (of.positions_q, of.positions_k))
    return replace(of.rope, positions_q=next(positions), positions_k=next(positions))


def _exchanged(ranks: Ranks, what: str, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Row `rank` of each tensor, `[ranks, ...]`, of every rank."""
    if torch.compiler.is_compiling() and not gradient_wanted(tensors):
        # Dynamo counts parameters to know whether such a forward function takes a ctx, and takes *tensors for one.
        return _AllToAll.forward(ranks, what, *tensors)
    return _AllToAll.apply(ranks, what, *tensors)


class _AllToAll(torch.autograd.Function):
    """Row r of each `[ranks, ...]` for row `rank` of rank r. The same exchanges take gradients back.

    One function for all that goes at the same time: a rank whose loss leaves one of them out sends zeros for it, where
    it would otherwise stay away from an exchange that others wait in.
    """

    @staticmethod
    def forward(ranks: Ranks, what: str, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(all_to_all(ranks, x, what) for x in tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.call = inputs[:2]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        ranks, what = ctx.call
        what = f"{what}, backward"
        if torch.compiler.is_compiling():  # which traces no function inside of another one's backward
            return None, None, *(all_to_all(ranks, grad, what) for grad in grads)
        return None, None, *_AllToAll.apply(ranks, what, *grads)  # so that torch.func sees it
