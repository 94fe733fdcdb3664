"""Gradients of softmax, layer_norm and cross_entropy: the cases of rows.py with gradients of results, and bounds.

As there, kernels compute in float32, u = 2^-24, and bounds count roundings per element:

softmax_bwd        with delta = sum of out dout: the sum has 32 u of sum |out dout|, difference and products 4 u.
layer_norm_bwd     with z = (x - mean) rstd: rstd is given with 32 u, z computed with 32 u (1 + |z|); the means over
                   the row, of g = dout weight and of g z, have as much of the mean magnitude of their terms. Sums over
                   rows: 64 rows in float32, and then in double.
cross_entropy_bwd  a weight exp(logit - lse) has the error of lse, 32 u (1 + lse - max) + u |lse|, and 32 + 4 d of
                   roundings at a distance d from lse.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from qflash import reference
from qflash.call.op import Op
from qflash.ops import OPS
from qflash.testing.rows import LONG, SMALL, RowCase, U, check_close

CASES = tuple(case for at, case in enumerate((*SMALL, *LONG)) if at % 3 == 0 or case.data != "normal" or case.gap)

GRADIENTS = ("softmax_backward", "layer_norm_backward", "cross_entropy_backward")


@dataclass(frozen=True)
class Cotangents:
    """Gradients of results: `rows` with the layout of out; `first` and `second` a number per row."""

    rows: np.ndarray
    first: np.ndarray
    second: np.ndarray


def cotangents_of(case: RowCase) -> Cotangents:
    """Normal numbers; if x has planted values, the last rows have some of them here, too."""
    x = RowCase(case.rows, case.columns, case.dtype, start=case.gap, gap=case.start).make()
    rng = np.random.default_rng(case.columns + 1)
    if case.data in ("nan", "infinite"):
        x[-1, case.columns // 2] = np.nan if case.data == "nan" else np.inf
    first, second = rng.standard_normal((2, case.rows)).astype(np.float32)
    return Cotangents(x, first, second)


def gradient_call(operation: str) -> tuple[Op, list[np.ndarray | None], tuple[Any, ...]]:
    """A small call of a backward operation: the operation, its arrays and its other arguments."""
    op = next(op for op in OPS if op.name == operation)
    case = RowCase(7, 41)
    x, g, vector, targets = case.make(), cotangents_of(case), case.columns_vector(1), case.targets()
    mean, rstd, lse = (
        one.astype(np.float32)
        for one in (*reference.layer_norm(x)[1:], reference.cross_entropy(x, np.zeros_like(targets))[1])
    )
    total = np.array(1.5, np.float32)
    known = {
        "dout": g.rows, "out": reference.softmax(x).astype(x.dtype), "x": x, "weight": vector, "bias": vector,
        "mean": mean, "rstd": rstd, "dmean": g.first, "drstd": g.second, "dlosses": g.first, "dlse": g.second,
        "dtotal": total, "logits": x, "targets": targets, "lse": lse,
    }  # fmt: skip
    words = {"scale": 0.7, "eps": 1e-5, "return_stats": True, "reduction": "mean", "ignore_index": -100}
    words |= {"label_smoothing": 0.1, "return_lse": True, "kernel": None}
    return op, [known[name] for name in op.arrays], tuple(words[name] for name in op.words)


def _finite(bound: np.ndarray) -> np.ndarray:
    return np.where(np.isfinite(bound), bound, 0)


def check_softmax_backward(out: np.ndarray, dout: np.ndarray, dx: np.ndarray, scale: float = 1.0) -> None:
    """Check that `dx` is softmax's gradient, given its own result, within the bounds above."""
    want = reference.softmax_backward(out, dout, scale)
    with np.errstate(invalid="ignore", over="ignore"):
        p, g = out.astype(np.float64), dout.astype(np.float64)
        size = np.abs(p * g).sum(-1, keepdims=True)
        bound = np.abs(scale) * p * 32 * U * size + 4 * U * np.abs(want)
    check_close("dx", dx, want, _finite(bound))


def check_layer_norm_backward(x, weight, dout, eps, dx, dweight=None, dbias=None, dmean=None, drstd=None) -> None:
    """Check that `dx`, and dweight and dbias if given, are layer_norm's gradients, within the bounds above."""
    want, want_weight, want_bias = reference.layer_norm_backward(x, weight, dout, eps, dmean, drstd)
    z, _, rstd = reference.layer_norm(x, None, None, eps)
    with np.errstate(invalid="ignore", over="ignore"):
        size, rstd, of_out = 1 + np.abs(z), rstd[..., None], np.abs(dout.astype(np.float64))
        g = of_out if weight is None else of_out * np.abs(weight.astype(np.float64))
        means = g.mean(-1, keepdims=True) + size * (g * size).mean(-1, keepdims=True)
        bound = 64 * U * rstd * (g + means) + 64 * U * np.abs(want)
        if drstd is not None:
            bound = bound + 64 * U * size * (rstd**2 * np.abs(drstd[..., None]) / x.shape[-1])
        check_close("dx", dx, want, _finite(bound))
        if dweight is not None:
            check_close("dweight", dweight, want_weight, _finite(128 * U * (of_out * size).sum(0)))
        if dbias is not None:
            check_close("dbias", dbias, want_bias, _finite(80 * U * of_out.sum(0)))


def check_cross_entropy_backward(x, targets, dlogits, dlosses, dlse=None, *, smoothing=0.0, ignore_index=-100) -> None:
    """Check that `dlogits` is cross_entropy's gradient, within the bounds above."""
    want = reference.cross_entropy_backward(x, targets, dlosses, dlse, ignore_index, smoothing)
    with np.errstate(invalid="ignore", over="ignore"):
        s, p = x.astype(np.float64), reference.softmax(x)
        lse = reference.cross_entropy(x, np.zeros_like(targets))[1][..., None]
        of_loss = np.abs(np.where(targets == ignore_index, 0.0, dlosses))[..., None]
        size = of_loss + (0.0 if dlse is None else np.abs(dlse)[..., None])
        roundings = 64 + 32 * (lse - np.fmax.reduce(s, -1, keepdims=True)) + 4 * np.abs(lse - s) + 2 * np.abs(lse)
        spread = (1 - smoothing) * (np.arange(s.shape[-1]) == targets[..., None]) + smoothing / s.shape[-1]
        bound = U * (size * p * np.where(p > 0, roundings, 0) + 4 * of_loss * spread + 2 * np.abs(want))
    check_close("dlogits", dlogits, want, _finite(bound))
