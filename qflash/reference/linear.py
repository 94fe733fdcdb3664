"""The oracle of linear and swiglu and of their gradients, and the replay of their INT8 form.

`linear` to `swiglu_backward` take NumPy arrays of any real dtype and return float64. NaN and infinities follow IEEE
arithmetic: gelu and silu of -inf are NaN.
"""

from __future__ import annotations

import math

import numpy as np

from qflash.reference.quantize import quantize

_erfc = np.vectorize(math.erfc, otypes=[np.float64])


def activate(activation: str | None, h: np.ndarray) -> np.ndarray:
    """h times a distribution function of h: the normal one for "gelu", nearly that for "gelu_tanh", the logistic one
    for "silu". None: h."""
    if activation is None:
        return h
    with np.errstate(invalid="ignore", over="ignore"):
        return h * _share(activation, h)


def slope(activation: str | None, h: np.ndarray) -> np.ndarray:
    """The derivative of `activate`."""
    if activation is None:
        return np.ones_like(h)
    with np.errstate(invalid="ignore", over="ignore"):
        share = _share(activation, h)
        if activation == "gelu":
            return share + h * np.exp(-h * h / 2) / math.sqrt(2 * math.pi)
        inner = 1.0 if activation == "silu" else math.sqrt(8 / math.pi) * (1 + 3 * 0.044715 * h * h)
        return share + h * share * (1 - share) * inner


def _share(activation: str, h: np.ndarray) -> np.ndarray:
    if activation == "gelu":
        return _erfc(-h / math.sqrt(2)) / 2  # (1 + erf) / 2 without the cancellation
    z = h if activation == "silu" else math.sqrt(8 / math.pi) * (h + 0.044715 * h**3)
    return 1 / (1 + np.exp(-z))


def linear(
    x: np.ndarray,
    w: np.ndarray,
    bias: np.ndarray | None = None,
    activation: str | None = None,
    residual: np.ndarray | None = None,
) -> np.ndarray:
    """activation(x w + bias) + residual; w is `[K, N]`."""
    return _add(activate(activation, _product(x, w, bias)), residual)


def swiglu(
    x: np.ndarray,
    gate: np.ndarray,
    up: np.ndarray,
    gate_bias: np.ndarray | None = None,
    up_bias: np.ndarray | None = None,
    residual: np.ndarray | None = None,
) -> np.ndarray:
    """silu(x gate + gate_bias) (x up + up_bias) + residual."""
    with np.errstate(invalid="ignore", over="ignore"):
        return _add(activate("silu", _product(x, gate, gate_bias)) * _product(x, up, up_bias), residual)


def linear_backward(
    x: np.ndarray, w: np.ndarray, bias: np.ndarray | None, dout: np.ndarray, activation: str | None = None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(dx, dw, dbias) of the sum of out dout."""
    dh = dout.astype(np.float64) * slope(activation, _product(x, w, bias))
    return dh @ w.astype(np.float64).T, _rows(x).T @ _rows(dh), _rows(dh).sum(0)


def swiglu_backward(
    x: np.ndarray,
    gate: np.ndarray,
    up: np.ndarray,
    gate_bias: np.ndarray | None,
    up_bias: np.ndarray | None,
    dout: np.ndarray,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(dx, dgate, dup, dgate_bias, dup_bias) of the sum of out dout."""
    h, u, dout = _product(x, gate, gate_bias), _product(x, up, up_bias), dout.astype(np.float64)
    dh, du = dout * u * slope("silu", h), dout * activate("silu", h)
    dx = dh @ gate.astype(np.float64).T + du @ up.astype(np.float64).T
    return dx, _rows(x).T @ _rows(dh), _rows(x).T @ _rows(du), _rows(dh).sum(0), _rows(du).sum(0)


def linear_int8(x: np.ndarray, w: np.ndarray, bias: np.ndarray | None = None) -> np.ndarray:
    """The argument of the activation with precision="int8", float32: a scale for each row of x and each column of w,
    exact sums, fma(float32(sum) x_scale, w_scale, bias).

    The product is exact in float64, so only the sum is rounded there first, to 53 bits: results agree with those of an
    fma bit for bit, except where that rounding gives a tie.
    """
    (values, x_scale), (weights, w_scale) = _integers(_rows(x)), _integers(w.T)
    sums = values.astype(np.int64) @ weights.astype(np.int64).T
    with np.errstate(invalid="ignore", over="ignore"):
        scaled = (sums.astype(np.float32) * x_scale[:, None]).astype(np.float64) * w_scale
        h = scaled + (0.0 if bias is None else bias.astype(np.float64))
        return h.astype(np.float32).reshape(*x.shape[:-1], w.shape[1])


def _integers(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    found = quantize(rows[None, :, None], group=1)
    return found.values[0, :, 0], found.scale[0, 0]


def _rows(x: np.ndarray) -> np.ndarray:
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def _product(x: np.ndarray, w: np.ndarray, bias: np.ndarray | None) -> np.ndarray:
    with np.errstate(invalid="ignore", over="ignore"):
        return _add(x.astype(np.float64) @ w.astype(np.float64), bias)


def _add(x: np.ndarray, more: np.ndarray | None) -> np.ndarray:
    return x if more is None else x + more.astype(np.float64)
