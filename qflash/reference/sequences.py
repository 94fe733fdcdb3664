"""From arrays of many sequences to one sequence at a time: all handling of batches for the oracle and the replays.

Packed arrays `[total, H, D]` are the general form. Padded arrays `[B, T, H, D]` are treated as packed ones with
sequences of length T, and their results get the padded shape again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from qflash.rotary import Rope

CuSeqlens = tuple[np.ndarray, np.ndarray]  # of the queries and of the keys


@dataclass(frozen=True)
class Words:
    """The options of one call with their defaults filled in."""

    left: int
    right: int
    softcap: float
    scale: float
    sinks: np.ndarray | None  # float64 [Hq]

    @classmethod
    def of(
        cls,
        head_dim: int,
        causal: bool = False,
        window: Sequence[int] | None = None,
        softcap: float | None = None,
        scale: float | None = None,
        sinks: np.ndarray | None = None,
    ) -> Words:
        left, right = (-1, -1) if window is None else window
        right = 0 if causal else right
        scale = 1.0 / math.sqrt(head_dim) if scale is None else scale
        return cls(left, right, softcap or 0.0, scale, None if sinks is None else np.asarray(sinks, np.float64))

    def empty_lse(self, head: int) -> float:
        """The lse of a row that sees no key."""
        return -math.inf if self.sinks is None else float(self.sinks[head])


@dataclass(frozen=True)
class Part:
    """The location of one sequence in packed arrays."""

    rows: slice  # its queries
    places: slice  # its keys, padding included
    keys: slice  # its keys that exist
    rope: Rope | None  # with the positions of this sequence only


def by_sequence(
    one: Callable[..., tuple[np.ndarray, np.ndarray]],
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    *,
    cu_seqlens: CuSeqlens | None = None,
    kv_lens: np.ndarray | None = None,
    rope: Rope | None = None,
    **words: Any,
) -> tuple[np.ndarray, np.ndarray]:
    """(out `[B, Tq, Hq, D]`, lse `[B, Hq, Tq]`), or with `cu_seqlens` (out `[total_q, Hq, D]`, lse `[Hq, total_q]`).

    `one(q, k, v, words=, rope=)` returns (out `[Tq, Hq, D]`, lse `[Hq, Tq]`) of one sequence, which has at least one
    row and one key; all keys exist, and positions are its own. The other sequences get zeros, and their sinks or -inf
    as lse.
    """
    if cu_seqlens is None:
        ends = (ends_of(q), ends_of(k))
        more = {"kv_lens": kv_lens, "rope": packed_rope(rope, q, k), **words}
        out, lse = by_sequence(one, packed(q), packed(k), packed(v), cu_seqlens=ends, **more)
        return out.reshape(q.shape), lse.reshape(q.shape[2], *q.shape[:2]).swapaxes(0, 1).copy()
    meaning = Words.of(q.shape[-1], **words)
    out = np.zeros(q.shape, np.float64)
    lse = np.empty((q.shape[1], q.shape[0]))
    for head in range(q.shape[1]):
        lse[head] = meaning.empty_lse(head)
    for part in parts(cu_seqlens, len(q), len(k), kv_lens, rope):
        if part.rows.stop > part.rows.start and part.keys.stop > part.keys.start:
            arrays = (q[part.rows], k[part.keys], v[part.keys])
            out[part.rows], lse[:, part.rows] = one(*arrays, words=meaning, rope=part.rope)
    return out, lse


def parts(
    cu_seqlens: CuSeqlens, total_q: int, total_k: int, kv_lens: np.ndarray | None, rope: Rope | None
) -> Iterator[Part]:
    """The sequences of packed arrays, in order."""
    for name, cu, total in zip(("cu_seqlens_q", "cu_seqlens_k"), cu_seqlens, (total_q, total_k), strict=True):
        if cu[0] != 0 or cu[-1] != total or (np.diff(cu) < 0).any():
            raise ValueError(f"{name} is {np.asarray(cu).tolist()}; allowed: from 0 to {total}, never falling")
    starts_q, starts_k = ([int(x) for x in cu] for cu in cu_seqlens)
    for b in range(len(starts_q) - 1):
        rows, places = slice(starts_q[b], starts_q[b + 1]), slice(starts_k[b], starts_k[b + 1])
        length = places.stop - places.start
        if kv_lens is not None:
            if not 0 <= kv_lens[b] <= length:
                raise ValueError(f"kv_lens[{b}] is {int(kv_lens[b])}; allowed: 0 to {length}")
            length = int(kv_lens[b])
        yield Part(rows, places, slice(places.start, places.start + length), _with_positions(rope, rows, places))


def packed(x: np.ndarray) -> np.ndarray:
    """`[B, T, ...]` as `[B T, ...]`."""
    return x.reshape(x.shape[0] * x.shape[1], *x.shape[2:])


def ends_of(x: np.ndarray) -> np.ndarray:
    """The cu_seqlens of a padded array `[B, T, ...]` after packing."""
    return np.arange(x.shape[0] + 1) * x.shape[1]


def packed_rope(rope: Rope | None, q: np.ndarray | None, k: np.ndarray) -> Rope | None:
    """The rope of padded arrays for packed ones: positions `[T]` or `[B, T]` become `[B T]`."""
    if rope is None:
        return None

    def flat(positions: Any, x: np.ndarray | None) -> np.ndarray | None:
        if positions is None or x is None:
            return None
        return packed(np.broadcast_to(np.asarray(positions), x.shape[:2]))

    return Rope(rope.cos, rope.sin, rope.interleaved, flat(rope.positions_q, q), flat(rope.positions_k, k))


def packed_lse(lse: np.ndarray) -> np.ndarray:
    """`[B, H, T]` as `[H, B T]`."""
    return packed(lse.swapaxes(1, 2)).T


def _with_positions(rope: Rope | None, rows: slice, places: slice) -> Rope | None:
    if rope is None:
        return None
    positions_q = None if rope.positions_q is None else np.asarray(rope.positions_q)[rows]
    positions_k = None if rope.positions_k is None else np.asarray(rope.positions_k)[places]
    return Rope(rope.cos, rope.sin, rope.interleaved, positions_q, positions_k)
