"""What is compiled once for all tests: CUDA libraries, and kernels for the emulator. Workers of pytest-xdist share it.

The full matrix of specialisations takes many minutes of nvcc: it runs when asked for, with `-m slow`.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from functools import cache
from pathlib import Path

import pytest

from qflash.backends import cuda
from qflash.jit import runtime, toolchain
from qflash.jit.cache import Cache
from qflash.jit.compiler import Unit, compile_unit

HERE = Path(__file__).parent
EMULATOR, HEADER = HERE / "emulator", "cuda_on_host.h"
CSRC = Path(cuda.__file__).resolve().parent.parent / "csrc"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "slow" in config.getoption("-m"):
        return
    left_out = [item for item in items if HERE in item.path.parents and item.get_closest_marker("slow")]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]


@pytest.fixture(scope="session")
def shared_cache(tmp_path_factory) -> Cache:
    """A compile cache of this run alone, whose locks let each entry be built by one worker."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:  # a worker's own folder lies in one that all of them have
        folder = folder.parent
    return Cache(folder / "compiled")


@pytest.fixture(scope="session")
def compiled(shared_cache):
    """compiled(unit): its cache entry. The runtime that its library names is open, so the library can be opened."""

    def compile_and_prepare(unit: Unit) -> Path:
        tools = toolchain.find()
        if (shared := runtime.find(tools)) is not None:
            runtime.ensure_loaded(shared.name, shared.key, shared.build, shared_cache)
        return compile_unit(unit, shared_cache)

    return compile_and_prepare


@pytest.fixture(scope="session")
def emulated(shared_cache):
    """emulated(kernel, name=value...): emulator/<kernel>.cc with these definitions, opened."""

    # -O1: what -O2 adds to compilation is more than it takes off the runs
    compiler = ["g++", "-std=c++17", "-O1", "-fPIC", "-w"]

    def run(*words: str | Path) -> None:
        done = subprocess.run([*compiler, *words], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr

    def precompile_into(directory: Path) -> None:
        shutil.copy(EMULATOR / HEADER, directory)
        run("-x", "c++-header", directory / HEADER, "-o", directory / f"{HEADER}.gch")

    @cache
    def build(kernel: str, **defines: int) -> ctypes.CDLL:
        def compile_into(directory: Path) -> None:
            header = shared_cache.get("emulated-header", precompile_into) / HEADER
            folders = [f"-I{folder}" for folder in (EMULATOR / "driver", CSRC, CSRC / "include")]
            words = [*folders, *(f"-D{name}={value}" for name, value in defines.items())]
            run("-shared", *words, "-include", header, EMULATOR / f"{kernel}.cc", "-o", directory / "emulated.so")

        key = "-".join(("emulated", kernel, *(f"{name}{value}" for name, value in defines.items())))
        return ctypes.CDLL(str(shared_cache.get(key, compile_into) / "emulated.so"))

    return build
