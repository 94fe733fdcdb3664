"""Counters of dynamic schedules: which launch gets which (tile_counters.cu)."""

from __future__ import annotations

import ctypes
import shutil
from pathlib import Path

import pytest

from qflash.testing.emulator import Library

NONE = -1


@pytest.fixture
def counters(emulated_source, tmp_path) -> Library:
    """A library that no stream has a counter of."""
    path = emulated_source("tile_counters.cu").path
    return Library(Path(shutil.copy(path, tmp_path)), "tile_counters")


def counter(library: Library, stream: int, capture: int = 0) -> int:
    return library.handle.try_counter(ctypes.c_void_p(stream), capture)


def first_of(library: Library, wanted: int, stream: int = 7, capture: int = 0) -> int:
    """Of 100 counters, of which four streams have ten each."""
    return library.handle.try_counters(ctypes.c_void_p(stream), capture, wanted)


def test_a_stream_keeps_its_counter_and_shares_it_with_no_other(counters):
    count = counters.handle.stream_counters()
    streams = [64 * i for i in range(count)]  # ids that collide: they are tried one after another
    first = [counter(counters, stream) for stream in streams]
    assert sorted(first) == list(range(count))
    assert [counter(counters, stream) for stream in streams] == first


def test_a_stream_for_which_none_is_left_gets_none_and_takes_nobody_elses(counters):
    count = counters.handle.stream_counters()
    first = [counter(counters, 16 + stream) for stream in range(count)]
    assert [counter(counters, 16 + count + more) for more in range(3)] == [NONE] * 3
    assert [counter(counters, 16 + stream) for stream in range(count)] == first


def test_the_default_stream_of_a_thread_gets_none_but_in_a_graph(counters):
    """cudaStreamPerThread is one handle for as many streams as there are threads, so its launches share none."""
    streams = counters.handle.stream_counters()
    assert counter(counters, 2) == NONE
    assert [counter(counters, 2, capture=1) for _ in range(3)] == [streams, streams + 1, streams + 2]


def test_every_captured_stream_gets_a_counter_that_no_other_has_until_there_are_none(counters):
    streams, count = counters.handle.stream_counters(), counters.handle.all_counters()
    counter(counters, 7)
    captures = range(1, count - streams + 1)
    assert [counter(counters, 7, capture) for capture in captures] == list(range(streams, count))
    assert counter(counters, 7, capture=count) == NONE
    assert counter(counters, 7) < streams


def test_launches_that_a_stream_captures_share_counters(counters):
    """A graph runs them in sequence. Another stream of the same capture may run beside them."""
    assert [first_of(counters, wanted, capture=5) for wanted in (8, 3, 8)] == [40, 40, 40]
    assert first_of(counters, 9, capture=5) == 48  # more than there were; from now on these serve
    assert [first_of(counters, wanted, capture=5) for wanted in (9, 2)] == [48, 40]
    assert first_of(counters, 8, stream=16, capture=5) == 57
    assert first_of(counters, 8, capture=6) == 65
    assert [first_of(counters, 8, capture=5), first_of(counters, 8, stream=16, capture=5)] == [40, 57]
    assert first_of(counters, 30, capture=7) == NONE and first_of(counters, 27, capture=7) == 73


def test_a_capture_that_others_displaced_gets_new_counters(counters):
    """Which captures took counters is remembered of the last sixteen."""
    taken = [first_of(counters, 1, capture=capture) for capture in range(1, 18)]
    assert taken == list(range(40, 57))
    assert first_of(counters, 1, capture=17) == 56 and first_of(counters, 1, capture=1) == 57
