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


ACTIVATIONS = {
    None: lambda h: h,
    "gelu": functional.gelu,
    "gelu_tanh": lambda h: functional.gelu(h, approximate="tanh"),
    "silu": functional.silu,
}


def differentiated(function, *arrays: np.ndarray):
    """PyTorch's result in float64, a cotangent, and its gradients."""
    tensors = [torch.tensor(x, requires_grad=True) for x in arrays]
    out = function(*tensors)
    dout = numbers(*out.shape)
    gradients = torch.autograd.grad(out, tensors, torch.tensor(dout))
    return out.detach().numpy(), dout, [x.numpy() for x in gradients]


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_linear(activation):
    x, w, bias, residual = numbers(3, 4, 7), numbers(7, 5), numbers(1, 5)[0], numbers(3, 4, 5)
    act = ACTIVATIONS[activation]
    out, dout, gradients = differentiated(lambda x, w, b: act(x @ w + b), x, w, bias)
    np.testing.assert_allclose(reference.linear(x, w, bias, activation), out, rtol=1e-12, atol=1e-13)
    with_residual = reference.linear(x, w, bias, activation, residual)
    np.testing.assert_allclose(with_residual, out + residual, rtol=1e-12, atol=1e-13)
    got = reference.linear_backward(x, w, bias, dout, activation)
    for one, want in zip(got, gradients, strict=True):
        np.testing.assert_allclose(one, want, rtol=1e-11, atol=1e-12)


def test_swiglu():
    x, gate, up = numbers(3, 4, 7), numbers(7, 5), numbers(7, 6)[:, 1:]
    biases = numbers(1, 5)[0], numbers(2, 5)[1]
    out, dout, gradients = differentiated(
        lambda x, g, u, a, b: functional.silu(x @ g + a) * (x @ u + b), x, gate, up, *biases
    )
    np.testing.assert_allclose(reference.swiglu(x, gate, up, *biases), out, rtol=1e-12, atol=1e-13)
    got = reference.swiglu_backward(x, gate, up, *biases, dout)
    for one, want in zip(got, gradients, strict=True):
        np.testing.assert_allclose(one, want, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("activation", [name for name in ACTIVATIONS if name])
def test_activations_of_what_is_not_finite(activation):
    h = np.array([[np.nan, np.inf, -np.inf, 1e4, -1e4, 0.0]])
    want = ACTIVATIONS[activation](torch.tensor(h)).numpy()
    got = reference.linear(np.ones((1, 1)), h, None, activation)
    np.testing.assert_allclose(got, want, atol=1e-300)


def test_linear_int8():
    """Integers by hand: rows of amplitude 127 are their own integers, and a channel that is not finite is NaN."""
    x = np.array([[127, -3, 5], [0, 0, 0]], np.float32)
    w = np.array([[127, 254], [1, -2], [-2, 0]], np.float32)
    h = reference.linear_int8(x, w, np.array([0.5, 0], np.float32))
    assert h.dtype == np.float32
    np.testing.assert_allclose(h, [[127 * 127 - 3 - 10 + 0.5, 127 * 254 + 6], [0.5, 0]], rtol=1e-6)
    w[1, 1] = np.nan
    h = reference.linear_int8(x, w)
    assert np.isnan(h[:, 1]).all() and np.isfinite(h[:, 0]).all()
