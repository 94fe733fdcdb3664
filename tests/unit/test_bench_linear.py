"""bench.linear, bench.linear_backward and bench.linear_accuracy: rows of small problems, a candidate that is wrong,
tables made from rows."""

from __future__ import annotations

import pytest

from qflash.cli.bench import load
from qflash.dispatch import kernels_of

torch = pytest.importorskip("torch")

accuracy, linear, backward, rows, run = (
    load(name) for name in ("linear_accuracy", "linear", "linear_backward", "rows", "run")
)
ACTIVATIONS = (None, "gelu_tanh", "swiglu")


@pytest.fixture
def small(monkeypatch, tmp_path):
    monkeypatch.setattr(rows, "RESULTS", tmp_path)
    monkeypatch.setattr(torch, "compile", lambda function, **words: function)  # which takes seconds
    native = [row for row in kernels_of("linear", "cpu") if "native" in row.precisions]
    monkeypatch.setattr(linear, "kernels_of", lambda op, device: native)
    problems = tuple(linear.Problem(24, 40, 64, activation) for activation in ACTIVATIONS)
    for suite in (linear, backward):
        monkeypatch.setitem(suite.PROBLEMS, "cpu", problems)


def test_rows_and_their_table(small):
    assert "No rows are committed yet" in linear.table()
    found = [row for part in run.measure(linear.Linear("cpu"), budget=0.01) for row in part]
    peers = {row["activation"]: set() for row in found if not row["kernel"]}
    for row in found:
        assert row["gflops"] > 0 and {"mean", "std", "min", "max", "p50", "p95", "p99"} <= set(row["us"])
        if not row["kernel"]:
            peers[row["activation"]].add(row["candidate"])
    assert peers[None] == {linear.PRODUCT}
    assert peers["gelu_tanh"] == peers["swiglu"] == {linear.EAGER, linear.COMPILED, linear.PRODUCT}
    floats = [row["rel_l2"] for row in found if row["dtype"] == "float32" and row["rel_l2"] is not None]
    assert floats and max(floats) < 1e-6
    assert {row["kernel"] for row in found if row["kernel"]} <= {row.name for row in kernels_of("linear", "cpu")}
    rows.write(rows.RESULTS / "machine" / f"{linear.NAME}.jsonl", found)
    table = linear.table()
    assert "24 × 40 × 64, swiglu" in table and f"× {linear.PRODUCT}" in table and "GFLOP/s" in table


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_wrong_results_are_not_timed(small, monkeypatch, activation):
    wrong = linear.Layer("wrong", lambda x: lambda: x.x @ x.w + 1)
    monkeypatch.setattr(linear, "candidates", lambda problem, device: iter([wrong]))
    with pytest.raises(SystemExit, match="wrong is off by"):
        list(run.measure(linear.Linear("cpu"), cases=(linear.Problem(24, 40, 64, activation),), budget=0.01))


def test_rows_of_gradients_and_their_table(small):
    """Every kernel of gradients by its name, PyTorch's own and the products alone."""
    assert "No rows are committed yet; `python -m bench.linear_backward`" in backward.table()
    found = [row for part in run.measure(backward.LinearBackward("cpu"), budget=0.01) for row in part]
    ours, torchs = {"qflash cpu_linear_bwd"}, {backward.EAGER, backward.PRODUCTS}
    for activation in ACTIVATIONS:
        names = {row["candidate"] for row in found if row["activation"] == activation}
        assert names == ours | torchs | ({backward.COMPILED} if activation else set())
    errors = [row["rel_l2"] for row in found]
    assert errors.count(None) == len(ACTIVATIONS) and max(filter(None, errors)) < 1e-6
    rows.write(rows.RESULTS / "machine" / f"{backward.NAME}.jsonl", found)
    assert f"× {backward.PRODUCTS}" in backward.table()


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_wrong_gradients_are_not_timed(small, monkeypatch, activation, which):
    def spoiled(arrays):
        found = list(backward._ours(arrays, "cpu_linear_bwd")())
        found[which] = found[which] + 1
        return lambda: found

    monkeypatch.setattr(backward, "candidates", lambda arrays, device: iter([run.Candidate("wrong", spoiled)]))
    with pytest.raises(SystemExit, match="gradients of wrong are off by"):
        list(run.measure(backward.LinearBackward("cpu"), cases=(linear.Problem(24, 40, 64, activation),), budget=0.01))


def test_kernels_of_gradients_that_nobody_gets_by_default_are_timed_too():
    arrays = backward.Arrays(linear.Problem(24, 40, 64), "cpu")
    names = {candidate.kernel for candidate in backward.candidates(arrays, "cuda")}
    assert {"linear_bwd", "sm90_linear_bwd"} <= names


def test_problems_are_those_of_the_issue_and_fit_a_gpu():
    """No operand has more than 2 GB."""
    problems = linear.PROBLEMS["cuda"]
    assert {(8192,) * 3, (4096,) * 3, (16384, 8192, 2048)} <= {(p.m, p.n, p.k) for p in problems}
    assert {1, 16, 64} <= {p.m for p in problems}
    problems += backward.PROBLEMS["cuda"]
    assert max(2 * max(p.m * p.k, p.n * p.k, p.m * p.n) for p in problems) < 2**31


def test_accuracy_beside_other_ways(monkeypatch, tmp_path):
    """A scale for each row and column is torchao's way, to what float32 scales round; coarser ones are farther off."""
    monkeypatch.setattr(rows, "RESULTS", tmp_path)
    assert "No rows are committed yet" in accuracy.table()
    cases = [accuracy.Problem(one.data, 200, 100, 1024) for one in accuracy.PROBLEMS]
    found = [row for part in run.measure(accuracy.LinearAccuracy(cases)) for row in part]
    errors = {(row["input"], row["candidate"]): row["rel_l2"] for row in found}
    same, for_the_weight, for_each = accuracy.SIMULATED
    for case in cases:
        ours = errors[case.data, accuracy.OURS]
        assert errors[case.data, accuracy.ROUNDED] < 3e-3 and ours == pytest.approx(errors[case.data, same], rel=0.02)
        assert ours < errors[case.data, for_the_weight] < errors[case.data, for_each]
    rows.write(tmp_path / "machine" / f"{accuracy.NAME}.jsonl", found)
    assert f"| outlier channels, 200 × 100 × 1024 | **{accuracy.OURS}** | 0.99" in accuracy.table()
