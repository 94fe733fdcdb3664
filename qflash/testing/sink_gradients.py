"""The gradient of sinks: a Case's plan and arrays, the float64 result, and a kernel's error bound."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from qflash import reference
from qflash.call.op import Plan
from qflash.ops import attention
from qflash.testing import oracle
from qflash.testing.case import Case
from qflash.testing.cases import cases
from qflash.testing.compare import GRADIENT_L2
from qflash.testing.runner import arrays_of, problem_of

CASES = [case for case in cases("full") if case.sinks]
QUICK = [case for case in CASES if case.q_len * max(case.k_len, 1) <= 6000 or case.packed]


def planned(case: Case, kernel: str, device: str = "cpu") -> tuple[Plan, dict[str, Any]]:
    """The plan of all gradients of a case, with that of sinks last, and its arrays; out and lse are the oracle's."""
    inputs = case.make_inputs()
    want = oracle.expected(case)
    dout, dlse = case.make_gradients()
    arrays = arrays_of(inputs) | {"dout": dout, "dlse": dlse}
    arrays |= {"out": want.out.astype(case.dtype), "lse": want.lse.astype(np.float32)}
    plan = attention.plan_of_backward(problem_of(case, inputs, None, device), arrays, True, True)
    return replace(plan, kernel=kernel), arrays


def check_sink_gradient(case: Case, dsinks: np.ndarray) -> None:
    """Check the contract's bound for gradients, relative to the sum of the magnitudes of the rows' terms."""
    inputs, (dout, dlse) = case.make_inputs(), case.make_gradients()
    words = {**case.options(), "kv_lens": inputs.kv_lens, "rope": inputs.rope, "sinks": inputs.sinks}
    words["cu_seqlens"] = (inputs.cu_seqlens_q, inputs.cu_seqlens_k) if case.packed else None
    want = reference.sink_gradient(inputs.q, inputs.k, inputs.v, dout, dlse, **words)
    # |out| is at most the largest |v|, so rows add at most weight (|dlse| + max |v| sum |dout|) each.
    sizes = [np.abs(np.asarray(x, np.float64)) for x in (dout, dlse)]
    ones = np.full(inputs.v.shape, -1.0)  # out . dout of these is minus the sum of |dout|, in rows that see any keys
    size = reference.sink_gradient(inputs.q, inputs.k, ones, sizes[0], sizes[1], **words)
    bound = GRADIENT_L2[case.dtype] * np.where(np.isfinite(size), size, 0) + 1e-30
    got = dsinks.astype(np.float64)
    wrong = ~(np.abs(got - want) <= bound) & ~(np.isnan(got) & np.isnan(want)) & ~(got == want)
    assert got.dtype == want.dtype and not wrong.any(), f"{case.name}: dsinks is {got}, exactly {want}, within {bound}"
