"""What bench.beside_triton counts and measures: lines, and the first calls of a process."""

from __future__ import annotations

import subprocess

import pytest

from qflash import dispatch
from qflash.cli.bench import load

beside, run, rows = (load(name) for name in ("beside_triton", "run", "rows"))


def test_lines_are_those_with_code_on_them(tmp_path):
    module = tmp_path / "module.py"
    module.write_text(
        '"""What it is.\n\nAnd why.\n"""\n\nX = 1  # one\n\n\ndef f():\n    """Says."""\n    # a note\n    return X\n'
    )
    assert beside.python_lines(module) == 3
    header = tmp_path / "header.cuh"
    header.write_text("/* What\n it is */\n#pragma once\n\n// why\nint f() { return 1; }  // one\n")
    assert beside.c_lines(header) == 2


def test_a_kernel_counts_what_it_includes():
    names = {path.name for path in beside.imported(beside.PACKAGE / "triton" / "triton_fwd.py")}
    assert {"triton_fwd.py", "mask.py", "rope.py", "sequence.py", "values.py"} <= names
    assert "launches.py" not in names and "triton_int8.py" not in names
    source = beside.PACKAGE / "csrc" / "kernels" / "softmax" / "softmax" / "launch.cu"
    names = {path.relative_to(beside.PACKAGE / "csrc").as_posix() for path in beside.included(source)}
    assert {"kernels/softmax/softmax/kernel.cuh", "reduce/row_softmax.cuh", "include/qflash_ops.h"} <= names


def test_every_problem_has_kernels_of_both_kinds():
    for problem in beside.PROBLEMS:
        backends = {dispatch.BY_NAME[kernel].backend for kernel in problem.kernels}
        assert backends == {"cuda", "triton"}, problem.kind
        for kernel in problem.kernels:
            own, whole = beside.lines_of(kernel)
            assert 0 < own <= whole, kernel
    in_triton = {row.name for row in dispatch.KERNELS if row.backend == "triton"}
    assert in_triton <= {kernel for problem in beside.PROBLEMS for kernel in problem.kernels}


@pytest.mark.process
def test_first_calls_are_measured_in_processes_of_their_own():
    pytest.importorskip("torch")
    problem = beside.Problem("softmax", "qflash.softmax(q, {})", (8, 32), ("cpu_softmax",))
    ((row,),) = run.measure(beside.Start("cpu", (problem,)))
    assert row["kernel"] == "cpu_softmax" and (row["kind"], row["shape"]) == ("softmax", [8, 32])
    assert row["cold_s"] > 0 and row["warm_s"] > 0 and row["again_s"] > 0


def test_a_kernel_that_cannot_run_is_left_out(monkeypatch):
    answer = subprocess.CompletedProcess([], 1, "", "Traceback\nqflash.errors.ToolchainError: no triton\n")
    monkeypatch.setattr(beside.subprocess, "run", lambda *words, **more: answer)
    told = []
    problem = beside.Problem("softmax", "qflash.softmax(q, {})", (8, 32), ("triton_softmax",))
    monkeypatch.setattr(rows, "provenance", lambda device: {})
    assert list(run.measure(beside.Start("cpu", (problem,)), on_skip=told.append)) == [[]]
    assert told == ["qflash triton_softmax: qflash.errors.ToolchainError: no triton"]


def test_tables_show_the_rows(monkeypatch):
    shared = {"machine": "m", "gpu": "A GPU", "driver": "1", "versions": {"torch": "2"}, "commit": "abc"}
    about = {"kind": "forward", "kernel": "triton_fwd", "candidate": "qflash triton_fwd"}
    counted = {"cold_s": 2.5, "warm_s": 0.125, "again_s": 1e-5, "lines": 130, "lines_with_included": 540}
    monkeypatch.setattr(rows, "committed", lambda name, machine=None: {"m": [shared | about | counted]})
    assert "| forward | **qflash triton_fwd** | 130 | 540 | 2.50 s | 125 ms |" in beside.start_table()
