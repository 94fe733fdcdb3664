"""bench.run, the one runner, and that the suites it runs write rows of the columns that are committed."""

from __future__ import annotations

import itertools
import types

import numpy as np
import pytest

import qflash
from qflash.cli.bench import load
from qflash.reference import sm90_quantize as replay
from qflash.testing.timing import WallClock

int8_gemm, quantize, reductions, rows, run, sm90 = (
    load(name) for name in ("int8_gemm", "quantize", "reductions", "rows", "run", "sm90_quantize")
)


class Sums(run.Suite):
    """Adds numbers up, several ways."""

    name, device, cases, over = "sums", "cpu", (3, 5), ("built in", "absent")
    budget = 0.01

    def __init__(self):
        self.asked = []

    def arrays(self, case):
        return list(range(case))

    def candidates(self, arrays):
        def refuses(arrays):
            raise run.Unavailable("cannot count\nbeyond two")

        yield run.Candidate("ours", lambda arrays: lambda: sum(x for x in arrays), "sum")
        yield run.Candidate("refuses", refuses)
        yield run.Candidate("built in", lambda arrays: lambda: sum(arrays))

    def problem(self, arrays):
        return {"kind": "sum", "n": len(arrays)}

    def check(self, arrays, candidate, call, result):
        self.asked.append((candidate.name, result))
        return result - len(arrays) * (len(arrays) - 1) / 2

    def row(self, arrays, candidate, checked, timing):
        us = timing.stats[candidate.name].as_dict()
        return {"candidate": candidate.name, "kernel": candidate.kernel, "us": us, "error": checked}

    def clock(self):
        return WallClock(settle=0), 1e-5


def test_every_candidate_is_checked_then_timed_on_every_problem(monkeypatch):
    monkeypatch.setattr(rows, "provenance", lambda device: {"machine": device})
    suite, told = Sums(), []
    parts = list(run.measure(suite, min_rounds=2, on_skip=told.append))
    assert [[row["candidate"] for row in part] for part in parts] == [["ours", "built in"]] * 2
    assert told == ["refuses: cannot count"]  # once, in a line
    assert suite.asked == [("ours", 3), ("built in", 3), ("ours", 10), ("built in", 10)]
    ours, theirs = parts[1]
    assert list(ours) == ["preset", "machine", "kind", "n", "candidate", "kernel", "us", "error", "speedup"]
    assert (ours["preset"], ours["machine"], ours["n"], ours["error"]) == ("sums", "cpu", 5, 0)
    assert ours["us"]["n"] >= 2 and ours["us"]["n"] == theirs["us"]["n"]  # interleaved
    assert list(ours["speedup"]) == ["built in"] and theirs["speedup"] == {}


def test_cases_and_candidates_can_be_fewer(monkeypatch):
    monkeypatch.setattr(rows, "provenance", lambda device: {})
    (part,) = run.measure(Sums(), cases=(4,), leave_out=("ours",), min_rounds=2)
    assert [(row["candidate"], row["n"]) for row in part] == [("built in", 4)]


def test_a_suite_of_long_calls_takes_fewer_rounds(monkeypatch):
    monkeypatch.setattr(rows, "provenance", lambda device: {})
    suite = Sums()
    for suite.min_rounds in (2, 9):
        for part in run.measure(suite, budget=0):
            assert [row["us"]["n"] for row in part] == [suite.min_rounds] * 2
    # A call of this suite serves every request one by one, half a minute on a GPU.
    assert load("serving").Serving("cuda").min_rounds < run.Suite.min_rounds


def test_an_error_of_another_sort_is_nobodys_refusal(monkeypatch):
    monkeypatch.setattr(rows, "provenance", lambda device: {})
    monkeypatch.setattr(Sums, "candidates", lambda self, arrays: [run.Candidate("x", lambda arrays: 1 / 0)])
    with pytest.raises(ZeroDivisionError):
        list(run.measure(Sums()))


def test_rows_are_told_and_written(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(rows, "provenance", lambda device: {"machine": "m"})
    monkeypatch.setattr(rows, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(rows, "ROOT", tmp_path)
    found = run.main(Sums())
    assert rows.read(tmp_path / "results" / "m" / "sums.jsonl") == found and len(found) == 4
    first, *said = capsys.readouterr().out.splitlines()
    assert first == "timing sums (0 of 2 done)"
    assert said[0] == "refuses: cannot count" and said[1].startswith("kind sum, n 3, candidate ours, ")
    assert said[-1] == "4 rows in results/m/sums.jsonl"


def committed(preset: str) -> set[tuple[str, ...]]:
    return {tuple(row) for found in rows.committed(preset).values() for row in found}


def small_suites():
    yield "int8-gemm", int8_gemm.Gemm("cpu"), (int8_gemm.Problem(16, 16, 32),)
    yield (
        "reductions",
        reductions.Reductions("cpu"),
        tuple(reductions.Problem(operation, 8, 32, "float32") for operation in reductions.OPERATIONS),
    )
    yield "quantize", quantize.Quantize("cpu"), quantize.PROBLEMS


@pytest.mark.parametrize("preset", ["int8-gemm", "reductions", "quantize"])
def test_rows_have_the_committed_columns(preset, monkeypatch):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch, "compile", lambda function, **words: function)  # which takes seconds, and a C compiler
    monkeypatch.setitem(quantize.SHAPES, "cpu", (1, 32, 2, 16))
    for shapes in quantize.MATRICES.values():
        monkeypatch.setitem(shapes, "cpu", (8, 32))
    suite, cases = next((suite, cases) for name, suite, cases in small_suites() if name == preset)
    found = [row for part in run.measure(suite, cases=cases, budget=0, min_rounds=1) for row in part]
    assert {tuple(row) for row in found} == committed(preset)
    for row in found:
        assert run.line(row).startswith(f"kind {row['kind']}, ") and "versions" not in run.line(row)
        assert row["kernel"] is None or list(row["speedup"])
        assert row.get("rel_l2") is None or row["rel_l2"] < 1e-5


def test_integers_that_differ_from_the_replays_are_not_timed(monkeypatch):
    pytest.importorskip("torch")
    monkeypatch.setitem(quantize.SHAPES, "cpu", (1, 32, 2, 16))
    monkeypatch.setattr(quantize.Arrays, "same_as_the_replay", lambda self: False)
    with pytest.raises(SystemExit, match=r"per token.*differs from the replay"):
        list(run.measure(quantize.Quantize("cpu"), cases=quantize.PROBLEMS[:1], budget=0))


@pytest.mark.parametrize("precision", ["int8", "int8_fp8"])
def test_the_pass_of_hopper_is_held_to_its_replay(precision, monkeypatch):
    """With the replay in the kernel's place, whole, and then with a bit of it changed."""
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.Tensor, "cuda", lambda self: self)
    monkeypatch.setattr(torch, "empty", lambda *size, empty=torch.empty, device=None, **words: empty(*size, **words))
    monkeypatch.setattr(rows, "provenance", lambda device: {})
    monkeypatch.setattr(run.Suite, "clock", lambda self: (WallClock(settle=0), 1e-5))
    change = 0

    def stand_in(k, v, precision, rope=None, seed=None, rounding=None):
        tables = None if rope is None else qflash.Rope(rope.cos.numpy(), rope.sin.numpy())
        k, v = (x.float().numpy() for x in (k, v))
        kv = replay.quantize_kv(k, v if precision == "int8_fp8" else None, rope=tables, seed=seed)
        parts = {name: getattr(kv, name) for name in (*replay.OF_KEYS, *replay.OF_VALUES)}
        parts["k_scale"] = parts["k_scale"] + np.float32(change)
        return types.SimpleNamespace(**{name: x if x is None else torch.from_numpy(x) for name, x in parts.items()})

    monkeypatch.setattr(qflash, "quantize_kv", stand_in)
    words = ({}, {"rounding": "stochastic", "seed": 1})
    cases = [
        sm90.Problem("", precision, (1, 130, 2, 32), rope, more) for rope, more in itertools.product((0, 1), words)
    ]
    found = [row for part in run.measure(sm90.QuantizeKV(), cases=cases, budget=0, min_rounds=1) for row in part]
    assert [row["candidate"] for row in found] == ["qflash quantize_kv", "copy"] * 4
    assert [row["kernel"] for row in found[:2]] == [sm90.KERNEL, None] and found[1]["speedup"] == {}
    shared = rows.committed(sm90.NAME)["nvidia-h200"][0]
    assert list(found[0]) == [name for name in shared if name in found[0]]
    change = 1
    with pytest.raises(SystemExit, match="differs from the replay"):
        list(run.measure(sm90.QuantizeKV(), cases=cases[:1], budget=0))


def test_the_device_that_a_command_names(monkeypatch):
    for arguments, device in ((["cpu"], "cpu"), ([], "cuda")):
        monkeypatch.setattr("sys.argv", ["bench.words", *arguments])
        assert run.device_asked_for(("cuda", "cpu")) == device
    monkeypatch.setattr("sys.argv", ["bench.words", "tpu"])
    with pytest.raises(SystemExit, match="the device is 'tpu'; allowed: cuda, cpu"):
        run.device_asked_for(("cuda", "cpu"))
