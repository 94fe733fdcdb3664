"""One provoked fault for every kind of barrier, wait, arrival and fence of the Hopper tier, in `sm90_fwd`'s own code.

Each must show within a few seeds: as a complaint of the emulator, as an output that breaks the contract, or as bits
that differ from seed to seed. The table says which.
"""

from __future__ import annotations

import pytest

from qflash.testing import Case
from qflash.testing.faults import Fault

KERNEL, DTYPE, HEAD_DIM = "sm90_fwd", "bfloat16", 64
SEEDS = range(24)
BLOCK, PRODUCER, NONFINITE, CONSUMER, OUTPUT, SHARED, SCORES, WEIGHTS = (
    f"attn/wgmma/{name}.cuh"
    for name in (
        "block", "producer", "nonfinite", "consumer", "output", "shared_memory", "scores_16bit", "weights_16bit"
    )
)  # fmt: skip

NONFINITE_V = (("v", (0, 440, 0, 3), "nan"), ("v", (0, 300, 0, 9), "inf"), ("v", (0, 20, 0, 9), "inf"))
CASES = {
    # A static schedule, tiles that every row sees: nobody inspects them.
    "even": Case("even", 400, 384, 3, 1, HEAD_DIM, dtype=DTYPE),
    # Many short work tiles.
    "short": Case("short", 1000, 60, 3, 1, HEAD_DIM, dtype=DTYPE),
    # A dynamic schedule, tiles that are inspected.
    "causal": Case("causal", 450, 450, 3, 1, HEAD_DIM, causal=True, dtype=DTYPE, plant=NONFINITE_V),
    # Work tiles without keys, most of them.
    "empty": Case("empty", 1500, 90, 2, 1, HEAD_DIM, causal=True, dtype=DTYPE),
}

EITHER = "complaint or contract"  # what comes of it depends on who is late: the barriers jam, or outputs are wrong
# What changes no result. Without the first, the next work tile is drawn too early for balance; `work`'s ring keeps it
# from being described too early. Before the second, a vote lets lanes meet in any case; a GPU promises no order of
# memory there, so it stays. The third is no fault: streams that find every counter taken use the workspace's.
HARMLESS = {
    "next tile: not waited for": Fault(PRODUCER, "mbarrier_wait(s.next_tile, parity);"),
    "V inspected: arrival before the zeros of every lane": Fault(
        NONFINITE, "__syncwarp();", within="__syncwarp();  // the zeros of every lane are in place"
    ),
    "counter: none is left": Fault("common/counters.cuh", "if (owner != id + 1) continue;", "continue;"),
}

# name: the fault, the case, how it shows, and a part of what is said
FAULTS = {
    "block: barriers in place": (
        Fault(BLOCK, "__syncthreads();", within="__syncthreads();  // the barriers are in place"),
        "even", "complaint", "no mbarrier was initialised",
    ),
    "block: barriers known to the copy engine": (
        Fault(SHARED, "fence_mbarrier_init();"),
        "even", "complaint", 'no fence (fence_mbarrier_init) since the mbarrier "q full, stage 0"',
    ),
    "work: full, by the producer": (
        Fault(PRODUCER, "work_at.wait_full(*s.work_ring);"), "short", "complaint", "",
    ),
    "work: full, by inspectors": (Fault(NONFINITE, "work_at.wait_full(*s.work_ring);"), "short", "complaint", ""),
    "work: full, by consumers": (Fault(CONSUMER, "work_at.wait_full(*s.work_ring);"), "short", "complaint", ""),
    "work: empty": (
        Fault(PRODUCER, "at.wait_empty(*s.work_ring);",
              within="at.wait_empty(*s.work_ring);\n    if (By::leads()) s.work[at.stage()].fill"),
        "short", EITHER, "",
    ),
    "work: empty, at the end": (
        Fault(PRODUCER, "at.wait_empty(*s.work_ring);",
              within="at.wait_empty(*s.work_ring);\n  s.work[at.stage()].tiles = -1;"),
        "short", EITHER, "",
    ),
    "work: never filled": (
        Fault(PRODUCER, "at.fill(*s.work_ring);", within="at.fill(*s.work_ring);\n    }\n    at.advance();"),
        "even", "complaint", '"work full, stage 0"',
    ),
    "work: filled twice": (
        Fault(PRODUCER, "at.fill(*s.work_ring);", "at.fill(*s.work_ring); at.fill(*s.work_ring);",
              within="at.fill(*s.work_ring);\n    }\n    at.advance();"),
        "short", "complaint", "",
    ),
    "work: not released by the producer": (
        Fault(PRODUCER, "work_at.release(*s.work_ring)"), "short", "complaint", '"work empty, stage 0"',
    ),
    "work: not released by inspectors": (
        Fault(NONFINITE, "work_at.release(*s.work_ring);"), "short", "complaint", '"work empty, stage 0"',
    ),
    "work: not released by consumers": (
        Fault(CONSUMER, "current.release(*s.work_ring);"), "short", "complaint", '"work empty, stage 0"',
    ),
    "work: released twice": (
        Fault(CONSUMER, "current.release(*s.work_ring);",
              "current.release(*s.work_ring); current.release(*s.work_ring);"),
        "short", EITHER, "",
    ),
    "work: released before all lanes have stored": (
        Fault(CONSUMER, "__syncwarp();", within="__syncwarp();  // every lane has read the work tile, and its rows"),
        "short", EITHER, "",
    ),
    "work: released before all lanes have read that it is empty": (
        Fault(CONSUMER, "__syncwarp();", within="__syncwarp();  // every lane has read the work tile\n"),
        "empty", EITHER, "",
    ),
    "work: released before all inspecting lanes have read it": (
        Fault(NONFINITE, "__syncwarp();", within="__syncwarp();  // every lane has read the work tile"),
        "empty", EITHER, "",
    ),
    "q: full": (Fault(CONSUMER, "q_at.wait_full(*s.q_ring);"), "even", EITHER, ""),
    "q: not released": (
        Fault(CONSUMER, "q_done.release(*s.q_ring);",
              within="if (Config::kQStages > 1 && leads) q_done.release(*s.q_ring);"),
        "short", "complaint", '"q empty, stage 0"',
    ),
    "q: written over by the copy engine, without a fence": (
        Fault("kernels/attention/sm90_fwd/kernel.cuh", "fence_proxy_async();"),
        "short", "complaint", "a copy writes over what a thread wrote, without a fence between",
    ),
    "K: full, of the first tile": (
        Fault(CONSUMER, "k_at.wait_full(*s.k_ring);",
              within="k_at.wait_full(*s.k_ring);\n    }\n    scores.start(q, k);"),
        "even", EITHER, "",
    ),
    "K: full": (
        Fault(CONSUMER, "k_at.wait_full(*s.k_ring);",
              within="if (!k_full) k_at.wait_full(*s.k_ring);\n    scores.start(q, k);  // S(n + 1) = Q K(n + 1)^T\n"
                     "    if (!v_full) v_at().wait_full(*s.v_ring);\n    wait_inspected"),
        "even", EITHER, "",
    ),
    "K: not released": (
        Fault(CONSUMER, "k_at.release(*s.k_ring);",
              within="if (leads) k_at.release(*s.k_ring);\n    k_at.advance();\n  }"),
        "even", "complaint", '"K empty, stage 0"',
    ),
    "K: released twice": (
        Fault(CONSUMER, "k_at.release(*s.k_ring);", "k_at.release(*s.k_ring); k_at.release(*s.k_ring);",
              within="if (leads) k_at.release(*s.k_ring);\n    k_at.advance();\n  }"),
        "even", EITHER, "",
    ),
    "K and V and q: empty": (
        Fault(PRODUCER, "at.wait_empty(ring);"), "even", "complaint", "one arrival too many at the mbarrier",
    ),
    "V: full": (
        Fault(CONSUMER, "v_at().wait_full(*s.v_ring);",
              within="if (!v_full) v_at().wait_full(*s.v_ring);\n    wait_inspected"),
        "even", EITHER, "",
    ),
    "V: full, of the last tile": (Fault(CONSUMER, "last_v.wait_full(*s.v_ring);"), "even", EITHER, ""),
    "V: full, by inspectors": (Fault(NONFINITE, "v_at.wait_full(*s.v_ring);"), "causal", EITHER, ""),
    "V: not released": (Fault(CONSUMER, "v_at().release(*s.v_ring);"), "even", "complaint", '"V empty, stage 0"'),
    "V: the last tile not released": (
        Fault(CONSUMER, "last_v.release(*s.v_ring);", within="if (leads && others() == 0) last_v.release(*s.v_ring);"),
        "short", "complaint", '"V empty, stage 0"',
    ),
    "V: not released by inspectors": (
        Fault(NONFINITE, "v_at.release(*s.v_ring);"), "even", "complaint", '"V empty, stage 0"',
    ),
    "V: skipped tiles released before all lanes have seen them": (
        Fault(CONSUMER, "__syncwarp();", within="__syncwarp();  // every lane has seen them"), "causal", EITHER, "",
    ),
    "V inspected: not waited for": (
        Fault(CONSUMER, "mbarrier_wait(&s.v_inspected[inspected_at.stage()], inspected_at.parity());"),
        "causal", "contract", "NaN in other places",
    ),
    "V inspected: no arrival": (
        Fault(NONFINITE, "mbarrier_arrive(&s.v_inspected[inspected_at.stage()]);"),
        "causal", "complaint", '"V inspected, stage 0"',
    ),
    "V inspected: zeros without a fence": (
        Fault(NONFINITE, "fence_proxy_async();"),
        "causal", "complaint", "a product reads what a thread wrote, without a fence between",
    ),
    "V inspected: what was cleared is added before all lanes have stored": (
        Fault(OUTPUT, "__syncwarp();", within="__syncwarp();  // other lanes change what this one stored"),
        "causal", "contract", "Inf in other places",
    ),
    "next tile: no arrival": (
        Fault(PRODUCER, "mbarrier_arrive(s.next_tile);"), "causal", "complaint", '"next tile, stage 0"',
    ),
    "wgmma: first scores not waited for": (
        Fault(CONSUMER, "wgmma_wait<0>();", within="wgmma_wait<0>();  // S(0)"),
        "even", "contract", "NaN in other places",
    ),
    "wgmma: scores not waited for": (
        Fault(CONSUMER, "wgmma_wait<1>();",
              within="wgmma_wait<1>();  // S(n + 1)\n    scores.hold_sums();\n    scores.weigh(work"),
        "even", "contract", "NaN in other places",
    ),
    "wgmma: outputs not waited for": (
        Fault(CONSUMER, "wgmma_wait<0>();", "wgmma_wait<1>();",
              within="wgmma_wait<0>();  // O\n    hold_outputs();\n    weights.finish_product();\n    if (!Rare"),
        "even", "complaint", "before the wait for",
    ),
    "counter: not 0 again after a launch": (
        Fault("hopper/tile_schedule.cuh",
              "return int(atomicInc(By::kKeepsAddress ? kept : take_from(), unsigned(total - 1)));",
              "return int(atomicInc(take_from(), unsigned(total)));"),
        "causal", "contract", "",
    ),
    "wgmma: last outputs not waited for": (
        Fault(CONSUMER, "wgmma_wait<1>();", "wgmma_wait<2>();", within="start_work(more);\n      wgmma_wait<1>();"),
        "even", "complaint", "sums were changed before the wait for their product",
    ),
    "wgmma: scores without a fence": (
        Fault(SCORES, "wgmma_fence();"), "even", "complaint", "wgmma without a fence since the last wait",
    ),
    "wgmma: outputs without a fence": (
        Fault(WEIGHTS, "wgmma_fence();", within="wgmma_fence();\n#pragma unroll"),
        "even", "complaint", "wgmma without a fence since the last wait",
    ),
    "wgmma: outputs not committed": (
        Fault(WEIGHTS, "wgmma_commit();",
              within="Multiply::template multiply<true>(O[0], P[i], v.step(i));\n    wgmma_commit();"),
        "even", "complaint", "before the wait for",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_reported(faults, name):
    _, case, kind, said = FAULTS[name]
    found = faults.provoke(name, CASES[case], SEEDS)
    assert found.kind in kind.split(" or ") and said in found.text, found


@pytest.mark.parametrize("name", HARMLESS)
def test_what_changes_no_result(faults, name):
    assert faults.provoke(name, CASES["causal"], range(4)).kind == ""


@pytest.mark.parametrize("case", CASES)
def test_without_a_fault_nothing_is_reported(faults, case):
    assert faults.provoke("", CASES[case], range(2)).kind == ""
