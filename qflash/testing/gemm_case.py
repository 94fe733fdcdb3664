"""A linear layer in the form of its C struct: arrays in memory with gaps and misalignment, poisoned results, and their
float64 reference. For kernels that are called by their struct, in the emulator."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes  # noqa: F401  (registers the name "bfloat16" with NumPy)
import numpy as np

from qflash.call.spec import ACTIVATIONS, OP_DTYPES
from qflash.testing.compare import ContractError
from qflash.testing.emulator import Library
from qflash.testing.linear_problems import activated

POISON = 0xA5  # every byte of results, and of the gaps between rows
GELU_ERROR = 1e-4  # absolute, of the activation (docs/numerics.md)
# In units in the last place, where a result is rounded once: a half, and what the float32 arithmetic before may add.
ROUNDING = {"float32": 0.0, "float16": 0.51 * 2.0**-10, "bfloat16": 0.51 * 2.0**-7}


def in_memory(x: np.ndarray, along: int = 1, gap: int = 0, offset: int = 0) -> np.ndarray:
    """x in its own memory: dimension `along` contiguous, `gap` elements between rows, `offset` elements past a multiple
    of 256 bytes. The rest is poison."""
    rows, width = (x.shape[1 - along], x.shape[along])
    stride = width + gap
    memory = np.full(rows * stride * x.itemsize + 512, POISON, np.uint8)
    start = -memory.ctypes.data % 256 + offset * x.itemsize
    whole = memory[start : start + rows * stride * x.itemsize].view(x.dtype).reshape(rows, stride)
    whole[:, :width] = x if along == 1 else x.T
    return whole[:, :width] if along == 1 else whole[:, :width].T


def same_poison(x: np.ndarray) -> bool:
    """Whether only x, made by `in_memory`, was written to."""
    memory = x.base
    while memory.base is not None and isinstance(memory.base, np.ndarray):
        memory = memory.base
    own = np.zeros(len(memory), bool)
    first = x.ctypes.data - memory.ctypes.data
    for i in range(x.shape[0]):
        own[first + i * x.strides[0] : first + i * x.strides[0] + x.shape[1] * x.itemsize] = True
    return bool((memory[~own] == POISON).all())


@dataclass(frozen=True)
class GemmCase:
    """m, n, k, and all other fields of the struct that describe a problem."""

    m: int
    n: int
    k: int
    dtype: str = "bfloat16"  # of x and w
    out_dtype: str = ""  # "": dtype, or int32 for integers
    activation: str = ""
    x_along: str = "k"  # the contiguous dimension
    w_along: str = "k"
    bias: str = ""  # its dtype; "": none
    scales: str = ""  # of integers: "each", "one", "" (none)
    residual: bool = False
    pre: bool = False
    gaps: tuple[int, int, int] = (0, 0, 0)  # elements between rows of x; of w and up; of out and residual
    offsets: tuple[int, int, int] = (0, 0, 0)  # elements by which the same arrays are offset
    plant: tuple[tuple[str, tuple[int, int], float], ...] = ()  # (array, place, value)
    multiprocessors: int = 2  # of the emulated GPU; kernels choose tiles by it
    seed: int = 0
    results: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        if not self.out_dtype:
            object.__setattr__(self, "out_dtype", "int32" if self.dtype == "int8" else self.dtype)
        kept = ("pre", "pre_up")[: 1 + (self.activation == "swiglu")] if self.pre else ()
        object.__setattr__(self, "results", ("out", *kept))

    @property
    def precision(self) -> str:
        """The precision in its Spec."""
        return "int8" if self.dtype == "int8" else "native"

    def arrays(self) -> dict[str, Any]:
        """Operands and poisoned results by the names of the struct's fields; None where there is none."""
        rng = np.random.default_rng([self.seed, self.m, self.n, self.k])
        two = self.activation == "swiglu"

        def matrix(rows: int, columns: int, scale: float = 1.0) -> np.ndarray:
            if self.dtype == "int8":
                return rng.integers(-128, 128, (rows, columns), np.int8)
            return (rng.standard_normal((rows, columns)) * scale).astype(self.dtype)

        given: dict[str, Any] = {"x": matrix(self.m, self.k)}
        given["w"] = matrix(self.k, self.n, 1 / math.sqrt(max(self.k, 1)))
        given["up"] = matrix(self.k, self.n, 1 / math.sqrt(max(self.k, 1))) if two else None
        integers = 1 / (73**2 * math.sqrt(max(self.k, 1)))  # so that scaled sums are about 1
        for name, size in (("x_scale", self.m), ("w_scale", self.n), ("up_scale", self.n)):
            wanted = self.scales and (name != "up_scale" or two)
            size = 1 if self.scales == "one" else size
            near = integers if name == "x_scale" else 1.0
            given[name] = (rng.uniform(0.5, 1.5, size) * near).astype(np.float32) if wanted else None
        for name in ("bias", "up_bias"):
            wanted = self.bias and (name == "bias" or two)
            given[name] = rng.standard_normal(self.n).astype(self.bias) if wanted else None
        residual = rng.standard_normal((self.m, self.n)).astype(self.out_dtype) if self.residual else None
        for name, place, value in self.plant:
            target = given[name] if name != "residual" else residual
            target[place if target.ndim == 2 else place[0]] = value
        (x_gap, w_gap, out_gap), (x_off, w_off, out_off) = self.gaps, self.offsets
        given["x"] = in_memory(given["x"], int(self.x_along == "k"), x_gap, x_off)
        for name in ("w", "up")[: 1 + two]:
            given[name] = in_memory(given[name], int(self.w_along == "n"), w_gap, w_off)
        given["residual"] = None if residual is None else in_memory(residual, 1, out_gap, out_off)
        poison = np.full((self.m, self.n * np.dtype(self.out_dtype).itemsize), POISON, np.uint8).view(self.out_dtype)
        for name in ("out", "pre", "pre_up"):
            wanted = name in self.results
            gap, off = (out_gap, out_off) if name == "out" else (0, 0)
            given[name] = in_memory(poison, 1, gap, off) if wanted else None
        return given

    def fields(self, arrays: Mapping[str, Any]) -> dict[str, Any]:
        """The fields of QfLinearParams, except for the workspace."""
        found: dict[str, Any] = {
            **arrays,
            "dtype": OP_DTYPES.index(self.dtype),
            "out_dtype": OP_DTYPES.index(self.out_dtype),
            "bias_dtype": OP_DTYPES.index(self.bias or "float32"),
            "activation": ACTIVATIONS.index(self.activation),
            **{"m": self.m, "n": self.n, "k": self.k},
        }
        for name, (rows, columns) in (("x", "mk"), ("w", "kn"), ("up", "kn")):
            if arrays[name] is not None:
                size, along = arrays[name].itemsize, self.x_along if name == "x" else self.w_along
                for dim, stride in zip((rows, columns), arrays[name].strides, strict=True):
                    found[f"{name}_stride_{dim}"] = 1 if dim == along else stride // size
        for name in ("out", "residual"):
            if arrays[name] is not None:
                found[f"{name}_stride_m"] = self.n + self.gaps[2]
        for name in ("x_scale", "w_scale", "up_scale"):
            found[f"{name}_stride"] = int(self.scales == "each")
        return found

    def wanted(self, arrays: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """The results in float64; int32 sums and scaled integers are rounded as in every engine."""

        def of(name: str) -> np.ndarray | None:
            return None if arrays[name] is None else np.asarray(arrays[name])

        def product(weight: str, scale: str, bias: str) -> np.ndarray:
            w = of(weight)
            assert w is not None
            if self.dtype != "int8":
                with np.errstate(invalid="ignore"):
                    h = np.asarray(arrays["x"], np.float64) @ w.astype(np.float64)
                    return h if of(bias) is None else h + of(bias).astype(np.float64)
            sums = np.asarray(arrays["x"], np.int32) @ w.astype(np.int32)
            if self.out_dtype == "int32":
                return sums
            x_scale = np.ones(1, np.float32) if of("x_scale") is None else of("x_scale")
            scaled = sums.astype(np.float32) * x_scale[:, None]  # rounded; the next is exact in float64, like an fma
            h = scaled.astype(np.float64) * (1.0 if of(scale) is None else of(scale))
            h = h + (0.0 if of(bias) is None else of(bias).astype(np.float64))
            return h.astype(np.float32).astype(np.float64)

        h = product("w", "w_scale", "bias")
        u = product("up", "up_scale", "up_bias") if self.activation == "swiglu" else np.zeros_like(h)
        if self.out_dtype == "int32":
            return {"out": h}
        with np.errstate(all="ignore"):
            out = activated(self.activation, h, u)
            if self.residual:
                out = out + np.asarray(arrays["residual"], np.float64)
        return {"out": out, "pre": h, "pre_up": u}

    def check(self, arrays: Mapping[str, Any]) -> None:
        """Check the results, and that nothing else was written. Raises ContractError."""
        wanted = self.wanted(arrays)
        # Sums of k products in float32, in any order: a valid bound, although it is never reached.
        x, w = (np.abs(np.nan_to_num(np.asarray(arrays[name], np.float64), posinf=0, neginf=0)) for name in ("x", "w"))
        summing = 0.0 if self.dtype == "int8" else 2.0**-24 * (8 + math.sqrt(self.k)) * (x @ w)
        if self.activation == "swiglu" and self.dtype != "int8":
            up = np.abs(np.asarray(arrays["up"], np.float64))
            summing = summing + 2.0**-24 * (8 + math.sqrt(self.k)) * (x @ up)
        for name in self.results:
            got, want = np.asarray(arrays[name]), wanted[name]
            if not same_poison(arrays[name]):
                raise ContractError(f"{name}: something was written beside it")
            if self.out_dtype == "int32":
                if not np.array_equal(got, want):
                    raise ContractError(f"{name}: {np.sum(got != want)} sums are wrong, first {_first(got != want)}")
                continue
            exact = self.dtype == "int8" and (not self.activation or name != "out") and not self.residual
            if exact:
                with np.errstate(over="ignore"):
                    rounded = want.astype(np.float32).astype(self.out_dtype)
                same = (got == rounded) | (np.isnan(got.astype(float)) & np.isnan(rounded.astype(float)))
                if not same.all():
                    raise ContractError(
                        f"{name}: {np.sum(~same)} results differ from the replay, first {_first(~same)}"
                    )
                continue
            with np.errstate(invalid="ignore"):
                far = np.abs(got.astype(np.float64) - want)
            large = np.abs(want) + (np.abs(np.asarray(arrays["residual"], np.float64)) if self.residual else 0)
            allowed = 4 * summing * np.maximum(1, large) + large * (ROUNDING[self.out_dtype] + 2.0**-21) + 1e-6
            if self.out_dtype == "float16":
                allowed = allowed + 2.0**-25
            polynomial = self.activation == "gelu" or (self.activation == "gelu_tanh" and self.out_dtype != "float32")
            if polynomial and name == "out":
                allowed = allowed + GELU_ERROR
            with np.errstate(invalid="ignore"):
                bad = (far > allowed) | (np.isnan(got.astype(float)) != np.isnan(want))
                bad &= ~((got == want) | (np.isnan(got.astype(float)) & np.isnan(want)))
            if bad.any():
                at = _first(bad)
                raise ContractError(
                    f"{name}: {np.sum(bad)} of {bad.size} results are off, the first at {at}: {got[at]} instead of "
                    f"{want[at]} (allowed: {allowed[at]:.3g} apart)"
                )


def run(library: Library, case: GemmCase, seed: int = 0) -> dict[str, Any]:
    """The arrays of a case, with the results that a kernel's library computed under a schedule."""
    arrays = case.arrays()
    library.launch_struct("QfLinearParams", case.fields(arrays), seed, case.multiprocessors)
    return arrays


def check_same_bits(case: GemmCase, first: Mapping[str, Any], second: Mapping[str, Any]) -> None:
    """Check that two runs have the same bits. Raises ContractError."""
    for name in case.results:
        one, other = (np.ascontiguousarray(arrays[name]).view(np.uint8) for arrays in (first, second))
        if not np.array_equal(one, other):
            raise ContractError(f"{name}: bits differ from run to run")


def _first(wrong: np.ndarray) -> tuple[int, ...]:
    return tuple(int(i) for i in np.argwhere(wrong)[0])
