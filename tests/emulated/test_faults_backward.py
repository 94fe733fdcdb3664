"""Provoked faults in the backward kernels: barriers left out between tiles, chunks, statistics and stored rows."""

from __future__ import annotations

import pytest

from qflash.testing import Case
from qflash.testing.faults import Fault, Faults

DTYPE = "bfloat16"
SEEDS = range(12)
KEYS, QUERIES, PRODUCT, FA_BWD = (
    "kernels/attention_backward/fa_mma_bwd/keys.cuh",
    "kernels/attention_backward/fa_mma_bwd/queries.cuh",
    "kernels/attention_backward/fa_mma_bwd/product.cuh",
    "kernels/attention_backward/fa_bwd/kernel.cuh",
)
# Who reads too early gets what was there before, NaN or another tile; or, of the state, waits for the wrong barrier.
SHOWN = ("bits", "contract", "complaint")


def problem(kernel: str, name: str, head_dim: int) -> Case:
    """What shows a fault: even tiles, few of them on slow kernels; packed rows, whose dS nobody keeps."""
    if kernel == "fa_bwd" or not name:
        return Case("small", 70, 100, 2, 1, head_dim, dtype=DTYPE)
    if name.startswith("queries"):
        return Case("packed", 0, 0, 2, 1, head_dim, dtype=DTYPE, q_lens=(200,), k_lens=(256,))
    return Case("even", 200, 256, 2, 1, head_dim, dtype=DTYPE)


def barrier(file: str, why: str, text: str = "__syncthreads();") -> Fault:
    return Fault(file, text, within=f"{text}  // {why}")


def tile_not_visible(file: str) -> Fault:
    return Fault(file, "__syncthreads();", within="if (whole)\n      __syncthreads();")


# By kernel and head_dim: pairs of warps share keys at 128.
FAULTS = {
    ("fa_mma_bwd", 64): {
        "keys: cp.async not waited for": Fault(KEYS, "cp_async_wait<0>();"),
        "keys: a tile not made visible": tile_not_visible(KEYS),
        "keys: the state not in place": barrier(KEYS, "the state is in place"),
        "keys: rows stored before they are there": barrier(KEYS, "the rows are in place"),
        "keys: rows over tiles that are still read": barrier(KEYS, "nobody reads what stands there any more"),
        "queries: cp.async not waited for": Fault(QUERIES, "cp_async_wait<0>();"),
        "queries: a tile not made visible": tile_not_visible(QUERIES),
        "queries: rows stored before they are there": barrier(QUERIES, "the rows are in place"),
        "queries: rows over tiles that are still read": barrier(QUERIES, "nobody reads what stands there any more"),
        "product: cp.async not waited for": Fault(PRODUCT, "cp_async_wait<kProductStages - 2>();"),
        "product: a tile not made visible": tile_not_visible(PRODUCT),
        "product: the state not in place": barrier(PRODUCT, "the state is in place"),
        "product: rows stored before they are there": barrier(PRODUCT, "the rows are in place"),
        "product: rows over tiles that are still read": barrier(PRODUCT, "nobody reads what stands there any more"),
    },
    ("fa_mma_bwd", 128): {
        "pairs: the other's half not waited for": barrier(
            KEYS, "both have put their Pt and dSt", "barrier_sync<64>(1 + KeyState::part());"
        ),
        "pairs: a tile not made visible": tile_not_visible(KEYS),
    },
    ("fa_bwd", 64): {
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
        (kernel, dim): Faults(kernel, DTYPE, dim, of_kernel, tmp_path_factory.mktemp(f"{kernel}{dim}"), shared_cache)
        for (kernel, dim), of_kernel in FAULTS.items()
    }
    yield compiled
    for one in compiled.values():
        one.close()


@pytest.mark.parametrize(("of", "name"), [(of, name) for of in FAULTS for name in FAULTS[of]], ids=str)
def test_a_fault_is_reported(faults, of, name):
    kernel, head_dim = of
    found = faults[of].provoke(name, problem(kernel, name, head_dim), SEEDS)
    assert found.kind in SHOWN, found


@pytest.mark.parametrize("of", FAULTS, ids=str)
def test_without_a_fault_nothing_is_reported(faults, of):
    kernel, head_dim = of
    assert faults[of].provoke("", problem(kernel, "", head_dim), range(2)).kind == ""
