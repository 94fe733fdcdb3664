"""The pipeline of sm90_int8, both precisions: its replay keeps the contract, wherever there is a GPU or not."""

from __future__ import annotations

import numpy as np
import pytest

from qflash.testing import Case, cases, check_contract, errors, expected
from qflash.testing.oracle import integers_of, replayed
from qflash.testing.runner import suited

KERNELS = {"sm90_int8": "int8", "sm90_int8_fp8": "int8_fp8"}


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("case", cases("full"), ids=lambda case: case.name)
def test_the_replay_keeps_the_contract(case: Case, kernel: str) -> None:
    """On the cases as sm90_fwd takes them, whose limits are the same. Kernels must then match the replay to 2e-3."""
    case = suited(case, "sm90_fwd", 90)
    out, lse = replayed(case, kernel)
    check_contract(case, out.astype(case.dtype), lse.astype(np.float32), KERNELS[kernel], integers=integers_of(kernel))


@pytest.mark.parametrize(("kernel", "bound"), [("sm90_int8", 0.012), ("sm90_int8_fp8", 0.0405)])
@pytest.mark.parametrize("data", ["normal", "biased_k", "outlier"])
def test_errors_do_not_depend_on_the_kind_of_numbers(data: str, kernel: str, bound: float) -> None:
    """What the Hadamard matrix (outliers) and smoothing (bias) are for."""
    case = Case(q_len=256, k_len=1024, q_heads=2, kv_heads=2, head_dim=128, dtype="bfloat16", data=data)
    out, _ = replayed(case, kernel)
    assert errors(out, expected(case, KERNELS[kernel]).out).relative_l2 <= bound
