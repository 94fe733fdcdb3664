"""CUDA libraries, compiled once for all tests. Workers of pytest-xdist share them.

The full matrix of specialisations takes many minutes of nvcc: it runs when asked for, with `-m slow`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from qflash.jit import runtime, toolchain
from qflash.jit.compiler import Unit, compile_unit

HERE = Path(__file__).parent


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "slow" in config.getoption("-m"):
        return
    left_out = [item for item in items if HERE in item.path.parents and item.get_closest_marker("slow")]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]


@pytest.fixture(scope="session")
def compiled(shared_cache):
    """compiled(unit): its cache entry. The runtime that its library names is open, so the library can be opened."""

    def compile_and_prepare(unit: Unit) -> Path:
        tools = toolchain.find()
        if (shared := runtime.find(tools)) is not None:
            runtime.ensure_loaded(shared.name, shared.key, shared.build, shared_cache)
        return compile_unit(unit, shared_cache)

    return compile_and_prepare
