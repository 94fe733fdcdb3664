"""What the emulator says to those who use Hopper's instructions wrongly (emulator/hopper_faults.cc)."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from test_emulated import pytestmark  # noqa: F401

FAULTS = {  # in the order of hopper_faults.cc
    "none": "",
    "no fence": "wgmma without a fence",
    "early read": "",  # of NaN
    "early write": "sums were changed before the wait",
    "overwritten A": "A was changed before the wait",
    "other products": "start different products",
    "other groups": "commit different products",
    "no wait": "a product was under way at the end",
    "no arrival": "wait for parity 0 of the mbarrier at byte 2048",
    "second arrival": "one arrival too many",
    "no init": "no mbarrier was initialised at byte 2048",
    "odd box": "a swizzled box begins at byte 512",
    "no copy": "(0 arrivals and 2048 bytes to come)",
    "skipped barrier": "wait for barrier 1 (32 threads to come)",
    "half trade": "a part of a warpgroup traded registers",
}


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_told(emulated, fault, seed):
    tried = emulated("hopper_faults").try_fault
    tried.restype = ctypes.c_char_p
    out = np.full(128, 12345.0, np.float32)
    told = tried(list(FAULTS).index(fault), seed, out.ctypes.data_as(ctypes.c_void_p)).decode()
    assert FAULTS[fault] in told and bool(FAULTS[fault]) == bool(told)
    if fault == "none":
        assert (out == 16).all()
    if fault == "early read":
        assert np.isnan(out).all()
