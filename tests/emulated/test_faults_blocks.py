"""Provoked faults in kernels whose blocks meet at __syncthreads: `fa_mma` with cp.async, `fa` with buffers in turn."""

from __future__ import annotations

import pytest

from qflash.testing import Case
from qflash.testing.faults import Fault, Faults

DTYPE, HEAD_DIM = "bfloat16", 64
SEEDS = range(24)
FA_MMA, FA, OUTPUT, SOFTMAX = (
    "kernels/attention/fa_mma/kernel.cuh",
    "kernels/attention/fa/kernel.cuh",
    "attn/mma/output.cuh",
    "attn/cuda_core/softmax.cuh",
)
PLANT = (("v", (0, 290, 0, 3), "nan"), ("v", (0, 100, 0, 9), "inf"))
CASES = {
    "even": Case("even", 200, 384, 2, 1, HEAD_DIM, dtype=DTYPE),
    "causal": Case("causal", 300, 300, 2, 1, HEAD_DIM, causal=True, dtype=DTYPE, plant=PLANT),
}
EITHER = "bits or contract"  # who reads too early gets what was there before: NaN, or another tile

# name: the kernel, the fault, the case, how it shows
FAULTS = {
    "fa_mma: cp.async not waited for": ("fa_mma", Fault(FA_MMA, "cp_async_wait<0>();"), "even", EITHER),
    "fa_mma: a tile not made visible": (
        "fa_mma",
        Fault(FA_MMA, "__syncthreads();", within="if (whole)\n      __syncthreads();"),
        "even", EITHER,
    ),
    "fa_mma: zeros not in place": (
        "fa_mma", Fault(FA_MMA, "__syncthreads();", within="__syncthreads();  // the zeros are in place"),
        "causal", EITHER,
    ),
    "fa_mma: rows read before they are written": (
        "fa_mma", Fault(OUTPUT, "__syncwarp();", within="__syncwarp();  // other lanes read what this one wrote"),
        "even", EITHER,
    ),
    "fa_mma: rows stored before what is not finite was added": (
        "fa_mma", Fault(FA_MMA, "__syncwarp();", within="__syncwarp();  // other lanes read what this one wrote"),
        "causal", EITHER,
    ),
    "fa: the first chunk not made visible": (
        "fa", Fault(FA, "__syncthreads();", within="__syncthreads();\n\n  float* s_now"), "even", EITHER,
    ),
    "fa: chunks of K not made visible": ("fa", Fault(FA, "v_finite = !__syncthreads_or(!v_finite);"), "even", EITHER),
    "fa: chunks of V not made visible": (
        "fa", Fault(FA, "v_finite = !__syncthreads_or(!next_finite);"), "even", EITHER,
    ),
    "fa: weights read before they are written": (
        "fa", Fault(FA, "__syncwarp();", within="__syncwarp();  // the weights are read by other lanes"),
        "even", EITHER,
    ),
}  # fmt: skip

# A collective of the warp stands between the reads and the writes that these separate: lanes meet there in any case. A
# GPU promises no order of memory at a shuffle or a vote, so they stay.
COVERED = {
    "fa_mma: q written over before all lanes have read it": (  # by mma, which all lanes start together
        "fa_mma", Fault(OUTPUT, "__syncwarp();", within="__syncwarp();  // the warp is done reading what s_rows held"),
    ),
    "fa: maxima written over before all lanes have read them": (  # by the shuffles of max_across_x
        "fa", Fault(SOFTMAX, "__syncwarp();", within="__syncwarp();  // every lane of the row has read m"),
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def faults(tmp_path_factory, shared_cache):
    compiled = {
        kernel: Faults(
            kernel, DTYPE, HEAD_DIM, {name: row[1] for name, row in (FAULTS | COVERED).items() if row[0] == kernel},
            tmp_path_factory.mktemp(kernel), shared_cache,
        )
        for kernel in ("fa_mma", "fa")
    }  # fmt: skip
    yield compiled
    for one in compiled.values():
        one.close()


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_reported(faults, name):
    kernel, _, case, kind = FAULTS[name]
    found = faults[kernel].provoke(name, CASES[case], SEEDS)
    assert found.kind in kind.split(" or "), found


@pytest.mark.parametrize("name", COVERED)
def test_a_collective_covers_it(faults, name):
    """The emulator sees no difference. Should it ever, the fault belongs into the table above."""
    assert faults[COVERED[name][0]].provoke(name, CASES["even"], range(4)).kind == ""


@pytest.mark.parametrize("kernel", ["fa_mma", "fa"])
@pytest.mark.parametrize("case", CASES)
def test_without_a_fault_nothing_is_reported(faults, kernel, case):
    assert faults[kernel].provoke("", CASES[case], range(2)).kind == ""
