"""qflash.merge: attention to some keys and to others is attention to all of them."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import qflash
from qflash import reference

DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
TOLERANCE = {"float32": 1e-6, "float16": 1e-3, "bfloat16": 8e-3}
LSE_TOLERANCE = 2e-6


def drawn(*shape, dtype="float32", seed=0):
    return np.random.default_rng([seed, *shape]).standard_normal(shape, np.float32).astype(DTYPES[dtype])


def check(out_a, lse_a, out_b, lse_b):
    """Against the definition; returns the results."""
    out, lse = qflash.merge(out_a, lse_a, out_b, lse_b)
    wanted_out, wanted_lse = reference.merge(out_a, lse_a, out_b, lse_b)
    assert (out.shape, out.dtype, lse.dtype) == (out_a.shape, out_a.dtype, np.float32)
    tolerance = TOLERANCE[out.dtype.name]
    np.testing.assert_allclose(out.astype(np.float64), wanted_out, rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(lse, wanted_lse, rtol=LSE_TOLERANCE, atol=LSE_TOLERANCE)
    return out, lse


@pytest.mark.parametrize("a", DTYPES)
@pytest.mark.parametrize("b", DTYPES)
@pytest.mark.parametrize("shape", [(2, 5, 3, 64), (1, 1, 1, 1), (7, 4, 20), (3, 2, 2, 300), (2, 0, 3, 8)], ids=str)
def test_every_pair_of_types(a, b, shape):
    rows = (*shape[:-3], shape[-2], shape[-3])
    check(drawn(*shape, dtype=a), 3 * drawn(*rows), drawn(*shape, dtype=b, seed=1), 3 * drawn(*rows, seed=1))


def test_edges_of_lse():
    """No keys on either side, weights that vanish, sums past the largest float, infinities and NaN."""
    values = np.array([-np.inf, np.inf, np.nan, 0.0, -200.0, 200.0, 3e38, -3e38, 1e-30], np.float32)
    lse_a, lse_b = (x.reshape(1, 1, -1) for x in np.meshgrid(values, values))
    out_a, out_b = drawn(1, lse_a.size, 1, 8), drawn(1, lse_a.size, 1, 8, seed=1)
    out, lse = check(out_a, lse_a, out_b, lse_b)
    both_empty = (lse_a == -np.inf) & (lse_b == -np.inf)
    assert (out[0, both_empty[0, 0]] == 0).all() and (lse[both_empty] == -np.inf).all()


def test_a_row_without_keys_may_hold_anything():
    out_a = np.full((1, 3, 1, 8), np.nan, np.float32)
    lse_a = np.full((1, 1, 3), -np.inf, np.float32)
    out_b, lse_b = drawn(1, 3, 1, 8), drawn(1, 1, 3)
    for arrays in ((out_a, lse_a, out_b, lse_b), (out_b, lse_b, out_a, lse_a)):
        out, lse = qflash.merge(*arrays)
        np.testing.assert_array_equal(out, out_b)
        np.testing.assert_array_equal(lse, lse_b)


def test_strides():
    """Of views, as `layout="bhtd"` gives them."""
    out_a, out_b = (drawn(2, 3, 5, 64, seed=seed).swapaxes(1, 2) for seed in (0, 1))
    lse_a, lse_b = (drawn(2, 5, 3, seed=seed).swapaxes(1, 2) for seed in (0, 1))
    check(out_a, lse_a, out_b, lse_b)
    check(out_a[..., ::2], lse_a, out_b[..., ::2], lse_b)


@pytest.mark.parametrize("dtype", DTYPES)
def test_parts_of_attention(dtype):
    """Any cut of the keys, with sums in float32, and sinks in one part."""
    q, k, v = drawn(2, 6, 8, 64, dtype=dtype), *(drawn(2, 300, 2, 64, dtype=dtype, seed=seed) for seed in (1, 2))
    sinks = drawn(8)
    wanted, wanted_lse = qflash.attention(q, k, v, sinks=sinks, return_lse=True)
    out, lse = np.zeros(q.shape, np.float32), np.full(wanted_lse.shape, -np.inf, np.float32)
    for keys in (slice(150, 300), slice(0, 1), slice(1, 1), slice(1, 150)):
        part = {"sinks": sinks} if keys.stop == 300 else {}
        out, lse = qflash.merge(out, lse, *qflash.attention(q, k[:, keys], v[:, keys], return_lse=True, **part))
    tolerance = 2 * TOLERANCE[dtype]  # parts were rounded, and so was what they are compared with
    np.testing.assert_allclose(out, wanted.astype(np.float32), rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(lse, wanted_lse, rtol=1e-5, atol=1e-5)
