"""The runner: every candidate of a suite on every problem, checked, then timed interleaved, as rows.

A suite defines its problems, its candidates, how a result is checked, and what a row contains in addition to times.
`qflash bench` runs those of attention (bench/presets.py); `python -m bench.NAME` runs that of another module.
"""

from __future__ import annotations

import itertools
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import qflash
from bench import rows
from bench.journal import Journal
from qflash import machine
from qflash.cli.console import make_console, steps
from qflash.testing.timing import Call, Clock, Comparison, CudaClock, WallClock, compare

Row = dict[str, Any]


class Unavailable(Exception):
    """A candidate cannot run here; the text says why."""


@dataclass(frozen=True)
class Candidate:
    """One way to compute a problem. `make(arrays)` returns the call to time, or raises Unavailable with the reason."""

    name: str
    make: Callable[[Any], Call]
    kernel: str | None = None  # of qflash; None for peers


class Suite(ABC):
    """Problems on one device, and their candidates."""

    name: str  # of its rows, and of their file
    device: str
    cases: Sequence[Any]
    over: tuple[str, ...] = ()  # candidates that speed-ups are computed over, if they take part
    timed = True
    says_left_out = False  # whether rows contain which candidates do not support their problem, and why
    budget = 3.0  # seconds of timing per problem
    min_rounds = 7  # every candidate is timed in each round, however long that takes
    graph = True  # CUDA: short calls are replayed from a graph, so that the host's share is not counted

    @abstractmethod
    def arrays(self, case: Any) -> Any:
        """A problem's arrays, which all candidates share."""

    @abstractmethod
    def candidates(self, arrays: Any) -> Iterable[Candidate]:
        """All candidates that may take part, in the order of rows."""

    @abstractmethod
    def problem(self, arrays: Any) -> Row:
        """The part of a row that describes the problem."""

    def check(self, arrays: Any, candidate: Any, call: Call, result: Any) -> Any:
        """Check a result, and return what `row` needs; SystemExit if it is wrong and so not worth timing."""
        return None

    @abstractmethod
    def row(self, arrays: Any, candidate: Any, checked: Any, timing: Comparison | None) -> Row:
        """The part of a row that is specific to a candidate, without speed-ups."""

    def rivals(self, candidate: Any) -> Sequence[str]:
        """The candidates that a candidate's speed-ups are computed over."""
        return self.over

    def clock(self) -> tuple[Clock, float]:
        """A clock, and the minimum seconds per sample."""
        return (CudaClock(graph=self.graph) if self.device == "cuda" else WallClock()), 1e-3

    def time(self, calls: Mapping[str, Call], **options: Any) -> Comparison:
        """Options as in `qflash.testing.timing.compare`."""
        return compare(calls, **options)


def measure(
    suite: Suite,
    *,
    budget: float | None = None,
    min_rounds: int | None = None,
    cases: Sequence[Any] | None = None,
    leave_out: tuple[str, ...] = (),
    on_skip: Callable[[str], None] = lambda text: None,
    resume: bool = False,
) -> Iterator[list[Row]]:
    """Yield a list of rows per problem of `suite`. `on_skip` is called for what is omitted: candidates that cannot run,
    once each, and problems that are not measured again.

    `budget`, `min_rounds` and `cases` override the suite's own; `leave_out` names candidates that are omitted. resume:
    store the rows of each problem when it ends, and reuse those of an interrupted run (bench/journal.py).
    """
    shared = {"preset": suite.name} | rows.provenance(suite.device)
    options: dict[str, Any] = {
        "budget": suite.budget if budget is None else budget,
        "min_rounds": suite.min_rounds if min_rounds is None else min_rounds,
    }
    how = {**options, "leave_out": leave_out}
    if suite.timed:
        options["clock"], options["min_sample"] = suite.clock()
    journal = Journal(shared, how) if resume else None
    if journal:
        on_skip(f"{len(journal)} of the problems of {suite.name}, which a run that was cut off has measured")
    told = set()
    for case in suite.cases if cases is None else cases:
        kept = journal.rows_of(case) if journal is not None else None
        if kept is not None:
            yield kept
            continue
        arrays = suite.arrays(case)
        calls, checked, taking_part, absent = {}, {}, [], {}
        for candidate in suite.candidates(arrays):
            name = candidate.name
            if name in leave_out:
                continue
            try:
                call = candidate.make(arrays)
                result = call()
            except Exception as error:
                reason = refusal(error)
                if reason is None:
                    raise
                absent[name] = reason
                if name not in told:
                    told.add(name)
                    on_skip(f"{name}: {reason}")
                continue
            calls[name], checked[name] = call, suite.check(arrays, candidate, call, result)
            taking_part.append(candidate)
        timing = suite.time(calls, **options) if suite.timed and calls else None
        about, missing = shared | suite.problem(arrays), {"left_out": absent} if suite.says_left_out else {}
        part = [
            about | suite.row(arrays, one, checked[one.name], timing) | _speedups(suite, one, timing) | missing
            for one in taking_part
        ]
        if journal is not None:
            journal.add(case, part)
        yield part


def refusal(error: Exception) -> str | None:
    """Why a candidate cannot take part, in a line; None if the error has another cause."""
    if isinstance(error, (Unavailable, NotImplementedError, qflash.NoKernelError, qflash.ToolchainError)):
        return str(error).splitlines()[0]
    return "out of memory" if isinstance(error, RuntimeError) and "out of memory" in str(error).lower() else None


def tried(call: Call) -> Call:
    """The call of a peer, after a first run has shown that it supports the problem."""
    try:
        call()
    except (RuntimeError, ValueError) as error:
        raise Unavailable(str(error).splitlines()[0]) from None
    return call


def _speedups(suite: Suite, candidate: Candidate, timing: Comparison | None) -> Row:
    if timing is None:
        return {}
    others = [peer for peer in suite.rivals(candidate) if peer in timing.samples and peer != candidate.name]
    return {"speedup": {peer: round(timing.speedup(candidate.name, over=peer), 3) for peer in others}}


def set_threads(threads: int | None) -> None:
    """Set the same number of threads for qflash and torch; default: all cores."""
    threads = threads or machine.cores()
    qflash.set_num_threads(threads)
    if machine.version("torch"):
        import torch

        torch.set_num_threads(threads)


def line(row: Row) -> str:
    """A readable row: its problem, its candidate and the figures."""
    cells = dict(itertools.dropwhile(lambda cell: cell[0] != "kind", row.items()))
    cells |= {"us": row["us"]["p50"]} if "us" in row else {}
    return ", ".join(f"{name} {value}" for name, value in cells.items())


def device_asked_for(devices: Iterable[str]) -> str:
    """The device named on a module's command line; default: cuda."""
    device = sys.argv[1] if len(sys.argv) > 1 else "cuda"
    if device not in devices:
        raise SystemExit(f"the device is {device!r}; allowed: {', '.join(devices)}")
    return device


def main(suite: Suite, budget: float | None = None) -> list[Row]:
    """Measure a suite, print and write its rows as they are measured. Continues an interrupted run."""
    set_threads(None)
    console = make_console()
    collected = []
    with steps(console, len(suite.cases)) as progress:
        progress.describe(f"timing {suite.name}")
        told = partial(console.print, soft_wrap=True)
        for part in measure(suite, budget=budget, resume=True, on_skip=told):
            collected += part
            console.print("\n".join(map(line, part)), soft_wrap=True)
            progress.advance()
    if not collected:
        console.print(f"no rows: nobody could take part in {suite.name}", soft_wrap=True)
        return collected
    path = rows.save(suite.name, collected)
    console.print(f"{len(collected)} rows in {path.relative_to(rows.ROOT)}", soft_wrap=True)
    return collected
