"""The timer: statistics, interleaving, ratios, and how short calls are repeated."""

import sys
import time
import types

import numpy as np
import pytest

from qflash.testing.timing import Comparison, CudaClock, HostClock, Stats, WallClock, compare, measure


class ScriptedClock:
    """Gives out prepared durations and writes down what was run."""

    def __init__(self, durations):
        self.durations = durations
        self.log = []

    def prepare(self, call):
        return call

    def sample(self, call, repeats):
        name = call()
        self.log.append((name, repeats))
        return self.durations[name]


def test_statistics_are_those_of_numpy():
    seconds = [3e-6, 1e-6, 2e-6, 10e-6]
    stats = Stats.of(seconds)
    us = np.array(seconds) * 1e6
    assert (stats.n, stats.min, stats.max) == (4, pytest.approx(1), pytest.approx(10))
    assert stats.mean == pytest.approx(us.mean())
    assert stats.std == pytest.approx(us.std(ddof=1))
    assert (stats.p50, stats.p95, stats.p99) == pytest.approx(tuple(np.percentile(us, (50, 95, 99))))


def test_one_sample_has_no_spread_and_none_is_refused():
    assert Stats.of([1e-3]).std == 0
    with pytest.raises(ValueError, match="seconds is empty"):
        Stats.of([])


def test_rounds_interleave_and_rotate_the_order():
    clock = ScriptedClock({"a": 1.0, "b": 2.0, "c": 4.0})
    calls = {name: (lambda name=name: name) for name in "abc"}
    result = compare(calls, clock=clock, warmup=1, budget=0, min_rounds=4, max_rounds=4)
    order = "".join(name for name, _ in clock.log)
    assert order == "abc" + "abc" + "bca" + "cab" + "abc"
    assert {name: stats.n for name, stats in result.stats.items()} == {"a": 4, "b": 4, "c": 4}
    assert result.speedup("a", over="c") == 4.0
    assert result.speedup("c", over="a") == 0.25


def test_speedup_is_the_median_of_ratios_inside_a_round():
    # The machine slows down threefold half-way; the ratio does not notice.
    result = Comparison({"fast": [1.0, 1.0, 3.0, 3.0], "slow": [2.0, 2.0, 6.0, 6.0]})
    assert result.speedup("fast", over="slow") == 2.0


def test_short_calls_are_repeated_up_to_the_sample_length():
    clock = ScriptedClock({"short": 1e-5, "long": 1.0})
    calls = {name: (lambda name=name: name) for name in clock.durations}
    compare(calls, clock=clock, min_sample=1e-3, budget=0, min_rounds=1)
    assert clock.log[-2:] == [("short", 100), ("long", 1)]


def test_wall_clock_measures_a_sleep_and_waits_for_the_result():
    waited = []
    stats = measure(lambda: time.sleep(0.01), clock=WallClock(sync=waited.append), budget=0, min_rounds=3)
    assert stats.n == 3
    assert stats.min >= 9_900
    assert waited


@pytest.mark.parametrize(("options", "name"), [({"min_rounds": 0}, "min_rounds"), ({"max_rounds": 1}, "max_rounds")])
def test_bad_rounds_are_refused(options, name):
    with pytest.raises(ValueError, match=name):
        compare({"a": lambda: None}, **options)


def test_no_candidates_are_refused():
    with pytest.raises(ValueError, match="candidates is empty"):
        compare({})


def test_host_time_starts_on_an_idle_gpu_and_waits_for_nothing(monkeypatch):
    log = []
    cuda = types.SimpleNamespace(synchronize=lambda: log.append("idle") or time.sleep(0.02))
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(cuda=cuda))
    seconds = HostClock().sample(lambda: log.append("call"), 3)
    assert log == ["idle", "call", "call", "call"]
    assert seconds < 0.02 / 3


@pytest.mark.gpu
def test_a_short_call_is_replayed_from_a_graph_and_a_long_one_called():
    torch = pytest.importorskip("torch")
    clock = CudaClock(graph=True)
    x = torch.zeros(16, device="cuda")
    short = clock.prepare(lambda: x.add_(1))
    before = x.clone()
    short()
    assert (x == before + 1).all()
    assert short.__name__ == "replay"
    square = torch.randn(8192, 8192, device="cuda", dtype=torch.float64)

    def long():
        return square @ square

    assert clock.prepare(long) is long
