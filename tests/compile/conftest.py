"""CUDA libraries, compiled once for all tests. Workers of pytest-xdist share them."""

from __future__ import annotations

from pathlib import Path

import pytest

from qflash.jit import runtime, toolchain
from qflash.jit.compiler import Unit, compile_unit


@pytest.fixture(scope="session")
def compiled(shared_cache):
    """compiled(unit): its cache entry. The runtime that its library names is open, so the library can be opened."""

    def compile_and_prepare(unit: Unit) -> Path:
        tools = toolchain.find()
        if (shared := runtime.find(tools)) is not None:
            runtime.ensure_loaded(shared.name, shared.key, shared.build, shared_cache)
        return compile_unit(unit, shared_cache)

    return compile_and_prepare
