"""One provoked fault for every kind of barrier, wait, arrival and fence of the wgmma tier of csrc/gemm, in the code of
`sm90_gemm`: within a block, between the blocks of a cluster, and between those that share a tile along k.

Each must show within a few seeds: as a complaint of the emulator, as results that are wrong, or as bits that differ
from seed to seed. The table says which.
"""

from __future__ import annotations

import pytest

from qflash.testing.faults import Fault
from qflash.testing.gemm_case import GemmCase

KERNEL, DTYPE, HEAD_DIM = "sm90_gemm", "bfloat16", 0
SEEDS = range(32)
BLOCK, PRODUCER, CONSUMER, OUTPUT, SHARED, SPLITS = (
    f"gemm/wgmma/{name}.cuh" for name in ("block", "producer", "consumer", "output", "shared_memory", "splits")
)
CASES = {
    # A cluster, several tiles for each block, rings that go round.
    "pair": GemmCase(600, 700, 700, bias="float32", multiprocessors=2),
    # Tiles of one step: the ends of tiles follow each other closely.
    "short": GemmCase(700, 1500, 60, bias="float32", multiprocessors=2),
    # A single block, without a cluster.
    "alone": GemmCase(60, 500, 2000, bias="float32", multiprocessors=1),
    # Splits of k.
    "splits": GemmCase(60, 200, 3000, bias="float32", multiprocessors=16),
    # Whole tiles on three pairs, then splits of the one that is left.
    "last wave": GemmCase(136, 800, 2560, bias="float32", multiprocessors=6),
    # One tile of one step; 32-bit results, which lanes store one by one.
    "one": GemmCase(200, 200, 60, multiprocessors=2),
    "words": GemmCase(700, 1500, 60, out_dtype="float32", multiprocessors=2),
    "residual": GemmCase(300, 700, 60, residual=True, multiprocessors=2),
}
EITHER = "complaint or contract or bits or crash"  # what comes of it depends on who is late

# name: the fault, the case, how it shows, and a part of what is said
FAULTS = {
    "block: barriers in place": (
        Fault(BLOCK, "__syncthreads();"), "alone", "complaint", "no mbarrier was initialised",
    ),
    "cluster: barriers in place": (
        Fault(BLOCK, "meet<Config>();", within="meet<Config>();            // the barriers are in place"),
        "pair", "complaint", "no mbarrier was initialised",
    ),
    "barriers known to the copy engine": (
        Fault(SHARED, "fence_mbarrier_init();"), "alone", "complaint", "no fence (fence_mbarrier_init)",
    ),
    "cluster: a block ends early": (
        Fault(BLOCK, "meet<Config>();",
              within="meet<Config>();  // no block ends while another may reach into it\n  } else {"),
        "short", "complaint", "",
    ),
    "cluster: consumers end early": (
        Fault(BLOCK, "meet<Config>();",
              within=".run();\n    if (Config::kCluster > 1) meet<Config>();"),
        "short", "complaint", "",
    ),
    "steps: empty": (Fault(PRODUCER, "at.wait_empty(*s.steps);"), "pair", EITHER, ""),
    "steps: nothing expected": (
        Fault(PRODUCER, "mbarrier_arrive_expect(full, stage_bytes);"), "alone", "complaint", "step full",
    ),
    "steps: fewer bytes expected": (
        Fault(PRODUCER, "mbarrier_arrive_expect(full, stage_bytes);",
              "mbarrier_arrive_expect(full, Config::X::Tile::kBytes);"),
        "pair", EITHER, "",
    ),
    "steps: full": (Fault(CONSUMER, "at.wait_full(*s.steps);"), "pair", EITHER, ""),
    "steps: not released": (
        Fault(CONSUMER, "release(at.previous());", within="if (step > 0) release(at.previous());"),
        "pair", "complaint", "step empty",
    ),
    "steps: the last not released": (
        Fault(CONSUMER, "release(at.previous());", within="if (steps > 0) release(at.previous());"),
        "pair", "complaint", "step empty",
    ),
    "steps: released twice": (
        Fault(CONSUMER, "release(at.previous());", "release(at.previous()); release(at.previous());",
              within="if (step > 0) release(at.previous());"),
        "pair", EITHER, "",
    ),
    "steps: released before their products": (
        Fault(CONSUMER, "wgmma_wait<1>();"), "pair", EITHER, "",
    ),
    "cluster: released in this block alone": (
        Fault(CONSUMER, "mbarrier_arrive_at(&s.steps->empty[done.stage()], uint32_t(lane));",
              "if (lane == 0) mbarrier_arrive_at(&s.steps->empty[done.stage()], cluster_rank());"),
        "pair", "complaint", "step empty",
    ),
    "cluster: w for this block alone": (
        Fault(PRODUCER, "copy_box_to((1 << kBlocks) - 1, s_to, &map, c0, c1, 0, 0, full);",
              "copy_box(s_to, &map, c0, c1, 0, 0, full);"),
        "pair", "complaint", "step full",
    ),
    "sums: taken out under their products": (
        Fault(CONSUMER, "wgmma_wait<0>();"), "pair", EITHER, "",
    ),
    "lag: the other is never started": (
        Fault(CONSUMER, "barrier_arrive<kLagBarrier, 2 * kWarpgroupThreads>();"), "pair", "complaint", "barrier 1",
    ),
    "lag: not even where a tile has fewer steps": (
        Fault(CONSUMER, "start_other();", within="if (to_lag > 0) start_other();"), "one", "complaint", "barrier 1",
    ),
    "terms: full": (Fault(CONSUMER, "terms_at.wait_full(*s.terms);"), "short", EITHER, ""),
    "terms: never filled": (Fault(PRODUCER, "at.fill(*s.terms);"), "alone", "complaint", "terms full"),
    "terms: filled by one lane for all": (
        Fault(PRODUCER, "at.fill(*s.terms);", "for (int i = 0; lane == 0 && i < 32; ++i) at.fill(*s.terms);"),
        "short", EITHER, "",
    ),
    "terms: empty": (Fault(PRODUCER, "at.wait_empty(*s.terms);"), "short", EITHER, ""),
    "terms: not released": (
        Fault(CONSUMER, "terms_at.release(*s.terms);"), "short", "complaint", "terms empty",
    ),
    "panels: written while they are read": (
        Fault(OUTPUT, "wait_stores_read<Config::kWarpPanels - 1>();"), "short", EITHER, "",
    ),
    "panels: written before the copy engine is known to be done": (
        Fault(OUTPUT, "__syncwarp();", within="__syncwarp();  // and every lane is done with it"), "words", EITHER, "",
    ),
    "panels: not known to the copy engine": (
        Fault(OUTPUT, "fence_proxy_async();"), "short", "complaint", "a store reads what a thread wrote",
    ),
    "panels: given up while they are read": (
        Fault(OUTPUT, "wait_stores_read<0>();"), "short", "complaint", "a store that nobody waited for",
    ),
    "panels: stored, and not committed": (
        Fault(OUTPUT, "commit_stores();"), "short", EITHER, "",
    ),
    "tensor map: of a thread without a context": (
        Fault("hopper/tensor_map.h", "if (const cudaError_t error = cudaSetDevice(device)) return error;"),
        "alone", EITHER, "",
    ),
    "splits: not added up": (Fault(SPLITS, "return true;", "return false;"), "splits", "contract", ""),
    "splits: not added up, of a last wave": (
        Fault(SPLITS, "return true;", "return false;"), "last wave", "contract", "",
    ),
}  # fmt: skip

# What changes no result. Without the first, both consumers end their tiles at the same time. The next three order
# memory of different blocks, which do not run at the same time here: whoever comes last is the last to write. Before
# the two after them, the exchange of a matrix (stmatrix, ldmatrix) lets lanes meet in any case; a GPU promises no order
# of memory there, so they stay. The last is no fault: streams that find every counter taken use the workspace's.
HARMLESS = {
    "lag: not waited for": (Fault(CONSUMER, "barrier_sync<kLagBarrier, 2 * kWarpgroupThreads>();"), "pair"),
    "splits: counted before they are in memory": (
        Fault(SPLITS, "__syncwarp();", within="__syncwarp();  // every lane has written its sums"), "splits",
    ),
    "splits: read before they are counted": (
        Fault(SPLITS, "__syncwarp();", within="__syncwarp();  // what that lane acquired, for all lanes"),
        "splits",
    ),
    "splits: added up by whoever comes": (Fault(SPLITS, "return false;"), "splits"),
    "residual: read before every lane has written": (
        Fault(OUTPUT, "__syncwarp();", within="__syncwarp();  // every lane has written\n"), "residual",
    ),
    "panels: stored before every lane has fenced": (
        Fault(OUTPUT, "__syncwarp();",
              within="fence_proxy_async();  // the panel just written, to the copy engine\n    __syncwarp();"),
        "short",
    ),
    "counter: none is left": (Fault("common/counters.cuh", "if (owner != id + 1) continue;", "continue;"), "splits"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_shows(faults, name):
    _, case, kind, said = FAULTS[name]
    found = faults.provoke(name, CASES[case], SEEDS)
    assert found.kind in kind.split(" or ") and said in found.text, found


@pytest.mark.parametrize("name", HARMLESS)
def test_what_changes_no_result(faults, name):
    _, case = HARMLESS[name]
    assert faults.provoke(name, CASES[case], range(3)).kind == ""


@pytest.mark.parametrize("case", CASES)
def test_without_a_fault_nothing_is_reported(faults, case):
    assert faults.provoke("", CASES[case], range(3)).kind == ""
