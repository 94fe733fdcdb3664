"""softmax, layer_norm and cross_entropy next to PyTorch, and next to a plain copy of the same memory.

python -m bench.reductions [cpu|cuda]   writes bench/results/<machine>/reductions[-cpu].jsonl (default: cuda)

Rows have microseconds, GB/s of the bytes that an operation must move (x in, results out, each once), and that rate
relative to the rate at which `copy_` copies x to another array in the same process and the same rounds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import qflash
from bench import tables
from bench.compiled import compiled
from bench.run import Candidate, Row, Suite, device_asked_for, main
from qflash import reference
from qflash.testing.compare import errors
from qflash.testing.timing import Call, Comparison

OPERATIONS = ("softmax", "layer_norm", "cross_entropy")
EAGER, COMPILED, AUTOTUNED, COPY = "torch", "torch.compile", "torch.compile max-autotune", "copy"
PEERS = (EAGER, COMPILED, AUTOTUNED)
CHECKED_ROWS = 64
SHAPES = {
    "cuda": ((16384, 8192), (131072, 1024), (1048576, 128), (4096, 32768), (2048, 131072)),
    "cpu": ((4096, 1024), (1024, 8192)),
}
DTYPES = {"cuda": ("bfloat16", "float32"), "cpu": ("float32",)}
PRESET = {"cuda": "reductions", "cpu": "reductions-cpu"}


@dataclass(frozen=True)
class Problem:
    """An operation on the rows of an array."""

    operation: str
    rows: int
    columns: int
    dtype: str

    def bytes(self, item: int) -> int:
        """The minimum number of bytes moved."""
        if self.operation == "cross_entropy":
            return self.rows * self.columns * item + self.rows * 8  # targets and losses
        vectors = 2 * self.columns * item if self.operation == "layer_norm" else 0
        return 2 * self.rows * self.columns * item + vectors


class Arrays:
    """A problem's arrays on a device, our call, torch's, and the first rows of the result in float64."""

    def __init__(self, problem: Problem, device: str):
        import torch
        from torch.nn import functional

        self.problem = problem
        columns, dtype = problem.columns, getattr(torch, problem.dtype)
        self.x = x = torch.randn(problem.rows, columns, device=device, dtype=dtype)
        first = x[:CHECKED_ROWS].double().cpu().numpy()
        if problem.operation == "softmax":
            self.ours, self.theirs = (lambda: qflash.softmax(x)), (lambda x: torch.softmax(x, -1))
            self.exact = reference.softmax(first)
        elif problem.operation == "layer_norm":
            weight, bias = (torch.randn(columns, device=device, dtype=dtype) for _ in range(2))
            self.ours = lambda: qflash.layer_norm(x, weight, bias)
            self.theirs = lambda x: functional.layer_norm(x, (columns,), weight, bias)
            self.exact = reference.layer_norm(first, weight.double().cpu().numpy(), bias.double().cpu().numpy())[0]
        else:
            targets = torch.randint(0, columns, (problem.rows,), device=device, dtype=torch.int64)
            narrow = targets.to(torch.int32)  # the kernel's dtype: torch needs 64 bits
            self.ours = lambda: qflash.cross_entropy(x, narrow, reduction="none")
            self.theirs = lambda x: functional.cross_entropy(x, targets, reduction="none")
            self.exact = reference.cross_entropy(first, targets[:CHECKED_ROWS].cpu().numpy())[0]


def _eager(arrays: Arrays) -> Call:
    return lambda: arrays.theirs(arrays.x)


def _compiled(arrays: Arrays) -> Call:
    theirs = compiled(arrays.theirs, mode=None)
    return lambda: theirs(arrays.x)


def _autotuned(arrays: Arrays) -> Call:
    theirs = compiled(arrays.theirs)
    return lambda: theirs(arrays.x)


def _copy(arrays: Arrays) -> Call:
    other = arrays.x.new_empty(arrays.x.shape)
    return lambda: other.copy_(arrays.x)


class Reductions(Suite):
    budget = 2.0
    graph = False

    def __init__(self, device: str):
        self.name, self.device = PRESET[device], device
        self.cases = tuple(
            Problem(operation, rows, columns, dtype)
            for rows, columns in SHAPES[device]
            for dtype in DTYPES[device]
            for operation in OPERATIONS
        )

    def arrays(self, case: Problem) -> Arrays:
        return Arrays(case, self.device)

    def candidates(self, arrays: Arrays) -> tuple[Candidate, ...]:
        kernel = f"{'' if self.device == 'cuda' else 'cpu_'}{arrays.problem.operation}"
        ours = Candidate(f"qflash {kernel}", lambda arrays: arrays.ours, kernel)
        ways = ((EAGER, _eager), (COMPILED, _compiled), (AUTOTUNED, _autotuned), (COPY, _copy))
        return ours, *(Candidate(name, make) for name, make in ways)

    def problem(self, arrays: Arrays) -> Row:
        case = arrays.problem
        return {"kind": case.operation, "rows": case.rows, "columns": case.columns, "dtype": case.dtype}

    def check(self, arrays: Arrays, candidate: Candidate, call: Call, result: Any) -> float | None:
        """The error of the first rows; None for a copy."""
        if candidate.name == COPY:
            return None
        return float(f"{errors(result[:CHECKED_ROWS].double().cpu().numpy(), arrays.exact).relative_l2:.3g}")

    def row(self, arrays: Arrays, candidate: Candidate, checked: float | None, timing: Comparison) -> Row:
        name, stats, item = candidate.name, timing.stats[candidate.name], arrays.x.element_size()
        copied = 2 * arrays.x.numel() * item
        count = copied if name == COPY else arrays.problem.bytes(item)
        return {
            "candidate": name,
            "framework": None if name == COPY else "torch",
            "kernel": candidate.kernel,
            "us": stats.as_dict(),
            "gbs": round(count / stats.p50 / 1e3, 1),
            "copy_share": round(timing.speedup(name, over=COPY) * count / copied, 3),
            "rel_l2": checked,
        }

    def rivals(self, candidate: Candidate) -> tuple[str, ...]:
        return PEERS if candidate.kernel else ()


def table(preset: str, machine: str | None = None, **chosen: Any) -> str:
    """One table per machine with committed rows: an operation and shape per line; `chosen`: by_machine's keep."""

    def of(found: list[Row]) -> str:
        lines = []
        peers = [peer for peer in PEERS if any(peer in row["speedup"] for row in found)]
        for ours in (row for row in found if row["kernel"]):
            cells = [f"`{ours['kind']}`", f"{ours['rows']} × {ours['columns']}", ours["dtype"], tables.time(ours)]
            cells += [f"{ours['gbs'] / 1e3:.2f} TB/s", f"**{ours['copy_share']:.1%}**", f"{ours['rel_l2']:.0e}"]
            lines.append(cells + [tables.ratio(ours["speedup"].get(peer)) for peer in peers])
        header = ["operation", "rows × columns", "dtype", "time", "rate", "of copy's rate", "error"]
        return tables.markdown([*header, *(f"× {peer}" for peer in peers)], lines)

    return tables.by_machine(preset, of, f"`python -m bench.reductions` makes them ({preset}).", machine, **chosen)


if __name__ == "__main__":
    main(Reductions(device_asked_for(PRESET)))
