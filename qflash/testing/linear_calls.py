"""Calls of linear-layer kernels by their C structs: any strides, any outputs, on any machine."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from qflash.call.spec import ACTIVATIONS, OP_DTYPES, Spec
from qflash.dispatch import VARIANTS
from qflash.testing.linear_problems import KINDS, Arrays, LinearProblem

_POISON = 113  # fills results beforehand


@dataclass(frozen=True)
class LinearCall:
    """A struct, its numbers, and the arrays that its pointers refer to, including results."""

    struct: str
    numbers: dict[str, int]
    arrays: Arrays
    memory: Arrays  # of the results, with the gaps between their rows

    def results(self, memory: Arrays) -> Arrays:
        """The results in `memory` after the call. Checks that gaps between rows were not written to."""
        found = {}
        for name, whole in memory.items():
            columns = self.arrays[name].shape[-1]
            gaps = whole[..., columns:]
            assert (gaps == whole.dtype.type(_POISON)).all(), f"{name} has gaps between its rows"
            found[name] = whole[..., :columns]
        return found


def spec_of(kernel: str, problem: LinearProblem, arch: int) -> Spec:
    """The Spec of a problem's library."""
    spec = VARIANTS[kernel].spec(arch, problem.dtype)
    return replace(spec, activation=problem.activation) if spec.op == "linear" else spec


def _strides(x: np.ndarray, *names: str) -> dict[str, int]:
    """A matrix's strides in elements. NumPy has none for empty arrays; these are those that front ends use."""
    found = (x.shape[1], 1) if 0 in x.shape else (s // x.itemsize for s in x.strides)
    return dict(zip(names, found, strict=True))


def _poisoned(shape: tuple[int, ...], dtype: str, pad: int = 0) -> np.ndarray:
    return np.full((*shape[:-1], shape[-1] + pad), _POISON, KINDS[dtype])


def forward(problem: LinearProblem, arrays: Arrays, pad: int = 0, keep_pre: bool = False) -> LinearCall:
    """The layer itself. pad: elements between the rows of out."""
    shape, out_dtype = (problem.m, problem.n), problem.out_dtype or problem.dtype
    memory = {"out": _poisoned(shape, out_dtype, pad)}
    if keep_pre:
        memory |= {name: _poisoned(shape, out_dtype) for name in ("pre", "pre_up")[: 1 + problem.gated]}
    numbers = {
        "dtype": OP_DTYPES.index(problem.dtype),
        "out_dtype": OP_DTYPES.index(out_dtype),
        "bias_dtype": OP_DTYPES.index(problem.bias or "float32"),
        "activation": ACTIVATIONS.index(problem.activation),
        **{"m": problem.m, "n": problem.n, "k": problem.k, "out_stride_m": problem.n + pad},
        **_strides(arrays["x"], "x_stride_m", "x_stride_k"),
        **_strides(arrays["w"], "w_stride_k", "w_stride_n"),
        "residual_stride_m": problem.n,
    }
    if problem.gated:
        numbers |= _strides(arrays["up"], "up_stride_k", "up_stride_n")
    results = {name: whole[:, : problem.n] for name, whole in memory.items()}
    return LinearCall("QfLinearParams", numbers, arrays | results, memory)


def backward(
    problem: LinearProblem, arrays: Arrays, dout: np.ndarray, saved: Arrays, wanted: tuple[str, ...] | None = None
) -> LinearCall:
    """Gradients of all the layer's inputs, or of those in `wanted` ("dx", "dw", …)."""
    m, n, k = problem.m, problem.n, problem.k
    shapes = {"dx": (m, k), "dw": (k, n), "dup": (k, n), "dbias": (n,), "dup_bias": (n,), "dresidual": (m, n)}
    memory = {
        name: _poisoned(shape, problem.bias if name.endswith("bias") else problem.dtype)
        for name, shape in shapes.items()
        if name[1:] in arrays and (wanted is None or name in wanted)
    }
    numbers = {
        "dtype": OP_DTYPES.index(problem.dtype),
        "bias_dtype": OP_DTYPES.index(problem.bias or "float32"),
        "activation": ACTIVATIONS.index(problem.activation),
        **{"m": m, "n": n, "k": k},
        "dout_stride_m": _strides(dout, "m", "n")["m"],
        "x_stride_m": _strides(arrays["x"], "m", "k")["m"],
        **_strides(arrays["w"], "w_stride_k", "w_stride_n"),
    }
    if problem.gated:
        numbers |= _strides(arrays["up"], "up_stride_k", "up_stride_n")
    read = {name: arrays[name] for name in ("x", "w", "up") if name in arrays} | {"dout": dout}
    return LinearCall("QfLinearBwdParams", numbers, read | (saved if problem.activation else {}) | memory, memory)
