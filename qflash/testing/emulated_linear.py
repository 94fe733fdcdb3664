"""Linear-layer kernels in the emulator."""

from __future__ import annotations

import numpy as np

from qflash.backends import cuda
from qflash.dispatch import BY_NAME, VARIANTS
from qflash.jit.cache import Cache
from qflash.testing import emulator
from qflash.testing.linear_calls import LinearCall, backward, forward, spec_of
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

MANY = emulator.MOST_MULTIPROCESSORS  # problems of few tiles are small for such a GPU


def _library(cache: Cache, kernel: str, problem: LinearProblem, arch: int) -> emulator.Library:
    return emulator.load(cuda.unit(BY_NAME[kernel], spec_of(kernel, problem, arch)), cache)


def _launch(library: emulator.Library, call: LinearCall, seed: int, multiprocessors: int) -> Arrays:
    library.launch_struct(call.struct, {**call.numbers, **call.arrays}, seed, multiprocessors)
    return call.results(call.memory)


def run_linear(
    cache: Cache,
    kernel: str,
    problem: LinearProblem,
    *,
    arch: int = emulator.ARCH,
    seed: int = 1,
    multiprocessors: int = MANY,
    pad: int = 0,
    keep_pre: bool = False,
    given: Arrays | None = None,
) -> tuple[Arrays, Arrays]:
    """(operands, results) of a call. pad: elements between the rows of out; given: the operands."""
    arrays = operands(problem) if given is None else given
    call = forward(problem, arrays, pad, keep_pre)
    return arrays, _launch(_library(cache, kernel, problem, arch), call, seed, multiprocessors)


def run_gradients(
    cache: Cache,
    problem: LinearProblem,
    arrays: Arrays,
    dout: np.ndarray,
    saved: Arrays,
    *,
    kernel: str = "linear_bwd",
    arch: int = emulator.ARCH,
    seed: int = 1,
    multiprocessors: int = MANY,
    wanted: tuple[str, ...] | None = None,
) -> Arrays:
    """Gradients of a call: of all its arrays, or of those in `wanted`."""
    call = backward(problem, arrays, dout, saved, wanted)
    return _launch(_library(cache, kernel, problem, arch), call, seed, multiprocessors)


def check_tile(cache: Cache, kernel: str) -> None:
    """Check a small problem that the kernel supports: more rows, columns and k than a tile has, and a full epilogue."""
    row = BY_NAME[kernel]
    dtype = next(dtype for dtype in reversed(row.dtypes) if dtype in KINDS)
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
