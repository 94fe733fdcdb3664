"""Provoked faults in what `sm90_int8` (int8_fp8) has beside the Hopper tier that test_faults_sm90.py goes through: the
loop of steady tiles, products of 8-bit numbers, ones in shared memory, lanes that read K."""

from __future__ import annotations

import pytest

from qflash.testing import Case
from qflash.testing.faults import Fault

KERNEL, DTYPE, HEAD_DIM = "sm90_int8_fp8", "bfloat16", 64
SEEDS = range(24)
CONSUMER, SCORES, WEIGHTS, RARE = (
    f"attn/wgmma/{name}.cuh" for name in ("consumer", "scores_int8", "weights_e4m3", "rare_int8")
)

CASES = {
    "steady": Case("steady", 128, 1400, 2, 1, HEAD_DIM, dtype=DTYPE),
    "causal": Case("causal", 300, 300, 2, 1, HEAD_DIM, causal=True, dtype=DTYPE, plant=(("v", (0, 290, 0, 3), "nan"),)),
    "nonfinite keys": Case("keys", 256, 1000, 2, 1, HEAD_DIM, dtype=DTYPE, plant=(("k", (0, 300, 0, 3), "nan"),)),
}
EITHER = "complaint or contract"  # what comes of it depends on who is late
_STEADY = "scores.start(q, k);  // S(n + 1) = Q K(n + 1)^T\n        if (!v_full) v_at().wait_full(*s.v_ring);\n"

# name: the fault, the case, how it shows, and a part of what is said
FAULTS = {
    "steady: K full": (
        Fault(CONSUMER, "k_at.wait_full(*s.k_ring);",
              within=f"if (!k_full) k_at.wait_full(*s.k_ring);\n        {_STEADY}"),
        "steady", EITHER, "",
    ),
    "steady: V full": (
        Fault(CONSUMER, "v_at().wait_full(*s.v_ring);", within=_STEADY), "steady", EITHER, "",
    ),
    "steady: scores not waited for": (
        Fault(CONSUMER, "wgmma_wait<1>();",
              within="wgmma_wait<1>();  // S(n + 1)\n        scores.hold_sums();\n        auto half"),
        "steady", EITHER, "",
    ),
    "steady: outputs not waited for": (
        Fault(CONSUMER, "wgmma_wait<0>();", "wgmma_wait<1>();",
              within="wgmma_wait<0>();  // O\n        hold_outputs();\n        weights.finish_product();\n"
                     "        scores.weigh_second_half"),
        "steady", "complaint", "before the wait for",
    ),
    "scores without a fence": (
        Fault(SCORES, "wgmma_fence();"), "steady", "complaint", "wgmma without a fence since the last wait",
    ),
    "outputs without a fence": (
        Fault(WEIGHTS, "wgmma_fence();"), "steady", "complaint", "wgmma without a fence since the last wait",
    ),
    "ones without a fence": (
        Fault(WEIGHTS, "fence_proxy_async();", within="fence_proxy_async();  // them, to wgmma"),
        "steady", "complaint", "a product reads what a thread wrote, without a fence between",
    ),
    "zeros without a fence": (
        Fault(WEIGHTS, "fence_proxy_async();", within="if (found) fence_proxy_async();"),
        "causal", "complaint", "a product reads what a thread wrote, without a fence between",
    ),
}  # fmt: skip

# A collective of the warp stands between the reads and the writes that these separate: lanes meet there in any case. A
# GPU promises no order of memory at a shuffle or a vote, so they stay.
COVERED = {
    "K released before all lanes have read it": (  # by the vote of Rare::due
        Fault(CONSUMER, "__syncwarp();",
              within="if (Scores::kReadsKeys) __syncwarp();  // every lane has read K, where it did\n    if (leads)"),
        "nonfinite keys",
    ),
    "promoted outputs written over before all lanes have read them": (  # by stmatrix, which all lanes start together
        Fault(RARE, "__syncwarp();", within="__syncwarp();  // rows go where these were"), "steady",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_reported(faults, name):
    _, case, kind, said = FAULTS[name]
    found = faults.provoke(name, CASES[case], SEEDS)
    assert found.kind in kind.split(" or ") and said in found.text, found


@pytest.mark.parametrize("name", COVERED)
def test_a_collective_covers_it(faults, name):
    """The emulator sees no difference. Should it ever, the fault belongs into the table above."""
    assert faults.provoke(name, CASES[COVERED[name][1]], range(4)).kind == ""


@pytest.mark.parametrize("case", CASES)
def test_without_a_fault_nothing_is_reported(faults, case):
    assert faults.provoke("", CASES[case], range(2)).kind == ""
