"""The timer: candidates run interleaved in one process, so that the ratio between them is meaningful.

Every round times each candidate once and the order rotates from round to round, so drift of the machine (clock rate,
heat, neighbours) affects all of them equally. Ratios are medians of ratios within a round. Imports no framework, except
torch in the GPU clocks.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import numpy as np

Call = Callable[[], Any]
LONG = 0.2  # seconds; a call this long is warm after its first run
HIDES_HOST = 2e-3  # seconds; in a call this long the host's share is negligible


@dataclass(frozen=True, slots=True)
class Stats:
    """Statistics of a set of samples; times in microseconds per call."""

    n: int
    mean: float
    std: float
    min: float
    max: float
    p50: float
    p95: float
    p99: float

    @classmethod
    def of(cls, seconds: list[float]) -> Stats:
        """Statistics of samples given in seconds."""
        if not seconds:
            raise ValueError("seconds is empty; allowed: at least one sample")
        us = np.asarray(seconds, np.float64) * 1e6
        p50, p95, p99 = np.percentile(us, (50, 95, 99))
        return cls(
            n=len(seconds),
            mean=float(us.mean()),
            std=float(us.std(ddof=1)) if len(seconds) > 1 else 0.0,
            min=float(us.min()),
            max=float(us.max()),
            p50=float(p50),
            p95=float(p95),
            p99=float(p99),
        )

    def as_dict(self) -> dict[str, float]:
        """As a dict for a JSON row; digits below a hundredth of a microsecond exceed the resolution of clocks."""
        return {key: value if key == "n" else round(value, 2) for key, value in asdict(self).items()}


class Clock(Protocol):
    """How one sample is measured."""

    def prepare(self, call: Call) -> Call:
        """Convert the candidate to what is run repeatedly (a captured graph, for example)."""

    def sample(self, call: Call, repeats: int) -> float:
        """Seconds per call, over `repeats` calls."""


class WallClock:
    """perf_counter, for the CPU and for anything that `sync` (of the last result) can wait for."""

    def __init__(self, sync: Callable[[Any], Any] | None = None, settle: float = 0.002):
        # Worker threads of the previous candidate (OpenMP's, for example) spin for a while after their last task and
        # would occupy cores of the next candidate; a pause lets them go to sleep.
        self._settle = settle
        self._sync = sync

    def prepare(self, call: Call) -> Call:
        return call

    def sample(self, call: Call, repeats: int) -> float:
        if self._settle:
            time.sleep(self._settle)
        start = time.perf_counter()
        for _ in range(repeats):
            result = call()
        if self._sync is not None:
            self._sync(result)
        return (time.perf_counter() - start) / repeats


class HostClock:
    """perf_counter around calls that only submit work to the GPU: the host time per call, without waiting for results.

    The GPU is idle at the start of each sample. Its queue takes about a thousand launches before it blocks the host, so
    a sample must be shorter than that.
    """

    def __init__(self):
        import torch

        self._idle = torch.cuda.synchronize

    def prepare(self, call: Call) -> Call:
        return call

    def sample(self, call: Call, repeats: int) -> float:
        self._idle()
        start = time.perf_counter()
        for _ in range(repeats):
            call()
        return (time.perf_counter() - start) / repeats


class CudaClock:
    """CUDA events around each call on torch's current stream, with the L2 cache flushed before it.

    With `graph`, a short candidate is captured once and replayed, so that the host's share of a call is not counted. A
    long one is called directly: its graph would retain the memory of its intermediate results.
    """

    def __init__(self, graph: bool = False, flush_bytes: int = 256 << 20):
        import torch

        self._torch = torch
        self._graph = graph
        self._flush = torch.empty(flush_bytes, dtype=torch.uint8, device="cuda") if flush_bytes else None

    def prepare(self, call: Call) -> Call:
        if not self._graph:
            return call
        call()  # the first call may compile
        if self.sample(call, 1) >= HIDES_HOST:
            return call
        torch = self._torch
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            call()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        return graph.replay

    def sample(self, call: Call, repeats: int) -> float:
        torch = self._torch
        pairs = [tuple(torch.cuda.Event(enable_timing=True) for _ in range(2)) for _ in range(repeats)]
        for start, end in pairs:
            if self._flush is not None:
                self._flush.zero_()
            start.record()
            call()
            end.record()
        torch.cuda.synchronize()
        return sum(start.elapsed_time(end) for start, end in pairs) * 1e-3 / repeats


@dataclass(frozen=True)
class Comparison:
    """Samples of several candidates, measured round by round (seconds)."""

    samples: Mapping[str, list[float]]

    @property
    def stats(self) -> dict[str, Stats]:
        return {name: Stats.of(seconds) for name, seconds in self.samples.items()}

    def speedup(self, name: str, over: str) -> float:
        """How many times faster `name` is than `over`: the median over rounds of time(over) / time(name)."""
        ratios = [b / a for a, b in zip(self.samples[name], self.samples[over], strict=True)]
        return float(np.median(ratios))


def compare(
    candidates: Mapping[str, Call],
    *,
    clock: Clock | None = None,
    budget: float = 1.0,
    min_rounds: int = 5,
    max_rounds: int = 200,
    min_sample: float = 1e-3,
    warmup: int = 3,
) -> Comparison:
    """Time `candidates` round-robin until `budget` seconds are spent and at least `min_rounds` rounds are done.

    A sample repeats its call until it lasts `min_sample` seconds, so that the clock can resolve short calls.
    """
    if not candidates:
        raise ValueError("candidates is empty; allowed: at least one")
    if min_rounds < 1 or max_rounds < min_rounds:
        raise ValueError(f"min_rounds is {min_rounds}, max_rounds {max_rounds}; allowed: 1 <= min_rounds <= max_rounds")
    clock = clock or WallClock()
    calls, repeats = {}, {}
    for name, call in candidates.items():
        calls[name] = clock.prepare(call)
        once = math.inf
        for _ in range(max(warmup, 1)):
            once = min(once, clock.sample(calls[name], 1))
            if once > LONG:
                break
        repeats[name] = max(1, math.ceil(min_sample / max(once, 1e-7)))
    samples: dict[str, list[float]] = {name: [] for name in calls}
    names = list(calls)
    started = time.perf_counter()
    for round_index in range(max_rounds):
        if round_index >= min_rounds and time.perf_counter() - started >= budget:
            break
        turn = round_index % len(names)
        for name in names[turn:] + names[:turn]:
            samples[name].append(clock.sample(calls[name], repeats[name]))
    return Comparison(samples)


def measure(call: Call, **options: Any) -> Stats:
    """Statistics of one candidate; options as in `compare`."""
    return compare({"call": call}, **options).stats["call"]
