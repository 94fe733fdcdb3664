"""Hopper's own instructions on the emulator, and what it says to those who use them wrongly (hopper/faults.cu)."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from qflash.testing.instructions import INSTRUCTIONS

LAUNCH_FAILURE = 719  # cudaErrorLaunchFailure
FAULTS = {  # in the order of hopper/faults.cu
    "none": "",
    "no fence": "wgmma without a fence",
    "early read": "",  # of NaN
    "early write": "sums were changed before the wait",
    "overwritten A": "A was changed before the wait",
    "other products": "start different products",
    "other copy": "go through different copies of the code",
    "other groups": "commit different products",
    "no wait": "a product was under way at the end",
    "no arrival": "wait for parity 0 of the mbarrier at byte 2048",
    "second arrival": "one arrival too many",
    "no init": "no mbarrier was initialised at byte 2048",
    "odd box": "a swizzled box begins at byte 512",
    "no copy": "(0 arrivals and 2048 bytes to come)",
    "half trade": "a part of a warpgroup traded registers",
    "no init fence": "no fence (fence_mbarrier_init) since the mbarrier",
    "no proxy fence": "a product reads what a thread wrote, without a fence between",
    "no store fence": "a store reads what a thread wrote, without a fence between",
    "no store wait": "a store that nobody waited for was under way",
    "odd store": "a swizzled box begins at byte 512",
    "early store": "a store begins before its tensor",
    "ended block": "of its cluster, which has ended",
    "no meeting": "no mbarrier was initialised",
}
# What shows in some orders alone.
SOMETIMES = ("no store wait", "ended block", "no meeting")


def provoke(library, fault, seed):
    """(status, what was told, what was written)."""
    library.schedule(seed)
    out = np.full(128, 12345.0, np.float32)
    status = library.handle.try_fault(list(FAULTS).index(fault), out.ctypes.data_as(ctypes.c_void_p))
    return status, library.complaint, out


@pytest.mark.parametrize("fault", SOMETIMES)
def test_faults_that_an_order_brings_out(emulated_source, fault):
    library = emulated_source("hopper/faults.cu")
    told = {provoke(library, fault, seed)[1] for seed in range(16)}
    assert any(FAULTS[fault] in text for text in told), told


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault not in SOMETIMES])
def test_faults_are_told(emulated_source, fault, seed):
    status, told, out = provoke(emulated_source("hopper/faults.cu"), fault, seed)
    assert status == (LAUNCH_FAILURE if FAULTS[fault] else 0)
    assert FAULTS[fault] in told and bool(FAULTS[fault]) == bool(told)
    if fault == "none":
        assert (out == 16).all()
    if fault == "early read":
        assert np.isnan(out).all()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", INSTRUCTIONS)
def test_instructions(emulated_source, name, seed):
    library = emulated_source("hopper/all.cu")

    def call(name: str, *words: int | np.ndarray | ctypes.Array | tuple[np.ndarray, int]) -> None:
        sent = []
        for word in words:
            x, offset = word if isinstance(word, tuple) else (word, 0)
            sent.append(ctypes.c_void_p(x.ctypes.data + offset) if isinstance(x, np.ndarray) else x)
        library.schedule(seed)
        assert getattr(library.handle, f"try_{name}")(*sent) == 0, library.complaint

    INSTRUCTIONS[name](call)
