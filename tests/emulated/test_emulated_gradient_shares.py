"""Shares of gradients by the backward kernels' own source on the CPU: keys in two parts, each with the out and lse of
both. Rows that see few keys of a part are the ones to look at: what such rows do with P and dP of all keys, they must
not do with those of some."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from qflash import dispatch
from qflash.dispatch import VARIANTS
from qflash.ops.attention import plan_of_backward
from qflash.testing.case import Case
from qflash.testing.compare import check_gradients
from qflash.testing.emulated_attention import UNTOUCHED
from qflash.testing.emulator import ARCH
from qflash.testing.oracle import expected
from qflash.testing.runner import arrays_of, problem_of, suited
from qflash.testing.sink_gradients import check_sink_gradient

KERNELS = [row.name for row in dispatch.kernels_of("attention_backward", "cuda") if row.sinks]
CUT = 12  # keys of the first part


def share(library, whole: Case, part: Case, kernel: str) -> list[np.ndarray]:
    """The gradients of the last keys of a case, as many as `part` has, or of the first, where part has no sinks."""
    inputs, want = whole.make_inputs(), expected(whole)
    keys = slice(whole.k_len - part.k_len, None) if part.sinks else slice(0, part.k_len)
    dout, dlse = whole.make_gradients()
    lens = None if part.kv_lens is None else np.array(part.kv_lens, np.int32)
    sinks = inputs.sinks if part.sinks else None
    some = replace(inputs, k=inputs.k[:, keys], v=inputs.v[:, keys], kv_lens=lens, sinks=sinks)
    arrays = arrays_of(some) | {"dout": dout, "dlse": dlse}
    arrays |= {"out": want.out.astype(whole.dtype), "lse": want.lse.astype(np.float32)}
    plan = plan_of_backward(problem_of(part, some, None, "cuda"), arrays, True, bool(part.sinks), partial=True)
    plan = replace(plan, kernel=kernel)
    results = [np.full(result.shape, UNTOUCHED, result.dtype) for result in plan.results]
    compiled = library(kernel, whole.dtype, whole.head_dim, ARCH)
    operands = (arrays[operand.argument] for operand in plan.operands)
    compiled.launch(compiled.prepare(plan, VARIANTS[kernel]), (*operands, *results), 0)
    return results


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("causal", [False, True])
def test_shares_add_up(library, kernel, causal):
    """Queries are the last 12 of 24 tokens: all see the first 12, and of the last 12 those that a mask leaves."""
    case = Case("shares", CUT, 2 * CUT, 2, 1, 64, causal=causal, dtype="bfloat16", sinks=("0.5", "-1"))
    case = suited(case, kernel, ARCH)
    first = share(library, case, replace(case, k_len=CUT, causal=False, sinks=None), kernel)
    last = share(library, case, replace(case, k_len=CUT), kernel)
    dq = (first[0].astype(np.float32) + last[0].astype(np.float32)).astype(case.dtype)
    dk, dv = (np.concatenate([first[at], last[at]], 1) for at in (1, 2))
    check_gradients(case, dq, dk, dv)
    check_sink_gradient(case, last[3])


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_sink_counts_where_its_rows_see_keys_of_another_part_alone(library, kernel):
    case = suited(Case("elsewhere", CUT, 2 * CUT, 2, 1, 64, kv_lens=(CUT,), sinks=("0.5", "-1")), kernel, ARCH)
    results = share(library, case, replace(case, k_len=CUT, kv_lens=(0,)), kernel)  # no key of the last part exists
    assert not any(x.astype(np.float32).any() for x in results[:3])
    check_sink_gradient(case, results[3])
