"""Kernels compiled for the emulator, once for all tests. Workers of pytest-xdist share them."""

from __future__ import annotations

from contextlib import closing
from functools import partial
from pathlib import Path

import pytest

from qflash.jit.cache import Cache
from qflash.jit.compiler import Unit
from qflash.testing import emulator
from qflash.testing.emulated_ops import EmulatedGpu
from qflash.testing.emulator import Library
from qflash.testing.faults import Fault, Faults

HERE = Path(__file__).parent
CSRC = Path(emulator.__file__).resolve().parent.parent / "csrc"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if why := emulator.why_not():
        for item in items:
            if HERE in item.path.parents:
                item.add_marker(pytest.mark.skip(reason=why))


@pytest.fixture(scope="session")
def library(shared_cache: Cache):
    """library(kernel, dtype, head_dim, arch): the kernel that serves them, compiled for the emulator."""
    return partial(emulator.kernel_library, cache=shared_cache)


@pytest.fixture
def gpu(shared_cache: Cache, monkeypatch) -> EmulatedGpu:
    """NumPy arrays are on an emulated GPU."""
    emulated = EmulatedGpu(shared_cache)
    monkeypatch.setattr("qflash.frontends.numpy.run", emulated.run)
    return emulated


@pytest.fixture(scope="module")
def faults(request, tmp_path_factory, shared_cache: Cache):
    """The faults of a module's KERNEL, compiled once. Rows of its tables are faults, or begin with one."""
    of = request.module
    tables = (getattr(of, name, {}) for name in ("FAULTS", "COVERED", "HARMLESS"))
    rows = {name: row for table in tables for name, row in table.items()}
    named = {name: row if isinstance(row, Fault) else row[0] for name, row in rows.items()}
    folder = tmp_path_factory.mktemp("faults")
    with closing(Faults(of.KERNEL, of.DTYPE, of.HEAD_DIM, named, folder, shared_cache)) as compiled:
        yield compiled


@pytest.fixture(scope="session")
def emulated_source(shared_cache: Cache):
    """emulated_source("hopper/all.cu", QF_DTYPE=1...): a source of this folder, compiled for the emulator."""

    def get(source: str, **defines: int) -> Library:
        folders = (HERE, CSRC, CSRC / "include")
        named = tuple((name, str(value)) for name, value in defines.items())
        return emulator.load(Unit(Path(source).stem, HERE / source, folders, named, "90a", source), shared_cache)

    return get
