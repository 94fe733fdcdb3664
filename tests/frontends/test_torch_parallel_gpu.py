"""qflash.parallel.torch with two processes that share one GPU. NCCL takes one process for each, so gloo carries what
moves through the host's memory."""

from __future__ import annotations

import pytest

from qflash.testing.case import Case, Rotary
from qflash.testing.compare import HALF_FACTOR, check_contract, check_gradients, errors
from qflash.testing.oracle import expected

pytest.importorskip("torch")
BASE = {"q_len": 512, "k_len": 512, "q_heads": 8, "kv_heads": 2, "head_dim": 128, "batch": 2, "dtype": "bfloat16"}
CASES = [
    Case("full", **BASE),
    Case("causal", **BASE, causal=True),
    Case("window", **BASE, causal=True, window=(100, 0)),
    Case("rope", **BASE, causal=True, rope=Rotary(128)),
    Case(
        "packed",
        q_heads=8,
        kv_heads=2,
        head_dim=128,
        dtype="bfloat16",
        causal=True,
        q_lens=(300, 212),
        k_lens=(300, 212),
    ),
]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    from qflash.testing.processes import Processes

    group = Processes(2, tmp_path_factory.mktemp("ranks") / "store")
    yield group
    group.close()


@pytest.mark.gpu
@pytest.mark.parametrize("strategy", ["ring", "all_gather", "ulysses"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_two_processes_on_one_gpu(ranks, case, strategy):
    from qflash.testing import torch_ranks

    got = ranks.values(torch_ranks.attend, case, strategy, None, "world", None, "cuda")[0]
    want = expected(case)
    once = errors(want.rounded, want.out).relative_l2
    assert errors(got["out"], want.out).relative_l2 <= HALF_FACTOR * once
    check_gradients(case, got["dq"], got["dk"], got["dv"])
    assert got["same"]


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["int8", "int8_fp8"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_ring_of_integers(ranks, case, precision):
    import torch

    from qflash.testing import torch_ranks

    if precision == "int8_fp8" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("int8_fp8 is Hopper's")
    got = ranks.values(torch_ranks.attend, case, "ring", None, "world", precision, "cuda")[0]
    check_contract(case, got["out"], precision=precision)
    assert got["same"]
