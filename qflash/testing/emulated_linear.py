"""Kernels of linear layers on the emulator, called by their C structs: any strides, any outputs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from qflash.backends import cuda
from qflash.call.spec import ACTIVATIONS, OP_DTYPES
from qflash.dispatch import BY_NAME, VARIANTS
from qflash.jit.cache import Cache
from qflash.testing import emulator
from qflash.testing.linear_problems import (
    KINDS,
    Arrays,
    LinearProblem,
    check_near,
    gradients,
    linear,
    operands,
    upstream,
)

_POISON = 113  # what outputs are full of before


def library(cache: Cache, kernel: str, dtype: str, activation: str = "", arch: int = emulator.ARCH) -> emulator.Library:
    """The library of a kernel for an activation."""
    spec = replace(VARIANTS[kernel].spec(arch, dtype), activation=activation)
    return emulator.load(cuda.unit(BY_NAME[kernel], spec), cache)


def strides(x: np.ndarray, names: tuple[str, str]) -> dict[str, int]:
    """A matrix's strides in elements. NumPy has none for no elements; front ends say it so."""
    found = (x.shape[1], 1) if 0 in x.shape else (s // x.itemsize for s in x.strides)
    return dict(zip(names, found, strict=True))


def poisoned(shape: tuple[int, ...], dtype: str, pad: int = 0) -> np.ndarray:
    """Rows of a matrix, `pad` elements apart, all of a value that no kernel writes."""
    return np.full((*shape[:-1], shape[-1] + pad), _POISON, KINDS[dtype])


def run_linear(
    cache: Cache,
    kernel: str,
    case: LinearProblem,
    *,
    arch: int = emulator.ARCH,
    seed: int = 1,
    multiprocessors: int = emulator.MOST_MULTIPROCESSORS,
    pad: int = 0,
    keep_pre: bool = False,
    given: Arrays | None = None,
) -> tuple[Arrays, Arrays]:
    """(operands, results) of a call on the emulator. pad: elements between the rows of out; given: the operands."""
    arrays = operands(case) if given is None else given
    out_dtype = case.out_dtype or case.dtype
    memory = poisoned((case.m, case.n), out_dtype, pad)
    fields: dict[str, Any] = {
        "dtype": OP_DTYPES.index(case.dtype),
        "out_dtype": OP_DTYPES.index(out_dtype),
        "bias_dtype": OP_DTYPES.index(case.bias or "float32"),
        "activation": ACTIVATIONS.index(case.activation),
        **{"m": case.m, "n": case.n, "k": case.k, "out": memory, "out_stride_m": case.n + pad},
        **strides(arrays["x"], ("x_stride_m", "x_stride_k")),
        **strides(arrays["w"], ("w_stride_k", "w_stride_n")),
        **arrays,
    }
    if case.gated:
        fields |= strides(arrays["up"], ("up_stride_k", "up_stride_n"))
    if case.residual:
        fields["residual_stride_m"] = case.n
    results = {"out": memory[:, : case.n]}
    if keep_pre:
        results |= {name: poisoned((case.m, case.n), out_dtype) for name in ("pre", "pre_up")[: 1 + case.gated]}
        fields |= {name: results[name] for name in results if name != "out"}
    found = library(cache, kernel, case.dtype, case.activation, arch)
    found.launch_struct("QfLinearParams", fields, seed, multiprocessors)
    assert (memory[:, case.n :] == memory.dtype.type(_POISON)).all(), "out has gaps between its rows"
    return arrays, results


def check_tile(cache: Cache, kernel: str) -> None:
    """A small problem that the kernel serves: more rows, columns and k than a tile has, all that may follow the sums."""
    row = BY_NAME[kernel]
    dtype = row.dtypes[-1]
    if row.op == "linear_backward":
        problem = LinearProblem(130, 140, 70, dtype, "swiglu", bias="float32", residual=True)
        arrays = operands(problem)
        dout, saved = upstream(problem, arrays)
        got = run_gradients(cache, problem, arrays, dout, saved, kernel=kernel)
        check_near(got, *gradients(problem, arrays, dout, saved))
        return
    activation = VARIANTS[kernel].spec(emulator.ARCH, dtype).activation
    problem = LinearProblem(130, 140, 70, dtype, activation, bias=dtype, residual=True)
    arrays, got = run_linear(cache, kernel, problem, keep_pre=True)
    check_near(got, *linear(problem, arrays))


def run_gradients(
    cache: Cache,
    case: LinearProblem,
    arrays: Arrays,
    dout: np.ndarray,
    saved: Arrays,
    *,
    kernel: str = "linear_bwd",
    arch: int = emulator.ARCH,
    seed: int = 1,
    multiprocessors: int = emulator.MOST_MULTIPROCESSORS,
    wanted: tuple[str, ...] | None = None,
) -> Arrays:
    """Gradients of a call on the emulator: of all its arrays, or those that are wanted."""
    shapes = {"dx": (case.m, case.k), "dw": (case.k, case.n), "dup": (case.k, case.n), "dbias": (case.n,),
              "dup_bias": (case.n,), "dresidual": (case.m, case.n)}  # fmt: skip
    results = {
        name: poisoned(shape, case.bias if name.endswith("bias") else case.dtype)
        for name, shape in shapes.items()
        if name[1:] in arrays and (wanted is None or name in wanted)
    }
    fields: dict[str, Any] = {
        "dtype": OP_DTYPES.index(case.dtype),
        "bias_dtype": OP_DTYPES.index(case.bias or "float32"),
        "activation": ACTIVATIONS.index(case.activation),
        **{"m": case.m, "n": case.n, "k": case.k, "dout": dout, "x": arrays["x"], "w": arrays["w"]},
        "dout_stride_m": strides(dout, ("m", "n"))["m"],
        "x_stride_m": strides(arrays["x"], ("m", "k"))["m"],
        **strides(arrays["w"], ("w_stride_k", "w_stride_n")),
        **(saved if case.activation else {}),
        **results,
    }
    if case.gated:
        fields |= {"up": arrays["up"], **strides(arrays["up"], ("up_stride_k", "up_stride_n"))}
    found = library(cache, kernel, case.dtype, "", arch)
    found.launch_struct("QfLinearBwdParams", fields, seed, multiprocessors)
    return results
