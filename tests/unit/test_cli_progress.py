"""What a command says while it works: a bar with the time left, or, in a log, a line now and then."""

from __future__ import annotations

import io
import types

import pytest
from rich.console import Console

from qflash.cli import bench, console
from qflash.cli.console import duration, steps
from qflash.cli.verify import verify_kernels
from qflash.dispatch import variants_of
from qflash.testing.compare import Errors


def terminal() -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=100)


def log() -> Console:
    return Console(file=io.StringIO(), force_terminal=False, width=100)


@pytest.fixture
def clock(monkeypatch):
    """clock.now: what time it is for the log."""
    told = types.SimpleNamespace(now=0.0)
    monkeypatch.setattr(console.time, "monotonic", lambda: told.now)
    return told


def test_text_is_printed_as_it_is():
    screen = terminal()
    with steps(screen, 1) as progress:
        progress.describe("timing [bold]all[/bold]")
        progress.advance()
    assert "timing [bold]all[/bold]" in screen.file.getvalue()


def test_a_terminal_shows_how_far_and_how_long():
    screen = terminal()
    with steps(screen, 3) as progress:
        progress.describe("timing")
        for _ in range(3):
            progress.advance()
    assert "3/3" in screen.file.getvalue() and "left:" in screen.file.getvalue()


def test_a_log_has_a_line_at_the_start_and_now_and_then(clock):
    told = log()
    with steps(told, 100) as progress:
        progress.describe("timing cpu")
        for _ in range(99):
            clock.now += 4.0
            progress.advance()
    lines = told.file.getvalue().splitlines()
    assert lines[:3] == [
        "timing cpu (0 of 100 done)",
        "timing cpu (8 of 100 done, about 6 min left)",
        "timing cpu (16 of 100 done, about 6 min left)",
    ]
    assert len(lines) == 1 + 99 // 8


def test_a_quick_command_says_little(clock):
    told = log()
    with steps(told, 50) as progress:
        progress.describe("verifying cpu")
        for _ in range(50):
            progress.advance()
    assert told.file.getvalue() == "verifying cpu (0 of 50 done)\n"


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0 s"), (99, "99 s"), (100, "2 min"), (3599, "60 min"), (7260, "2 h 1 min")]
)
def test_durations(seconds, text):
    assert duration(seconds) == text


def test_verify_counts_the_cases_of_all_kernels(monkeypatch):
    monkeypatch.setattr("qflash.testing.cases", lambda tag: [types.SimpleNamespace(finite=False)] * 3)
    monkeypatch.setattr("qflash.testing.check", lambda *words: Errors(0.0, 0.0, 1.0, 0.0, 0.0))
    told = log()
    verify_kernels(told, list(variants_of("attention", "cpu")), quick=True)
    lines = told.file.getvalue().splitlines()
    assert lines[0] == "verifying cpu (0 of 6 done)"
    assert lines[1].startswith("verifying cpu_int8 (3 of 6 done, about 0 s left")


def test_benchmarks_count_the_problems_of_all_presets(monkeypatch):
    presets = [types.SimpleNamespace(title=title, cases=(1, 2)) for title in ("first", "second")]
    modules = {
        "attention": types.SimpleNamespace(suite_of=lambda preset: preset),
        "run": types.SimpleNamespace(measure=lambda suite, **options: ([{"case": case}] for case in suite.cases)),
    }
    monkeypatch.setattr(bench, "load", modules.get)
    told = log()
    rows = {preset.title: rows for preset, rows in bench.measured(told, presets)}
    assert rows == {"first": [{"case": 1}, {"case": 2}], "second": [{"case": 1}, {"case": 2}]}
    lines = told.file.getvalue().splitlines()
    assert lines[0] == "timing first (0 of 4 done)" and lines[1].startswith("timing second (2 of 4 done, about")
