"""`fa_int8_quantized` run on the CPU, thread by thread, against float64 attention on the arrays its integers stand for.

Sums of integers are exact, so what separates the two is what 16 bits take off weights and results.
"""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from test_emulated import library, pytestmark  # noqa: F401

from qflash import _native
from qflash.frontends.numpy import describe
from qflash.ops.attention import ATTENTION_INT8, call_of
from qflash.testing.quantized import CASES, FEW, QuantizedCase, check_meant

KERNEL = "fa_int8_quantized"


def run(library, case: QuantizedCase, arch: int = 90, seed: int = 0):  # noqa: F811
    """(out, lse), both full of a value no kernel writes before the call."""
    q, k, v, kv_lens = case.inputs()
    arrays, words = call_of(q, k, v, case.options, kv_lens, None, True)
    described = [
        None if x is None else describe(name, x) for name, x in zip(ATTENTION_INT8.arrays, arrays, strict=True)
    ]
    plan = ATTENTION_INT8.plan(*described, *words)
    by_name = dict(zip(ATTENTION_INT8.arrays, arrays, strict=True))
    results = [np.full(result.shape, 12345.0, result.dtype) for result in plan.results]
    operands = [
        np.ascontiguousarray(by_name[x.argument]) if x.contiguous else by_name[x.argument] for x in plan.operands
    ]
    handle = library(KERNEL, case.case.dtype, case.case.head_dim, arch)
    functions = (getattr(handle, name) for name in (f"qf_{KERNEL}", "qf_status_text"))
    entry, text = (ctypes.cast(function, ctypes.c_void_p).value for function in functions)
    call = _native.OpCall(plan.struct, plan.params(), list(plan.pointers), entry, text, 0)
    call(*(x.ctypes.data for x in (*operands, *results)), 0, 0, seed)
    return results


def check(library, case: QuantizedCase, arch: int = 90) -> None:  # noqa: F811
    first = run(library, case, arch, seed=1)
    check_meant(case, *first)
    second = run(library, case, arch, seed=2)
    assert all(x.tobytes() == y.tobytes() for x, y in zip(first, second, strict=True))


@pytest.mark.parametrize("case", FEW, ids=str)
def test_modes(library, case):  # noqa: F811
    check(library, case)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_mode_on_every_problem(library, case):  # noqa: F811
    check(library, case)
