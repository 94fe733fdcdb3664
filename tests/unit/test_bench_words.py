"""bench.words: both calls of every word give the same values, and rows have a table."""

import pytest

from qflash.cli.bench import load

pytest.importorskip("torch")
rows, run, words = load("rows"), load("run"), load("words")
SMALL = words._problems((64, 128), ((2, 300),), ((3, 256),))


@pytest.mark.parametrize("problem", SMALL, ids=str)
def test_a_word_changes_no_value(problem):
    arrays = words.Arrays(problem, "cpu")
    assert arrays.difference(arrays.call_with()()) < 1e-6


def test_shared_pages_are_shared():
    problem = next(one for one in SMALL if one.prefix)
    (kv,) = words.Arrays(problem, "cpu").kv
    assert (kv.page_table[:, 0] == 0).all() and len(kv.page_table[:, 1:].unique()) == problem.batch


def test_a_wrong_result_is_not_timed(monkeypatch):
    monkeypatch.setattr(words.Arrays, "call_with", lambda self: lambda: 2 * self.without())
    with pytest.raises(SystemExit, match="return_lse is off by 1"):
        list(run.measure(words.Words("cpu"), cases=SMALL[:1], budget=0.01, min_rounds=1))


def test_rows_become_a_table(monkeypatch, tmp_path):
    monkeypatch.setattr(rows, "RESULTS", tmp_path)
    found = [row for part in run.measure(words.Words("cpu"), cases=SMALL, budget=0, min_rounds=1) for row in part]
    rows.save(words.NAME, found)
    table = words.table()
    for cell in ("| `return_lse` | B=2 Tq=64 Tk=64 |", "| `share_prefix` | B=3 Tq=1 256 shared keys, 256 of its own |"):
        assert cell in table
    assert table.count(" % |") == len(SMALL)
