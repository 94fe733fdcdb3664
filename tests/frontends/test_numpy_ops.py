"""Operations beside attention on NumPy arrays: definitions, strides, dtypes, empty arrays, values out of range."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import qflash
from qflash import reference as oracle
from qflash.testing.op_cases import CASES, bytes_, check_equal, floats

STRIDED = {
    "gaps": lambda x: np.repeat(x, 2, -1)[..., ::2],
    "wide rows": lambda x: np.concatenate([x, x], -1)[..., : x.shape[-1]],
    "reversed": lambda x: np.ascontiguousarray(x[::-1])[::-1],
    "transposed": lambda x: np.asfortranarray(x),
}


def test_definitions():
    x, weight, bias = floats(6, 50), floats(50), floats(50)
    np.testing.assert_allclose(qflash.softmax(x, scale=3), oracle.softmax(x, 3), rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(
        qflash.layer_norm(x, weight, bias), oracle.layer_norm(x, weight, bias)[0], rtol=1e-4, atol=1e-5
    )
    targets = np.array([0, 49, 7, -100, 3, 3])
    losses, lse, total, mean = oracle.cross_entropy(x, targets)
    for reduction, wanted in (("none", losses), ("sum", total), ("mean", mean)):
        got, got_lse = qflash.cross_entropy(x, targets, reduction=reduction, return_lse=True)
        np.testing.assert_allclose(got, wanted, rtol=1e-5)
        np.testing.assert_allclose(got_lse, lse, rtol=1e-5)
    a, b = bytes_(2, 6, 50), bytes_(50, 7)
    exact = a.astype(np.int64) @ b.astype(np.int64)
    np.testing.assert_array_equal(qflash.int8_matmul(a, b), exact)
    scaled = qflash.int8_matmul(a, b, np.float32(0.5), 2, floats(7) * 0 + 1)
    np.testing.assert_allclose(scaled, exact + 1.0, rtol=1e-6)
    assert scaled.dtype == np.float32


@pytest.mark.parametrize("words", [{}, {"granularity": "token"}, {"symmetric": False}, {"smooth": True}], ids=str)
def test_quantize_and_back(words):
    x = floats(2, 20, 3, 16) + 3
    quantized = qflash.quantize(x, **words)
    back = qflash.dequantize(quantized)
    step = np.max(quantized.scale)
    assert back.dtype == x.dtype and np.abs(back - x).max() <= 0.51 * step
    assert qflash.dequantize(quantized, np.float16).dtype == np.float16
    assert quantized.dtype == "float32" and quantized.values.dtype == np.int8


def test_a_quantized_matrix_goes_into_a_product():
    x, w = floats(40, 64), floats(64, 24)
    a, b = qflash.quantize(x, granularity="token"), qflash.quantize(w.T.copy(), granularity="token")
    assert a.scale.shape == (40,) and b.scale.shape == (24,)
    got = qflash.int8_matmul(a.values, b.values.T, a.scale, b.scale)
    assert np.linalg.norm(got - x @ w) <= 0.02 * np.linalg.norm(x @ w)


@pytest.mark.parametrize("strided", STRIDED)
@pytest.mark.parametrize("name", CASES)
def test_strides_do_not_matter(name, strided):
    case = CASES[name]
    views = {key: STRIDED[strided](x) if x.ndim > 1 else x for key, x in case.arrays.items()}
    for key, x in case.arrays.items():
        np.testing.assert_array_equal(views[key], x)
    check_equal(case.call(**views), case.call(**case.arrays))


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16], ids=["float16", "bfloat16"])
def test_half_precision_comes_back(dtype):
    x = floats(3, 32).astype(dtype)
    assert qflash.softmax(x).dtype == dtype
    assert qflash.layer_norm(x, x[0], x[1]).dtype == dtype
    assert qflash.cross_entropy(x, np.zeros(3, np.int32)).dtype == np.float32
    quantized = qflash.quantize(x)
    assert quantized.dtype == np.dtype(dtype).name and qflash.dequantize(quantized).dtype == dtype
    assert qflash.int8_matmul(bytes_(2, 3), bytes_(3, 2), out_dtype=dtype).dtype == dtype


def test_empty_arrays():
    none = floats(0, 5)
    assert qflash.softmax(none).shape == (0, 5) and qflash.softmax(floats(5, 0)).shape == (5, 0)
    out, mean, rstd = qflash.layer_norm(none, return_stats=True)
    assert out.shape == (0, 5) and mean.shape == rstd.shape == (0,)
    targets = np.zeros(0, np.int64)
    assert qflash.cross_entropy(none, targets, reduction="none").shape == (0,)
    assert qflash.cross_entropy(none, targets, reduction="sum") == 0
    assert np.isnan(qflash.cross_entropy(none, targets))
    assert qflash.int8_matmul(bytes_(0, 4), bytes_(4, 3)).shape == (0, 3)
    np.testing.assert_array_equal(qflash.int8_matmul(bytes_(2, 0), bytes_(0, 3)), np.zeros((2, 3), np.int32))
    np.testing.assert_array_equal(
        qflash.int8_matmul(bytes_(2, 0), bytes_(0, 3), 2.0, bias=np.ones(3, np.float32)), np.ones((2, 3))
    )
    quantized = qflash.quantize(floats(2, 0, 3, 8), granularity="token")
    assert quantized.values.shape == (2, 0, 3, 8) and quantized.scale.shape == (2, 3, 0)
    assert qflash.dequantize(quantized).shape == (2, 0, 3, 8)


@pytest.mark.parametrize("bad", [19, -1, 2**31 + 3, -(2**40), 2**32 - 100])
def test_a_target_out_of_range_is_refused_whatever_its_width(bad):
    logits = floats(3, 19)
    with pytest.raises(ValueError, match="target"):
        qflash.cross_entropy(logits, np.array([0, bad, 1]))
    if abs(bad) < 2**31:
        with pytest.raises(ValueError, match="target"):
            qflash.cross_entropy(logits, np.array([0, bad, 1], np.int32))


def test_bad_lengths_and_positions_are_refused():
    x = floats(2, 12, 3, 8)
    cos, sin = qflash.rope_tables(12, 8)
    with pytest.raises(ValueError, match="lens"):
        qflash.quantize(x, lens=np.array([13, 1], np.int32))
    with pytest.raises(ValueError, match="positions_k"):
        qflash.quantize(x, rope=qflash.Rope(cos, sin, positions_k=np.full(12, 12, np.int32)))


def test_inputs_are_left_alone():
    for case in CASES.values():
        before = {key: x.copy() for key, x in case.arrays.items()}
        for x in case.arrays.values():
            x.flags.writeable = False
        case.call(**case.arrays)
        for key, x in case.arrays.items():
            np.testing.assert_array_equal(x, before[key])
            x.flags.writeable = True
