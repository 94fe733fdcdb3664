"""Which hops of a ring one call takes together (qflash/parallel/rounds.py)."""

from __future__ import annotations

import pytest

from qflash.parallel import rounds as module
from qflash.parallel.parts import Part
from qflash.parallel.pieces import CAUSAL, OPEN
from qflash.parallel.rounds import rounds_of

OWN = [Part((0, 8), (0, 8), CAUSAL, sinks=True)]
EARLIER = [Part((0, 8), (0, 4), OPEN, sinks=False)]
LATER = [Part((4, 8), (0, 8), OPEN, sinks=False)]


def lengths(*steps):
    found = rounds_of(list(steps))
    assert [parts for hops in found for parts in hops] == list(steps)
    return [len(hops) for hops in found]


def test_a_round_has_no_more_hops_than_came_before_it_and_four_at_most():
    assert lengths(OWN, *[LATER] * 7) == [1, 1, 2, 4]
    assert lengths(OWN, *[EARLIER] * 20) == [1, 1, 2, 4, 4, 4, 4, 1]
    assert lengths(OWN) == [1] and lengths() == []


def test_hops_of_a_round_are_of_the_same_queries():
    assert lengths(OWN, *[EARLIER] * 3, *[LATER] * 4) == [1, 1, 2, 4]
    assert lengths(OWN, *[EARLIER] * 4, *[LATER] * 3) == [1, 1, 2, 1, 3]
    assert lengths(OWN, *[EARLIER] * 6, LATER) == [1, 1, 2, 3, 1]


def test_keys_of_a_round_are_bounded(monkeypatch):
    monkeypatch.setattr(module, "MOST_KEYS", 16)
    assert lengths(OWN, *[EARLIER] * 7, *[LATER] * 3) == [1, 1, 2, 4, 2, 1]
    monkeypatch.setattr(module, "MOST_KEYS", 4)  # less than a hop has: alone
    assert lengths(OWN, *[EARLIER] * 3, *[LATER] * 3) == [1] * 7


@pytest.mark.parametrize(
    "other",
    [
        [],
        EARLIER * 2,
        [EARLIER[0]._replace(window=(3, 0))],
        [EARLIER[0]._replace(sinks=True)],
        [EARLIER[0]._replace(kv_lens="some")],
        [EARLIER[0]._replace(offsets=("some", "some"))],
    ],
)
def test_what_is_masked_is_alone(other):
    assert lengths(OWN, EARLIER, other, EARLIER, EARLIER) == [1, 1, 1, 2]
    assert lengths(OWN, EARLIER, EARLIER, other, other) == [1, 1, 1, 1, 1]
