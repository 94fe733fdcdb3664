"""Rounds of a ring: which hops of keys and values are one transfer, and which of them one call takes.

Where parts are short, a call for each hop leaves multiprocessors idle at its end, and a merge in float32 follows it. So
hops come in rounds of one, one, two, four and again four, and keys that the same queries see whole are laid end to end.
A round is one transfer from one rank: who has the keys of hops 0 to 3 sends all of them four ranks on, where they are
those of hops 4 to 7. It is under way while the round before is computed on. What moves is what hops one by one move.

A round of twice as many hops as the one before hides if a hop takes half as long as what is computed on its keys, or
less. That is for the links of one node: in a group of more ranks than a node has, every hop is a round.
"""

from __future__ import annotations

from typing import NamedTuple

from qflash.parallel.parts import Part
from qflash.parallel.pieces import OPEN
from qflash.parallel.placement import Placement

MOST_HOPS, MOST_KEYS = 4, 65536  # of a round, where it has several hops
MOST_RANKS = 8  # of a group that is taken for one node


class Round(NamedTuple):
    """Hops from `first` to `end`, whose keys come from `distance` ranks before: there they were hops less by that."""

    first: int
    end: int
    distance: int

    @property
    def hops(self) -> range:
        return range(self.first, self.end)


def most_hops(at: Placement) -> int:
    """How many hops a round may have."""
    return min(MOST_HOPS, max(MOST_KEYS // max(at.part, 1), 1)) if at.ranks <= MOST_RANKS else 1


def rounds_of(hops: int, at: Placement) -> list[Round]:
    """All rounds. The first is hop 0, a rank's own keys, which do not move."""
    found = [Round(0, 1, 0)]
    while (first := found[-1].end) < hops:
        distance = min(first, most_hops(at))
        found.append(Round(first, min(first + distance, hops), distance))
    return found


Call = list[tuple[int, Part]]  # parts on the keys of one hop or of several, each with the hop's number in its round


def calls_of(hops: list[list[Part]]) -> list[Call]:
    """What a rank computes in a round, parts of neighbouring hops together that one call can take."""
    calls: list[Call] = []
    for number, parts in enumerate(hops):
        for part in parts:
            if calls and _join(calls[-1][-1], (number, part)):
                calls[-1].append((number, part))
            else:
                calls.append([(number, part)])
    return calls


def _join(before: tuple[int, Part], after: tuple[int, Part]) -> bool:
    """Whether the keys of one can follow those of the other: the same queries see all of them."""
    return before[0] < after[0] and before[1].q == after[1].q and _is_plain(before[1]) and _is_plain(after[1])


def _is_plain(part: Part) -> bool:
    return part.window == OPEN and not part.sinks and part.kv_lens is None and part.offsets is None
