"""strategy="all_gather": every rank gets all keys and values, and attends to them with its own queries.

Each chunk of queries is one call on the keys up to its end, so nothing is merged, and any mask that ends with the keys
is supported. In the backward pass keys are gathered again, which takes less memory than keeping them for every layer,
and their gradients are summed over the ranks in float32.
"""

from __future__ import annotations

from typing import Any

import torch

from qflash.parallel.parts import Sequences
from qflash.parallel.torch.by_hand import ByHand, once_differentiable
from qflash.parallel.torch.exchange import all_gather, reduce_scatter, saved_again
from qflash.parallel.torch.groups import Ranks
from qflash.parallel.torch.shards import by_rank, in_token_order

Tensor = torch.Tensor
_GATHERING = "the gathering of keys and values"


def attend_gathered(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, of: Sequences, ranks: Ranks
) -> tuple[Tensor, Tensor]:
    """out and lse of this rank's queries."""
    out, lse = _Gathered.apply(q, k, v, sinks, of, ranks)
    return out, lse


def _all_keys(keys: Tensor, of: Sequences, ranks: Ranks, what: str) -> Tensor:
    """k and v of all ranks in token order, `[2, B, S, Hkv, D]`. keys: this rank's, stacked."""
    return in_token_order(all_gather(ranks, keys, what), of.at, of.token_dim + 1)


class _Gathered(ByHand):
    @staticmethod
    def forward(
        q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, of: Sequences, ranks: Ranks
    ) -> tuple[Tensor, Tensor]:
        keys = _all_keys(torch.stack([k, v]), of, ranks, _GATHERING)
        results = [of.attend(part, q, keys[0], keys[1], sinks) for part in of.gathered_parts(ranks.rank)]
        out = torch.cat([out for out, _ in results], of.token_dim)
        return out, torch.cat([lse for _, lse in results], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
        q, k, v, sinks, out, lse = ctx.saved_tensors
        of, ranks = ctx.call
        dout = torch.zeros_like(out) if dout is None else dout
        keys = _all_keys(saved_again(torch.stack([k, v]), dout), of, ranks, f"{_GATHERING}, backward")
        dkeys = torch.zeros(keys.shape, dtype=torch.float32, device=q.device)
        dqs, dsinks = [], None if sinks is None else torch.zeros_like(sinks, dtype=torch.float32)
        for part in of.gathered_parts(ranks.rank):
            dq, dk, dv, *of_sinks = of.gradients(part, dout, dlse, q, keys[0], keys[1], sinks, out, lse)
            dqs.append(dq)
            for total, share in ((dkeys[0], dk), (dkeys[1], dv)):
                total.narrow(of.token_dim, part.k[0], part.k[1] - part.k[0]).add_(share)
            if of_sinks and dsinks is not None:
                dsinks = dsinks + of_sinks[0]
        by_ranks = by_rank(dkeys, of.at, of.token_dim + 1)
        dk, dv = reduce_scatter(ranks, by_ranks, "the sums of the gradients of keys and values").to(k.dtype)
        dq = torch.cat(dqs, of.token_dim)
        return dq, dk, dv, None if dsinks is None else dsinks.to(sinks.dtype), None, None
