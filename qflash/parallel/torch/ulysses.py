"""strategy="ulysses": every rank gets all tokens of some heads, attends, and sends the results back.

The inner call is plain attention over the whole sequence, so every argument has its usual meaning.
"""

from __future__ import annotations

from typing import Any

import torch

from qflash.frontends.torch.autograd import wanted as gradient_wanted
from qflash.parallel.parts import Sequences
from qflash.parallel.torch.exchange import all_to_all
from qflash.parallel.torch.groups import Ranks
from qflash.parallel.torch.shards import by_rank, in_token_order

Tensor = torch.Tensor


def attend_ulysses(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, of: Sequences, ranks: Ranks
) -> tuple[Tensor, Tensor | None]:
    """out and, if requested, lse of this rank's queries."""
    own_sinks = None if sinks is None else sinks.chunk(ranks.size)[ranks.rank]
    out, lse = of.attend(of.whole_part(), *_all_tokens(q, k, v, of, ranks), own_sinks)
    # out: tokens before heads. lse: heads before tokens.
    places = [(out, of.token_dim, of.token_dim + 1), (lse, lse.dim() - 1, lse.dim() - 2)][: 1 + of.words.return_lse]
    sent = (by_rank(x, of.at, token_dim) for x, token_dim, _ in places)
    arrived = _exchanged(ranks, "the exchange of heads for tokens", *sent)
    own = [x.movedim(0, head_dim).flatten(head_dim, head_dim + 1)
           for x, (_, _, head_dim) in zip(arrived, places, strict=True)]  # fmt: skip
    return own[0], own[1] if of.words.return_lse else None


def _all_tokens(q: Tensor, k: Tensor, v: Tensor, of: Sequences, ranks: Ranks) -> tuple[Tensor, ...]:
    """q, k and v of all tokens, with the heads of this rank. A head of k that several ranks need goes to each."""
    dim = of.token_dim + 1
    if k.shape[dim] < ranks.size:
        k, v = (x.repeat_interleave(ranks.size // k.shape[dim], dim) for x in (k, v))
    by_ranks = [x.unflatten(dim, (ranks.size, -1)).movedim(dim, 0) for x in (q, k, v)]
    sent = torch.cat(by_ranks, dim + 1)  # one exchange for all three
    (arrived,) = _exchanged(ranks, "the exchange of tokens for heads", sent)
    return in_token_order(arrived, of.at, of.token_dim).split([x.shape[dim + 1] for x in by_ranks], dim)


def _exchanged(ranks: Ranks, what: str, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Row `rank` of each tensor, `[ranks, ...]`, from every rank."""
    if torch.compiler.is_compiling() and not gradient_wanted(tensors):
        # Dynamo counts parameters to detect whether such a forward function takes a ctx, and counts *tensors as one.
        return _AllToAll.forward(ranks, what, *tensors)
    return _AllToAll.apply(ranks, what, *tensors)


class _AllToAll(torch.autograd.Function):
    """Exchange row r of each `[ranks, ...]` for row `rank` of rank r. The same exchanges return gradients.

    One function exchanges all tensors that are sent together: a rank whose loss omits one of them sends zeros for it,
    where it would otherwise skip an exchange that other ranks wait in.
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
        if torch.compiler.is_compiling():  # it traces no function inside another one's backward
            return None, None, *(all_to_all(ranks, grad, what) for grad in grads)
        return None, None, *_AllToAll.apply(ranks, what, *grads)  # so that torch.func sees it
