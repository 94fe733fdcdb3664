"""Hopper's smaller instructions on the emulator (hopper/small.cuh), and what it says to those who use the larger ones
wrongly (emulator/hopper_faults.cc)."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import ml_dtypes  # noqa: F401  (teaches NumPy the name "bfloat16")
import numpy as np
import pytest
from test_emulated import pytestmark  # noqa: F401

from qflash.call.spec import DTYPES

FAULTS = {  # in the order of hopper_faults.cc
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


def check_pairs(call: Callable[..., None]) -> None:
    """Every float16 in either half, and any other."""
    rng = np.random.default_rng(0)
    x = np.stack([np.arange(2**16), rng.permutation(2**16)], -1).astype(np.uint16).view(np.float16)
    y = rng.integers(0, 2**16, x.shape).astype(np.uint16).view(np.float16)
    out = np.zeros_like(x)
    call("pairs", len(x), x, y, out)
    with np.errstate(all="ignore"):
        check_same(out, x + y)


def check_codes(call: Callable[..., None]) -> None:
    """Every float16, and what lies next to the middle between two E4M3, where rounding turns."""
    codes = np.arange(0x7F, dtype=np.uint8).view("float8_e4m3fn").astype(np.float32)
    middles = (codes[1:] + codes[:-1]) / 2
    turns = np.concatenate([middles, np.nextafter(middles, np.float32(0)), np.nextafter(middles, np.float32(1e9))])
    rare = np.array([3e38, np.inf, 1e-40, 449, 464, 480, 1e-9, 0], np.float32)
    halves = np.arange(2**16, dtype=np.uint16).view(np.float16).astype(np.float32)
    x = np.concatenate([turns, -turns, rare, -rare, halves])
    x = np.resize(np.random.default_rng(0).permutation(x), (len(x) // 4 + 1, 4))
    found = np.zeros(x.shape, np.uint8)
    call("codes", len(x), x, found)
    wanted = np.clip(np.nan_to_num(x), -448, 448).astype("float8_e4m3fn").view(np.uint8)  # saturates
    assert np.array_equal(found, np.where(np.isnan(x), 0x7F, wanted))


def check_decoded(call: Callable[..., None]) -> None:
    """Every E4M3, in each place of a word."""
    codes = np.stack([np.roll(np.arange(256), 67 * place) for place in range(4)], -1).astype(np.uint8)
    out = np.zeros(codes.shape, np.float16)
    call("decoded", len(codes), codes, out)
    check_same(out, codes.view("float8_e4m3fn").astype(np.float16))


def check_same(found: np.ndarray, wanted: np.ndarray) -> None:
    """Bits of float16, but of one NaN and another."""
    spoiled = np.isnan(wanted)
    assert np.array_equal(np.isnan(found), spoiled)
    assert np.array_equal(found.view(np.uint16)[~spoiled], wanted.view(np.uint16)[~spoiled])


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
SMALL = {
    "matrices": check_matrices, "zeros": check_zeros, "pairs": check_pairs, "codes": check_codes,
    "decoded": check_decoded, "answers": check_answers, "numbers": check_numbers,
}  # fmt: skip


def caller(library: ctypes.CDLL, seed: int) -> Callable[..., None]:
    def call(name: str, *words: int | np.ndarray) -> None:
        sent = [ctypes.c_void_p(word.ctypes.data) if isinstance(word, np.ndarray) else word for word in words]
        assert getattr(library, f"try_{name}")(*sent, seed) == 0

    return call


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", SMALL)
def test_small_instructions(emulated, name, seed):
    SMALL[name](caller(emulated("hopper_small"), seed))


def check_byte_products(call: Callable[..., None], kind: str, n: int, row_bytes: int) -> None:
    """Of all of int8; of small integers in E4M3, so that its sums are exact, too."""
    rng = np.random.default_rng(n + row_bytes)
    low, high = (-128, 128) if kind == "s8" else (-4, 5)
    a, b = (rng.integers(low, high, (rows, 128)) for rows in (64, n))
    sent = [x.astype(np.int8 if kind == "s8" else "float8_e4m3fn").view(np.uint8) for x in (a, b)]
    out = np.full((64, n), 77, np.int32 if kind == "s8" else np.float32)
    call(kind, n, row_bytes, *sent, out)
    assert np.array_equal(out, a @ b.T + (0 if kind == "s8" else 0.5))


# (kind, n, row_bytes) of hopper/byte_products.cuh.
BYTE_PRODUCTS = [("s8", n, row) for n in (64, 128) for row in (64, 128)]
BYTE_PRODUCTS += [("e4m3", n, row) for n in (64, 128, 256) for row in (64, 128)]


@pytest.mark.parametrize(("kind", "n", "row_bytes"), BYTE_PRODUCTS)
def test_byte_products(emulated, kind, n, row_bytes):
    for seed in range(2):
        check_byte_products(caller(emulated("hopper_byte_products"), seed), kind, n, row_bytes)
