"""The emulator's CUDA runtime: limits, errors and what it says of a launch that cannot end (runtime.cu)."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from qflash.errors import CompileError, KernelError, ToolchainError
from qflash.jit.compiler import Unit
from qflash.testing import emulator
from qflash.testing.emulator import MOST_MULTIPROCESSORS, Library

INVALID_VALUE, INVALID_CONFIGURATION, LAUNCH_FAILURE = 1, 9, 719  # of cudaError_t
MOST_SHARED, USUAL_SHARED = 227 * 1024, 48 * 1024


@pytest.fixture
def runtime(emulated_source) -> Library:
    library = emulated_source("runtime.cu")
    library.schedule()
    return library


@pytest.mark.parametrize("seed", range(3))
def test_a_stuck_block_is_an_error_that_names_block_threads_and_barrier(runtime, seed):
    with pytest.raises(KernelError) as told:
        runtime.launch_struct("QfRowsParams", {}, seed)
    text = str(told.value)
    assert text.startswith(f"runtime on the emulator (seed {seed}, 3 multiprocessors): block 1 is stuck; ")
    assert "threads 0 to 31 wait for the block (__syncthreads)" in text
    assert "threads 32 to 34 wait for their warp (__syncwarp); threads 35 to 35 wait for the block" in text


@pytest.mark.parametrize(
    ("call", "said"),
    [
        ("outside", "thread 5 of block 0: an access outside all memory"),
        ("forever", "thread 7 of block 0: it goes on for ever"),
    ],
)
def test_a_thread_that_would_take_the_process_with_it_is_an_error(runtime, call, said):
    memory = np.zeros(4, np.int32)
    assert getattr(runtime.handle, f"try_{call}")(memory.ctypes.data_as(ctypes.c_void_p)) == LAUNCH_FAILURE
    assert said in runtime.complaint
    assert runtime.handle.try_launch(ctypes.c_int64(2), 64, 0) == 0 and not runtime.complaint


def test_a_launch_after_a_stuck_one_runs(runtime):
    with pytest.raises(KernelError):
        runtime.launch_struct("QfRowsParams", {})
    assert runtime.complaint
    assert runtime.handle.try_launch(ctypes.c_int64(2), 64, 0) == 0 and not runtime.complaint


def test_a_launch_that_failed_leaves_nothing_to_the_next(runtime):
    """Whose library is a copy: counters of a kernel that did not end are anywhere."""
    before = runtime.entry
    assert runtime.entry == before
    with pytest.raises(KernelError):
        runtime.launch_struct("QfRowsParams", {})
    assert runtime.complaint and runtime.entry != before and not runtime.complaint


@pytest.mark.parametrize(("blocks", "threads"), [(0, 32), (1, 0), (1, 1025), (2**31, 32)])
def test_a_launch_of_no_or_too_many_threads_is_refused(runtime, blocks, threads):
    assert runtime.handle.try_launch(ctypes.c_int64(blocks), threads, 0) == INVALID_CONFIGURATION
    assert runtime.handle.try_last_error() == INVALID_CONFIGURATION and runtime.handle.try_last_error() == 0


def test_shared_memory_past_what_was_asked_for_is_refused(runtime):
    def launch(size: int) -> int:
        return runtime.handle.try_launch(ctypes.c_int64(1), 32, size)

    assert runtime.handle.try_allow(MOST_SHARED + 1) == INVALID_VALUE
    assert launch(USUAL_SHARED) == 0 and launch(USUAL_SHARED + 16) == INVALID_VALUE
    assert runtime.handle.try_allow(MOST_SHARED) == 0 and launch(MOST_SHARED) == 0
    assert runtime.handle.try_allow(1024) == 0 and launch(2048) == INVALID_VALUE


@pytest.mark.parametrize("threads", [1, 33, 64])
def test_blocks_know_their_launch_and_shared_memory_begins_as_nan(runtime, threads):
    out = np.zeros((5, 3), np.float32)
    assert runtime.handle.try_report(ctypes.c_int64(5), threads, out.ctypes.data_as(ctypes.c_void_p)) == 0
    assert (out[:, :2] == [5, threads]).all() and np.isnan(out[:, 2]).all()


def test_the_number_of_multiprocessors_can_be_set(runtime):
    """Again and again, though launch code remembers what a device told it."""
    for count in (1, 3, MOST_MULTIPROCESSORS, 3):
        runtime.schedule(multiprocessors=count)
        assert runtime.handle.try_multiprocessors() == count
    for count in (0, MOST_MULTIPROCESSORS + 1):
        with pytest.raises(ValueError, match=f"multiprocessors is {count}; allowed: 1 to {MOST_MULTIPROCESSORS}"):
            runtime.schedule(multiprocessors=count)


def test_borrowed_memory_begins_as_nan(runtime):
    assert runtime.handle.try_borrow(1000) == 1000


def test_streams_have_an_identity_and_do_not_capture(runtime):
    found = ctypes.c_uint64()
    assert runtime.handle.try_stream(ctypes.c_void_p(4096), ctypes.byref(found)) == 0 and found.value == 4096


def test_an_observer_sees_blocks_begin_and_end_and_threads_wait(runtime):
    counts = (ctypes.c_int * 16)()
    runtime.handle.try_observer(counts)
    begins, ends, runs, waits = counts[:4]
    assert begins == ends == 2  # the third block does not begin
    assert runs == waits >= 2 * 64


def test_a_source_that_does_not_compile_says_why(shared_cache, tmp_path):
    source = tmp_path / "launch.cu"
    source.write_text("int broken() { return missing; }\n")
    with pytest.raises(CompileError, match=r"g\+\+ failed \(1\) on a broken one[^$]*missing"):
        emulator.load(Unit("broken", source, (), (), "90a", "a broken one"), shared_cache)


def test_without_a_compiler_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr(emulator.shutil, "which", lambda name: None)
    emulator.compiler.cache_clear()
    with pytest.raises(ToolchainError, match=r"g\+\+, which is not on the PATH: install it"):
        emulator.compiler()
    emulator.compiler.cache_clear()
