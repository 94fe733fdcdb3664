"""strategy="ring": keys and values move around the ring, and each rank attends to every block as it arrives.

Hops are grouped into rounds (rounds.py), and the transfer of the next one starts before the current one is computed.
Partial results are merged by lse in float32, in the order of hops, which is fixed for every rank: the same input gives
the same bits. In the backward pass blocks go around again hop by hop, and their gradients follow one hop behind. Every
share is computed from the out and lse of all keys, and is exact.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from qflash.ops.merge import merge
from qflash.parallel.parts import Part, Sequences
from qflash.parallel.pieces import Span, ring_steps
from qflash.parallel.rounds import Call, Round, calls_of, most_hops, rounds_of
from qflash.parallel.torch.by_hand import ByHand, once_differentiable
from qflash.parallel.torch.exchange import Hop, TracedHop, saved_again, start_hop
from qflash.parallel.torch.groups import Ranks
from qflash.parallel.wire import Wire, from_wire, to_wire

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
    find = ring_steps.__wrapped__ if torch.compiler.is_compiling() else ring_steps  # a compiler warns about caches
    steps = find(of.at, rank, of.words.edges, of.offsets is not None)
    return [
        [of.ring_part(piece, rank, (rank - hop) % of.at.ranks) for piece in pieces] for hop, pieces in enumerate(steps)
    ]


def attend_blocks(
    q: Tensor, sinks: Tensor | None, of: Sequences, steps: list[list[Part]], blocks: Iterable[list[Tensor]]
) -> tuple[Tensor, Tensor]:
    """out and lse of a rank's queries. blocks: for each round, keys and values after each of its hops, stacked."""
    merged = _Merged(of.token_dim)
    for one, came in zip(rounds_of(len(steps), of.at), blocks, strict=True):
        for call in _calls(of, steps[one.first : one.end]):
            merged.add(call[0][1].q, q, *_attend(q, sinks, of, call, came))
    return merged.results(q)


def _calls(of: Sequences, hops: list[list[Part]]) -> list[Call]:
    if of.words.precision is None:
        return calls_of(hops)
    # Each rank's keys are quantized separately.
    return [[(number, part)] for number, parts in enumerate(hops) for part in parts]


def _attend(q: Tensor, sinks: Tensor | None, of: Sequences, call: Call, blocks: list[Tensor]) -> tuple[Tensor, Tensor]:
    """out and lse of a call. The memory of keys concatenated for it is freed before the next call."""
    part, block = _end_to_end(of, call, blocks)
    return of.attend(part, q, block[0], block[1], sinks)


def _end_to_end(of: Sequences, call: Call, blocks: list[Tensor]) -> tuple[Part, Tensor]:
    """A part on the keys of all parts of a call, and these keys."""
    number, part = call[0]
    if len(call) == 1:
        return part, blocks[number]
    dim = of.token_dim + 1  # of keys and values, stacked
    block = torch.cat([blocks[number].narrow(dim, one.k[0], one.k[1] - one.k[0]) for number, one in call], dim)
    rope = part.rope
    if rope is not None:
        rope = replace(rope, positions_k=torch.cat([one.rope.positions_k for _, one in call if one.rope], -1))
    return part._replace(k=(0, block.shape[dim]), rope=rope), block


def _converted(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert x, unless it has that dtype: a conversion to x's own dtype would lose the gradient of a forward pass's
    result in programs of PyTorch 2.11's compiler."""
    return x if x.dtype == dtype else x.to(dtype)


def _going_round(block: Tensor, hops: int, of: Sequences, ranks: Ranks) -> Iterator[list[Tensor]]:
    """The blocks of each round; those of the next one are in flight while they are used."""
    rounds = rounds_of(hops, of.at)
    wires: dict[int, Wire] = {0: to_wire(of, block, ranks.rank) if hops > 1 else ()}  # by hop, as received
    for number, one in enumerate(rounds):
        coming = _start_round(ranks, wires, rounds[number + 1]) if number + 1 < len(rounds) else None
        yield [from_wire(wires[hop], block) if hop else block for hop in one.hops]
        if coming is None:
            return
        came, count = coming.wait(), len(wires[one.first])
        wires = {hop: wires[hop] for hop in wires if hop >= one.end - most_hops(of.at)}  # may be sent again
        for first in range(0, len(came), count):
            wires[one.end + first // count] = tuple(came[first : first + count])


def _start_round(ranks: Ranks, wires: dict[int, Wire], one: Round) -> Hop | TracedHop:
    sent = [x for hop in one.hops for x in wires[hop - one.distance]]
    return start_hop(ranks, sent, _FORWARD, one.distance)


class _Merged:
    """Float32 results and their lse, into which parts are merged, as pieces: a part of only some rows splits the
    existing pieces, is merged into these rows, and nothing is copied. Rows without any part are zeros and -inf."""

    def __init__(self, token_dim: int) -> None:
        self._dim = token_dim
        self._pieces: list[_Piece] = []  # of all rows in order, once there is a part

    def add(self, rows: Span, like: Tensor, out: Tensor, lse: Tensor) -> None:
        """Merge the result of some rows. like: a tensor with the shape of all rows."""
        first, end = rows
        if not self._pieces:
            self._begin(rows, like, out, lse)
            return
        pieces = []
        for piece in self._cut(first, end):
            if first <= piece.first and piece.end <= end:
                part = (
                    self._rows(x, at, piece.first - first, piece.end - first) for x, at in ((out, self._dim), (lse, -1))
                )
                piece = _Piece(piece.first, piece.end, *merge(piece.out, piece.lse, *part))
            pieces.append(piece)
        self._pieces = pieces

    def results(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """out, in the dtype of `like`, and lse of all rows."""
        if not self._pieces:
            empty = self._empty(like, 0, like.shape[self._dim])
            return _converted(empty.out, like.dtype), empty.lse
        if len(self._pieces) == 1:
            return _converted(self._pieces[0].out, like.dtype), self._pieces[0].lse
        out = torch.empty(like.shape, dtype=like.dtype, device=like.device)
        for piece in self._pieces:
            self._rows(out, self._dim, piece.first, piece.end).copy_(piece.out)
        return out, torch.cat([piece.lse for piece in self._pieces], -1)

    def _begin(self, rows: Span, like: Tensor, out: Tensor, lse: Tensor) -> None:
        (first, end), length = rows, like.shape[self._dim]
        pieces = [self._empty(like, 0, first), _Piece(first, end, _converted(out, torch.float32), lse)]
        pieces.append(self._empty(like, end, length))
        self._pieces = [piece for piece in pieces if piece.end > piece.first] or pieces[:1]

    def _cut(self, *places: int) -> Iterator[_Piece]:
        """The pieces, split at some rows."""
        for piece in self._pieces:
            ends = [piece.first, *(row for row in places if piece.first < row < piece.end), piece.end]
            for first, end in pairwise(ends):
                within = first - piece.first, end - piece.first
                yield _Piece(first, end, self._rows(piece.out, self._dim, *within), self._rows(piece.lse, -1, *within))

    def _empty(self, like: Tensor, first: int, end: int) -> _Piece:
        shape = list(like.shape)
        shape[self._dim] = end - first
        of_lse = (*shape[: self._dim], shape[-2], end - first)
        lse = torch.full(of_lse, -torch.inf, dtype=torch.float32, device=like.device)
        return _Piece(first, end, torch.zeros(shape, dtype=torch.float32, device=like.device), lse)

    def _rows(self, x: Tensor, dim: int, first: int, end: int) -> Tensor:
        return x if (first, end) == (0, x.shape[dim]) else x.narrow(dim, first, end - first)


class _Piece(NamedTuple):
    """Rows from `first` to `end`."""

    first: int
    end: int
    out: Tensor
    lse: Tensor


class _Ring(ByHand):
    @staticmethod
    def forward(
        q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, of: Sequences, ranks: Ranks
    ) -> tuple[Tensor, Tensor]:
        steps = steps_of(of, ranks.rank)
        return attend_blocks(q, sinks, of, steps, _going_round(torch.stack([k, v]), len(steps), of, ranks))

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
        # dblock is the gradient of the current block: the sum of what its earlier ranks have added.
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
        if len(steps) > 1:  # back to the rank that owns the keys, as many ranks behind as there were hops
            (dblock,) = start_hop(ranks, [dblock], _GRADIENTS, distance=1 - len(steps)).wait()
        dk, dv = dblock.to(k.dtype)
        return dq.to(q.dtype), dk, dv, None if dsinks is None else dsinks.to(sinks.dtype), None, None


def _rows_of(x: Tensor, token_dim: int, rows: Span) -> Tensor:
    return x.narrow(token_dim, rows[0], rows[1] - rows[0])
