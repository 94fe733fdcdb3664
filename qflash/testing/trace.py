"""An emulated run in the emulator's model of time (csrc/emulate/trace.h): which threads work or wait, and for what.

It is a model, not a measurement. A few kinds of work take a time defined by the model, everything else takes none.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from qflash.dispatch import VARIANTS
from qflash.testing import compare, emulator
from qflash.testing.case import Case
from qflash.testing.emulated_attention import run_case
from qflash.testing.oracle import integers_of
from qflash.testing.runner import suited

NOTE = "a model of time (csrc/emulate/trace.h), not a measurement: one unit is about a clock of a Hopper multiprocessor"
TENSOR_CORES = "tensor cores"
# wgmma reads A from shared memory for the scores and from registers for the outputs, in every kernel that uses it.
PRODUCTS = {"A in shared memory": "S = Q Kᵀ", "A in registers": "O += P V"}
WARPS_OF_A_GROUP = 4


@dataclass(frozen=True)
class Span:
    """An event from `begin` to `end`, in a row of its block; an arrival has no duration."""

    kind: str  # work | wait | arrive | copy | product
    launch: int
    block: int
    row: str
    begin: int
    end: int
    name: str


def trace(kernel: str, case: Case, multiprocessors: int = 1) -> list[Span]:
    """The events of a run of an attention kernel on a case, which is changed to what the kernel supports."""
    case = suited(case, kernel, emulator.arch())
    library = emulator.kernel_library(kernel, case.dtype, case.head_dim, emulator.arch())
    library.handle.qf_emulate_trace(1)
    try:
        found = run_case(lambda *_: library, case, kernel, emulator.arch(), multiprocessors=multiprocessors)
        text = library.handle.qf_emulate_spans().decode()
    finally:
        library.handle.qf_emulate_trace(0)
    compare.check_contract(case, *found, VARIANTS[kernel].contract, integers=integers_of(kernel))
    return merged(parse(text))


def parse(text: str) -> list[Span]:
    """The spans that the emulator recorded, in rows with readable names."""
    lines = [line.split("\t") for line in text.splitlines()]
    roles = {tuple(line[1:4]): line[6] for line in lines if line[0] == "role"}

    def row(line: list[str]) -> str:
        kind, *place, _, _, name = line
        if kind == "product":
            return TENSOR_CORES
        if kind == "copy":
            return f"copy of {name.replace(' full', '')}"
        role = roles.get(tuple(place), "")
        if not role:
            return f"warp {place[2]}"
        return f"{role}, warp {int(place[2]) % WARPS_OF_A_GROUP}"

    spans = []
    for line in lines:
        kind, launch, block, warp, begin, end, name = line
        if kind == "role":
            continue
        if kind == "product":
            role = roles.get((launch, block, warp), "")
            name = f"{PRODUCTS[name]}, {role}" if role else PRODUCTS[name]
        spans.append(Span(kind, int(launch), int(block), row(line), int(begin), int(end), name))
    return sorted(spans, key=lambda span: (span.launch, span.block, span.row, span.begin, -span.end))


def merged(spans: Iterable[Span]) -> list[Span]:
    """Merge the copies of one tile, which consist of several boxes."""
    result: list[Span] = []
    for span in spans:
        last = result[-1] if result else None
        same = last and (last.kind, last.launch, last.block, last.row) == ("copy", span.launch, span.block, span.row)
        if same and span.kind == "copy" and span.begin < last.end:
            result[-1] = replace(last, end=max(last.end, span.end))
        else:
            result.append(span)
    return result


def chrome(spans: list[Span], title: str) -> dict:
    """The spans as a Chrome trace, for https://ui.perfetto.dev: a process is a block, its threads are rows."""
    events: list[dict] = []
    processes: dict[tuple[int, int], int] = {}
    threads: dict[tuple[int, str], int] = {}
    for span in spans:
        place = (span.launch, span.block)
        if place not in processes:
            processes[place] = len(processes) + 1
            name = f"launch {span.launch}, block {span.block}"
            events.append({"ph": "M", "name": "process_name", "pid": processes[place], "args": {"name": name}})
        process = processes[place]
        if (process, span.row) not in threads:
            threads[process, span.row] = len(threads) + 1
            thread = {"pid": process, "tid": threads[process, span.row]}
            events.append({"ph": "M", "name": "thread_name", **thread, "args": {"name": span.row}})
        event = {"name": span.name, "cat": span.kind, "pid": process, "tid": threads[process, span.row]}
        if span.kind == "wait":
            event["name"] = f"wait: {span.name}"
        if span.kind == "arrive":
            events.append({**event, "ph": "i", "s": "t", "name": f"arrive: {span.name}", "ts": span.begin})
        else:
            events.append({**event, "ph": "X", "ts": span.begin, "dur": span.end - span.begin})
    return {"traceEvents": events, "displayTimeUnit": "ns", "otherData": {"title": title, "time": NOTE}}
