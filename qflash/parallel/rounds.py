"""Rounds of a ring: which hops of keys and values share one transfer, and which of them share one call.

With short parts, one call per hop leaves SMs idle at its end and is followed by a merge in float32. So hops are grouped
into rounds of one, one, two, four and again four, and keys that the same queries see without a mask are concatenated. A
round is one transfer from one rank: a rank that has the keys of hops 0 to 3 sends all of them four ranks on, where they
are those of hops 4 to 7. The transfer overlaps with the computation of the previous round. The bytes moved are the same
as with separate hops.

A round of twice as many hops as the previous one is hidden if a hop takes at most half as long as the computation on
its keys. That holds for the links of one node: in a group of more ranks than a node has, every hop is a round.
"""

from __future__ import annotations

from typing import NamedTuple

from qflash.parallel.parts import Part
from qflash.parallel.pieces import OPEN
from qflash.parallel.placement import Placement

MOST_HOPS, MOST_KEYS = 4, 65536  # of a round with several hops
MOST_RANKS = 8  # of a group that is assumed to be one node


class Round(NamedTuple):
    """Hops from `first` to `end`, whose keys come from `distance` ranks before, where they had that many hops fewer."""

    first: int
    end: int
    distance: int

    @property
    def hops(self) -> range:
        return range(self.first, self.end)


def most_hops(at: Placement) -> int:
    """The maximum number of hops per round."""
    return min(MOST_HOPS, max(MOST_KEYS // max(at.part, 1), 1)) if at.ranks <= MOST_RANKS else 1


def rounds_of(hops: int, at: Placement) -> list[Round]:
    """All rounds. The first is hop 0, a rank's own keys, which do not move."""
    found = [Round(0, 1, 0)]
    while (first := found[-1].end) < hops:
        distance = min(first, most_hops(at))
        found.append(Round(first, min(first + distance, hops), distance))
    return found


Call = list[tuple[int, Part]]  # parts on the keys of one or several hops, each with the hop's number in its round


def calls_of(hops: list[list[Part]]) -> list[Call]:
    """What a rank computes in a round, with parts of neighbouring hops merged where one call can process them."""
    calls: list[Call] = []
    for number, parts in enumerate(hops):
        for part in parts:
            if calls and _join(calls[-1][-1], (number, part)):
                calls[-1].append((number, part))
            else:
                calls.append([(number, part)])
    return calls


def _join(before: tuple[int, Part], after: tuple[int, Part]) -> bool:
    """Whether the keys of both can be concatenated: the same queries see all of them."""
    return before[0] < after[0] and before[1].q == after[1].q and _is_plain(before[1]) and _is_plain(after[1])


def _is_plain(part: Part) -> bool:
    return part.window == OPEN and not part.sinks and part.kv_lens is None and part.offsets is None
