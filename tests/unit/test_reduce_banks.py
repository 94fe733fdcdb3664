"""The claim of csrc/reduce/block.cuh about shared memory: a plane per word of a state, one clock per plane."""

from __future__ import annotations

from pathlib import Path

import pytest

import qflash

SOURCE = (Path(qflash.__file__).parent / "csrc" / "reduce" / "block.cuh").read_text()
LANES = range(32)


def clocks(words: list[int]) -> int:
    """Clocks of 32 lanes that each ask for a 4-byte word: what the busiest bank has different words."""
    banks: dict[int, set[int]] = {}
    for word in words:
        banks.setdefault(word % 32, set()).add(word)
    return max(map(len, banks.values()))


def test_the_model_is_the_headers():
    assert "kMostWarps = 32;" in SOURCE
    assert "s_words[i * kMostWarps + warp] = words[i]" in SOURCE
    assert "words[i] = s_words[i * kMostWarps + other]" in SOURCE


@pytest.mark.parametrize("width", [1, 2, 4, 8, 16, 32])
@pytest.mark.parametrize("state_words", [2, 3, 4])
def test_planes_have_no_conflicts(state_words, width):
    for i in range(state_words):
        assert clocks([i * 32 + (lane & (width - 1)) for lane in LANES]) == 1


@pytest.mark.parametrize("state_words", [2, 4])
def test_an_array_of_states_would_have(state_words):
    """Of three words it would not: 3 and 32 have no common factor."""
    assert clocks([lane * state_words for lane in LANES]) == state_words
