"""The gradient of sinks by the backward kernels' own source on the CPU."""

from __future__ import annotations

import numpy as np
import pytest

from qflash import dispatch
from qflash.dispatch import VARIANTS
from qflash.testing.case import Case
from qflash.testing.emulated_attention import UNTOUCHED
from qflash.testing.emulator import ARCH
from qflash.testing.runner import suited
from qflash.testing.sink_gradients import QUICK, check_sink_gradient, planned

KERNELS = [row.name for row in dispatch.kernels_of("attention_backward", "cuda") if row.sinks]
PACKED = "sinks_packed"
CHOSEN = [
    case for case in QUICK if case.name in (PACKED, "sinks_padding", "sinks_no_keys", "sinks_nonfinite", "sinks_rope")
]


def gradients(library, case: Case, kernel: str, seed: int = 0, **changes) -> list[np.ndarray]:
    plan, arrays = planned(case, kernel, "cuda")
    arrays |= changes
    results = [np.full(result.shape, UNTOUCHED, result.dtype) for result in plan.results]
    compiled = library(kernel, case.dtype, case.head_dim, ARCH)
    operands = (arrays[operand.argument] for operand in plan.operands)
    compiled.launch(compiled.prepare(plan, VARIANTS[kernel]), (*operands, *results), seed)
    return results


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("case", CHOSEN, ids=lambda case: case.name)
def test_cases(library, case, kernel):
    case = suited(case, kernel, ARCH)
    first, again = (gradients(library, case, kernel, seed)[-1] for seed in (1, 2))
    check_sink_gradient(case, first)
    assert first.tobytes() == again.tobytes()


@pytest.mark.parametrize("kernel", KERNELS)
def test_more_rows_than_a_block_has_threads(library, kernel):
    case = suited(Case("rows", 700, 8, 1, 1, 32, batch=2, window=(3, 3), sinks=("0.5",), seed=2), kernel, ARCH)
    check_sink_gradient(case, gradients(library, case, kernel)[-1])


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_sequence_that_is_out_of_range_spoils_the_sums(library, kernel):
    case = suited(next(case for case in QUICK if case.name == "sinks_padding"), kernel, ARCH)
    dsinks = gradients(library, case, kernel, kv_lens=np.array([0, 97, 5], np.int32))[-1]
    assert np.isnan(dsinks).all()


@pytest.mark.parametrize("kernel", KERNELS)
def test_nan_in_what_a_row_that_sees_nothing_gets_does_not_reach_it(library, kernel):
    case = suited(Case("unseen", 9, 6, 2, 2, 64, causal=True, sinks=("0.5",), dtype="float16"), kernel, ARCH)
    dout = case.make_gradients()[0].copy()
    dout[:, :3] = np.nan
    assert np.isfinite(gradients(library, case, kernel, dout=dout)[-1]).all()
    dout[:, 4] = np.nan
    assert np.isnan(gradients(library, case, kernel, dout=dout)[-1]).all()
