"""Pieces: masks over a sequence that is distributed over ranks, as calls of attention on slices of local tokens.

A mask of the whole sequence has two edges: query i sees the keys from i - left to i + right. Between a chunk of queries
and a chunk of keys it is the same band with another diagonal. attention aligns its diagonal to the last query and the
last key, so slicing at other ends moves it: every such band is one call, or none, and needs no additional argument.
"""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from typing import NamedTuple

from qflash.parallel.placement import Placement

OPEN = (-1, -1)  # the edges without a mask
CAUSAL = (-1, 0)

Span = tuple[int, int]  # from, to


class Piece(NamedTuple):
    """A call of attention on some of a rank's queries and some of the keys that it has received from a rank."""

    q: Span
    k: Span
    window: tuple[int, int]
    own: bool = False  # whether each query has the key of its own token: sinks count only in these pieces
    alone: bool = True  # whether it has all keys that its queries see, so that no merge follows


def ring_pieces(at: Placement, rank: int, source: int, edges: tuple[int, int], packed: bool = False) -> list[Piece]:
    """What `rank` computes on the keys of `source`. packed: a piece has one chunk of queries and one of keys."""
    whole = (0, at.part)
    if not packed and edges == OPEN:
        return [Piece(whole, whole, OPEN, rank == source)]
    if not packed and edges == CAUSAL:
        return _causal_pieces(at, rank, source)
    found = []
    for q_run, q_chunk in enumerate(at.chunks(rank)):
        for k_run, k_chunk in enumerate(at.chunks(source)):
            band = _band((q_chunk - k_chunk) * at.chunk, at.chunk, edges)
            if band is not None:
                q, k, window = band
                q_start, k_start = q_run * at.chunk, k_run * at.chunk
                found.append(Piece(_moved(q, q_start), _moved(k, k_start), window, q_chunk == k_chunk))
    return sorted(found, key=lambda piece: not piece.own)  # a row's own key first, as in every other step


def _causal_pieces(at: Placement, rank: int, source: int) -> list[Piece]:
    """A causal mask leaves one call per source, or none.

    With zigzag, a rank's own chunks, concatenated, are plain causal attention. Chunk `source` of an earlier rank is
    before both chunks of queries, and its other chunk after both; both chunks of a later rank are before the second
    chunk of queries and after the first.
    """
    whole, half = (0, at.part), at.part // 2
    if source == rank:
        return [Piece(whole, whole, CAUSAL, True)]
    if at.kind == "contiguous":
        return [Piece(whole, whole, OPEN)] if source < rank else []
    return [Piece(whole, (0, half), OPEN)] if source < rank else [Piece((half, at.part), whole, OPEN)]


def _band(shift: int, chunk: int, edges: tuple[int, int]) -> tuple[Span, Span, tuple[int, int]] | None:
    """Queries, keys and window of the call on a chunk of queries `shift` tokens after a chunk of keys; None: no query
    sees a key. Query i of the chunk sees its keys j with low <= j - i <= high."""
    left, right = edges
    farthest = chunk - 1
    low = -farthest if left < 0 else max(shift - left, -farthest)
    high = farthest if right < 0 else min(shift + right, farthest)
    if low > farthest or high < -farthest:
        return None
    diagonal = max(low, min(high, 0))
    # j = i + diagonal at the ends of both slices; queries beyond them see no key, and keys beyond them are not seen.
    q = (max(-diagonal, 0), chunk - max(diagonal, 0))
    k = (max(diagonal, 0), chunk - max(-diagonal, 0))
    return q, k, (-1 if low == -farthest else diagonal - low, -1 if high == farthest else high - diagonal)


def _moved(span: Span, by: int) -> Span:
    return span[0] + by, span[1] + by


def ring_hops(at: Placement, edges: tuple[int, int], packed: bool = False) -> int:
    """The number of hops after which no rank needs the keys. No rank needs keys of empty chunks."""
    return next((hop for hop in reversed(range(at.ranks)) if _is_wanted(at, hop, edges, packed)), 0)


def _is_wanted(at: Placement, hop: int, edges: tuple[int, int], packed: bool) -> bool:
    """Whether some rank computes on the keys that arrive with a hop."""
    # With contiguous chunks only the distance to the keys matters: before a rank, as for the last one, or after it, as
    # for the rank that receives the last one's.
    some = range(at.ranks) if at.runs > 1 else (at.ranks - 1, (hop - 1) % at.ranks)
    return any(ring_pieces(at, to, (to - hop) % at.ranks, edges, packed) for to in some)


@lru_cache(maxsize=4096)
def ring_steps(at: Placement, rank: int, edges: tuple[int, int], packed: bool = False) -> tuple[tuple[Piece, ...], ...]:
    """What `rank` computes after each hop: after h of them it has the keys of the rank h before it."""
    sources = ((rank - hop) % at.ranks for hop in range(ring_hops(at, edges, packed) + 1))
    steps = [ring_pieces(at, rank, source, edges, packed) for source in sources]
    spans = Counter(piece.q for pieces in steps for piece in pieces)
    alone = {span: _meet(span, spans) == 1 for span in spans}
    return tuple(tuple(piece._replace(alone=alone[piece.q]) for piece in pieces) for pieces in steps)


def _meet(q: Span, spans: Counter[Span]) -> int:
    """The number of pieces that include some of these queries."""
    return sum(count for other, count in spans.items() if other[0] < q[1] and q[0] < other[1])


class ChunkCall(NamedTuple):
    """A call of attention on a chunk of queries and all keys up to `k_end`, in token order."""

    k_end: int
    window: tuple[int, int]


def chunk_call(at: Placement, chunk: int, edges: tuple[int, int]) -> ChunkCall:
    """The keys that a chunk of queries sees, up to the right edge of the mask, and the window relative to their end."""
    left, right = edges
    end = (chunk + 1) * at.chunk
    k_end = at.length if right < 0 else min(at.length, end + right)
    beyond = k_end - end  # tokens from the chunk's last query to the diagonal, which is at the last key
    return ChunkCall(k_end, (-1 if left < 0 else left + beyond, -1 if right < 0 else right - beyond))
