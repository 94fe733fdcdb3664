"""`qflash verify --emulate`: CUDA kernels without a GPU."""

import shutil

import pytest

from qflash.errors import KernelError
from qflash.jit.cache import Cache
from qflash.testing import cases, emulator
from qflash.testing.compare import Errors


@pytest.fixture(autouse=True)
def few_cases(monkeypatch):
    """A case list short enough for a unit test."""
    chosen = cases("quick")[:2]
    monkeypatch.setattr("qflash.testing.cases", lambda tag: chosen)


@pytest.fixture
def checked(monkeypatch) -> list[tuple]:
    """What `check` and `check_backward` were asked for; nothing is compiled."""
    asked = []

    def check(case, *words):
        asked.append(words)
        return Errors(0.0, 0.0, 1.0, 0.0, 0.0)

    monkeypatch.setattr("qflash.testing.check", check)
    monkeypatch.setattr("qflash.testing.check_backward", check)
    return asked


@pytest.mark.process
@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ on the PATH")
def test_a_kernel_is_compiled_and_agrees(invoke, cache_dir, shared_cache):
    made = emulator.prelude(shared_cache).parent  # the emulator itself, which takes longer than the kernel
    shutil.copytree(made, Cache(cache_dir).folder / made.name)
    result = invoke("verify", "--emulate", "--kernel", "unfused", "--seed", "3")
    assert result.exit_code == 0, result.output
    line = next(line for line in result.output.splitlines() if line.startswith("│ unfused "))
    assert [cell.strip() for cell in line.split("│")[2:5]] == ["2", "0", "0"]
    assert list(Cache(cache_dir).folder.glob("unfused-emulated-*"))
    assert "0 entries" not in invoke("cache").output and "left alone" not in invoke("cache").output


def test_every_cuda_kernel_of_attention_and_no_other_is_emulated(invoke, checked, monkeypatch):
    monkeypatch.setattr(emulator, "why_not", lambda: "")
    assert invoke("verify", "--emulate", "--seed", "7").exit_code == 0
    names = {name for name, _, _ in checked}
    assert {"fa", "sm90_fwd", "sm90_int8_fp8", "fa_bwd", "fa_mma_bwd"} <= names and not {"cpu", "cpu_int8"} & names
    assert {words[1:] for words in checked} == {("emulated", 7)}


def test_what_the_emulator_says_is_a_failure(invoke, monkeypatch):
    def check(*words):
        raise KernelError("fa on the emulator (seed 0): block 3 is stuck")

    monkeypatch.setattr("qflash.testing.check", check)
    monkeypatch.setattr(emulator, "why_not", lambda: "")
    result = invoke("verify", "--emulate", "--kernel", "fa")
    assert result.exit_code == 1
    assert "FAILED fa" in result.output and "block 3 is stuck" in result.output


def test_without_a_compiler_it_says_what_to_install(invoke, monkeypatch):
    monkeypatch.setattr(emulator.shutil, "which", lambda name: None)
    emulator.compiler.cache_clear()
    result = invoke("verify", "--emulate", "--kernel", "fa")
    emulator.compiler.cache_clear()
    assert result.exit_code == 1
    assert "fa cannot run here: the emulator compiles kernels with g++, which is not on the PATH" in result.output


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("--emulate", "--kernel", "cpu"), "'cpu' is no CUDA kernel of attention; allowed: "),
        (("--emulate", "--repeat", "2"), "--repeat is of kernels at their full size; allowed: --emulate without it"),
        (("--seed", "2"), "--seed is of the emulator's schedule; allowed: with --emulate"),
        (("--emulate", "--seed", "-1"), "-1 is not in the range"),
    ],
)
def test_what_does_not_go_together_is_refused(invoke, words, text):
    result = invoke("verify", *words)
    assert result.exit_code == 2
    assert text in " ".join(result.output.split())
