"""What CUDA and Triton kernels of the same operation cost beside their speed: lines, compilation, the first call.

python -m bench.beside_triton   writes bench/results/<machine>/triton-start.jsonl and triton-softmax.jsonl

`qflash bench triton triton-decode` measures the speed of attention. triton-start runs each kernel in processes of its
own, first with empty caches and then with what the first left in them, and counts its source; triton-softmax times
softmax as bench.reductions does, with both kernels.
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import qflash
from bench import reductions, tables
from bench.rows import ROOT
from bench.run import Candidate, Row, Suite, Unavailable, main
from qflash import dispatch
from qflash.testing.timing import Call

START, SOFTMAX = "triton-start", "triton-softmax"
PACKAGE = ROOT / "qflash"
_SHARED_OF_TRITON = {"launches"}  # what every Triton kernel is launched with, as csrc/common is no kernel's own


# Lines ---------------------------------------------------------------------------------------------------------------


def lines_of(kernel: str) -> tuple[int, int]:
    """(its own, with all that it includes of the package): lines that hold more than a comment or a docstring."""
    row = dispatch.BY_NAME[kernel]
    if row.backend == "triton":
        own = PACKAGE / "triton" / f"{kernel}.py"
        return python_lines(own), sum(map(python_lines, imported(own)))
    folder = PACKAGE / "csrc" / "kernels" / row.op / kernel
    own = sum(c_lines(path) for path in sorted(folder.iterdir()))
    return own, sum(map(c_lines, included(folder / "launch.cu")))


def python_lines(path: Path) -> int:
    """Lines with code on them."""
    tree = ast.parse(path.read_text())
    docstrings = {
        line
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    lines = enumerate(path.read_text().splitlines(), 1)
    return sum(bool(line.strip()) and not line.lstrip().startswith("#") and at not in docstrings for at, line in lines)


def c_lines(path: Path) -> int:
    """Lines with code on them."""
    text = re.sub(r"/\*.*?\*/", lambda found: "\n" * found[0].count("\n"), path.read_text(), flags=re.DOTALL)
    return sum(bool(re.sub(r"//.*", "", line).strip()) for line in text.splitlines())


def imported(path: Path, seen: set[Path] | None = None) -> set[Path]:
    """A Triton kernel's module and those of qflash/triton that it is made of."""
    seen = set() if seen is None else seen
    seen.add(path)
    names = re.findall(r"^from qflash\.triton\.(\w+) import", path.read_text(), re.MULTILINE)
    for group in re.findall(r"^from qflash\.triton import (.+)$", path.read_text(), re.MULTILINE):
        names += re.findall(r"\w+", group)
    for name in (name for name in names if name not in _SHARED_OF_TRITON):
        if (other := path.with_name(f"{name}.py")) not in seen:
            imported(other, seen)
    return seen


def included(path: Path, seen: set[Path] | None = None) -> set[Path]:
    """A CUDA kernel's source and the headers of csrc that it is made of."""
    seen = set() if seen is None else seen
    seen.add(path)
    csrc = PACKAGE / "csrc"
    for name in re.findall(r'^#include "(.+)"', path.read_text(), re.MULTILINE):
        found = next((one for one in (csrc / name, csrc / "include" / name) if one.exists()), None)
        if found and found not in seen:
            included(found, seen)
    return seen


# The first call ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Problem:
    """What one operation is called with first: `call`, an expression of q, k and v, and the kernels that serve it."""

    kind: str
    call: str
    shape: tuple[int, ...]
    kernels: tuple[str, ...]
    before: str = ""  # what is made before


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
# Imports and the device's own start are not the kernel's. Prints the seconds of the first call and of one more.
SCRIPT = """
import json, time
import torch
import qflash
device, dtype = {device!r}, torch.bfloat16
q, k, v = (torch.randn({shape}, device=device).to(dtype) for _ in range(3))
{before}
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
    call = problem.call.format(f"kernel={kernel!r}")
    script = SCRIPT.format(device=device, shape=problem.shape, before=problem.before, call=call)
    with tempfile.TemporaryDirectory() as folder:
        caches = {name: str(Path(folder) / name) for name in ("QFLASH_CACHE_DIR", "TRITON_CACHE_DIR")}
        env = os.environ | caches | {"PYTHONPATH": os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", "")))}
        cold, warm = (_run(script, env) for _ in range(2))
    return {"cold_s": round(cold[0], 6), "warm_s": round(warm[0], 6), "again_s": round(warm[1], 6)}


def _run(script: str, env: dict[str, str]) -> list[float]:
    found = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True)
    if found.returncode:
        raise Unavailable(found.stderr.strip().splitlines()[-1])
    seconds: list[float] = json.loads(found.stdout.splitlines()[-1])
    return seconds


class Start(Suite):
    """Nothing is timed against another: each kernel is told what it costs to begin with."""

    timed = False

    def __init__(self, device: str = "cuda", problems: Sequence[Problem] = PROBLEMS):
        self.name, self.device, self.cases = START, device, problems

    def arrays(self, case: Problem) -> Problem:
        return case

    def candidates(self, arrays: Problem) -> Iterator[Candidate]:
        for kernel in arrays.kernels:
            yield Candidate(f"qflash {kernel}", lambda problem, kernel=kernel: self._call(problem, kernel), kernel)

    def _call(self, problem: Problem, kernel: str) -> Call:
        return lambda: first_calls(problem, kernel, self.device)

    def problem(self, arrays: Problem) -> Row:
        return {"kind": arrays.kind, "shape": list(arrays.shape)}

    def check(self, arrays: Problem, candidate: Candidate, call: Call, result: Any) -> Row:
        return dict(result)

    def row(self, arrays: Problem, candidate: Candidate, checked: Row, timing: None) -> Row:
        assert candidate.kernel is not None
        own, whole = lines_of(candidate.kernel) if dispatch.BY_NAME[candidate.kernel].device == "cuda" else (0, 0)
        about = {"candidate": candidate.name, "kernel": candidate.kernel}
        return about | checked | {"lines": own, "lines_with_included": whole}


class Softmax(reductions.Reductions):
    """bench.reductions' softmax, with the kernel in Triton."""

    def __init__(self) -> None:
        super().__init__("cuda")
        self.name = SOFTMAX
        self.cases = tuple(case for case in self.cases if case.operation == "softmax")

    def candidates(self, arrays: reductions.Arrays) -> tuple[Candidate, ...]:
        ours, *peers = super().candidates(arrays)
        name = "triton_softmax"
        in_triton = Candidate(f"qflash {name}", lambda arrays: lambda: qflash.softmax(arrays.x, kernel=name), name)
        return ours, in_triton, *peers


# Tables --------------------------------------------------------------------------------------------------------------


def start_table(machine: str | None = None) -> str:
    """One table per machine with committed rows: a line per operation and kernel."""

    def of(found: list[Row]) -> str:
        lines = [
            [
                *(row["kind"], tables.candidate(row), f"{row['lines']}", f"{row['lines_with_included']}"),
                *(f"{row['cold_s']:.2f} s", f"{row['warm_s'] * 1e3:.0f} ms"),
            ]
            for row in found
        ]
        header = ["operation", "kernel", "lines", "with what it includes", "first call ever", "first of a process"]
        return tables.markdown(header, tables.unrepeated(lines))

    return tables.by_machine(START, of, "`python -m bench.beside_triton` makes them.", machine)


def softmax_table(machine: str | None = None) -> str:
    """One table per machine with committed rows: a line per shape and candidate."""

    def of(found: list[Row]) -> str:
        lines = [
            [
                *(f"{row['rows']} × {row['columns']} {row['dtype']}", tables.candidate(row), tables.time(row)),
                *(f"{row['gbs'] / 1e3:.2f} TB/s", f"{row['copy_share']:.1%}"),
            ]
            for row in found
        ]
        header = ["rows × columns", "candidate", "time", "rate", "of copy's rate"]
        return tables.markdown(header, tables.unrepeated(lines))

    return tables.by_machine(SOFTMAX, of, "`python -m bench.beside_triton` makes them.", machine)


TABLES = {START: start_table, SOFTMAX: softmax_table}


if __name__ == "__main__":
    for suite in (Start(), Softmax()):
        main(suite)
