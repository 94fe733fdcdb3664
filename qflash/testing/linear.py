"""Cases of linear and swiglu, forward and backward, and the allowed error of each element of a result.

With u = 2^-24, a sum of k products has an error of at most u (16 + 4 sqrt(min(k, 256))) sqrt(sum of their squares), if
chains are 256 long or shorter: several times the error for normal numbers. Activations have slopes of at most 1.13 and
an error of 32 u of their own, and the result is rounded once.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import ml_dtypes
import numpy as np

from qflash import reference
from qflash.reference.linear import activate, slope

U = 2.0**-24
DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
ACTIVATIONS = (None, "gelu", "gelu_tanh", "silu", "swiglu")
# Of w [k, n]: the contiguous dimension, gaps between its lines, starts that are not a multiple of a vector.
LAYOUTS = ("k", "n", "k gaps", "k odd", "n odd")
# m, n, k: single elements, tails on either side of vectors, tiles and chunks, long and short sides, empty arrays.
SHAPES = (
    (1, 1, 1), (1, 1000, 64), (17, 3, 5), (128, 128, 128), (129, 255, 257), (64, 96, 2049), (300, 40, 600),
    (33, 513, 31), (2, 2, 20000), (0, 5, 3), (5, 0, 3), (5, 3, 0),
)  # fmt: skip


def _matrix(rng: np.random.Generator, shape: tuple[int, int], dtype: str, start: int, gap: int) -> np.ndarray:
    """Normal numbers; rows are `gap` numbers longer in memory, and the first number is at index `start` of its row."""
    rows, columns = shape
    memory = rng.standard_normal((rows, columns + gap), np.float32).astype(DTYPES[dtype])
    return memory[:, start : start + columns]


@dataclass(frozen=True)
class LinearCase:
    """A call on normal numbers; bias, residual and weights are scaled so that results are near 1."""

    m: int
    n: int
    k: int
    dtype: str = "float32"
    layout: str = "k"
    activation: str | None = None
    bias_dtype: str | None = None  # None: no bias
    residual: bool = False
    out_dtype: str | None = None
    seed: int = 0

    @property
    def result_dtype(self) -> str:
        return self.out_dtype or self.dtype

    @cached_property
    def arrays(self) -> dict[str, np.ndarray]:
        """The arrays, by their names in the public call."""
        rng = np.random.default_rng([self.seed, self.m, self.n, self.k])
        start, gap = {"k gaps": (0, 16), "k odd": (1, 3), "n odd": (1, 5)}.get(self.layout, (0, 0))
        found = {"x": _matrix(rng, (self.m, self.k), self.dtype, start, gap)}
        for name in self.weights:
            along_k = self.layout.startswith("k")
            w = _matrix(rng, (self.n, self.k) if along_k else (self.k, self.n), self.dtype, start, gap)
            w *= w.dtype.type(max(self.k, 1) ** -0.5)
            found[name] = w.T if along_k else w
        if self.bias_dtype is not None:
            for name in self.biases:
                found[name] = rng.standard_normal(self.n, np.float32).astype(DTYPES[self.bias_dtype])
        if self.residual:
            found["residual"] = _matrix(rng, (self.m, self.n), self.result_dtype, start, gap)
        return found

    @property
    def weights(self) -> tuple[str, ...]:
        return ("gate", "up") if self.activation == "swiglu" else ("w",)

    @property
    def biases(self) -> tuple[str, ...]:
        return ("gate_bias", "up_bias") if self.activation == "swiglu" else ("bias",)

    @property
    def words(self) -> dict[str, str]:
        """The other arguments of the public call."""
        found = {} if self.activation in (None, "swiglu") else {"activation": self.activation}
        return found if self.out_dtype is None else {**found, "out_dtype": self.out_dtype}

    def dout(self) -> np.ndarray:
        """A gradient of the result."""
        rng = np.random.default_rng([self.seed, self.m, self.n, self.k, 1])
        return _matrix(rng, (self.m, self.n), self.dtype, 0, 3 if "odd" in self.layout else 0)

    def products(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """The activation's inputs in float64, and the allowed error of each element."""
        x = self.arrays["x"].astype(np.float64)
        found = []
        for name, bias in zip(self.weights, self.biases, strict=True):
            w = self.arrays[name].astype(np.float64)
            h = reference.linear(x, w, self.arrays.get(bias))
            found.append((h, sum_error(x, w) + 2 * U * np.abs(h)))
        return found

    def expected(self) -> tuple[np.ndarray, np.ndarray]:
        """The result in float64, and the allowed error of each element before it is rounded to its dtype."""
        (h, error), *more = self.products()
        activation = "silu" if more else self.activation
        out, error = activate(activation, h), 1.13 * error
        if more:
            u, error_u = more[0]
            out, error = out * u, error * np.abs(u) + np.abs(out) * error_u
        error = error + (32 * U * np.abs(out) if self.activation else 0)
        if self.residual:
            out = out + self.arrays["residual"].astype(np.float64)
        return out, error + U * np.abs(out)

    def check(self, out: np.ndarray, activation_error: float = 0.0) -> None:
        """Check the result of the call. activation_error: the additional error allowed for a kernel's activation."""
        assert out.dtype == DTYPES[self.result_dtype] and out.shape == (self.m, self.n)
        want, error = self.expected()
        check_close(out, want, error + activation_error, str(self))

    def expected_gradients(self) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """Gradients in float64 by the names of the arrays, and the allowed error of each element before it is rounded.

        Kernels compute slopes from products that were rounded to the dtype, and round their gradients to it, too.
        """
        x, dout = self.arrays["x"].astype(np.float64), self.dout().astype(np.float64)
        half_unit = {"float32": U, "float16": 2.0**-11, "bfloat16": 2.0**-8}[self.dtype]
        products = self.products()
        activation = "silu" if len(products) == 2 else self.activation
        # The change of an activation's slope over half a unit of h: the derivative of the slope is below 1.2.
        errors = [error + half_unit * np.abs(h) for h, error in products]
        by_h, wrong = slope(activation, products[0][0]), 1.2 * errors[0] + 64 * U
        if self.activation is None:
            wrong = np.zeros_like(wrong)
        if self.activation == "swiglu":
            h, u = products[0][0], products[1][0]
            parts = [(by_h * u, wrong * np.abs(u) + np.abs(by_h) * errors[1]), (activate("silu", h), 1.13 * errors[0])]
        else:
            parts = [(by_h, wrong)]
        found = {"x": [np.zeros_like(x), np.zeros_like(x)]}
        for (share, wrong), weight, bias in zip(parts, self.weights, self.biases, strict=True):
            w = self.arrays[weight].astype(np.float64)
            dh = dout * share
            error = np.abs(dout) * wrong + (0 if self.activation is None else half_unit * np.abs(dh))
            # Errors of single elements are independent: their squares add up in a sum, and 6 deviations do not occur.
            found["x"][0] += dh @ w.T
            found["x"][1] += sum_error(dh, w.T) + 6 * np.sqrt(error**2 @ (w**2).T)
            found[weight] = [x.T @ dh, sum_error(x.T, dh) + 6 * np.sqrt((x**2).T @ error**2)]
            if self.bias_dtype is not None:
                ones = np.ones((1, self.m))
                found[bias] = [dh.sum(0), (sum_error(ones, dh) + 6 * np.sqrt(ones @ error**2))[0]]
        if self.residual:
            found["residual"] = [dout, np.zeros_like(dout)]
        return {name: (want, error) for name, (want, error) in found.items()}


def sum_error(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """The allowed float32 error of the sums in a product of float64 matrices, added in runs of 256 products."""
    return U * (16 + 4 * np.sqrt(min(x.shape[-1], 256))) * np.sqrt(x**2 @ w**2)


def check_close(got: np.ndarray, want: np.ndarray, error: np.ndarray, what: str) -> None:
    """Check that every element of `got` is `want` within `error` and half a unit in its last place."""
    with np.errstate(over="ignore"):
        rounded = np.abs(want).astype(got.dtype)
    bound = error + 0.51 * np.spacing(rounded).astype(np.float64)
    off = np.abs(got.astype(np.float64) - want)
    bad = ~(off <= bound)
    if bad.any():
        at = np.unravel_index(np.argmax(np.where(bad, off / bound, 0)), bad.shape)
        raise AssertionError(
            f"{what}: {bad.sum()} of {bad.size} elements are off, the worst at {tuple(map(int, at))}: "
            f"{got[at]!s} instead of {want[at]:.9g}, allowed {bound[at]:.3g}"
        )
