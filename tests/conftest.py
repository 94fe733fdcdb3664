"""What every test shares: whether there is a GPU, a count of the tests that did not run for want of one, and a cache of
what is compiled."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import re
import sys
import time
from collections.abc import Generator
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

# Before NumPy is imported: the oracle's products are small, and BLAS threads would spin beside the engine's own.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# Before torch is: its threads are to sleep while they wait, and leave the cores to other workers.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# Before JAX is: it would take most of a GPU's memory at once, and leave none to other workers and to torch.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")


@lru_cache(maxsize=1)
def why_no_gpu() -> str | None:
    """None when an NVIDIA GPU can be used from here, else the reason. Asks the driver; needs no framework."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "no NVIDIA driver (libcuda.so.1) on this machine"
    count = ctypes.c_int(0)
    status = driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count))
    if status != 0 or count.value == 0:
        return f"the NVIDIA driver finds no GPU (status {status})"
    return None


def xla_knows(flag: str) -> bool:
    """Whether the installed XLA has a flag. A process whose XLA_FLAGS has an unknown one ends when JAX starts."""
    found = find_spec("jaxlib")
    library = Path(found.origin).with_name("libjax_common.so") if found and found.origin else None
    if library is None or not library.exists():
        return False
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
        return text.find(flag.encode()) >= 0


if why_no_gpu():
    # JAX compiles a program for nearly every test of its front end, and LLVM's optimisation would be most of the time,
    # then XLA's newer compiler of fused operations on the CPU: with the older one a program takes two thirds.
    os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
    if "XLA_FLAGS" not in os.environ and xla_knows("xla_cpu_use_fusion_emitters"):
        os.environ["XLA_FLAGS"] = "--xla_cpu_use_fusion_emitters=false"


@lru_cache(maxsize=64)
def why_no_code(kernel: str) -> str | None:
    """None when the kernel called so has code for the GPU, or is no CUDA kernel; else why it has none."""
    from qflash import dispatch, machine
    from qflash.backends.arch import arch_for

    row, (gpus, _) = dispatch.BY_NAME.get(kernel), machine.gpus()
    if row is None or row.device != "cuda" or not gpus:
        return None
    found = dispatch.arch_reasons(row, arch_for(gpus[0].arch))
    return f"{kernel} {found[0]}" if found else None


_gpu_tests_left_out = pytest.StashKey[int]()


@pytest.hookimpl(trylast=True)  # of what -k and -m have left
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    def leave_out(found: list[pytest.Item]) -> None:
        config.hook.pytest_deselected(items=found)
        left_out = set(found)
        items[:] = [item for item in items if item not in left_out]

    if "slow" not in config.getoption("-m"):
        leave_out([item for item in items if item.get_closest_marker("slow")])
    gpu = [item for item in items if item.get_closest_marker("gpu")]
    # Thousands of tests, each of which would take milliseconds to be skipped. Asked for alone, each says why.
    if why_no_gpu() and len(gpu) < len(items):
        leave_out(gpu)
        config.stash[_gpu_tests_left_out] = len(gpu)
        return
    for item in gpu:
        kernel = item.callspec.params.get("kernel") if hasattr(item, "callspec") else None
        why = why_no_gpu() or (why_no_code(kernel) if isinstance(kernel, str) else None)
        if why:
            item.add_marker(pytest.mark.skip(reason=f"GPU test: {why}"))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Thousands of tests and all that they import are here to stay: collections of garbage need not look at them."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish(session: pytest.Session) -> None:
    gc.unfreeze()  # else modules that count what is left when a process ends would name all of it
    if hasattr(session.config, "workeroutput"):  # a worker of pytest-xdist; each collects all tests
        session.config.workeroutput["gpu_tests"] = session.config.stash.get(_gpu_tests_left_out, 0)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    node.config.stash[_gpu_tests_left_out] = getattr(node, "workeroutput", {}).get("gpu_tests", 0)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    skipped = [r for r in terminalreporter.stats.get("skipped", []) if "gpu" in getattr(r, "keywords", ())]
    if count := len(skipped) + config.stash.get(_gpu_tests_left_out, 0):
        why = why_no_gpu() or "-rs tells why"
        terminalreporter.write_line(f"{count} GPU tests were skipped: {why}")


ROOT = Path(__file__).resolve().parent.parent
KEPT_SECONDS = 14 * 24 * 3600  # an entry that is older is built again: sources change, and leave entries behind


# What makes a test too dear for `make check`, and needs the mark `process`; asking for a version does not.
_DEAR = re.compile(r"(python[\d.]*|nvcc|[gc]\+\+|cmake|make|mypy)$")
_ASKING = {"--version", "-dumpversion", "-dumpfullversion", "--dryrun"}
_unmarked: list[pytest.Item] = []  # the unit test that runs, if it has no mark


def _forbid_processes(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "subprocess.Popen" and _unmarked:
        command = list(map(str, arguments[1]))
        if _DEAR.search(command[0]) and not _ASKING & set(command):
            raise AssertionError(f"{_unmarked[0].nodeid} starts {command[0]} and has no pytest.mark.process")


sys.addaudithook(_forbid_processes)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None]:
    if "unit" in item.path.parts and not item.get_closest_marker("process"):
        _unmarked.append(item)
    try:
        return (yield)
    finally:
        _unmarked.clear()


@pytest.fixture
def cuda_torch():
    """Skips a test where PyTorch has no GPU, though the machine may have one."""
    import torch

    if not torch.cuda.is_available():
        pytest.skip("this torch was built without CUDA")


@pytest.fixture
def flatbuffers():
    """Skips a test that serializes an exported program where JAX lacks what it does that with."""
    pytest.importorskip("flatbuffers", reason="jax.export needs flatbuffers to serialize")


@pytest.fixture(scope="session")
def shared_cache():
    """A compile cache of the tests' own, kept from run to run; its locks let each entry be built by one worker.

    Entries are named by all that went into them, so that one which is there is what would be built.
    """
    from qflash.jit.cache import Cache

    return Cache(ROOT / ".cache" / "tests")


def pytest_sessionstart(session: pytest.Session) -> None:
    if hasattr(session.config, "workerinput"):
        return  # a worker of pytest-xdist; the process that started it has done this
    from qflash.jit.cache import Cache

    kept = Cache(ROOT / ".cache" / "tests")
    oldest = time.time() - KEPT_SECONDS
    for path in kept.folder.glob("*/"):
        if path.stat().st_mtime < oldest:
            kept.remove(path.name)
