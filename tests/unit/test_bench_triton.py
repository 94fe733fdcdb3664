"""bench.beside_triton, the one command that compares CUDA and Triton: what it counts, times and shows."""

from __future__ import annotations

import os
import subprocess
from functools import partial

import pytest
from click.testing import CliRunner

from qflash import dispatch, machine
from qflash.cli.bench import load
from qflash.testing.timing import WallClock

beside, costs, lines, linear, reductions, result_pages, rows, run, tutorial = (
    load(name)
    for name in (
        *("beside_triton", "kernel_costs", "source_lines", "linear", "reductions", "result_pages", "rows", "run"),
        "tutorial",
    )
)
sections = load("drawing.sections").sections
IN_TRITON = {row.name for row in dispatch.KERNELS if row.backend == "triton"}
SOFTMAX = costs.Problem("softmax", "qflash.softmax(q, {})", (8, 32), ("cpu_softmax",))


# Lines ---------------------------------------------------------------------------------------------------------------


def test_lines_are_those_with_code_on_them(tmp_path):
    module = tmp_path / "module.py"
    module.write_text(
        '"""What it is.\n\nAnd why.\n"""\n\nX = 1  # one\n\n\ndef f():\n    """Says."""\n    # a note\n    return X\n'
    )
    assert lines.python_lines(module) == 3
    header = tmp_path / "header.cuh"
    header.write_text("/* What\n it is */\n#pragma once\n\n// why\nint f() { return 1; }  // one\n")
    assert lines.c_lines(header) == 2


def test_a_kernel_counts_what_it_includes():
    names = {path.name for path in lines.imported(lines.PACKAGE / "triton" / "triton_fwd.py")}
    assert {"triton_fwd.py", "mask.py", "rope.py", "sequence.py", "values.py"} <= names
    assert "launches.py" not in names and "triton_int8.py" not in names
    source = lines.PACKAGE / "csrc" / "kernels" / "softmax" / "softmax" / "launch.cu"
    names = {path.relative_to(lines.PACKAGE / "csrc").as_posix() for path in lines.included(source)}
    assert {"kernels/softmax/softmax/kernel.cuh", "reduce/row_softmax.cuh", "include/qflash_ops.h"} <= names


def test_every_problem_has_kernels_of_both_kinds():
    for problem in costs.PROBLEMS:
        backends = {dispatch.BY_NAME[kernel].backend for kernel in problem.kernels}
        assert backends == {"cuda", "triton"}, problem.operation
        for kernel in problem.kernels:
            own, whole = lines.lines_of(kernel)
            assert 0 < own <= whole, kernel
    assert {kernel for problem in costs.PROBLEMS for kernel in problem.kernels} & IN_TRITON == IN_TRITON


# First calls ---------------------------------------------------------------------------------------------------------


@pytest.mark.process
def test_first_calls_are_measured_in_processes_of_their_own():
    pytest.importorskip("torch")
    ((row,),) = run.measure(costs.Costs("cpu", (SOFTMAX,)), budget=0, min_rounds=1)
    assert row["kernel"] == "cpu_softmax" and (row["operation"], row["shape"]) == ("softmax", [8, 32])
    assert row["cold_s"] > 0 and row["warm_s"] > 0 and row["again_s"] > 0 and row["us"]["p50"] > 0
    assert row["left_out"] == {}


def answers(monkeypatch, code: int, out: str, err: str = "") -> list[dict[str, str]]:
    """Processes that are not started: each answers this. Returns the environments that they would have had."""
    asked = []

    def run_process(words, env, **more):
        asked.append(env)
        return subprocess.CompletedProcess(words, code, out, err)

    monkeypatch.setattr(costs.subprocess, "run", run_process)
    monkeypatch.setattr(rows, "provenance", lambda device: {})
    monkeypatch.setattr(costs.Costs, "clock", lambda self: (WallClock(settle=0), 1e-5))
    return asked


def test_the_second_process_has_the_caches_of_the_first_and_nobody_elses(monkeypatch):
    pytest.importorskip("torch")
    asked = answers(monkeypatch, 0, "a word\n[0.5, 0.25]\n")
    ((row,),) = run.measure(costs.Costs("cpu", (SOFTMAX,)), budget=0, min_rounds=1)
    assert (row["cold_s"], row["warm_s"], row["again_s"]) == (0.5, 0.5, 0.25)
    caches = [[env["QFLASH_CACHE_DIR"], env["TRITON_CACHE_DIR"]] for env in asked]
    assert len(caches) == 2 and caches[0] == caches[1] and len(set(caches[0])) == 2
    assert not set(caches[0]) & set(os.environ.values())


def test_a_kernel_that_cannot_run_is_left_out(monkeypatch):
    pytest.importorskip("torch")
    answers(monkeypatch, 1, "", "Traceback\nqflash.errors.ToolchainError: no triton\n")
    told = []
    assert list(run.measure(costs.Costs("cpu", (SOFTMAX,)), budget=0, on_skip=told.append)) == [[]]
    assert told == ["qflash cpu_softmax: qflash.errors.ToolchainError: no triton"]


def test_kernels_in_triton_are_held_against_those_in_cuda():
    ours = {name: run.Candidate(f"qflash {name}", None, name) for name in ("triton_fwd", "sm90_fwd")}
    assert "qflash sm90_fwd" in costs.Costs().rivals(ours["triton_fwd"])
    assert not {f"qflash {name}" for name in IN_TRITON} & set(costs.Costs().rivals(ours["triton_fwd"]))
    assert costs.Costs().rivals(ours["sm90_fwd"]) == ()


# Suites --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def quick(monkeypatch):
    """Small layers and rows here, of which the compiler makes nothing."""
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch, "compile", lambda function, **words: function)  # which takes seconds
    monkeypatch.setattr(rows, "provenance", lambda device: {})
    monkeypatch.setattr(run.Suite, "clock", lambda self: (WallClock(settle=0), 1e-5))


def test_layers_have_all_baselines(quick, monkeypatch):
    monkeypatch.setattr(beside, "LAYER_KERNELS", ("cpu_linear",))
    suite = beside.Linear("cpu", (linear.Problem(24, 40, 64, "gelu_tanh"),))
    (found,) = run.measure(suite, budget=0, min_rounds=1)
    names = [row["candidate"] for row in found]
    assert names == ["qflash cpu_linear", linear.EAGER, linear.COMPILED, linear.PRODUCT]
    assert all(row["preset"] == "triton-linear" and {"p50", "p95", "std"} <= set(row["us"]) for row in found)


@pytest.mark.parametrize("problem", [reductions.Problem(name, 70, 256, "float32") for name in ("softmax", "rope")])
def test_rows_have_all_baselines_and_the_right_results(quick, problem):
    told = []
    suite = beside.Rows("cpu")
    (found,) = run.measure(suite, cases=(problem,), budget=0, min_rounds=1, on_skip=told.append)
    names = [row["candidate"] for row in found]
    assert names == [f"qflash cpu_{problem.operation}", *reductions.PEERS, reductions.COPY]
    assert [text.partition(":")[0] for text in told] == [f"qflash triton_{problem.operation}"]  # here is no GPU
    for row in found:
        assert row["kind"] == problem.operation and row["copy_share"] > 0
        assert row["rel_l2"] is None if row["candidate"] == reductions.COPY else row["rel_l2"] < 1e-6


def test_every_kernel_in_triton_is_timed_in_some_suite():
    timed = {*beside.LAYER_KERNELS, *(f"triton_{case.operation}" for case in beside.Rows().cases)}
    for name in (beside.ATTENTION, beside.DECODE):
        timed |= {kernel.removesuffix("_pages") for kernel in beside.PRESETS[name].kernels}
    assert timed >= IN_TRITON


# Tables --------------------------------------------------------------------------------------------------------------

SHARED = {"machine": "m", "gpu": "A GPU", "driver": "1", "versions": {"torch": "2"}, "commit": "abc"}


def with_rows(monkeypatch, *found):
    monkeypatch.setattr(rows, "committed", lambda name, machine=None: {"m": [SHARED | row for row in found]})


def test_the_table_of_costs(monkeypatch):
    about = {"kind": costs.NAME, "operation": "forward", "left_out": {}}
    cuda = {"kernel": "sm90_fwd", "candidate": "qflash sm90_fwd", "us": {"p50": 100.0}, "speedup": {}}
    cuda |= {"cold_s": 40.2, "warm_s": 0.2, "again_s": 1e-4, "lines": 700, "lines_with_included": 4000}
    ours = {"kernel": "triton_fwd", "candidate": "qflash triton_fwd", "us": {"p50": 150.0}}
    ours |= {"speedup": {"qflash sm90_fwd": 0.667, "qflash fa_mma": 1.2}, "left_out": {"qflash fa_mma": "no nvcc"}}
    ours |= {"cold_s": 2.5, "warm_s": 0.125, "again_s": 1e-5, "lines": 130, "lines_with_included": 540}
    with_rows(monkeypatch, about | cuda, about | ours)
    assert not sections([about | cuda, about | ours])  # no picture, which would want other columns
    table = costs.table()
    assert "| forward | **qflash sm90_fwd** | 100.0 µs |  | 700 | 4000 | 40.0 s | 200 ms |" in table
    assert "|  | **qflash triton_fwd** | 150.0 µs | 0.67× | 130 | 540 | 2.4 s | 125 ms |" in table
    assert table.endswith("Left out: qflash fa_mma (no nvcc).")


def test_the_table_of_attention(monkeypatch):
    about = {"kind": "forward", "B": 1, "Tq": 4096, "Tk": 4096, "Hq": 16, "D": 64, "dtype": "float16", "rel_l2": 3e-4}
    about |= {"gflops": 4e5, "us": {"p50": 150.0}, "left_out": {tutorial.NAME: "no file"}}
    found = [
        about | {"causal": causal, "candidate": name, "kernel": kernel, "speedup": speedup}
        for causal in (False, True)
        for name, kernel, speedup in (
            ("qflash triton_fwd", "triton_fwd", {beside.FA2: 0.8, tutorial.NAME: 0.95, "torch naive": 9.0}),
            (beside.FA2, None, {}),
        )
    ]
    with_rows(monkeypatch, *found)
    table = beside.attention_table()
    ours = "**qflash triton_fwd** | 150.0 µs | 400.0 TFLOP/s | 3e-04 | 0.80× | 0.95× |"
    assert f"| B=1 T=4096 H=16 D=64 full float16 | {ours}" in table
    assert f"- qflash triton_fwd: 0.95× {tutorial.NAME} (geometric mean of 2 problems, 0.95 to 0.95)" in table
    assert "torch naive" not in table and f"Left out: {tutorial.NAME} (no file)." in table


def test_the_table_of_rows(monkeypatch):
    row = {"kind": "rope", "rows": 64, "columns": 256, "dtype": "float32", "us": {"p50": 10.0}, "gbs": 3000.0}
    with_rows(monkeypatch, row | {"candidate": "qflash triton_rope", "kernel": "triton_rope", "copy_share": 0.9})
    assert "| `rope` 64 × 256 float32 | **qflash triton_rope** | 10.0 µs | 3.00 TB/s | 90.0% |" in beside.rows_table()


def test_the_page_shows_what_the_command_measures():
    (page,) = (page for page in result_pages.PAGES if page.name == "cuda-vs-triton")
    assert set(page.presets) == {*beside.SUITES, "triton-tiles"} and set(beside.TABLES) <= set(beside.SUITES)
    for table in beside.TABLES.values():
        assert "No rows are committed yet; `python -m bench.beside_triton` makes them." in table("no-such-machine")


# The command ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def command(monkeypatch):
    """The command, with suites of which nothing is measured, and what was asked of them."""
    asked = []
    monkeypatch.setattr(machine, "gpus", lambda: ((machine.Gpu("a GPU", 90, 1, "1"),), ""))
    monkeypatch.setattr(beside, "compile_ahead", lambda console, work: asked.append(len({v.name for v, _ in work})))
    monkeypatch.setattr(run, "main", lambda suite, budget: asked.append((suite.name, budget)))
    monkeypatch.delenv(tutorial.VARIABLE, raising=False)
    return partial(CliRunner().invoke, beside.main), asked


def test_one_command_measures_everything(command, tmp_path, monkeypatch):
    invoke, asked = command
    monkeypatch.setenv(tutorial.VARIABLE, "")  # so that what the command sets goes away again
    file = tmp_path / "06-fused-attention.py"
    file.touch()
    assert invoke(["--tutorial", str(file)]).exit_code == 0
    assert asked[1:] == [(name, 1.0) for name in beside.SUITES] and asked[0] > 6
    assert os.environ[tutorial.VARIABLE] == str(file)


def test_or_a_part_of_it(command):
    invoke, asked = command
    assert invoke(["triton-rows", "triton-costs", "--budget", "0.5"]).exit_code == 0
    assert asked == [0, ("triton-rows", 0.5), ("triton-costs", 0.5)]


def test_without_a_gpu_it_says_so(command, monkeypatch):
    invoke, asked = command
    monkeypatch.setattr(machine, "gpus", lambda: ((), "no NVIDIA driver"))
    found = invoke([])
    assert (found.exit_code, asked) == (1, []) and "on a GPU, and here is none: no NVIDIA driver" in found.output


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["triton-rope"], "'triton-rope' is not one of 'triton', 'triton-decode'"),
        (["--tutorial", "nowhere.py"], "'nowhere.py' does not exist"),
        (["--budget", "nan"], "'nan' is no time span"),
    ],
)
def test_words_that_it_does_not_know_are_refused(command, words, told):
    found = command[0](words)
    assert found.exit_code == 2 and told in found.output and command[1] == []
