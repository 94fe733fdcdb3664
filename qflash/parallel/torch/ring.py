"""strategy="ring": keys and values go round, and each rank attends to every block of them as it comes by.

The next block is on its way before the present one is computed on. Partial results are merged by lse in float32, in
the order of hops, which is fixed for every rank: the same input gives the same bits. Backward, blocks go round again
and their gradients follow one hop behind; every share is computed from the out and lse of all keys, and is exact.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from qflash.ops.merge import merge
from qflash.parallel.parts import Part, Sequences
from qflash.parallel.pieces import Span, ring_steps
from qflash.parallel.torch.exchange import Hop, TracedHop, saved_again, start_hop
from qflash.parallel.torch.groups import Ranks
from qflash.parallel.torch.once import once_differentiable
from qflash.parallel.wire import from_wire, to_wire

Tensor = torch.Tensor
_FORWARD = "a hop of keys and values"
_BACKWARD = "a hop of keys and values, backward"
_GRADIENTS = "a hop of the gradients of keys and values"


def attend_ring(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, of: Sequences, ranks: Ranks
) -> tuple[Tensor, Tensor]:
    """out and lse of this rank's queries."""
    out, lse = _Ring.apply(q, k, v, sinks, of, ranks)
    return out, lse


def steps_of(of: Sequences, rank: int) -> list[list[Part]]:
    """What a rank computes after each hop."""
    find = ring_steps.__wrapped__ if torch.compiler.is_compiling() else ring_steps  # a compiler warns of caches
    steps = find(of.at, rank, of.words.edges, of.offsets is not None)
    return [
        [of.ring_part(piece, rank, (rank - hop) % of.at.ranks) for piece in pieces] for hop, pieces in enumerate(steps)
    ]


def attend_blocks(
    q: Tensor, sinks: Tensor | None, of: Sequences, steps: list[list[Part]], blocks: Iterable[Tensor]
) -> tuple[Tensor, Tensor]:
    """out and lse of a rank's queries. blocks: keys and values, stacked, after each hop."""
    merged = _Merged(of.token_dim)
    for parts, block in zip(steps, blocks, strict=True):
        for part in parts:
            merged.add(part.q, q, *of.attend(part, q, block[0], block[1], sinks))
    out, lse = merged.results(q)
    return _converted(out, q.dtype), lse


def _converted(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x in a type. A conversion to the type that x has would lose the gradient of a forward pass's result in programs
    of PyTorch 2.11's compiler."""
    return x if x.dtype == dtype else x.to(dtype)


def _going_round(block: Tensor, steps: int, of: Sequences, ranks: Ranks) -> Iterator[Tensor]:
    """The block at hand after each hop; the next one is on its way while it is used."""
    wire = to_wire(of, block, ranks.rank) if steps > 1 else ()
    for hop in range(steps):
        coming = start_hop(ranks, wire, _FORWARD) if hop + 1 < steps else None
        block = from_wire(wire, block) if hop else block
        yield block
        if coming is not None:
            wire = tuple(coming.wait())


class _Merged:
    """A float32 out and an lse that parts are merged into. Rows that no part has had are zeros and -inf."""

    def __init__(self, token_dim: int) -> None:
        self._dim = token_dim
        self.out: Tensor | None = None
        self.lse: Tensor | None = None

    def add(self, rows: Span, like: Tensor, out: Tensor, lse: Tensor) -> None:
        """Merge the result of some rows. like: a tensor of the shape of all of them."""
        if self.out is None or self.lse is None:
            self._begin(rows, like, out, lse)
        elif rows == (0, self.out.shape[self._dim]):
            self.out, self.lse = merge(self.out, self.lse, out, lse)
        else:
            place, place_lse = self._rows(rows)
            merged, merged_lse = merge(place, place_lse, out, lse)
            place.copy_(merged)
            place_lse.copy_(merged_lse)

    def results(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """out and lse of all rows."""
        if self.out is None or self.lse is None:
            return self._empty(like)
        return self.out, self.lse

    def _begin(self, rows: Span, like: Tensor, out: Tensor, lse: Tensor) -> None:
        if rows == (0, like.shape[self._dim]):
            self.out, self.lse = _converted(out, torch.float32), lse
            return
        self.out, self.lse = self._empty(like)
        place, place_lse = self._rows(rows)
        place.copy_(out)
        place_lse.copy_(lse)

    def _empty(self, like: Tensor) -> tuple[Tensor, Tensor]:
        of_lse = (*like.shape[: self._dim], like.shape[-2], like.shape[self._dim])
        lse = torch.full(of_lse, -torch.inf, dtype=torch.float32, device=like.device)
        return torch.zeros(like.shape, dtype=torch.float32, device=like.device), lse

    def _rows(self, rows: Span) -> tuple[Tensor, Tensor]:
        assert self.out is not None and self.lse is not None
        start, length = rows[0], rows[1] - rows[0]
        return self.out.narrow(self._dim, start, length), self.lse.narrow(-1, start, length)


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, of: Sequences, ranks: Ranks
    ) -> tuple[Tensor, Tensor]:
        steps = steps_of(of, ranks.rank)
        return attend_blocks(q, sinks, of, steps, _going_round(torch.stack([k, v]), len(steps), of, ranks))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        *arrays, of, ranks = inputs
        ctx.save_for_backward(*arrays, *output)
        ctx.set_materialize_grads(False)
        ctx.call = of, ranks

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
        q, k, v, sinks, out, lse = ctx.saved_tensors
        of, ranks = ctx.call
        steps = steps_of(of, ranks.rank)
        dout = torch.zeros_like(out) if dout is None else dout
        dq = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
        dsinks = None if sinks is None else torch.zeros_like(sinks, dtype=torch.float32)
        block = saved_again(torch.stack([k, v]), dout)
        # dblock is the gradient of the block at hand: what the ranks that had it before have added to it so far.
        dblock = torch.zeros(block.shape, dtype=torch.float32, device=q.device)
        returning: Hop | TracedHop | None = None
        for hop, parts in enumerate(steps):
            coming = start_hop(ranks, [block], _BACKWARD) if hop + 1 < len(steps) else None
            shares = [of.gradients(part, dout, dlse, q, block[0], block[1], sinks, out, lse) for part in parts]
            if returning is not None:
                (dblock,) = returning.wait()
            for part, (dq_share, dk, dv, *of_sinks) in zip(parts, shares, strict=True):
                _rows_of(dq, of.token_dim, part.q).add_(dq_share)
                _rows_of(dblock[0], of.token_dim, part.k).add_(dk)
                _rows_of(dblock[1], of.token_dim, part.k).add_(dv)
                if of_sinks and dsinks is not None:
                    dsinks += of_sinks[0]
            if coming is not None:
                (block,) = coming.wait()
                returning = start_hop(ranks, [dblock], _GRADIENTS)
        if len(steps) > 1:  # back to the rank whose keys they are, as many ranks before this one as there were hops
            (dblock,) = start_hop(ranks, [dblock], _GRADIENTS, distance=1 - len(steps)).wait()
        dk, dv = dblock.to(k.dtype)
        return dq.to(q.dtype), dk, dv, None if dsinks is None else dsinks.to(sinks.dtype), None, None


def _rows_of(x: Tensor, token_dim: int, rows: Span) -> Tensor:
    return x.narrow(token_dim, rows[0], rows[1] - rows[0])
