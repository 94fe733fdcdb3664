"""Loss curves in a picture: one line each, and no curve without rows."""

import json
import sys

import pytest

pytest.importorskip("matplotlib")
from bench import curves


def write(path, attention: str, losses: list[float]) -> str:
    rows = ({"framework": "torch", "attention": attention, "step": i, "loss": loss} for i, loss in enumerate(losses))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_the_command_draws_every_curve(tmp_path, monkeypatch, capsys):
    files = [write(tmp_path / "a", "qflash", [5.0, 4.0, 3.5]), write(tmp_path / "b", "sdpa", [5.0, 4.1])]
    to = tmp_path / "curves.svg"
    monkeypatch.setattr(sys, "argv", ["curves", *files, "--to", str(to)])
    curves.main()
    svg = to.read_text()
    assert svg.startswith("<?xml") and all(name in svg for name in ("torch, qflash", "torch, sdpa", "difference"))
    assert str(to) in capsys.readouterr().out


def test_differences_are_of_the_steps_that_both_have(tmp_path):
    made = [write(tmp_path / "a", "qflash", [5.0, 4.0, 3.5]), write(tmp_path / "b", "sdpa", [5.0, 4.25])]
    _, below = curves.drawn([curves.read(tmp_path / name) for name in "ab"]).axes
    assert [list(line.get_ydata()) for line in below.lines] == [[0, 0, 0], [0, 0.25]] and len(made) == 2


def test_an_empty_file_is_refused(tmp_path):
    (tmp_path / "none").write_text("")
    with pytest.raises(ValueError, match=r"none has no rows; allowed: what examples/train_llama\.py"):
        curves.read(tmp_path / "none")
