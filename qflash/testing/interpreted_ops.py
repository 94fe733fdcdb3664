"""Functions other than attention for tests in Triton's interpreter, which its process can import (interpreted.py)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from qflash.call.op import Op
from qflash.frontends.numpy import describe
from qflash.ops import rows
from qflash.ops.linear import LINEAR_INT8
from qflash.ops.linear_weights import quantize_linear, quantized_rows
from qflash.ops.matmul import INT8_MATMUL
from qflash.ops.rope import ROPE
from qflash.rotary import Rope
from qflash.testing import interpreted
from qflash.testing.case import Case
from qflash.testing.emulator import poisoned
from qflash.testing.linear_calls import forward, spec_of
from qflash.testing.linear_problems import Arrays, LinearProblem, operands
from qflash.testing.rows import RowCase
from qflash.testing.runner import planned


def softmax(case: RowCase, scale: float = 1.0) -> np.ndarray:
    """softmax of a matrix with its layout in memory."""
    x = case.make()
    out = poisoned(x.size * x.itemsize).view(x.dtype).reshape(x.shape)
    plan = rows.SOFTMAX.plan(replace(describe("x", x), device="cuda"), scale, "triton_softmax")
    strides = {"x_stride": x.strides[0] // x.itemsize, "out_stride": x.shape[1]}
    plan = replace(plan, fields=tuple((dict(plan.fields) | strides).items()))
    interpreted.launch(plan, [x, out])
    return out


def regions(case: Case, kernel: str) -> dict[str, np.ndarray]:
    """The regions of the workspace after attention, as bytes."""
    plan, arrays = planned(case, case.make_inputs(), kernel, "cuda")
    results = [np.zeros(result.shape, result.dtype) for result in plan.results]
    return interpreted.launch(plan, [*(arrays[operand.argument] for operand in plan.operands), *results])


def page_table(case: Case, kernel: str) -> np.ndarray:
    """The page table of a case on pages."""
    _, arrays = planned(case, case.make_inputs(), kernel, "cuda")
    return np.array(arrays["kv.page_table"])


def run(op: Op, arrays: tuple[Any, ...], words: tuple[Any, ...]) -> np.ndarray:
    """The first result of an operation on NumPy arrays, as if they were on a GPU."""
    described = (None if x is None else replace(describe("x", x), device="cuda") for x in arrays)
    plan = op.plan(*described, *words)
    results = [np.full(one.shape, 77, one.dtype) for one in plan.results]
    given = dict(zip(op.arrays, arrays, strict=True))
    interpreted.launch(plan, [*(given[operand.argument] for operand in plan.operands), *results])
    return results[0]


def linear(problem: LinearProblem, pad: int = 0, keep_pre: bool = False, arch: int = interpreted.ARCH) -> Arrays:
    """The results of a linear layer on its operands in their layout."""
    call = forward(problem, operands(problem), pad, keep_pre)
    spec = replace(spec_of("triton_linear", problem, arch), layout=problem.w_layout)
    interpreted.launch_struct("triton_linear", spec, call.struct, {**call.numbers, **call.arrays})
    return call.results(call.memory)


def rope(x: np.ndarray, of: Rope, positions: np.ndarray | None = None, inverse: bool = False) -> np.ndarray:
    """x rotated, or with the rotation inverted."""
    return run(ROPE, (x, of.cos, of.sin, positions, of.positions_k), (of.interleaved, inverse, "triton_rope"))


def int8_linear(x: np.ndarray, w: np.ndarray, bias: np.ndarray | None, activation: str | None = None) -> np.ndarray:
    """qflash.linear of precision "int8": x and the columns of w are quantized in the same way."""
    layer = quantize_linear(w)
    values, scale = quantized_rows("linear", x)
    return run(
        LINEAR_INT8,
        (values, layer.values, bias, None, scale, layer.scale),
        (activation, x.dtype.name, "triton_linear"),
    )


def int8_sums(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """qflash.int8_matmul: exact sums."""
    return run(INT8_MATMUL, (a, b, None, None, None), ("int32", "triton_linear"))
