"""Which hops of a ring one call takes together (qflash/parallel/torch/ring.py)."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("torch")
from qflash.parallel.parts import Part
from qflash.parallel.pieces import CAUSAL, OPEN
from qflash.parallel.torch import ring

OWN = [Part((0, 8), (0, 8), CAUSAL, sinks=True)]
EARLIER = [Part((0, 8), (0, 4), OPEN, sinks=False)]
LATER = [Part((4, 8), (0, 8), OPEN, sinks=False)]


def rounds(*steps, precision=None):
    of = SimpleNamespace(words=SimpleNamespace(precision=precision))
    return [len(found) for found in ring._rounds(of, list(steps))]


def test_hops_of_the_same_queries_go_together_up_to_four():
    assert rounds(OWN, *[EARLIER] * 3, *[LATER] * 4) == [1, 3, 4]
    assert rounds(OWN, *[LATER] * 7) == [1, 4, 3]
    assert rounds(OWN) == [1] and rounds() == []


def test_keys_of_a_call_are_bounded(monkeypatch):
    monkeypatch.setattr(ring, "_MOST_KEYS", 16)
    assert rounds(OWN, *[EARLIER] * 5, *[LATER] * 3) == [1, 4, 1, 2, 1]
    monkeypatch.setattr(ring, "_MOST_KEYS", 4)  # less than a hop has: alone
    assert rounds(OWN, *[EARLIER] * 2, *[LATER] * 2) == [1, 1, 1, 1, 1]


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
    assert rounds(OWN, EARLIER, other, EARLIER, EARLIER) == [1, 1, 1, 2]
    assert rounds(OWN, other) == [1, 1]


def test_quantized_keys_stay_those_of_a_rank():
    assert rounds(OWN, *[EARLIER] * 3, precision="int8") == [1] * 4
