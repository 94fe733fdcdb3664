"""The ends of the ranges that scale, softcap and values may have: right up to them, refused or documented beyond."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import qflash


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
    np.testing.assert_allclose(out, float(v[0, 0, 0, 0]), rtol=1e-5 if dtype == "float32" else 2**-8)


@pytest.mark.parametrize("precision", [None, "int8"])
def test_sums_of_values_that_overflow_are_infinite(precision: str | None) -> None:
    """Not the largest finite number, to which averages that rounding put a little past it are brought back."""
    q, k = np.zeros((1, 4, 1, 32), ml_dtypes.bfloat16), np.zeros((1, 5000, 1, 32), ml_dtypes.bfloat16)
    v = np.full(k.shape, 1e37, ml_dtypes.bfloat16)
    v[..., 16:] *= -1
    out = qflash.attention(q, k, v, precision=precision).astype(np.float64)
    assert np.isposinf(out[..., :16]).all() and np.isneginf(out[..., 16:]).all()
