"""bench.journal: a run that is cut off keeps the rows of the problems that it has finished, and the next goes on."""

from __future__ import annotations

import json

import pytest

from qflash.cli.bench import load

rows, run = load("rows"), load("run")


class Squares(run.Suite):
    """Squares numbers. A machine that goes away is a problem that raises; nothing is timed."""

    name, device, cases, timed = "squares", "cpu", (2, 3, 4), False

    def __init__(self, lost=None):
        self.lost, self.asked = lost, []

    def arrays(self, case):
        self.asked.append(case)
        if case == self.lost:
            raise ConnectionError("the machine went away")
        return case

    def candidates(self, arrays):
        yield run.Candidate("by itself", lambda number: lambda: number * number, "square")

    def problem(self, arrays):
        return {"kind": "square", "n": arrays}

    def row(self, arrays, candidate, checked, timing):
        return {"candidate": candidate.name, "kernel": candidate.kernel, "result": arrays**2}


@pytest.fixture
def shared(monkeypatch, tmp_path):
    """What rows of a run share; a test may change it between two runs."""
    about = {"machine": "m", "commit": "abc", "versions": {"torch": "2"}}
    monkeypatch.setattr(rows, "provenance", lambda device: dict(about))
    monkeypatch.setattr(rows, "RESULTS", tmp_path)
    monkeypatch.setattr(rows, "ROOT", tmp_path)
    return about


def cut_off(at=4):
    with pytest.raises(ConnectionError):
        run.main(Squares(lost=at))


def test_a_run_goes_on_where_it_was_cut_off(shared, tmp_path, capsys):
    cut_off()
    part = tmp_path / "m" / "squares.part"
    assert [json.loads(line)[0] for line in part.read_text().splitlines()[1:]] == ["2", "3"]
    assert not (tmp_path / "m" / "squares.jsonl").exists()
    again = Squares()
    found = run.main(again)
    assert again.asked == [4] and [row["result"] for row in found] == [4, 9, 16]
    assert "2 of the problems of squares, which a run that was cut off has measured" in capsys.readouterr().out
    assert rows.read(tmp_path / "m" / "squares.jsonl") == found and not part.exists()


@pytest.mark.parametrize(
    "change", [{"commit": "abd"}, {"versions": {"torch": "3"}}, {"commit": "abc+"}, {"commit": "unknown"}]
)
def test_rows_that_may_be_of_another_tree_or_library_are_measured_again(shared, change):
    shared.update({"commit": change["commit"]} if change.get("commit") in ("abc+", "unknown") else {})
    cut_off()
    shared.update(change)
    again = Squares()
    run.main(again)
    assert again.asked == [2, 3, 4]


def test_rows_of_a_shorter_measurement_are_measured_again(shared):
    cut_off()
    again = Squares()
    run.main(again, budget=9.0)
    assert again.asked == [2, 3, 4]


def test_a_file_without_a_whole_line_is_of_no_run(shared, tmp_path):
    cut_off(at=3)
    part = tmp_path / "m" / "squares.part"
    part.write_text(part.read_text()[:20])
    again = Squares()
    run.main(again)
    assert again.asked == [2, 3, 4]


def test_a_line_that_was_cut_off_is_a_problem_that_is_not_done(shared, tmp_path):
    cut_off()
    part = tmp_path / "m" / "squares.part"
    part.write_text(part.read_text()[:-20])
    cut_off(at=3)
    again = Squares()
    assert [row["result"] for row in run.main(again)] == [4, 9, 16] and again.asked == [3, 4]


def test_a_run_that_need_not_be_kept_leaves_nothing(shared, tmp_path):
    assert len(list(run.measure(Squares()))) == 3
    assert list(tmp_path.iterdir()) == []


def test_a_suite_in_which_nobody_takes_part_says_so(shared, monkeypatch, capsys):
    def refuses(number):
        raise run.Unavailable("cannot count")

    monkeypatch.setattr(Squares, "candidates", lambda self, arrays: [run.Candidate("absent", refuses)])
    assert run.main(Squares()) == []
    assert "no rows: nobody could take part in squares" in capsys.readouterr().out


def test_a_problem_in_which_nobody_took_part_is_tried_again(shared, monkeypatch):
    def refuses(number):
        raise run.Unavailable("cannot count")

    with monkeypatch.context() as patch:
        patch.setattr(Squares, "candidates", lambda self, arrays: [run.Candidate("absent", refuses)])
        cut_off()
    again = Squares()
    assert [row["result"] for row in run.main(again)] == [4, 9, 16] and again.asked == [2, 3, 4]


def test_rows_of_a_suite_that_asks_say_who_was_left_out(shared, monkeypatch):
    def refuses(number):
        raise run.Unavailable("no file\nmore")

    ways = [run.Candidate("by itself", lambda number: lambda: number, "square"), run.Candidate("absent", refuses)]
    monkeypatch.setattr(Squares, "candidates", lambda self, arrays: ways)
    for asks, wanted in ((True, {"absent": "no file"}), (False, None)):
        monkeypatch.setattr(Squares, "says_left_out", asks)
        for (row,) in run.measure(Squares()):
            assert row.get("left_out") == wanted
