"""softmax, layer_norm and cross_entropy: a list of cases, and the differences that rounding allows.

Kernels compute in float32, with unit roundoff u = 2^-24, and round the result to x's dtype once. Bounds against the
float64 definition of qflash/reference/operations.py count roundings per element:

softmax        a weight exp(-d), d the distance of a score from the largest, has relative error 3 u d from the three
               roundings of its argument and 2^-22 = 4 u from the exponential, twice where maxima are reconciled; sums
               are trees of at most 16 levels, the quotient has 3 roundings: relative (32 + 4 d) u. Results below the
               normal numbers of float32 may become 0.
layer_norm     with z = (x - mean) rstd: mean and deviations are sums of differences from a number of the row's own
               size, which no offset affects: 32 u (1 + |z|) |weight| + 2 u |out|.
cross_entropy  differences first: 32 u (1 + ln l) for ln l, and 4 u of each difference that is added to it; a mean of
               logits has 16 u of their mean magnitude.
"""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np

from qflash import reference

U = 2.0**-24
TINY = 2.0**-125  # float32 results below it may be flushed to zero
WHAT = ("softmax", "layer_norm", "cross_entropy")


@dataclass(frozen=True)
class RowCase:
    """A matrix: its size, its data, and its memory layout (elements before its first row and between rows)."""

    rows: int
    columns: int
    dtype: str = "float32"
    data: str = "normal"
    start: int = 0
    gap: int = 0

    @property
    def name(self) -> str:
        layout = f"-at{self.start}+{self.gap}" if self.start or self.gap else ""
        return f"{self.rows}x{self.columns}-{self.dtype}-{self.data}{layout}"

    def make(self) -> np.ndarray:
        """The matrix, a view into a larger buffer."""
        rng = np.random.default_rng(self.columns * 7 + self.rows)
        pitch = self.columns + self.gap
        memory = np.full(self.start + self.rows * pitch, np.nan, self.dtype)
        x = memory[self.start :].reshape(self.rows, pitch)[:, : self.columns]
        x[:] = _DATA[self.data](rng, (self.rows, self.columns))
        return x

    def targets(self) -> np.ndarray:
        """int32; every fifth row is ignored."""
        targets = np.random.default_rng(self.columns).integers(0, self.columns, self.rows).astype(np.int32)
        targets[4::5] = -100
        return targets

    def columns_vector(self, seed: int) -> np.ndarray:
        """A vector for weight or bias."""
        return np.random.default_rng(seed).standard_normal(self.columns).astype(self.dtype)


def _planted(*values: float):
    """Normal numbers; row i has values[i] in one of its columns, alternating from the front and from the back."""

    def make(rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
        x = rng.standard_normal(shape)
        for i, value in enumerate(values[: shape[0]]):
            x[i, (i * 5) % shape[1] if i % 2 else -1] = value
        return x

    return make


def _of_value(*values: float):
    """All of row i is values[i]."""
    return lambda rng, shape: np.resize(np.array(values), shape[0])[:, None] * np.ones(shape)


def _narrow(rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    """Rows whose squares underflow float32, one of them far from zero relative to its width."""
    widths = np.resize([1e-15, 1e-22, 1e-30, 1e-34, 1e-30], shape[0])[:, None]
    return widths * (rng.standard_normal(shape) + np.resize([0, 0, 0, 0, 1000], shape[0])[:, None])


_DATA = {
    "normal": lambda rng, shape: rng.standard_normal(shape),
    "wide": lambda rng, shape: 30 * rng.standard_normal(shape),
    "offset": lambda rng, shape: 1000 + rng.standard_normal(shape),
    "rising": lambda rng, shape: np.linspace(-40, 40, shape[1]) + rng.standard_normal(shape),
    "outlier": _planted(3e4, -3e4, 1e4, -1e4, 2e4),
    "far_outlier": _planted(1e30, -1e30, -1e30, 1e30, 2e30),
    "huge": lambda rng, shape: np.clip(1e38 * rng.standard_normal(shape), -3e38, 3e38),
    "narrow": _narrow,
    "nan": _planted(np.nan, 1.0, np.nan),
    "infinite": _planted(np.inf, -np.inf, 1.0, -np.inf, np.inf),
    "constant": _of_value(1.0, -7.3, 1e4, 0.1, 0.0),
    "minus_infinity": _of_value(-np.inf, 1.0, np.inf),
}

_PAST_FLOAT16 = ("far_outlier", "huge")
_EDGES = (1, 2, 3, 7, 8, 9, 31, 32, 33, 100, 127, 129, 255, 256, 257, 511, 513, 1000, 1024, 1025, 2047, 4099, 8192)

SMALL = tuple(
    [RowCase(3, columns, "float32") for columns in _EDGES]
    + [RowCase(3, columns, dtype) for columns in _EDGES[::2] for dtype in ("float16", "bfloat16")]
    + [RowCase(5, columns, "bfloat16", start=start, gap=1) for start, columns in enumerate((1, 6, 8, 15, 255, 1030))]
    + [RowCase(5, columns, "float32", start=start, gap=3) for start, columns in enumerate((1, 5, 130, 1027), 1)]
    + [RowCase(5, columns, "float32", data) for data in _DATA for columns in (37, 1500)]
    + [RowCase(5, columns, "bfloat16", data) for data in _DATA for columns in (37, 1500)]
    + [RowCase(5, columns, "float16", data) for data in _DATA if data not in _PAST_FLOAT16 for columns in (37, 1500)]
)
LONG = (
    RowCase(2, 32768, "float32"),
    RowCase(2, 32769, "float32", start=1),
    RowCase(2, 40001, "bfloat16", "wide", start=3, gap=2),
    RowCase(2, 33000, "float32", "huge"),
    RowCase(2, 50000, "float16", "offset", gap=8),
)
LONGEST = (RowCase(1, 1_200_007, "bfloat16"), RowCase(2, 1_048_577, "float32", "rising", start=1))


def check_close(what: str, got: np.ndarray, want: np.ndarray, bound: np.ndarray | float) -> None:
    """|got - want| within the bound and the rounding of got's dtype; NaN and infinities in the same places."""
    finest = np.finfo(np.float32) if got.dtype == np.float32 else ml_dtypes.finfo(got.dtype)
    largest, smallest = float(finest.max), float(finest.smallest_normal)
    digits = {"float32": 24, "float16": 11, "bfloat16": 8}[got.dtype.name]
    y = got.astype(np.float64)
    magnitude = np.abs(want) + bound
    with np.errstate(invalid="ignore"):
        exponent = np.floor(np.log2(np.maximum(np.where(np.isfinite(magnitude), magnitude, 1.0), smallest)))
        step = 2.0 ** (exponent + 1 - digits)
        overflows = magnitude > largest
        wrong = ~(np.abs(y - want) <= bound + step / 2 + TINY)
        wrong &= ~(np.isnan(y) & np.isnan(want)) & ~(y == want) & ~(overflows & (np.abs(y) == np.inf))
    if wrong.any():
        at = tuple(int(i) for i in np.argwhere(wrong)[0])
        allowed = np.broadcast_to(bound, want.shape)[at]
        raise AssertionError(
            f"{what} is wrong in {wrong.sum()} of {wrong.size} places; first at {at}: {y[at]!r}, exactly {want[at]!r}, "
            f"allowed to differ by {allowed:.3g} and rounding"
        )


def check_softmax(x: np.ndarray, out: np.ndarray, scale: float = 1.0) -> None:
    """Check that `out` is softmax(scale x), within the bounds above."""
    want = reference.softmax(x, scale)
    with np.errstate(invalid="ignore"):
        s = scale * x.astype(np.float64)
        distance = np.fmax.reduce(s, -1, keepdims=True) - s
        bound = np.where(want > 0, want * (32 + 4 * np.where(np.isfinite(distance), distance, 0)) * U, 0)
    check_close("softmax", out, want, np.where(np.isfinite(bound), bound, 0))


def check_layer_norm(x, weight, bias, eps, out, mean=None, rstd=None) -> None:
    """Check that `out`, and mean and rstd if given, are layer_norm's, within the bounds above."""
    want, want_mean, want_rstd = reference.layer_norm(x, weight, bias, eps)
    z = reference.layer_norm(x, None, None, eps)[0]
    scale = 1.0 if weight is None else np.abs(weight.astype(np.float64))
    with np.errstate(invalid="ignore"):
        bound = 32 * U * (1 + np.abs(z)) * scale + 2 * U * np.abs(want)
        check_close("layer_norm", out, want, np.where(np.isfinite(bound), bound, 0))
        if mean is not None:
            check_close("mean", mean, want_mean, np.nan_to_num(32 * U / want_rstd))
        if rstd is not None:
            check_close("rstd", rstd, want_rstd, np.nan_to_num(32 * U * want_rstd))


def check_cross_entropy(
    x, targets, losses, *, smoothing=0.0, ignore_index=-100, lse=None, total=None, mean=True
) -> None:
    """Check that `losses`, and lse and total if given, are cross_entropy's, within the bounds above."""
    want, want_lse, want_sum, want_mean = reference.cross_entropy(x, targets, ignore_index, smoothing)
    with np.errstate(invalid="ignore"):
        s = x.astype(np.float64)
        greatest = np.fmax.reduce(s, -1)
        known = (targets >= 0) & (targets < s.shape[-1])
        picked = np.take_along_axis(s, np.where(known, targets, 0)[:, None], -1)[:, 0]
        ln_sum = 32 * U * (1 + np.abs(want_lse - greatest))
        bound = ln_sum + 4 * U * (1 - smoothing) * (greatest - picked)
        if smoothing:
            bound = bound + U * smoothing * (4 * np.abs(greatest - s.mean(-1)) + 16 * np.abs(s).mean(-1))
        bound = np.where(np.isfinite(bound), bound, 0)
        check_close("losses", losses, want, bound)
        if lse is not None:
            check_close("lse", lse, want_lse, np.where(np.isfinite(ln_sum), ln_sum, 0))
        if total is not None:
            allowed, counted = bound.sum() + U * np.nansum(np.abs(want)), max(int((targets != ignore_index).sum()), 1)
            wanted = np.array([want_mean if mean else want_sum])
            if (np.abs(want) > np.finfo(np.float32).max).any():  # a loss that overflows float32 is infinite
                wanted = np.sign(wanted) * np.inf
            check_close("total", np.asarray(total).reshape(1), wanted, allowed / counted if mean else allowed)
