"""`fa_int8_quantized` run on the CPU, thread by thread, against float64 attention on the arrays its integers stand for.

Sums of integers are exact, so what separates the two is what 16 bits take off weights and results.
"""

from __future__ import annotations

import ctypes
from dataclasses import replace

import numpy as np
import pytest
from test_emulated import library, pytestmark, run_case  # noqa: F401

from qflash import NoKernelError, _native
from qflash.frontends.numpy import describe
from qflash.ops.attention import ATTENTION_INT8, call_of
from qflash.testing import Case
from qflash.testing.quantized import CASES, FEW, QuantizedCase, check_meant

KERNEL = "fa_int8_quantized"


def run(library, case: QuantizedCase, arch: int = 90, seed: int = 0, change=(), without: str = ""):  # noqa: F811
    """(out, lse), both full of a value no kernel writes before the call. `change`, `without`: fields to spoil."""
    q, k, v, kv_lens = case.inputs()
    arrays, words = call_of(q, k, v, case.options, kv_lens, None, True)
    described = [
        None if x is None else describe(name, x) for name, x in zip(ATTENTION_INT8.arrays, arrays, strict=True)
    ]
    plan = ATTENTION_INT8.plan(*described, *words)
    plan = replace(
        plan,
        fields=tuple({**dict(plan.fields), **dict(change)}.items()),
        operands=tuple(operand for operand in plan.operands if operand.field != without),
    )
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


def test_fa_int8_gives_the_bits_of_arrays_quantized_beforehand(library):  # noqa: F811
    case = Case("bits", 40, 70, 4, 2, dtype="float16", causal=True, seed=6)
    out, _ = run(library, QuantizedCase(case, "groups"))
    want, _ = run_case(library, case, "fa_int8")
    assert out.tobytes() == want.tobytes()


def test_what_the_kernel_does_not_serve_is_refused(library):  # noqa: F811
    """By the C entry too: a stored program may come past the front ends."""
    case = QuantizedCase(Case("refused", 8, 40, 1, 1, dtype="float16"), "wide_groups")
    with pytest.raises(NoKernelError):
        run(library, case, change={"k_scales.group": 24})
    with pytest.raises(NoKernelError):
        run(library, replace(case, mode="zero_points"), without="k_scales.sums")
