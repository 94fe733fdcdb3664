"""The oracle of softmax, layer_norm, cross_entropy and merge, and of gradients: their definitions in NumPy float64.

Takes NumPy arrays of any real dtype, returns float64. NaN and infinities follow IEEE arithmetic.
"""

from __future__ import annotations

import numpy as np


def softmax(x: np.ndarray, scale: float = 1.0) -> np.ndarray:
    """exp(s - max s) / sum of them, s = scale x, over the last dimension.

    A row with a NaN, a +inf, or nothing but -inf becomes NaN. fmax ignores NaN; the sum propagates it.
    """
    with np.errstate(invalid="ignore", divide="ignore"):
        s = np.float64(scale) * x.astype(np.float64)
        weights = np.exp(s - np.fmax.reduce(s, -1, keepdims=True, initial=-np.inf))
        return weights / weights.sum(-1, keepdims=True)


def layer_norm(
    x: np.ndarray, weight: np.ndarray | None = None, bias: np.ndarray | None = None, eps: float = 1e-5
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(x - mean) / sqrt(variance + eps) weight + bias over the last dimension, and mean and 1 / sqrt(variance + eps).

    A row with any nonfinite element is NaN, including its mean and the third result.
    """
    with np.errstate(invalid="ignore", divide="ignore"):
        x = np.where(np.isfinite(x).all(-1, keepdims=True), x.astype(np.float64), np.nan)
        mean = x.mean(-1, keepdims=True)
        variance = np.square(x - mean).mean(-1, keepdims=True)
        rstd = 1.0 / np.sqrt(variance + np.float64(eps))
        out = (x - mean) * rstd
        if weight is not None:
            out = out * weight.astype(np.float64)
        if bias is not None:
            out = out + bias.astype(np.float64)
        return out, mean[..., 0], rstd[..., 0]


def cross_entropy(
    logits: np.ndarray, targets: np.ndarray, ignore_index: int = -100, label_smoothing: float = 0.0
) -> tuple[np.ndarray, np.ndarray, float, float]:
    """(losses, lse, sum, mean): lse - (1 - s) logits[target] - s mean(logits) of every row, 0 for ignored ones.

    The mean is over rows that are not ignored; NaN if there are none. A target out of range gives NaN.
    """
    with np.errstate(invalid="ignore", divide="ignore"):
        x = logits.astype(np.float64)
        greatest = np.fmax.reduce(x, -1, keepdims=True, initial=-np.inf)
        lse = (greatest + np.log(np.exp(x - greatest).sum(-1, keepdims=True)))[..., 0]
        ignored = targets == ignore_index
        known = (targets >= 0) & (targets < x.shape[-1])
        picked = np.take_along_axis(x, np.where(known, targets, 0)[..., None], -1)[..., 0]
        losses = lse - (1.0 - label_smoothing) * picked
        if label_smoothing != 0.0:
            losses = losses - label_smoothing * x.mean(-1)
        losses = np.where(ignored, 0.0, np.where(known, losses, np.nan))
        total = losses.sum()
        return losses, lse, float(total), float(np.float64(total) / np.float64((~ignored).sum()))


def merge(out_a: np.ndarray, lse_a: np.ndarray, out_b: np.ndarray, lse_b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(out, lse) of attention to the keys of both; lse is `[..., heads, length]`, out `[..., length, heads, head_dim]`.

    A row with lse -inf is ignored. One with lse +inf gets the full weight, or each a half if both have it.
    """
    a, b = lse_a.astype(np.float64), lse_b.astype(np.float64)
    with np.errstate(invalid="ignore"):
        top = np.where(a > b, a, b)
        weight_a, weight_b = (np.where(x == top, 1.0, np.exp(x - top)) for x in (a, b))
        weight_a, weight_b = np.where(b == -np.inf, 1.0, weight_a), np.where(b == -np.inf, 0.0, weight_b)
        weight_a, weight_b = np.where(a == -np.inf, 0.0, weight_a), np.where(a == -np.inf, 1.0, weight_b)
        total = weight_a + weight_b
        lse = np.where(a == -np.inf, b, np.where(b == -np.inf, a, top + np.log(total)))
        parts = [
            np.where(seen, x.astype(np.float64), 0.0) * np.where(seen, weight, 0.0)
            for x, weight, seen in (
                (x, *(np.swapaxes(y, -1, -2)[..., None] for y in (weight / total, one != -np.inf)))
                for x, weight, one in ((out_a, weight_a, a), (out_b, weight_b, b))
            )
        ]
        return parts[0] + parts[1], lse


def softmax_backward(out: np.ndarray, dout: np.ndarray, scale: float = 1.0) -> np.ndarray:
    """scale out (dout - sum of out dout), from the result of softmax."""
    with np.errstate(invalid="ignore", over="ignore"):
        out, dout = out.astype(np.float64), dout.astype(np.float64)
        return np.float64(scale) * out * (dout - (out * dout).sum(-1, keepdims=True))


def layer_norm_backward(
    x: np.ndarray,
    weight: np.ndarray | None,
    dout: np.ndarray,
    eps: float = 1e-5,
    dmean: np.ndarray | None = None,
    drstd: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(dx, dweight, dbias) of sum(out dout) + sum(mean dmean) + sum(rstd drstd)."""
    z, _, rstd = layer_norm(x, None, None, eps)
    with np.errstate(invalid="ignore", over="ignore"):
        dout, rstd = dout.astype(np.float64), rstd[..., None]
        g = dout if weight is None else dout * weight.astype(np.float64)
        dx = rstd * (g - g.mean(-1, keepdims=True) - z * (g * z).mean(-1, keepdims=True))
        if dmean is not None:
            dx = dx + dmean.astype(np.float64)[..., None] / x.shape[-1]
        if drstd is not None:
            dx = dx - z * drstd.astype(np.float64)[..., None] * rstd**2 / x.shape[-1]
        rows = tuple(range(x.ndim - 1))
        return dx, (dout * z).sum(rows), dout.sum(rows)


def cross_entropy_backward(
    logits: np.ndarray,
    targets: np.ndarray,
    dlosses: np.ndarray,
    dlse: np.ndarray | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> np.ndarray:
    """dlogits of sum(losses dlosses) + sum(lse dlse). An ignored row has a gradient only through its lse."""
    columns = logits.shape[-1]
    ignored, known = targets == ignore_index, (targets >= 0) & (targets < columns)
    with np.errstate(invalid="ignore", over="ignore"):
        w = np.where(ignored, 0.0, np.where(known, dlosses.astype(np.float64), np.nan))[..., None]
        of_lse = 0.0 if dlse is None else dlse.astype(np.float64)[..., None]
        wanted = (1.0 - label_smoothing) * (np.arange(columns) == targets[..., None]) + label_smoothing / columns
        dlogits = (w + of_lse) * softmax(logits) - w * wanted
        return dlogits if dlse is not None else np.where(ignored[..., None], 0.0, dlogits)
