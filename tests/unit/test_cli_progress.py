"""What a command says while it works: a bar with the time left, or, in a log, a line now and then."""

from __future__ import annotations

import io
import itertools
import types

import pytest
from rich.console import Console

from qflash import machine
from qflash.backends import cuda
from qflash.cli import ahead, bench, console
from qflash.cli.console import duration, steps
from qflash.cli.verify import verify_kernels
from qflash.dispatch import VARIANTS, reasons, variants_of
from qflash.errors import ToolchainError
from qflash.jit import toolchain
from qflash.testing import Case, cases
from qflash.testing.compare import Errors
from qflash.testing.runner import problem_of


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
    presets = [types.SimpleNamespace(title=title, kernels=(), cases=(1, 2)) for title in ("first", "second")]
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


@pytest.fixture
def hopper(monkeypatch):
    monkeypatch.setattr(machine, "gpus", lambda: ((machine.Gpu("NVIDIA H200", 90, 1, "1"),), ""))
    monkeypatch.setattr(toolchain, "find", lambda: None)


def test_what_a_command_needs_is_compiled_before_it_starts(monkeypatch, hopper):
    """Each library once, and those that are there already not at all."""
    asked = []

    def prebuild(units, cache, progress):
        asked.extend(units)
        progress(units[0], 1, len(units))

    monkeypatch.setattr(ahead, "prebuild", prebuild)
    monkeypatch.setattr(ahead, "is_compiled", lambda unit, cache: unit.name == "fa_mma")
    told = log()
    cases = [Case(head_dim=64, dtype="float16"), Case(head_dim=128, dtype="float16"), Case(head_dim=60, softcap=2.0)]
    kernels = [VARIANTS[name] for name in ("cpu", "fa_mma", "fa", "sm90_fwd")]
    ahead.compile_ahead(told, itertools.product(kernels, cases))
    assert [unit.label for unit in asked] == [
        "fa (head_dim 64, float16)",
        "fa (head_dim 128, float16)",
        "fa (head_dim 64, float32)",
        "sm90_fwd (head_dim 64, float16, arrays k and v)",
        "sm90_fwd (head_dim 128, float16, arrays k and v)",
    ]
    assert told.file.getvalue() == "compiling CUDA kernels for this GPU, once (0 of 5 done)\n"


def test_libraries_compiled_ahead_are_those_that_calls_load():
    """The Spec made from a case selects the library that the call's own Spec does."""
    for case in cases("quick"):
        for name in ("sm90_fwd", "sm90_int8_fp8", "fa"):
            variant = VARIANTS[name]
            spec = problem_of(case, case.make_inputs(), name, "cuda").spec(90)
            wanted = [] if reasons(variant.kernel, spec) else [cuda.unit(variant.kernel, spec)]
            assert set(wanted) <= set(ahead.units_of([(variant, case)], 90))


def test_without_a_compiler_nothing_is_compiled_ahead(monkeypatch, hopper):
    def find():
        raise ToolchainError("none")

    monkeypatch.setattr(toolchain, "find", find)
    told = log()
    ahead.compile_ahead(told, [(VARIANTS["fa"], Case())])
    assert told.file.getvalue() == ""
