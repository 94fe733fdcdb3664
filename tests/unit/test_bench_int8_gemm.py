"""bench.int8_gemm: rows of a small problem, a candidate that is wrong, and the table made from rows."""

from __future__ import annotations

import pytest

from qflash.cli.bench import load

pytest.importorskip("torch")

int8_gemm, rows, run = (load(name) for name in ("int8_gemm", "rows", "run"))


@pytest.fixture
def small(monkeypatch, tmp_path):
    monkeypatch.setattr(rows, "RESULTS", tmp_path)
    problems = (int8_gemm.Problem(24, 40, 64), int8_gemm.Problem(17, 5, 33, "n"))
    monkeypatch.setitem(int8_gemm.PROBLEMS, "cpu", problems)


def test_rows_and_their_table(small):
    assert "No rows are committed yet" in int8_gemm.table()
    found = [row for part in run.measure(int8_gemm.Gemm("cpu"), budget=0.01) for row in part]
    ours = [row for row in found if row["kernel"]]
    assert {(row["m"], row["b"]) for row in ours} == {(24, "k"), (17, "n")} and len(ours) == 4
    assert all(row["exact"] for row in ours if row["dtype"] == "int32")
    for row in found:
        assert row["tops"] > 0 and {"mean", "std", "min", "max", "p50", "p95", "p99"} <= set(row["us"])
    rows.write(rows.RESULTS / "machine" / f"{int8_gemm.NAME}.jsonl", found)
    table = int8_gemm.table()
    assert "24 × 40 × 64, b along k" in table and "**qflash cpu_int8_matmul**" in table and "GOP/s" in table


def test_wrong_sums_are_not_timed(small, monkeypatch):
    wrong = int8_gemm.Product("wrong", lambda x: lambda: (x.a.int() @ x.b.int()) + 1)
    monkeypatch.setattr(int8_gemm, "candidates", lambda device: iter([wrong]))
    with pytest.raises(SystemExit, match="wrong gives wrong sums"):
        list(run.measure(int8_gemm.Gemm("cpu"), budget=0.01))
