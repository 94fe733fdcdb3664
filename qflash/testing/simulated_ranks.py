"""A group of ranks in one process: what each computes, in NumPy, with slices in place of transfers.

It iterates over the same parts as the front ends of torch and JAX, so it checks masks, lengths, offsets and positions
for any number of ranks. The transfer of tensors is tested in the front ends.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

import qflash
from qflash.parallel.parts import Part, Sequences
from qflash.parallel.pieces import chunk_call, ring_steps
from qflash.parallel.placement import Placement
from qflash.parallel.wire import from_wire, to_wire
from qflash.parallel.words import check_words
from qflash.testing.case import Case, Inputs


class NumpyMaths:
    """NumPy's qflash.parallel.parts.Maths."""

    @staticmethod
    def arange(count, like):
        return np.arange(count, dtype=np.int32)

    @staticmethod
    def concatenate(arrays):
        return np.concatenate(arrays, -1)

    @staticmethod
    def clip(x, low, high):
        return np.clip(x, low, high).astype(np.int32)

    @staticmethod
    def where(condition, x, y):
        return np.where(condition, x, y).astype(np.int32)

    @staticmethod
    def as_float32(x):
        return x.astype(np.float32)

    @staticmethod
    def starts(offsets, tokens):
        return offsets[np.searchsorted(offsets, tokens, "right") - 1]


@dataclass
class Simulated:
    """The results of all ranks, in token order."""

    out: np.ndarray
    lse: np.ndarray
    dq: np.ndarray | None = None
    dk: np.ndarray | None = None
    dv: np.ndarray | None = None
    dsinks: np.ndarray | None = None


@dataclass
class Ranks:
    """A case over simulated ranks."""

    case: Case
    of: Sequences
    inputs: Inputs

    @classmethod
    def of_case(cls, case: Case, strategy: str, placement: str, ranks: int, wide: bool, precision: str | None) -> Ranks:
        inputs = case.make_inputs()
        words = check_words(
            strategy, placement, case.causal, case.window, case.softcap, case.scale, precision, True, case.head_dim
        )
        length = inputs.q.shape[0 if case.packed else 1]
        at = Placement.of_whole(placement, ranks, length, "q", 1)
        longest = max(case.q_lens) if case.packed else 0
        lens, offsets = inputs.kv_lens, inputs.cu_seqlens_q
        of = Sequences(at, words, NumpyMaths(), inputs.q, lens, offsets, longest, inputs.rope, wide=wide)
        if inputs.rope is not None and inputs.rope.positions_k is not None:
            given = np.stack([inputs.rope.positions_k[..., of.tokens(rank)] for rank in range(ranks)])
            of = replace(of, positions_k=given)
        return cls(case, of, inputs)

    def mine(self, x: np.ndarray, rank: int) -> np.ndarray:
        """A rank's part of an array like q, k or v."""
        return np.take(x, self.of.tokens(rank), self.of.token_dim)

    def for_rank(self, rank: int) -> Sequences:
        """The description of all tokens, with the given positions of this rank's queries."""
        rope = self.inputs.rope
        if rope is None or rope.positions_q is None:
            return self.of
        return replace(self.of, rope=replace(rope, positions_q=rope.positions_q[..., self.of.tokens(rank)]))

    def steps(self, rank: int) -> list[tuple[Part, np.ndarray, int | None]]:
        """Each part that a rank computes, the tokens of its keys, and in a ring the rank that they come from."""
        of, everything = self.for_rank(rank), np.arange(self.of.at.length)
        if of.words.strategy == "ring":
            found = []
            for hop, pieces in enumerate(ring_steps(of.at, rank, of.words.edges, self.case.packed)):
                source = (rank - hop) % of.at.ranks
                found += [(of.ring_part(piece, rank, source), of.tokens(source), source) for piece in pieces]
            return found
        if of.words.strategy == "masked":
            found = []
            for run, chunk in enumerate(of.at.chunks(rank)):
                call = chunk_call(of.at, chunk, of.words.edges)
                found.append((of.masked_part(run, rank, chunk, call.k_end, call.window), everything, None))
            return found
        return [(part, everything, None) for part in of.gathered_parts(rank)]

    def keys(self, tokens: np.ndarray, source: int | None, rank: int) -> np.ndarray:
        """k and v of some tokens, stacked, as `rank` has them: those of other ranks were transferred."""
        block = np.stack([np.take(x, tokens, self.of.token_dim) for x in (self.inputs.k, self.inputs.v)])
        return block if source in (None, rank) else from_wire(to_wire(self.of, block, source), block)

    def run(self) -> Simulated:
        """The combined results of all ranks and, without a precision, gradients."""
        case, of, inputs, axis = self.case, self.of, self.inputs, self.of.token_dim
        dout, dlse = case.make_gradients()
        out, lse = np.empty_like(dout), np.empty_like(dlse)
        totals = [np.zeros(x.shape, np.float32) for x in (inputs.q, inputs.k, inputs.v)]
        dsinks = None if inputs.sinks is None else np.zeros(case.q_heads, np.float64)
        for rank in range(of.at.ranks):
            own = of.tokens(rank)
            q, steps = self.mine(inputs.q, rank), self.steps(rank)
            at_rows = np.s_[own] if axis == 0 else np.s_[:, own]
            merged = np.zeros(q.shape, np.float32)
            merged_lse = np.full(lse[..., own].shape, -np.inf, np.float32)
            for part, keys, source in steps:
                rows = slice(*part.q)
                cut = np.s_[rows] if axis == 0 else np.s_[:, rows]
                share = of.attend(part, q, *self.keys(keys, source, rank), inputs.sinks)
                merged[cut], merged_lse[..., rows] = qflash.merge(merged[cut], merged_lse[..., rows].copy(), *share)
            out[at_rows], lse[..., own] = merged.astype(q.dtype), merged_lse
            if of.words.precision is not None:
                continue
            grads = (self.mine(dout, rank), np.ascontiguousarray(dlse[..., own]))
            for part, keys, source in steps:
                block = self.keys(keys, source, rank)
                shares = of.gradients(part, *grads, q, *block, inputs.sinks, merged.astype(q.dtype), merged_lse)
                places = (own[slice(*part.q)], keys[slice(*part.k)], keys[slice(*part.k)])
                for total, place, share in zip(totals, places, shares, strict=False):
                    total[place if axis == 0 else np.s_[:, place]] += share.astype(np.float32)
                if len(shares) > 3:
                    dsinks += shares[3]
        if of.words.precision is not None:
            return Simulated(out, lse)
        rounded = [x.astype(case.dtype) for x in totals]
        return Simulated(out, lse, *rounded, None if dsinks is None else dsinks.astype(np.float32))


def simulate(
    case: Case, strategy: str, placement: str, ranks: int, wide: bool = True, precision: str | None = None
) -> Simulated:
    """A case over this many ranks. strategy: "ring", "all_gather", or "masked": JAX's form of the latter.

    wide: parts are merged in float32 as they were computed, as on the CPU; otherwise each is first rounded to the
    case's dtype, as GPU kernels do.
    """
    checked = "all_gather" if strategy == "masked" else strategy
    group = Ranks.of_case(case, checked, placement, ranks, wide, precision)
    if strategy == "masked":
        group.of = replace(group.of, words=replace(group.of.words, strategy="masked"))
    return group.run()
