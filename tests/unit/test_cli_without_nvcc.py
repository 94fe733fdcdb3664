"""A GPU, no CUDA compiler, and a compile cache that was filled elsewhere: what is in it runs, and is told so."""

from __future__ import annotations

from pathlib import Path

import pytest

import qflash
from qflash import machine
from qflash.backends import cuda
from qflash.cli.bench import load
from qflash.cli.usable import usable_kernels
from qflash.jit.cache import Cache
from qflash.jit.compiler import LIBRARY, UNIT, Unit, digest_of
from qflash.testing import cases


def no_compiler():
    raise qflash.ToolchainError("no nvcc; install one")


@pytest.fixture(autouse=True)
def gpu_without_compiler(monkeypatch, cache_dir):
    a100 = machine.Gpu("NVIDIA A100", 80, 81920, "580.1")
    monkeypatch.setattr(machine, "gpus", lambda: ((a100,), ""))
    monkeypatch.setattr("qflash.jit.toolchain.find", no_compiler)


@pytest.fixture
def built(cache_dir):
    """built(kernel, count): as if so many of its libraries for an A100 had been compiled."""

    def fill(kernel: str, count: int | None = None) -> int:
        units = cuda.specialisations([80], [kernel])[:count]
        for number, unit in enumerate(units):

            def build(directory: Path, unit: Unit = unit) -> dict[str, str]:
                (directory / LIBRARY).write_text("machine code")
                return {"nvcc": "13.0.88", UNIT: digest_of(unit)}

            Cache().get(f"{unit.name}-{unit.code}-{number:024x}", build)
        return len(units)

    return fill


def test_a_kernel_with_compiled_libraries_can_be_used(built):
    everything, some = built("softmax"), built("fa", 2)
    found = usable_kernels()
    assert everything and not found["softmax"].why_not and not found["softmax"].note
    total = len(cuda.specialisations([80], ["fa"]))
    assert not found["fa"].why_not
    assert found["fa"].note == f"{some} of {total} libraries are compiled; there is no CUDA compiler for the others"
    assert "no CUDA compiler, and the compile cache has no library of it" in found["fa_mma"].why_not
    assert "needs compute capability 9.0" in found["sm90_fwd"].why_not


def test_doctor_tells_what_is_compiled(invoke, built):
    built("softmax")
    built("fa", 2)
    said = invoke("doctor").output.partition("Kernels")[2]
    usable, rest = said.split("not usable", 1)
    assert "softmax" in usable and "2 of" in usable and "fa_mma" not in usable
    assert said.count("no CUDA compiler, and the compile cache has no library of it") == 1 and "fa_mma" in rest


def test_verify_counts_cases_whose_library_is_missing(invoke, built, monkeypatch):
    built("fa", 2)
    monkeypatch.setattr("qflash.testing.cases", lambda tag: cases("quick")[:2])
    monkeypatch.setattr("qflash.testing.check", lambda *words: no_compiler())
    result = invoke("verify", "--kernel", "fa")
    assert result.exit_code == 1, "nothing was verified"
    line = next(line for line in result.output.splitlines() if line.startswith("│ fa "))
    assert [cell.strip() for cell in line.split("│")[2:6]] == ["0", "0", "0", "2"]
    assert "not compiled" in result.output


def test_a_benchmark_leaves_out_what_cannot_be_compiled():
    assert load("run").refusal(qflash.ToolchainError("no nvcc; install one\n  PATH: nothing")) == "no nvcc; install one"
