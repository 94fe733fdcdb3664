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


def counter(library: Library, stream: int, capturing: bool = False) -> int:
    return library.handle.try_counter(ctypes.c_void_p(stream), int(capturing))


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
    """cudaStreamPerThread is one handle for as many streams as there are threads."""
    assert counter(counters, 2) == NONE
    assert counter(counters, 2, capturing=True) == counters.handle.stream_counters()


def test_every_captured_launch_gets_a_counter_that_no_stream_has_until_there_are_none(counters):
    streams, count = counters.handle.stream_counters(), counters.handle.all_counters()
    counter(counters, 7)
    assert [counter(counters, 7, capturing=True) for _ in range(count - streams)] == list(range(streams, count))
    assert counter(counters, 7, capturing=True) == NONE
    assert counter(counters, 7) < streams
