"""`fa_int8` run on the CPU, thread by thread, as in test_emulated.py: the contract of precision="int8", and the replay.
"""

from __future__ import annotations

import pytest
from test_emulated import by_name, library, pytestmark, run_case  # noqa: F401

from qflash.testing import BY_NAME, Case, cases
from qflash.testing.compare import check_contract, check_replay, check_same_bits
from qflash.testing.oracle import replayed
from qflash.testing.runner import suited

KERNEL = "fa_int8"


def check_kernel(library, case: Case, arch: int = 90) -> None:  # noqa: F811
    """The contract holds, the replay gives the same, and the order that warps and lanes run in does not matter."""
    case = suited(case, KERNEL, arch)
    first = run_case(library, case, KERNEL, arch, seed=1)
    check_contract(case, *first, "int8")
    check_replay(case, *first, replayed(case, KERNEL))
    check_same_bits(case, first, run_case(library, case, KERNEL, arch, seed=2))


@pytest.mark.parametrize("case", cases("quick"), ids=by_name)
def test_contract(library, case):  # noqa: F811
    check_kernel(library, case)


@pytest.mark.slow
@pytest.mark.parametrize("case", cases("full"), ids=by_name)
def test_contract_in_full(library, case):  # noqa: F811
    check_kernel(library, case)
