"""`sm90_int8` and `sm90_int8_fp8` run on the CPU, thread by thread (test_emulated.py), on emulated mbarriers, copies
and products of warpgroups: the contracts of both precisions, and the replay."""

from __future__ import annotations

import pytest
from test_emulated import by_name, library, pytestmark, run_case  # noqa: F401

from qflash.dispatch import BY_NAME as BY_KERNEL
from qflash.testing import Case, cases
from qflash.testing.compare import check_contract, check_replay, check_same_bits
from qflash.testing.oracle import integers_of, replayed
from qflash.testing.runner import suited

KERNELS = ("sm90_int8", "sm90_int8_fp8")
WEIGHTS = {"sm90_int8_fp8": "float8_e4m3fn"}  # what they are rounded to, where that is not the dtype of the arrays
pytestmark = [pytestmark, pytest.mark.parametrize("kernel", KERNELS)]


def check_kernel(library, case: Case, kernel: str) -> None:  # noqa: F811
    """The contract holds, the replay gives the same, and the order that warps and lanes run in does not matter."""
    case = suited(case, kernel, 90)
    first = run_case(library, case, kernel, seed=1)
    check_contract(case, *first, BY_KERNEL[kernel].precision, integers=integers_of(kernel))
    check_replay(case, *first, replayed(case, kernel), weights_dtype=WEIGHTS.get(kernel, case.dtype))
    check_same_bits(case, first, run_case(library, case, kernel, seed=2))


@pytest.mark.parametrize("case", cases("full"), ids=by_name)
def test_contract(library, case, kernel):  # noqa: F811
    check_kernel(library, case, kernel)
