"""Placement: which tokens of a sequence each rank has.

The sequence is cut into chunks of equal length. "contiguous" gives each rank one of them, in order. "zigzag" makes two
for each rank and gives rank r chunks r and 2 · ranks - 1 - r, so that a causal mask leaves every rank the same work.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from qflash.call.words import check_flag, check_word

PLACEMENTS = ("zigzag", "contiguous")


def check_placement(placement: Any, causal: Any) -> str:
    """The word, or what stands for None: "zigzag" where a mask is causal, else "contiguous"."""
    if placement is None:
        return "zigzag" if check_flag("causal", causal) else "contiguous"
    return check_word("placement", placement, PLACEMENTS)


@dataclass(frozen=True, slots=True)
class Placement:
    """`length` tokens over `ranks` ranks. Ranks may be traced: what depends on one is arithmetic alone."""

    kind: str
    ranks: int
    length: int

    @classmethod
    def of_whole(cls, kind: str, ranks: int, length: int, name: str, dim: int) -> Placement:
        """That of an array `name` with all tokens in its dimension `dim`."""
        parts = runs_of(kind) * ranks
        if length % parts:
            raise ValueError(
                f"{name} has {length} tokens in dimension {dim}; allowed: a multiple of {parts}, "
                f"{_parts_in_words(kind, ranks)}; pad it at the end"
            )
        return cls(kind, ranks, length)

    @classmethod
    def of_part(cls, kind: str, ranks: int, tokens: int, name: str) -> Placement:
        """That of an array `name` with one rank's tokens."""
        if tokens % runs_of(kind):
            raise ValueError(
                f"{name} has {tokens} tokens on this rank; allowed: an even number, because placement 'zigzag' gives "
                "each rank two chunks of equal length"
            )
        return cls(kind, ranks, ranks * tokens)

    @property
    def runs(self) -> int:
        """How many chunks a rank has."""
        return runs_of(self.kind)

    @property
    def chunk(self) -> int:
        """Tokens of a chunk."""
        return self.length // (self.runs * self.ranks)

    @property
    def part(self) -> int:
        """Tokens of a rank."""
        return self.length // self.ranks

    def chunks(self, rank: Any) -> tuple[Any, ...]:
        """The chunks of a rank, in the order in which it has them, which is that of their tokens."""
        return (rank,) if self.runs == 1 else (rank, 2 * self.ranks - 1 - rank)

    def holders(self) -> tuple[tuple[int, int], ...]:
        """(rank, run) of every chunk, in the order of tokens: the chunk is that rank's first or second."""
        of_ranks = [(rank, 0) for rank in range(self.ranks)]
        return (*of_ranks, *((rank, 1) for rank, _ in reversed(of_ranks))) if self.runs == 2 else tuple(of_ranks)


def runs_of(kind: str) -> int:
    """How many chunks a rank has."""
    return 2 if kind == "zigzag" else 1


def _parts_in_words(kind: str, ranks: int) -> str:
    each = "two chunks for each" if kind == "zigzag" else "one chunk for each"
    return f"{each} of {ranks} ranks (placement {kind!r})"
