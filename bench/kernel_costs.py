"""The costs of CUDA and Triton kernels of the same operation, in one table: a call, the first call, compilation, lines.

Each kernel is run in separate processes, first with empty caches and then with those that the first run filled; its
lines of source are counted; then all kernels of the operation are timed together on the same arrays.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import tables
from bench.rows import ROOT
from bench.run import Candidate, Row, Suite, Unavailable
from bench.source_lines import lines_of
from qflash import dispatch
from qflash.testing.timing import Call, Comparison

NAME = "triton-costs"


@dataclass(frozen=True)
class Problem:
    """The call of one operation: `call`, an expression of q, k and v, and the kernels that serve it."""

    operation: str
    call: str
    shape: tuple[int, ...]
    kernels: tuple[str, ...]
    before: str = ""  # statements before the call

    def call_of(self, kernel: str) -> str:
        """The expression that calls a kernel."""
        return self.call.format(f"kernel={kernel!r}")


_ATTENTION = (1, 4096, 16, 128)
PROBLEMS = (
    Problem("forward", "qflash.attention(q, k, v, causal=True, {})", _ATTENTION, ("sm90_fwd", "fa_mma", "triton_fwd")),
    Problem(
        "int8",
        'qflash.attention(q, k, v, causal=True, precision="int8", {})',
        _ATTENTION,
        ("sm90_int8", "fa_int8", "triton_int8"),
    ),
    Problem("decode", "qflash.attention(q[:, -1:], k, v, {})", _ATTENTION, ("sm90_decode", "decode", "triton_decode")),
    Problem("softmax", "qflash.softmax(q, {})", (4096, 4096), ("softmax", "triton_softmax")),
    Problem(
        "rope",
        "qflash.rope(q, rope, {})",
        _ATTENTION,
        ("rope", "triton_rope"),
        "rope = qflash.Rope(*(torch.from_numpy(x).to(device) for x in qflash.rope_tables(4096, 128)))",
    ),
    Problem(
        "linear",
        'qflash.linear(q, k, activation="gelu", {})',
        (4096, 4096),
        ("sm90_gemm", "gemm_mma", "triton_linear"),
    ),
)
ARRAYS = """
import torch
import qflash
device, dtype = {device!r}, torch.bfloat16
q, k, v = (torch.randn({shape}, device=device).to(dtype) for _ in range(3))
{before}
"""
# Imports and the device's own startup are not counted. Prints the seconds of the first call and of one more.
FIRST_CALLS = """
import json, time
settle = torch.cuda.synchronize if device == "cuda" else (lambda: None)
def seconds():
    start = time.perf_counter()
    {call}
    settle()
    return time.perf_counter() - start
qflash.softmax(torch.zeros(1, 1))  # imports what PyTorch's tensors need
settle()
print(json.dumps([seconds(), seconds()]))
"""


def first_calls(problem: Problem, kernel: str, device: str) -> Row:
    """Seconds of the first call with empty caches, with full ones, and of the second call."""
    script = arrays_of(problem, device) + FIRST_CALLS.format(call=problem.call_of(kernel))
    with tempfile.TemporaryDirectory() as folder:
        caches = {name: str(Path(folder) / name) for name in ("QFLASH_CACHE_DIR", "TRITON_CACHE_DIR")}
        env = os.environ | caches | {"PYTHONPATH": os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", "")))}
        cold, warm = (_run(script, env) for _ in range(2))
    return {"cold_s": round(cold[0], 6), "warm_s": round(warm[0], 6), "again_s": round(warm[1], 6)}


def arrays_of(problem: Problem, device: str) -> str:
    """The statements that make the arguments of a problem's call."""
    return ARRAYS.format(device=device, shape=problem.shape, before=problem.before)


def _run(script: str, env: dict[str, str]) -> list[float]:
    found = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True)
    if found.returncode:
        raise Unavailable(found.stderr.strip().splitlines()[-1])
    seconds: list[float] = json.loads(found.stdout.splitlines()[-1])
    return seconds


class Arrays:
    """A problem, the names used in its call, and the costs of the kernels' first calls."""

    def __init__(self, problem: Problem, device: str):
        self.problem, self.device = problem, device
        self.names, self.costs = dict[str, Any](), dict[str, Row]()
        exec(arrays_of(problem, device), self.names)

    def call(self, kernel: str) -> Call:
        """A kernel's call here, after its first calls were timed in processes that had not called it."""
        self.costs[kernel] = first_calls(self.problem, kernel, self.device)
        call: Call = eval(f"lambda: {self.problem.call_of(kernel)}", self.names)
        return call


class Costs(Suite):
    """The kernels of an operation, in CUDA and in Triton."""

    name = NAME
    says_left_out = True

    def __init__(self, device: str = "cuda", problems: Sequence[Problem] = PROBLEMS):
        self.device, self.cases = device, problems

    def arrays(self, case: Problem) -> Arrays:
        return Arrays(case, self.device)

    def candidates(self, arrays: Arrays) -> Iterator[Candidate]:
        for kernel in arrays.problem.kernels:
            yield Candidate(f"qflash {kernel}", lambda arrays, kernel=kernel: arrays.call(kernel), kernel)

    def problem(self, arrays: Arrays) -> Row:
        return {"kind": NAME, "operation": arrays.problem.operation, "shape": list(arrays.problem.shape)}

    def row(self, arrays: Arrays, candidate: Candidate, checked: None, timing: Comparison) -> Row:
        assert candidate.kernel is not None
        own, whole = lines_of(candidate.kernel) if dispatch.BY_NAME[candidate.kernel].device == "cuda" else (0, 0)
        us = timing.stats[candidate.name].as_dict()
        about = {"candidate": candidate.name, "kernel": candidate.kernel, "us": us}
        return about | arrays.costs[candidate.kernel] | {"lines": own, "lines_with_included": whole}

    def rivals(self, candidate: Candidate) -> tuple[str, ...]:
        """A Triton kernel is compared with the CUDA kernels."""
        if dispatch.BY_NAME[candidate.kernel or ""].backend != "triton":
            return ()
        return tuple(f"qflash {row.name}" for row in dispatch.KERNELS if row.backend != "triton")


def table(machine: str | None = None) -> str:
    """One table per machine with committed rows: a line per operation and kernel."""

    def of(found: list[Row]) -> str:
        lines = []
        for row in found:
            call = [tables.time(row), tables.ratio(min(row["speedup"].values(), default=None))]
            first = [f"{row['cold_s'] - row['warm_s']:.1f} s", f"{row['warm_s'] * 1e3:.0f} ms"]
            counts = [f"{row['lines']}", f"{row['lines_with_included']}"]
            lines.append([row["operation"], tables.candidate(row), *call, *counts, *first])
        header = ["operation", "kernel", "a call", "× the best in CUDA", "lines", "with what they include"]
        return "\n\n".join(
            filter(None, [tables.markdown([*header, "compilation", "first call"], tables.unrepeated(lines)),
                          tables.left_out(found)])
        )  # fmt: skip

    return tables.by_machine(NAME, of, "`python -m bench.beside_triton` makes them.", machine)
