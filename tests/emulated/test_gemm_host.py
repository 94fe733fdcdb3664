"""What csrc/gemm has without a GPU: which tile a problem gets (policy.h), and how far the activations of Hopper's
epilogue (fast_activation.cuh) are from their definitions."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from qflash.call.spec import ACTIVATIONS
from qflash.reference.linear import slope
from qflash.testing import linear_problems

H200, MOST_SPLITS, LEAST_STEPS, WORTH_IT = 132, 16, 4, 0.99
BYTES = {True: 128 * 256 * 4, False: 64 * 128 * 4}  # of partial sums: of a large tile, of a small one
SHAPES = [
    (m, n, steps)
    for m in (1, 16, 17, 64, 65, 128, 129, 256, 512, 1000, 4096, 16384)
    for n in (1, 100, 1024, 4096, 28672)
    for steps in (0, 1, 7, 32, 64, 448)
]


@pytest.fixture(scope="module")
def host(emulated_source):
    handle = emulated_source("gemm_host.cu").handle
    for name, result in (("try_clocks", ctypes.c_double), ("try_partial_bytes", ctypes.c_int64)):
        getattr(handle, name).restype = result
    return handle


def words(*numbers: int) -> list:
    return [ctypes.c_int64(number) for number in numbers[:3]] + [ctypes.c_int(number) for number in numbers[3:]]


def choose(host, m: int, n: int, steps: int, processors: int = H200, pairs: int | None = None) -> tuple[bool, int, int]:
    """(large, splits of k, whole tiles before those that are cut). pairs: of blocks that run at the same time."""
    chosen = (ctypes.c_int32 * 3)()
    host.try_policy(*words(m, n, steps, processors, processors // 2 if pairs is None else pairs), chosen)
    return bool(chosen[0]), chosen[1], chosen[2]


def clusters(m: int, n: int, large: bool) -> int:
    rows, columns = (256, 256) if large else (64, 128)
    return -(-m // rows) * -(-n // columns)


@pytest.mark.parametrize(
    ("m", "n", "k_bytes", "large", "splits"),
    [
        (8192, 8192, 8192, True, {1}),  # int8
        (8192, 8192, 16384, True, {1}),  # 16-bit
        (4096, 4096, 4096, True, {1}),
        (16384, 8192, 2048, True, {1}),
        (1024, 4096, 8192, True, {1}),  # 64 pairs for 66
        (512, 4096, 8192, True, {2}),  # 32 pairs
        (256, 4096, 8192, True, {4}),
        (128, 4096, 8192, False, {2}),  # no second block of a pair would have rows
        (16, 4096, 4096, False, {2, 3, 4}),
        (1, 4096, 8192, False, {2, 3, 4}),
        (1, 28672, 16384, False, {1}),
        (1, 100, 100, False, {1}),
    ],
)
def test_tiles_of_known_problems(host, m, n, k_bytes, large, splits):
    chosen = choose(host, m, n, -(-k_bytes // 128))
    assert chosen[0] == large and chosen[1] in splits and chosen[2] == 0


@pytest.mark.parametrize(
    ("m", "n", "k_bytes", "splits", "whole"),
    [
        (4096, 3584, 2 * 18944, {2}, 3 * 66),  # 3.39 waves, in 16 bits
        (4096, 3584, 18944, {2}, 3 * 66),  # and of int8
        (4096, 28672, 2 * 4096, {4, 5, 6}, 27 * 66),  # 27.15 waves
        (512, 28672, 2 * 4096, {2}, 3 * 66),
        (16384, 8192, 2 * 2048, {1}, 0),  # 31.03 waves of 32 steps: less than a hundredth is to be had
        (4096, 57344, 2 * 8192, {1}, 0),  # 54.30 waves: the same
        (8192, 8192, 2 * 8192, {1}, 0),  # 15.52 waves: two splits of each tile that is left are more than run at once
    ],
)
def test_the_last_wave_of_known_problems(host, m, n, k_bytes, splits, whole):
    large, *chosen = choose(host, m, n, k_bytes // 128)
    assert large and chosen[0] in splits and chosen[1] == whole


@pytest.mark.parametrize(("m", "n", "processors", "splits", "whole"), [(136, 800, 6, 3, 3), (300, 530, 8, 2, 4)])
def test_the_emulator_has_last_waves_that_are_cut(host, m, n, processors, splits, whole):
    """Those of test_emulated_sm90_gemm.py and test_emulated_sm90_linear_bwd.py."""
    for steps in (40, 41):
        assert choose(host, m, n, steps, processors) == (True, splits, whole)


# Of clusters that run at the same time: as many as there are pairs, fewer, one, and where none was asked for.
@pytest.mark.parametrize(
    ("processors", "pairs"),
    [*((n, n // 2) for n in (1, 2, 3, 64, 114, H200, 144)), (H200, 65), (H200, 50), (H200, 1), (H200, 0), (144, 71)],
)
def test_splits_keep_to_their_bounds(host, processors, pairs):
    """All of a problem's splits run at the same time, have steps, and fit the memory that a plan reserved for them,
    which knows nothing of the GPU. Whole tiles fill waves."""
    cut_last_waves = 0
    for m, n, steps in SHAPES:
        large, splits, whole = choose(host, m, n, steps, processors, pairs)
        assert 1 <= splits <= MOST_SPLITS and (not large or (pairs > 0 and m > 128))
        assert whole == 0 or (large and splits > 1 and whole % pairs == 0)
        if splits > 1:
            units, blocks = (clusters(m, n, large) - whole) * splits, 2 if large else 1
            assert steps // splits >= LEAST_STEPS and 0 < units <= (pairs if large else processors)
            assert units * blocks * BYTES[large] <= host.try_partial_bytes(*words(m, n, steps, 144))
            cut_last_waves += whole > 0
    assert pairs not in (65, 66, 72) or cut_last_waves > 0


def test_the_choice_is_the_fastest_of_the_model(host):
    for m, n, steps in SHAPES:
        large, splits, whole = choose(host, m, n, steps)
        chosen = host.try_clocks(*words(m, n, steps, H200 // (1 + large), large, splits, whole))
        assert chosen <= host.try_clocks(*words(m, n, steps, H200, 0, 1, 0))
        if m > 128:
            assert chosen <= host.try_clocks(*words(m, n, steps, H200 // 2, 1, 1, 0))
        if whole > 0:
            assert chosen < WORTH_IT * host.try_clocks(*words(m, n, steps, H200 // 2, 1, 1, whole))


def test_memory_for_splits_is_reserved_where_there_may_be_some(host):
    assert host.try_partial_bytes(*words(8192, 8192, 7, 144)) == 0
    assert host.try_partial_bytes(*words(8192, 28672, 0, 144)) == 0
    assert 0 < host.try_partial_bytes(*words(8192, 8192, 64, 144)) <= 144 * BYTES[True]
    assert host.try_partial_bytes(*words(1, 4096, 3, 144)) == 0
    assert 0 < host.try_partial_bytes(*words(1, 4096, 64, 144)) <= 144 * BYTES[False]
    assert 0 < host.try_partial_bytes(*words(512, 4096, 64, 144)) <= 144 * BYTES[True]


# |error|: absolute where the definition is small, relative elsewhere.
ERRORS = {"": 0.0, "gelu": 5e-5, "gelu_tanh": 3e-7, "silu": 3e-7, "swiglu": 3e-7}
ROUNDED_ERRORS = ERRORS | {"gelu_tanh": 8e-5}  # of what is rounded to 16 bits after it


def activated(host, activation: str, h: np.ndarray, u: np.ndarray, rounded: bool = False) -> np.ndarray:
    out = np.full_like(h, 77)
    pointers = [x.ctypes.data_as(ctypes.c_void_p) for x in (h, u, out)]
    host.try_activation(ACTIVATIONS.index(activation), int(rounded), ctypes.c_int64(h.size), *pointers)
    return out


@pytest.mark.parametrize("rounded", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_are_near_their_definitions(host, activation, rounded):
    rng = np.random.default_rng(0)
    edges = [0.0, -0.0, 4.0, -4.0, 4.4, -4.4, 1e4, -1e4, 1e-30, -1e-30, 88.0, -88.0]
    h = np.concatenate([np.linspace(-12, 12, 200_001), rng.standard_normal(20_000), edges]).astype(np.float32)
    u = rng.standard_normal(h.size).astype(np.float32)
    with np.errstate(over="ignore"):
        want = linear_problems.activated(activation, h.astype(np.float64), u.astype(np.float64))
    error = np.abs(activated(host, activation, h, u, rounded) - want) / np.maximum(1, np.abs(want))
    allowed = (ROUNDED_ERRORS if rounded else ERRORS)[activation]
    assert error.max() <= allowed, (error.max(), h[error.argmax()])


@pytest.mark.parametrize("rounded", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_of_what_is_not_finite(host, activation, rounded):
    """As IEEE arithmetic has it in the definitions: of -inf, NaN, but for the identity."""
    h = np.array([np.nan, np.inf, -np.inf, 1, 1], np.float32)
    u = np.array([1, 1, 1, np.nan, np.inf], np.float32)
    found = activated(host, activation, h, u, rounded)
    two = activation == "swiglu"
    assert np.isnan(found[0]) and found[1] == np.inf
    assert np.isnan(found[2]) if activation else found[2] == -np.inf
    assert np.isnan(found[3]) == two and (found[4] == np.inf) == two


@pytest.mark.parametrize("activation", ACTIVATIONS[1:4])
def test_slopes_where_squares_overflow(host, activation):
    """The derivative is 0 or 1 far out, not NaN, and near float64's everywhere."""
    h = np.concatenate([np.linspace(-12, 12, 2001), [0.0, -0.0, 1e10, -1e10, 1e20, -1e20, 3e38, -3e38]]).astype(
        np.float32
    )
    got = np.empty_like(h)
    pointers = (array.ctypes.data_as(ctypes.c_void_p) for array in (h, got))
    host.try_slopes(ctypes.c_int(ACTIVATIONS.index(activation)), ctypes.c_int64(h.size), *pointers)
    with np.errstate(over="ignore"):
        np.testing.assert_allclose(got, slope(activation, h.astype(np.float64)), rtol=0, atol=2e-6)
