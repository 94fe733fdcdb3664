"""Words of calls: NumPy's scalars are as good as Python's, and what is out of range is refused by name."""

from __future__ import annotations

import warnings
from fractions import Fraction

import numpy as np
import pytest

import qflash
from qflash.call.words import check_flag, check_int, check_number, shown


@pytest.mark.parametrize(
    "value", [0.3, np.float16(0.3), np.float32(0.3), np.longdouble(0.3), np.int8(3), Fraction(1, 3)]
)
def test_numbers_of_every_kind(value):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert check_number("x", value) == float(value)


@pytest.mark.parametrize(
    "value", [10**400, -(10**400), 1e39, float("inf"), float("-inf"), float("nan"), np.float64("nan")]
)
def test_numbers_out_of_range(value):
    with pytest.raises(ValueError, match=r"x is .*; allowed: a finite number, up to float32's"):
        check_number("x", value)


@pytest.mark.parametrize("value", [True, np.True_, "1", None, 1j, np.array(1.0), [1.0]])
def test_what_is_no_number(value):
    with pytest.raises(TypeError, match=r"x is .*; allowed: a number"):
        check_number("x", value)


def test_flags():
    for value in (True, np.True_, 1, np.int8(1)):
        assert check_flag("x", value) is True
    for value in (False, np.False_, 0):
        assert check_flag("x", value) is False
    for value in (2, -1, 1.0, "yes", None, np.array(True)):
        with pytest.raises(TypeError, match=r"x is .*; allowed: True or False"):
            check_flag("x", value)


def test_ints():
    assert check_int("x", np.int64(3), 0, 3) == 3
    for value in (-1, 4, 10**5000):
        with pytest.raises(ValueError, match=r"x is .*; allowed: 0 to 3"):
            check_int("x", value, 0, 3)
    for value in (True, 1.0, "1", None):
        with pytest.raises(TypeError, match=r"x is .*; allowed: an int"):
            check_int("x", value, 0, 3)


def test_nothing_is_shown_at_great_length():
    for value in (10**5000, "x" * 1000, list(range(1000)), np.zeros(1000)):
        assert len(shown(value)) < 100


def test_numpy_scalars_in_calls():
    q = np.random.default_rng(0).standard_normal((1, 5, 2, 16)).astype(np.float32)
    want = qflash.attention(q, q, q, scale=0.5, causal=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for scale in (np.float16(0.5), np.float32(0.5), np.float64(0.5)):
            np.testing.assert_array_equal(qflash.attention(q, q, q, scale=scale, causal=np.True_), want)
        smooth = qflash.quantize(q, smooth=np.bool_(True), symmetric=np.bool_(True))
    assert smooth.mean is not None and smooth.symmetric is True
    np.testing.assert_array_equal(smooth.values, qflash.quantize(q, smooth=True).values)
    with pytest.raises(ValueError, match=r"scale is an int of 1329 bits; allowed: a finite number"):
        qflash.attention(q, q, q, scale=10**400)
