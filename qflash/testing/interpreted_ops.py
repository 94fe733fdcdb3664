"""What tests ask of Triton's interpreter beside attention: functions that its process can import (interpreted.py)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from qflash.frontends.numpy import describe
from qflash.ops import rows
from qflash.testing import interpreted
from qflash.testing.case import Case
from qflash.testing.emulator import poisoned
from qflash.testing.rows import RowCase
from qflash.testing.runner import planned


def softmax(case: RowCase, scale: float = 1.0) -> np.ndarray:
    """softmax of a matrix as it lies in memory."""
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
    """The page table that a case on pages has."""
    _, arrays = planned(case, case.make_inputs(), kernel, "cuda")
    return np.array(arrays["kv.page_table"])
