"""Which hops of a ring are one transfer, and which of them one call takes (qflash/parallel/rounds.py)."""

from __future__ import annotations

from itertools import pairwise

import pytest

from qflash.parallel.parts import Part
from qflash.parallel.pieces import CAUSAL, OPEN
from qflash.parallel.placement import Placement
from qflash.parallel.rounds import MOST_KEYS, calls_of, most_hops, rounds_of

OWN = Part((0, 8), (0, 8), CAUSAL, sinks=True)
EARLIER = Part((0, 8), (0, 4), OPEN, sinks=False)
LATER = Part((4, 8), (0, 8), OPEN, sinks=False)


def placed(part: int, ranks: int = 8) -> Placement:
    return Placement("contiguous", ranks, ranks * part)


def sizes(hops: int, part: int = 16, ranks: int = 8) -> list[int]:
    return [len(one.hops) for one in rounds_of(hops, placed(part, ranks))]


def test_rounds_grow_to_four_hops():
    assert sizes(1) == [1] and sizes(2) == [1, 1] and sizes(4) == [1, 1, 2]
    assert sizes(8) == [1, 1, 2, 4] and sizes(7) == [1, 1, 2, 3]


def test_keys_of_a_round_are_bounded():
    assert sizes(8, MOST_KEYS // 4) == [1, 1, 2, 4] and sizes(8, MOST_KEYS // 3) == [1, 1, 2, 3, 1]
    assert sizes(6, MOST_KEYS // 2) == [1, 1, 2, 2]
    assert sizes(6, MOST_KEYS // 2 + 1) == sizes(6, 10 * MOST_KEYS) == [1] * 6
    assert sizes(4, 0) == [1, 1, 2]


def test_beyond_a_node_every_hop_is_a_round():
    assert sizes(9, ranks=9) == [1] * 9


@pytest.mark.parametrize("part", [16, MOST_KEYS // 3, MOST_KEYS // 2, MOST_KEYS])
@pytest.mark.parametrize("hops", range(1, 20))
def test_ranks_have_what_they_send_on(hops, part):
    """Each hop once, in order; sent are hops that came, of which a rank keeps the last few."""
    rounds = rounds_of(hops, placed(part))
    assert [hop for one in rounds for hop in one.hops] == list(range(hops))
    for before, one in pairwise(rounds):
        sent = [hop - one.distance for hop in one.hops]
        assert max(before.end - most_hops(placed(part)), 0) <= sent[0] and sent[-1] < before.end


def calls(*hops: list[Part]) -> list[list[int]]:
    found = calls_of(list(hops))
    assert [part for call in found for _, part in call] == [part for parts in hops for part in parts]
    return [[number for number, _ in call] for call in found]


def test_a_call_takes_hops_of_the_same_queries():
    assert calls([OWN]) == [[0]] and calls([]) == [] and calls([], [LATER]) == [[1]]
    assert calls(*[[EARLIER]] * 4) == calls(*[[LATER]] * 4) == [[0, 1, 2, 3]]
    assert calls([EARLIER], [EARLIER], [LATER], [LATER]) == [[0, 1], [2, 3]]
    assert calls([EARLIER], [LATER], [LATER], []) == [[0], [1, 2]]


@pytest.mark.parametrize(
    "other",
    [
        EARLIER._replace(window=(3, 0)),
        EARLIER._replace(sinks=True),
        EARLIER._replace(kv_lens="some"),
        EARLIER._replace(offsets=("some", "some")),
    ],
)
def test_what_is_masked_is_alone(other):
    assert calls([EARLIER], [other], [EARLIER], [EARLIER]) == [[0], [1], [2, 3]]
    assert calls([other], [other]) == [[0], [1]]


def test_parts_of_one_hop_are_never_one_call():
    """Their keys may be the same."""
    assert calls([EARLIER, EARLIER], [EARLIER]) == [[0], [0, 1]]
