"""bench.training: rows of curves whose runs took turns."""

import json

import pytest

from qflash.cli.bench import load

training, store = load("training"), load("rows")


def write(folder, attention, ms, steps=training.FIRST + 4, **changes):
    """A curve whose first steps are slow, as compilation makes them."""
    same = {"device": "cpu", "size": "small", "parameters": 1_200_000, "length": 64, "batch": 2, "seed": 0}
    rows = [
        same | {"attention": attention, "step": step, "loss": 2.0, "ms": 1e4 if step < training.FIRST else ms[step % 4]}
        for step in range(steps)
    ]
    rows = [row | changes for row in rows]
    rows[-1]["held_out"] = 1.5
    (folder / f"{attention}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_a_ratio_is_the_median_of_ratios_of_steps(tmp_path):
    write(tmp_path, "qflash", [10.0, 20.0, 40.0, 10.0])
    write(tmp_path, "sdpa", [11.0, 24.0, 48.0, 40.0])  # ratios 1.1, 1.2, 1.2, 4
    ours, theirs = training.summary(training.read(tmp_path))
    assert (ours["candidate"], ours["speedup"], ours["ms"]) == ("qflash", 1.2, 15.0)
    assert (theirs["candidate"], theirs["speedup"], theirs["held_out"]) == ("sdpa", 1.0, 1.5)


def test_curves_that_do_not_belong_together_are_refused(tmp_path):
    write(tmp_path, "qflash", [1.0] * 4)
    with pytest.raises(ValueError, match=r"folder .* has curves of \['qflash'\]; allowed: of sdpa and of another"):
        training.read(tmp_path)
    write(tmp_path, "sdpa", [1.0] * 4, seed=1)
    with pytest.raises(ValueError, match="different runs; allowed: curves with the same device, size"):
        training.read(tmp_path)
    write(tmp_path, "sdpa", [1.0] * 4, steps=training.FIRST + 1)
    with pytest.raises(ValueError, match=r"'sdpa': 11\} steps; allowed: as many of each, and more than 10"):
        training.read(tmp_path)


def test_a_table_has_a_line_for_each_curve(tmp_path, monkeypatch):
    write(tmp_path, "qflash", [10.0] * 4)
    write(tmp_path, "sdpa", [11.0] * 4)
    about = {"cpu": "A Processor", "isa": "avx2", "threads": 2, "gpu": None, "driver": None, "commit": "abc"}
    rows = [about | {"versions": {"torch": "2"}} | row for row in training.summary(training.read(tmp_path))]
    monkeypatch.setattr(store, "RESULTS", tmp_path)
    store.write(tmp_path / "m-2c" / "training.jsonl", rows)
    assert "| 1.2 M, 2 × 64 bytes, 14 steps | qflash | 10.0 ms | 1.100× | 2.0000 | 1.5000 |" in training.table()
