"""Keys and values in 8 bits on their way round a ring: what that adds to the error of each quantized pipeline.

The replays attend to keys that have all gone round. In a ring some have not, a rank's own, so that errors are smaller.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from qflash import reference
from qflash.parallel.parts import Sequences
from qflash.parallel.placement import Placement
from qflash.parallel.wire import from_wire, to_wire
from qflash.parallel.words import check_words
from qflash.testing.compare import INT8, INT8_FP8, errors
from qflash.testing.simulated_ranks import NumpyMaths

DECISION = Path(__file__).resolve().parents[2] / "docs" / "decisions" / "0017-masks-over-ranks.md"
RANKS, TOKENS, HEADS, HEAD_DIM = 4, 512, 2, 64
PIPELINES = {
    "cpu_int8": reference.attention_int8,
    "fa_int8": reference.attention_fa_int8,
    "sm90_int8": reference.attention_sm90_int8,
    "sm90_int8_fp8": lambda *arrays: reference.attention_sm90_int8(*arrays, precision="int8_fp8"),
}
SOME_CHANNELS = np.arange(HEAD_DIM) % 16 == 3


def _outliers(rng, q, k, v):
    return tuple(x + 10 * (rng.random(x.shape) < 1e-3) * rng.standard_normal(x.shape, np.float32) for x in (q, k, v))


INPUTS = {
    "normal": lambda rng, q, k, v: (q, k, v),
    "k: a mean of 8 in 4 channels": lambda rng, q, k, v: (q, k + 8 * SOME_CHANNELS, v),
    "k: 4 channels ten times as large": lambda rng, q, k, v: (q, k * (1 + 9 * SOME_CHANNELS), v),
    "v: a mean of 3": lambda rng, q, k, v: (q, k, v + 3),
    "v: a mean of 100 in 4 channels": lambda rng, q, k, v: (q, k, v + 100 * SOME_CHANNELS),
    "v: 4 channels ten times as large": lambda rng, q, k, v: (q, k, v * (1 + 9 * SOME_CHANNELS)),
    "v: 4 channels a hundred times as large": lambda rng, q, k, v: (q, k, v * (1 + 99 * SOME_CHANNELS)),
    "one value in a thousand ten times as large": _outliers,
}


def arrays_of(name: str) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((3, 1, TOKENS, HEADS, HEAD_DIM), np.float32)
    return [x.astype("bfloat16") for x in INPUTS[name](rng, q, k, v)]


def gone_round(k: np.ndarray, v: np.ndarray, kv_lens: np.ndarray | None = None) -> np.ndarray:
    """k and v of all ranks, as others have them."""
    words = check_words("ring", "contiguous", False, None, None, None, "int8", True, HEAD_DIM)
    at = Placement.of_whole("contiguous", RANKS, k.shape[1], "k", 1)
    of = Sequences(at, words, NumpyMaths(), k, kv_lens)
    blocks = [np.stack([k, v])[:, :, of.tokens(rank)] for rank in range(RANKS)]
    return np.concatenate([from_wire(to_wire(of, block, rank), block) for rank, block in enumerate(blocks)], 2)


@cache
def measured(name: str) -> dict[str, tuple[float, float, float]]:
    """By pipeline: relative L2 error without a ring, in a ring, and the cosine there."""
    q, k, v = arrays_of(name)
    want, _ = reference.attention(q, k, v)
    found = {}
    for kernel, replay in PIPELINES.items():
        alone, ring = (errors(replay(q, *keys)[0], want) for keys in ((k, v), gone_round(k, v)))
        found[kernel] = alone.relative_l2, ring.relative_l2, ring.cosine
    return found


@pytest.mark.parametrize("name", INPUTS)
def test_the_figures_of_the_decision(name):
    (row,) = re.findall(rf"^\| {re.escape(name)} \|(.*)\|$", DECISION.read_text(), re.MULTILINE)
    published = [tuple(map(float, cell.split("→"))) for cell in row.split("|")]
    for (alone, ring, _), figures in zip(measured(name).values(), published, strict=True):
        assert (alone, ring) == pytest.approx(figures, abs=1.5e-4)


@pytest.mark.parametrize("kernel", PIPELINES)
def test_within_the_contract(kernel):
    contract = INT8_FP8 if kernel == "sm90_int8_fp8" else INT8
    _, error, cosine = measured("normal")[kernel]
    assert error <= contract["l2"] and cosine >= contract["cosine"]
    assert measured("k: a mean of 8 in 4 channels")[kernel][2] >= contract["biased_cosine"]
    for name in ("v: a mean of 3", "v: a mean of 100 in 4 channels", "v: 4 channels ten times as large"):
        assert measured(name)[kernel][1] <= contract["l2"]  # as of normal values


def test_what_the_mean_keeps_of_a_channel():
    """Beside channels of a large mean, whose scale they would share, small ones keep their digits."""
    _, k, v = arrays_of("v: a mean of 100 in 4 channels")
    error = (gone_round(k, v)[1].astype(np.float64) - v.astype(np.float64))[..., ~SOME_CHANNELS]
    assert np.abs(error).max() < 0.04  # half a step of 4.5 / 127, and a rounding to bfloat16


def test_padding_takes_no_part():
    """Neither in a mean nor in a scale; what comes is finite."""
    _, k, v = arrays_of("normal")
    spoiled = k.copy()
    spoiled[:, 200:300] = 1e30
    spoiled[:, 300:] = np.nan
    clean, padded = (gone_round(x, v, np.array([200], np.int32)) for x in (k, spoiled))
    assert np.isfinite(padded.astype(np.float32)).all()
    np.testing.assert_array_equal(clean[:, :, :200], padded[:, :, :200])


def test_what_is_not_finite_is_its_token_alone():
    _, k, v = arrays_of("normal")
    v[0, 130, 1, 5], k[0, 7, 0, 0] = np.inf, np.nan
    came = gone_round(k, v).astype(np.float32)
    nonfinite = np.zeros(came.shape, bool)
    nonfinite[1, 0, 130, 1] = nonfinite[0, 0, 7, 0] = True
    np.testing.assert_array_equal(np.isnan(came), nonfinite)


def test_no_rounding_makes_an_infinity_of_a_float16():
    """The step is that of the largest difference from a mean, 131008 / 127, and numbers may be half of it off."""
    _, _, v = arrays_of("normal")
    large = v.astype(np.float16)
    large[..., 3], large[:, ::2, :, 5], large[:, 1::2, :, 5] = 30000, -65504, 65504
    large[:, TOKENS // RANKS - 1, :, 3] = 65500
    large[0, 0, 0, 0] = np.inf
    _, came = gone_round(large, large)
    nonfinite = np.zeros(came.shape, bool)
    nonfinite[0, 0, 0] = True
    np.testing.assert_array_equal(np.isnan(came), nonfinite)
    assert not np.isinf(came).any() and np.abs(came[~nonfinite]).max() == 65504


@pytest.mark.parametrize("shape", [(1, 0, 2, HEAD_DIM), (0, 8, 2, HEAD_DIM)])
def test_nothing_comes_as_nothing(shape):
    nothing = np.zeros(shape, np.float16)
    came = gone_round(nothing, nothing)
    assert came.shape == (2, *shape) and came.dtype == np.float16
