"""CUDA libraries, compiled once for all tests. Workers of pytest-xdist share them.

The full matrix of specialisations takes many minutes of nvcc: it runs when asked for, with `-m slow`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from qflash.jit.compiler import compile_unit

HERE = Path(__file__).parent


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "slow" in config.getoption("-m"):
        return
    left_out = [item for item in items if HERE in item.path.parents and item.get_closest_marker("slow")]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]


@pytest.fixture(scope="session")
def compiled(shared_cache):
    """compiled(unit): its cache entry."""
    return lambda unit: compile_unit(unit, shared_cache)
