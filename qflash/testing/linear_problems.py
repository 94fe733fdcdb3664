"""linear and swiglu in NumPy: operands of any layout, the float64 definition with gradients, and error bounds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from qflash.reference.linear import activate, slope
from qflash.testing.guarded import guarded

Arrays = dict[str, np.ndarray]
KINDS = {"float32": np.dtype(np.float32), "float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
_ROUNDING = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}  # half an ulp of 1
_LEAST = {"float32": 0.0, "float16": 2.0**-25, "bfloat16": 0.0}  # half an ulp of subnormal numbers
_U = _ROUNDING["float32"]


@dataclass(frozen=True)
class LinearProblem:
    """A call. x_layout, w_layout: the contiguous dimension of x [m, k] and of w [k, n]; gaps: elements between the rows
    of either in memory; at_end: they end where readable memory ends. bias: its dtype; "": there is none."""

    m: int
    n: int
    k: int
    dtype: str = "float16"
    activation: str = ""
    out_dtype: str = ""  # "": dtype
    bias: str = ""
    residual: bool = False
    x_layout: str = "k"
    w_layout: str = "k"
    gaps: tuple[int, int] = (0, 0)
    at_end: bool = False
    integers: bool = False  # small ones, for which every sum is exact
    seed: int = 0

    @property
    def gated(self) -> bool:
        return self.activation == "swiglu"


def operands(case: LinearProblem) -> Arrays:
    """x, w and the other arrays of the call."""
    rng = np.random.default_rng([case.seed, case.m, case.n, case.k])
    kind, out = KINDS[case.dtype], KINDS[case.out_dtype or case.dtype]

    def numbers(*shape: int) -> np.ndarray:
        drawn = rng.integers(-4, 5, shape) if case.integers else rng.standard_normal(shape)
        return drawn.astype(np.float32)

    def matrix(rows: int, columns: int, along_rows: bool, gap: int) -> np.ndarray:
        """[rows, columns] with `columns` contiguous, or `rows`."""
        lies = (columns, rows) if along_rows else (rows, columns)
        x = numbers(*lies).astype(kind)
        view = guarded(x, (lies[1] + gap) * kind.itemsize, case.at_end)
        return view.T if along_rows else view

    found = {
        "x": matrix(case.m, case.k, case.x_layout == "m", case.gaps[0]),
        "w": matrix(case.k, case.n, case.w_layout == "k", case.gaps[1]),
    }
    if case.gated:
        found["up"] = matrix(case.k, case.n, case.w_layout == "k", case.gaps[1])
    if case.bias:
        for name in ("bias", "up_bias")[: 1 + case.gated]:
            found[name] = numbers(case.n).astype(KINDS[case.bias])
    if case.residual:
        found["residual"] = numbers(case.m, case.n).astype(out)
    return found


def activated(activation: str, h: np.ndarray, u: np.ndarray | None = None) -> np.ndarray:
    """The activation of h, or of h and u, in float64."""
    return activate("silu", h) * u if activation == "swiglu" else activate(activation or None, h)


def _double(x: Any) -> np.ndarray:
    return np.asarray(x).astype(np.float64)


def _product(x: np.ndarray, w: np.ndarray, bias: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """x w + bias in float64, and the error bound of float32 sums in any order."""
    x, w = _double(x), _double(w)
    sizes = np.abs(x) @ np.abs(w) + (0.0 if bias is None else np.abs(_double(bias)))
    return x @ w + (0.0 if bias is None else _double(bias)), (x.shape[1] + 4) * _U * sizes


def linear(case: LinearProblem, arrays: Arrays) -> tuple[Arrays, Arrays]:
    """out, pre and pre_up in float64, and a kernel's error bound for each."""
    h, error = _product(arrays["x"], arrays["w"], arrays.get("bias"))
    want, bound = {"pre": h}, {"pre": error}
    if case.gated:
        u, of_u = _product(arrays["x"], arrays["up"], arrays.get("up_bias"))
        want["pre_up"], bound["pre_up"] = u, of_u
        silu = activate("silu", h)
        out, error = silu * u, 1.2 * error * np.abs(u) + np.abs(silu) * of_u + error * of_u + 16 * _U * np.abs(silu * u)
    else:
        out = activate(case.activation or None, h)
        if case.activation:
            error = 1.2 * error + 16 * _U * (np.abs(h) + np.abs(out))
    if "residual" in arrays:
        residual = _double(arrays["residual"])
        out, error = out + residual, error + _U * (np.abs(out) + np.abs(residual))
    want["out"], bound["out"] = out, error
    rounding, least = (table[case.out_dtype or case.dtype] for table in (_ROUNDING, _LEAST))
    return want, {name: bound[name] + rounding * (np.abs(x) + bound[name]) + least for name, x in want.items()}


def upstream(case: LinearProblem, arrays: Arrays, gap: int = 0) -> tuple[np.ndarray, Arrays]:
    """Random dout with `gap` elements between its rows, and the pre-activations as the forward pass rounds them."""
    kind = KINDS[case.dtype]
    dout = np.random.default_rng(case.seed + 1).standard_normal((case.m, case.n)).astype(kind)
    want, _ = linear(case, arrays)
    saved = {name: x.astype(kind) for name, x in want.items() if name != "out" and case.activation}
    return guarded(dout, (case.n + gap) * kind.itemsize, case.at_end), saved


def gradients(case: LinearProblem, arrays: Arrays, dout: np.ndarray, saved: Arrays) -> tuple[Arrays, Arrays]:
    """Gradients of `arrays` in float64, from the rounded pre-activations, and a kernel's error bounds."""
    u, least = _ROUNDING[case.dtype], _LEAST[case.dtype]
    x, w, dout = _double(arrays["x"]), _double(arrays["w"]), _double(dout)
    h = _double(saved["pre"]) if case.activation else np.zeros_like(dout)
    if case.gated:
        v = _double(saved["pre_up"])
        slopes = {"": v * slope("silu", h), "up": activate("silu", h)}
        sizes = {"": np.abs(v) * (1.0 + np.abs(h)), "up": np.abs(h)}
    else:
        slopes, sizes = {"": slope(case.activation or None, h)}, {"": 1.0 + np.abs(h)}
    of = {"": ("w", "bias"), "up": ("up", "up_bias")}
    want: Arrays = {"dx": np.zeros_like(x)}
    bound: Arrays = {"dx": np.zeros_like(x)}
    for which, steepness in slopes.items():
        weight, bias = of[which]
        dh = dout * steepness
        # dh is computed in float32, from slopes whose terms may cancel, and rounded if there is an activation.
        error = np.abs(dout) * sizes[which] * 32 * _U if case.activation else np.zeros_like(dh)
        rounded = error + (u * np.abs(dh) + least if case.activation else 0.0)
        w = _double(arrays[weight])
        for name, a, b, of_b in (("dx", w.T, dh, rounded), (f"d{weight}", x.T, dh, rounded)):
            if name == "dx":
                want[name] = want[name] + b @ a
                bound[name] = bound[name] + of_b @ np.abs(a) + 2 * (case.n + 4) * _U * (np.abs(b) @ np.abs(a))
            else:
                want[name] = a @ b
                bound[name] = np.abs(a) @ of_b + (case.m + 4) * _U * (np.abs(a) @ np.abs(b))
        if bias in arrays:
            want[f"d{bias}"] = dh.sum(0)
            bound[f"d{bias}"] = error.sum(0) + rounded.sum(0) + (case.m + 4) * _U * np.abs(dh).sum(0)
    if "residual" in arrays:
        want["dresidual"], bound["dresidual"] = dout, np.zeros_like(dout)
    for name, x in want.items():
        dtype = case.bias if name in ("dbias", "dup_bias") else case.dtype
        if name != "dresidual":
            bound[name] = bound[name] + _ROUNDING[dtype] * (np.abs(x) + bound[name]) + _LEAST[dtype]
    return want, bound


def check_near(got: Arrays, want: Arrays, bound: Arrays) -> None:
    """Check that every requested result is within its bound."""
    assert got
    for name, x in got.items():
        off = np.abs(_double(x) - want[name])
        inside = off <= bound[name]
        if not inside.all():
            at = tuple(np.argwhere(~inside)[0])
            found = f"{_double(x)[at]} instead of {want[name][at]}, allowed {bound[name][at]:.3g}"
            raise AssertionError(f"{name}{list(map(int, at))} is off: {found}")
