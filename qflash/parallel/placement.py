"""Placement: which tokens of a sequence each rank has.

The sequence is divided into chunks of equal length. "contiguous" gives each rank one of them, in order. "zigzag" makes
two per rank and gives rank r chunks r and 2 · ranks - 1 - r, so that a causal mask leaves every rank the same work.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from qflash.call.words import check_flag, check_word

PLACEMENTS = ("zigzag", "contiguous")


def check_placement(placement: Any, causal: Any) -> str:
    """The placement, or the default for None: "zigzag" if the mask is causal, else "contiguous"."""
    if placement is None:
        return "zigzag" if check_flag("causal", causal) else "contiguous"
    return check_word("placement", placement, PLACEMENTS)


@dataclass(frozen=True, slots=True)
class Placement:
    """`length` tokens over `ranks` ranks. Ranks may be traced: only arithmetic depends on them."""

    kind: str
    ranks: int
    length: int

    @classmethod
    def of_whole(cls, kind: str, ranks: int, length: int, name: str, dim: int) -> Placement:
        """The placement of an array `name` with all tokens in its dimension `dim`."""
        parts = runs_of(kind) * ranks
        if length % parts:
            raise ValueError(
                f"{name} has {length} tokens in dimension {dim}; allowed: a multiple of {parts}, "
                f"{_parts_in_words(kind, ranks)}; pad it at the end"
            )
        return cls(kind, ranks, length)

    @classmethod
    def of_part(cls, kind: str, ranks: int, tokens: int, name: str) -> Placement:
        """The placement of an array `name` with one rank's tokens."""
        if tokens % runs_of(kind):
            raise ValueError(
                f"{name} has {tokens} tokens on this rank; allowed: an even number, because placement 'zigzag' gives "
                "each rank two chunks of equal length"
            )
        return cls(kind, ranks, ranks * tokens)

    @property
    def runs(self) -> int:
        """The number of chunks per rank."""
        return runs_of(self.kind)

    @property
    def chunk(self) -> int:
        """The number of tokens per chunk."""
        return self.length // (self.runs * self.ranks)

    @property
    def part(self) -> int:
        """The number of tokens per rank."""
        return self.length // self.ranks

    def chunks(self, rank: Any) -> tuple[Any, ...]:
        """The chunks of a rank in its order, which is token order."""
        return (rank,) if self.runs == 1 else (rank, 2 * self.ranks - 1 - rank)

    def holders(self) -> tuple[tuple[int, int], ...]:
        """(rank, run) of every chunk, in token order: the chunk is the first or second of that rank."""
        of_ranks = [(rank, 0) for rank in range(self.ranks)]
        return (*of_ranks, *((rank, 1) for rank, _ in reversed(of_ranks))) if self.runs == 2 else tuple(of_ranks)


def runs_of(kind: str) -> int:
    """The number of chunks per rank."""
    return 2 if kind == "zigzag" else 1


def _parts_in_words(kind: str, ranks: int) -> str:
    each = "two chunks for each" if kind == "zigzag" else "one chunk for each"
    return f"{each} of {ranks} ranks (placement {kind!r})"
