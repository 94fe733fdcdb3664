"""Hopper's smaller instructions on the emulator (hopper/small.cuh), and what it says to those who use the larger ones
wrongly (emulator/hopper_faults.cc)."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import ml_dtypes  # noqa: F401  (teaches NumPy the name "bfloat16")
import numpy as np
import pytest
from test_emulated import pytestmark  # noqa: F401

from qflash.spec import DTYPES

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


def check_matrices(call: Callable[..., None]) -> None:
    """Four matrices whose rows go anywhere: M_i[l / 4][2 (l % 4) ..+1] is word i of lane l."""
    rng = np.random.default_rng(0)
    matrices = rng.integers(0, 2**16, (4, 8, 8)).astype(np.uint16)
    rows = rng.permutation(32).astype(np.int32)
    out = np.zeros((32, 8), np.uint16)
    call("matrices", matrices.view(np.uint32).reshape(4, 32), rows, out)
    assert np.array_equal(out[rows].reshape(4, 8, 8), matrices)


def check_zeros(call: Callable[..., None]) -> None:
    """Every number, in either half: a sum stays what it was, unless the number is not finite."""
    rng = np.random.default_rng(0)
    x = np.stack([np.arange(2**16), rng.permutation(2**16)], -1).astype(np.uint16)
    for dtype in ("float16", "bfloat16"):
        sums = rng.choice(np.array([0.0, 1.5, np.nan]).astype(dtype), x.shape)
        out = np.zeros_like(x)
        call("zeros", DTYPES.index(dtype), len(x), x, sums, out)
        kept = np.isfinite(x.view(dtype).astype(np.float32)) & ~np.isnan(sums.astype(np.float32))
        assert np.array_equal(np.isnan(out.view(dtype).astype(np.float32)), ~kept)
        assert np.array_equal(out[kept], sums.view(np.uint16)[kept])


def check_answers(call: Callable[..., None]) -> None:
    """Two arrivals complete a phase: the parity of the one before the present is that which has completed."""
    answers = np.full((9, 2), -1, np.int32)
    call("answers", len(answers), answers)
    phase = np.arange(9)[:, None] // 2
    assert np.array_equal(answers, phase % 2 != [[0, 1]])


def check_numbers(call: Callable[..., None]) -> None:
    """Whoever was told that a stage is full finds in it what was left there."""
    rounds, found = 500, np.full(32, -1, np.int32)
    call("numbers", rounds, found)
    assert (found == rounds).all()


# By what of hopper/small.cuh they call.
SMALL = {"matrices": check_matrices, "zeros": check_zeros, "answers": check_answers, "numbers": check_numbers}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", SMALL)
def test_small_instructions(emulated, name, seed):
    def call(name: str, *words: int | np.ndarray) -> None:
        sent = [ctypes.c_void_p(word.ctypes.data) if isinstance(word, np.ndarray) else word for word in words]
        assert getattr(emulated("hopper_small"), f"try_{name}")(*sent, seed) == 0

    SMALL[name](call)
