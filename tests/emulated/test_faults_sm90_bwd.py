"""One provoked fault for every kind of barrier, wait, arrival and fence of `sm90_bwd`'s frame, in its own code.

Each must show within a few seeds: as a complaint of the emulator, as gradients that break the contract, or as bits that
differ from seed to seed. The table says which.
"""

from __future__ import annotations

import pytest

from qflash.testing import Case
from qflash.testing.faults import Fault, Faults

KERNEL, DTYPE = "sm90_bwd", "bfloat16"
SEEDS = range(24)
BLOCK, PRODUCER, INSPECT, CONSUMER, KEYS, QUERIES, SPLIT, KEPT, SHARED = (
    f"attn/wgmma/backward/{name}.cuh"
    for name in (
        "block", "producer", "inspect", "consumer", "consumer_keys", "consumer_queries", "consumer_split",
        "consumer_ds", "shared_memory",
    )
)  # fmt: skip

NAN = (("q", (0, 200, 0, 3), "nan"),)
CASES = {
    # A static schedule, tiles that every row meets.
    "even": Case("even", 256, 384, 2, 1, 64, dtype=DTYPE),
    # Rings that go round several times.
    "long": Case("long", 130, 1500, 2, 1, 64, dtype=DTYPE),
    "tall": Case("tall", 1500, 130, 2, 1, 64, dtype=DTYPE),
    # Many short work tiles.
    "short": Case("short", 60, 1000, 2, 1, 64, dtype=DTYPE),
    # A dynamic schedule, tiles that one consumer skips, tiles that are inspected.
    "causal": Case("causal", 330, 330, 2, 1, 64, causal=True, dtype=DTYPE, plant=NAN),
    "narrow": Case("narrow", 1500, 1500, 2, 1, 64, window=(30, 0), dtype=DTYPE),
    # Rows of neighbours in the last tiles.
    "packed": Case("packed", q_lens=(100, 90, 70), k_lens=(150, 40, 90), q_heads=2, head_dim=64, dtype=DTYPE),
    # Consumers that take turns, dS that is stored and multiplied; queries of four tiles of dS.
    "again": Case("again", 600, 700, 2, 1, 96, dtype=DTYPE),
    "causal again": Case("causal again", 500, 400, 2, 1, 96, causal=True, dtype=DTYPE, plant=NAN),
    # One consumer sums dV, the other dK.
    "split": Case("split", 260, 200, 2, 1, 192, dtype=DTYPE),
}
EITHER = "complaint or contract or crash"  # what comes of it depends on who is late

# name: the fault, the case, how it shows, and a part of what is said
FAULTS = {
    "block: barriers in place": (
        Fault(BLOCK, "__syncthreads();"), "even", "complaint", "no mbarrier was initialised",
    ),
    "block: barriers known to the copy engine": (
        Fault(SHARED, "fence_mbarrier_init();"), "even", "complaint", "no fence (fence_mbarrier_init)",
    ),
    "work: full, by the producer": (
        Fault(PRODUCER, "work_at.wait_full(*s.work_ring);"), "short", EITHER, "",
    ),
    "work: full, by inspectors": (Fault(INSPECT, "work_at.wait_full(*s.work_ring);"), "short", EITHER, ""),
    "work: full, by consumers": (Fault(CONSUMER, "work_at.wait_full(*s.work_ring);"), "short", EITHER, ""),
    "work: empty": (
        Fault(PRODUCER, "at.wait_empty(*s.work_ring);", within="at.wait_empty(*s.work_ring);\n    WorkTile"),
        "short", EITHER, "",
    ),
    "work: not released by the producer": (
        Fault(PRODUCER, "work_at.release(*s.work_ring)"), "short", "complaint", '"work empty, stage 0"',
    ),
    "work: not released by inspectors": (
        Fault(INSPECT, "work_at.release(*s.work_ring);"), "short", "complaint", '"work empty, stage 0"',
    ),
    "work: not released by consumers": (
        Fault(CONSUMER, "work_at.release(*s.work_ring);"), "short", "complaint", '"work empty, stage 0"',
    ),
    "rows: full, of keys": (Fault(KEYS, "this->rows_at.wait_full(*s.row_ring);"), "even", EITHER, ""),
    "rows: full, of queries": (Fault(QUERIES, "this->rows_at.wait_full(*s.row_ring);"), "even", EITHER, ""),
    "rows: not released": (Fault(CONSUMER, "rows_at.release(*s.row_ring);"), "short", "complaint", '"rows empty'),
    "rows: released before the last products that read them": (
        Fault(KEYS, "this->rows_at.wait_full(*s.row_ring);",
              "this->rows_at.wait_full(*s.row_ring); if (this->leads) this->rows_at.release(*s.row_ring);"),
        "short", EITHER, "",
    ),
    "columns: empty": (
        Fault(PRODUCER, "at.wait_empty(ring);"), "even", EITHER, "",
    ),
    "columns: full": (Fault(CONSUMER, "at.wait_full(*s.column_ring);"), "even", EITHER, ""),
    "columns: inspected": (
        Fault(CONSUMER, "mbarrier_wait(&s.inspected[at.stage()], at.parity());"), "causal", EITHER, "",
    ),
    "columns: not waited for by inspectors": (
        Fault(INSPECT, "at.wait_full(*s.column_ring);"), "causal", EITHER, "",
    ),
    "columns: statistics before the stage is empty": (
        Fault(INSPECT, "at.wait_empty(*s.column_ring);"), "even", EITHER, "",
    ),
    "columns: statistics that nobody tells of": (
        Fault(INSPECT, "mbarrier_arrive(&s.inspected[stage]);"), "even", "complaint", '"columns inspected, stage 0"',
    ),
    "columns: zeros known to wgmma": (Fault(INSPECT, "fence_proxy_async();"), "packed", "complaint", "fence"),
    "columns: not released": (
        Fault(CONSUMER, "at.previous().release(*s.column_ring);"), "even", "complaint", '"columns empty, stage 0"',
    ),
    "columns: skipped, not released": (
        Fault(CONSUMER, "at.release(*s.column_ring);"), "narrow", "complaint", '"columns empty',
    ),
    "sums of keys: stored, or columns released, too early": (
        Fault(KEYS, "wgmma_wait<0>();", within="wgmma_wait<0>();\n    hold(dK[0]), hold(dV[0]);"), "even", EITHER, "",
    ),
    "columns: released under the sum of queries": (
        Fault(QUERIES, "wgmma_wait<2>();"), "long", EITHER, "",
    ),
    "S, of keys: not waited for": (
        Fault(KEYS, "wgmma_wait<1>();", within="wgmma_wait<1>();  // S"), "even", EITHER, "",
    ),
    "dP, of keys: not waited for": (
        Fault(KEYS, "wgmma_wait<0>();", within="wgmma_wait<0>();  // dP"), "even", EITHER, "",
    ),
    "S, of queries: not waited for": (Fault(QUERIES, "wgmma_wait<1>();"), "even", EITHER, ""),
    "dP, of queries: not waited for": (
        Fault(QUERIES, "wgmma_wait<0>();", within="wgmma_wait<0>();  // dP"), "even", EITHER, "",
    ),
    "next tile: never let go": (
        Fault(PRODUCER, "mbarrier_arrive(s.next_tile);"), "causal", "complaint", '"next tile, stage 0"',
    ),
}  # fmt: skip
EXCHANGE = {
    "P: full": (Fault(SPLIT, "exchange_at.wait_full(*s.exchange_ring);"), "split", EITHER, ""),
    "P: not filled": (
        Fault(SPLIT, "exchange_at.fill(*s.exchange_ring);"), "split", "complaint", '"P full, stage 0"',
    ),
    "P: not released": (
        Fault(SPLIT, "exchange_at.release(*s.exchange_ring);"), "split", "complaint", '"P empty, stage 0"',
    ),
    "columns: released under a sum": (
        Fault(SPLIT, "wgmma_wait<0>();", within="wgmma_wait<0>();\n    hold(sums[0]);"), "split", EITHER, "",
    ),
}  # fmt: skip
ALTERNATING = {
    "columns: released under the sums of keys": (Fault(KEYS, "wgmma_wait<2>();"), "again", EITHER, ""),
    "alternating: not passed": (
        Fault(KEYS, "this->let_other_issue();", within="this->let_other_issue();\n    if constexpr"),
        "again", "complaint", "barrier",
    ),
    "alternating: not passed past tiles that are skipped": (
        Fault(CONSUMER, "wait_to_issue(), let_other_issue();"), "causal again", "complaint", "barrier",
    ),
    "alternating: not passed at the end": (
        Fault(KEYS, "this->let_other_issue();", within="this->let_other_issue();\n      if (head"),
        "again", "complaint", "barrier",
    ),
    "dP: started before it is preset": (
        Fault(KEYS, "of.preset(dP);"), "again", EITHER, "",
    ),
    "dS: full": (Fault(CONSUMER, "at.wait_full(*s.column_ring);"), "again", EITHER, ""),
    "dS: empty": (
        Fault(PRODUCER, "at.wait_empty(*s.column_ring);", within="at.wait_empty(*s.column_ring);\n  mbarrier"),
        "again", EITHER, "",
    ),
    "dS: fewer bytes expected": (
        Fault(PRODUCER, "bytes += meets(c) ? kDsTileBytes : 0;"), "again", EITHER, "",
    ),
    "dS: not copied": (
        Fault(PRODUCER, "copy_bytes(s_ds + c * kDsTileBytes, g_tile, kDsTileBytes, full);"),
        "causal again", "complaint", '"columns full',
    ),
    "dS: of another consumer": (
        Fault(PRODUCER, "copy_bytes(s_ds + c * kDsTileBytes, g_tile, kDsTileBytes, full);",
              "copy_bytes(s_ds, g_tile, kDsTileBytes, full);"), "again", EITHER, "",
    ),
    "dS: released under its product": (
        Fault(KEPT, "wgmma_wait<1>();"), "again", EITHER, "",
    ),
    "dQ: stored too early": (Fault(KEPT, "wgmma_wait<0>();"), "again", EITHER, ""),
}  # fmt: skip
# What changes no result while there are as many stages of columns as of P: whoever leaves P(n + 2) has got columns
# whose stage the other consumer released, after it took P(n). The ring does not count on that.
HARMLESS = {
    "P: empty": Fault(SPLIT, "exchange_at.wait_empty(*s.exchange_ring);"),
}
HEAD_DIMS = {"frame": (64, FAULTS), "alternating": (96, ALTERNATING), "exchange": (192, EXCHANGE)}


@pytest.fixture(scope="module")
def provoked(tmp_path_factory, shared_cache):
    """provoked("frame"): the faults of a table, compiled."""
    made = {}

    def get(table: str) -> Faults:
        if table not in made:
            head_dim, faults = HEAD_DIMS[table]
            folder = tmp_path_factory.mktemp(table)
            named = {name: fault for name, (fault, *_) in faults.items()}
            named |= HARMLESS if table == "exchange" else {}
            made[table] = Faults(KERNEL, DTYPE, head_dim, named, folder, shared_cache)
        return made[table]

    yield get
    for faults in made.values():
        faults.close()


@pytest.mark.parametrize(
    ("table", "name"), [(table, name) for table, (_, faults) in HEAD_DIMS.items() for name in faults]
)
def test_a_fault_shows(provoked, table, name):
    _, case, kind, said = HEAD_DIMS[table][1][name]
    found = provoked(table).provoke(name, CASES[case], SEEDS)
    assert found.kind in kind.split(" or ") and said in found.text, found


@pytest.mark.parametrize("name", HARMLESS)
def test_what_changes_no_result(provoked, name):
    assert provoked("exchange").provoke(name, CASES["split"], range(4)).kind == ""


@pytest.mark.parametrize("case", CASES)
def test_without_a_fault_nothing_is_reported(provoked, case):
    table = next(table for table, (head_dim, _) in HEAD_DIMS.items() if head_dim == CASES[case].head_dim)
    assert provoked(table).provoke("", CASES[case], range(2)).kind == ""
