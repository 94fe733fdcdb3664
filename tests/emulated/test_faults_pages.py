"""Provoked faults where `sm90_fwd` reads pages: in the warp that copies them, and in the one that checks the table."""

from __future__ import annotations

import pytest

from qflash.testing import Case
from qflash.testing.faults import Fault

pytestmark = pytest.mark.slow

KERNEL, DTYPE, HEAD_DIM = "sm90_fwd_pages", "bfloat16", 64
SEEDS = range(24)
PAGES, PRODUCER, TABLE = "attn/wgmma/page_producer.cuh", "attn/wgmma/producer.cuh", "attn/pages.cuh"
CASES = {
    "short": Case("short", 1000, 60, 3, 1, HEAD_DIM, dtype=DTYPE),  # many short work tiles
    "causal": Case("causal", 450, 450, 3, 1, HEAD_DIM, causal=True, dtype=DTYPE, seed=4),  # pages of 256
    "window": Case("window", 300, 450, 2, 1, HEAD_DIM, window=(40, 0), dtype=DTYPE, seed=1),
    "empty": Case("empty", 1500, 90, 2, 1, HEAD_DIM, causal=True, dtype=DTYPE),  # work tiles without keys, most of them
}
EITHER = "complaint or contract"  # what comes of it depends on who is late: the barriers jam, or outputs are wrong

# name: the fault, the case, how it shows, and a part of what is said
FAULTS = {
    "work: full": (Fault(PAGES, "work_at.wait_full(*s.work_ring);"), "short", EITHER, ""),
    "work: not released": (
        Fault(PAGES, "work_at.release(*s.work_ring);"), "short", "complaint", '"work empty, stage 0"',
    ),
    "work: released before all lanes have read it": (
        Fault(PAGES, "__syncwarp();", within="__syncwarp();  // every lane has read the work tile"),
        "empty", EITHER, "",
    ),
    "K and V: empty": (Fault(PAGES, "at.wait_empty(ring);"), "causal", EITHER, ""),
    "K and V: bytes not expected": (
        Fault(PAGES, "mbarrier_arrive_expect(full, Tile::kBytes);"), "causal", "complaint", "",
    ),
    "next tile: no arrival": (
        Fault(PAGES, "mbarrier_arrive(s.next_tile);"), "causal", "complaint", '"next tile, stage 0"',
    ),
    "the page of the tile before": (Fault(PAGES, "page = next;"), "causal", "contract", ""),
    "boxes that begin at any key": (
        Fault("attn/wgmma/work_tile.cuh", "keys.begin = keys.begin / Config::kFirstKey * Config::kFirstKey;"),
        "window", "contract", "",
    ),
    "the first token of a page for every box": (
        Fault(TABLE, "return token - column(token) * page_size;", "return 0;"), "causal", "contract", "",
    ),
    "a sequence that was not written yet": (
        Fault(PRODUCER, "__syncwarp();", within="__syncwarp();  // every lane sees what the first wrote"),
        "empty", EITHER, "",
    ),
}  # fmt: skip
# A vote lets lanes meet in any case; and bytes may come before they are expected, because the arrival that goes with
# the expectation is missing until then. A GPU promises no order of memory at a vote, so both stay.
HARMLESS = {
    "a sequence that not every lane has read": Fault(
        PRODUCER, "__syncwarp();", within="__syncwarp();  // every lane has read the sequence"
    ),
    "bytes that come before they are expected": Fault(
        PAGES, "__syncwarp();", within="__syncwarp();  // the barrier knows how many bytes to wait for"
    ),
}


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
