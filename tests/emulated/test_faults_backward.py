"""Provoked faults in the backward kernels: barriers left out between tiles, chunks, statistics and stored rows."""

from __future__ import annotations

import pytest

from qflash.testing import Case
from qflash.testing.faults import Fault, Faults

DTYPE, HEAD_DIM = "bfloat16", 64
SEEDS = range(12)
KEYS, QUERIES, FA_BWD = (
    "kernels/attention_backward/fa_mma_bwd/keys.cuh",
    "kernels/attention_backward/fa_mma_bwd/queries.cuh",
    "kernels/attention_backward/fa_bwd/kernel.cuh",
)
CASE = Case("even", 200, 256, 2, 1, HEAD_DIM, dtype=DTYPE)
# Who reads too early gets what was there before, NaN or another tile; or, of the state, waits for the wrong barrier.
SHOWN = ("bits", "contract", "complaint")
SMALL = Case("small", 70, 100, 2, 1, HEAD_DIM, dtype=DTYPE)


def barrier(file: str, why: str, text: str = "__syncthreads();") -> Fault:
    return Fault(file, text, within=f"{text}  // {why}")


FAULTS = {
    "fa_mma_bwd": {
        "keys: cp.async not waited for": Fault(KEYS, "cp_async_wait<0>();"),
        "keys: a tile not made visible": Fault(KEYS, "__syncthreads();", within="if (whole)\n      __syncthreads();"),
        "keys: the state not in place": barrier(KEYS, "the state is in place"),
        "keys: rows stored before they are there": barrier(KEYS, "the rows are in place"),
        "keys: rows over tiles that are still read": barrier(KEYS, "nobody reads what stands there any more"),
        "queries: cp.async not waited for": Fault(QUERIES, "cp_async_wait<0>();"),
        "queries: a tile not made visible": Fault(
            QUERIES, "__syncthreads();", within="if (whole)\n      __syncthreads();"
        ),
        "queries: rows stored before they are there": barrier(QUERIES, "the rows are in place"),
        "queries: rows over tiles that are still read": barrier(QUERIES, "nobody reads what stands there any more"),
    },
    "fa_bwd": {
        "a chunk over one that is still read": barrier(FA_BWD, "everybody is done with the chunk before"),
        "a chunk not made visible": barrier(FA_BWD, "the chunk is there"),
        "rows over a chunk that is still read": barrier(FA_BWD, "nobody reads a chunk any more"),
        "rows stored before they are there": barrier(FA_BWD, "other lanes read what this one wrote", "__syncwarp();"),
        "rows over rows that are still read": barrier(FA_BWD, "the rows were read", "__syncwarp();"),
    },
}


@pytest.fixture(scope="module")
def faults(tmp_path_factory, shared_cache):
    compiled = {
        kernel: Faults(kernel, DTYPE, HEAD_DIM, of_kernel, tmp_path_factory.mktemp(kernel), shared_cache)
        for kernel, of_kernel in FAULTS.items()
    }
    yield compiled
    for one in compiled.values():
        one.close()


@pytest.mark.parametrize(("kernel", "name"), [(kernel, name) for kernel in FAULTS for name in FAULTS[kernel]])
def test_a_fault_is_reported(faults, kernel, name):
    found = faults[kernel].provoke(name, CASE if kernel == "fa_mma_bwd" else SMALL, SEEDS)
    assert found.kind in SHOWN, found


@pytest.mark.parametrize("kernel", FAULTS)
def test_without_a_fault_nothing_is_reported(faults, kernel):
    assert faults[kernel].provoke("", SMALL, range(2)).kind == ""
