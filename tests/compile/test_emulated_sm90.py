"""`sm90_fwd` run on the CPU, thread by thread (test_emulated.py), on emulated mbarriers, copies and products of
warpgroups (emulator/hopper_on_host.h), which are as late or as early as the hardware may be. Fast enough for every case
of the contract, in buckets of every size."""

from __future__ import annotations

import numpy as np
import pytest
from test_emulated import by_name, call, check_kernel, library, pytestmark, run_case  # noqa: F401

from qflash.frontends.numpy import describe
from qflash.problem import Options, check
from qflash.testing import Case, cases
from qflash.testing.compare import check_contract

KERNEL = "sm90_fwd"


@pytest.mark.parametrize("case", [case for case in cases("full") if "quick" not in case.tags], ids=by_name)
def test_contract(library, case):  # noqa: F811
    check_kernel(library, case, KERNEL)


@pytest.mark.parametrize("seed", range(12))
def test_whoever_is_slow(library, seed):  # noqa: F811
    """Many tiles that every row sees, whose V nobody inspects, then one with what must be found: whichever warp falls
    behind must miss no phase of a barrier."""
    plant = (("v", (0, 1190, 0, 3), "nan"), ("v", (0, 1110, 0, 9), "inf"))
    case = Case("slow", 100, 1200, 2, 1, 128, causal=True, dtype="bfloat16", plant=plant, seed=1)
    check_contract(case, *run_case(library, case, KERNEL, seed=seed))


@pytest.mark.parametrize("odd", ["q", "k", "v", "all"])
def test_odd_addresses_are_copied(library, odd):  # noqa: F811
    """The copy engine reads from whole 16 bytes; nobody can plan for tensors that begin elsewhere."""
    rng = np.random.default_rng(0)

    def tensor(name: str) -> np.ndarray:
        memory = rng.standard_normal(2 * 150 * 64 + 8, np.float32).astype(np.float16)
        shift = (-memory.ctypes.data // 2) % 8 + (odd in (name, "all"))  # whole 16 bytes, or one element past them
        return memory[shift : shift + 2 * 150 * 64].reshape(1, 150, 2, 64)

    q, k, v = tensors = [tensor(name) for name in "qkv"]
    assert [x.ctypes.data % 16 > 0 for x in tensors] == [odd in (name, "all") for name in "qkv"]
    problem = check(*(describe("x", x) for x in tensors), Options(causal=True))
    handle = library(KERNEL, "float16", 64)
    found = call(handle, KERNEL, problem, q, k, v)
    wanted = call(handle, KERNEL, problem, *(aligned(x) for x in tensors))
    assert all(np.array_equal(x, y) for x, y in zip(found, wanted, strict=True)) and np.isfinite(found[0]).all()


def aligned(x: np.ndarray) -> np.ndarray:
    memory = np.empty(x.size + 8, x.dtype)
    shift = (-memory.ctypes.data // 2) % 8
    copy = memory[shift : shift + x.size].reshape(x.shape)
    copy[:] = x
    return copy
