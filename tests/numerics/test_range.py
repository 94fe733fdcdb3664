"""The ends of the ranges that scale, softcap and values may have: right up to them, refused or documented beyond."""

from __future__ import annotations

import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest

import qflash
from qflash.testing.corners import arrays, check_corners, weights_dtype

BEYOND = [
    ({"scale": 2.0**100 * 1.001}, r"scale is 1\.26.*e\+30; allowed: a finite number, up to 2\^100"),
    ({"scale": -2.4e38}, r"scale is -2\.4e\+38; allowed: a finite number, up to 2\^100"),
    ({"softcap": 1e38}, r"softcap is 1e\+38; allowed: a finite number, up to 2\^100"),
    ({"softcap": 1.2e-38}, r"softcap is 1\.2e-38; allowed: 0 \(off\), or 2\^-100 to 2\^100"),
    ({"softcap": 2.0**-100, "scale": 1.5}, r"scale is 1\.5 and softcap is 7\.88.*e-31; allowed: scale / softcap of 0"),
    ({"softcap": 2.0**100, "scale": 2.0**-27}, r"scale is 7\.45.*e-09 and softcap is 1\.26.*e\+30; allowed: scale /"),
]


@pytest.mark.parametrize("precision", [None, "int8"])
def test_right_at_the_ends(precision: str | None) -> None:
    check_corners(precision)


_FLUSHED = """
import torch
from qflash.testing.corners import check_corners

torch.set_flush_denormal(True)
check_corners({!r})
"""


@pytest.mark.parametrize("precision", [None, "int8"])
def test_right_at_the_ends_where_denormals_are_zero(precision: str | None) -> None:
    """As in the threads that XLA calls from. A vanished product must not show in a score of softcap times its size."""
    torch = pytest.importorskip("torch")
    if not torch.set_flush_denormal(False):
        pytest.skip("this processor cannot flush denormals")
    done = subprocess.run(
        [sys.executable, "-c", _FLUSHED.format(precision)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("words", "message"), BEYOND)
def test_refused_beyond(words: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        qflash.attention(*arrays(4), **words)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("precision", [None, "int8"])
@pytest.mark.parametrize(("rows", "keys"), [(40, 300), (1, 5000), (3, 1)])
def test_values_up_to_their_bound(rows: int, keys: int, precision: str | None, dtype: str) -> None:
    """Sums of weights, which are at most 1, times v fit float32 while |v| times the keys of a row does."""
    rng = np.random.default_rng(1)
    q, k = (rng.standard_normal((1, n, 1, 32), np.float32).astype(dtype) for n in (rows, keys))
    largest = float(ml_dtypes.finfo(dtype).max)
    v = np.full(k.shape, largest / keys * (1 if keys == 1 else 0.99)).astype(dtype)
    out = qflash.attention(q, k, v, precision=precision).astype(np.float64)
    np.testing.assert_allclose(
        out, float(v[0, 0, 0, 0]), rtol=1e-5 if weights_dtype(precision, dtype) == "float32" else 2**-8
    )


@pytest.mark.parametrize("precision", [None, "int8"])
def test_sums_of_values_that_overflow_are_infinite(precision: str | None) -> None:
    """Not the largest finite number, to which averages that rounding put a little past it are brought back."""
    q, k = np.zeros((1, 4, 1, 32), ml_dtypes.bfloat16), np.zeros((1, 5000, 1, 32), ml_dtypes.bfloat16)
    v = np.full(k.shape, 1e37, ml_dtypes.bfloat16)
    v[..., 16:] *= -1
    out = qflash.attention(q, k, v, precision=precision).astype(np.float64)
    assert np.isposinf(out[..., :16]).all() and np.isneginf(out[..., 16:]).all()
