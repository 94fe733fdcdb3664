"""The oracle of the row operations against PyTorch's float64, and where the definition decides."""

from __future__ import annotations

import numpy as np
import pytest

from qflash import reference

torch = pytest.importorskip("torch")
functional = torch.nn.functional


def numbers(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).standard_normal(shape)


@pytest.mark.parametrize("scale", [1.0, -0.3, 0.0])
def test_softmax(scale):
    x = numbers(4, 5, 33)
    np.testing.assert_allclose(reference.softmax(x, scale), torch.softmax(scale * torch.tensor(x), -1), rtol=1e-13)


def test_softmax_of_what_is_not_finite():
    x = np.zeros((4, 3))
    x[0, 1], x[1, 2], x[2], x[3, 0] = np.nan, np.inf, -np.inf, -np.inf
    out = reference.softmax(x)
    assert np.isnan(out[:3]).all() and out[3].tolist() == [0, 0.5, 0.5]
    assert np.array_equal(np.isnan(out), torch.isnan(torch.softmax(torch.tensor(x), -1)))


def test_layer_norm():
    x, weight, bias = numbers(6, 40), numbers(40), numbers(1, 40)[0]
    out, mean, rstd = reference.layer_norm(x, weight, bias, 1e-3)
    want = functional.layer_norm(torch.tensor(x), (40,), torch.tensor(weight), torch.tensor(bias), 1e-3)
    np.testing.assert_allclose(out, want, rtol=1e-12, atol=1e-13)
    np.testing.assert_allclose(mean, x.mean(-1))
    np.testing.assert_allclose(rstd, 1 / np.sqrt(x.var(-1) + 1e-3))
    x[2, 3] = np.inf
    assert [np.isnan(y[2]).all() for y in reference.layer_norm(x)] == [True] * 3


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
def test_cross_entropy(smoothing):
    x, targets = numbers(7, 11), np.array([0, 10, -100, 3, 4, -100, 9])
    losses, lse, total, mean = reference.cross_entropy(x, targets, label_smoothing=smoothing)
    arguments = torch.tensor(x), torch.tensor(targets)
    for got, reduction in ((losses, "none"), (total, "sum"), (mean, "mean")):
        want = functional.cross_entropy(*arguments, reduction=reduction, label_smoothing=smoothing)
        np.testing.assert_allclose(got, want, rtol=1e-12)
    np.testing.assert_allclose(lse, torch.logsumexp(arguments[0], -1), rtol=1e-13)


def test_cross_entropy_where_targets_decide():
    x = numbers(3, 4)
    losses = reference.cross_entropy(x, np.array([1, 4, -1]))[0]
    assert np.isnan(losses).tolist() == [False, True, True]
    nothing = reference.cross_entropy(x, np.full(3, 2), ignore_index=2)
    assert nothing[0].tolist() == [0, 0, 0] and nothing[2] == 0 and np.isnan(nothing[3])
