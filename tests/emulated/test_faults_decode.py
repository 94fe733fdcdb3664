"""Provoked faults in what `sm90_decode` has of its own: the ring of K and V, units, teams that clear V, sums that warps
and blocks merge, masks.

Each must show within a few seeds: as a complaint of the emulator, as an output that breaks the contract, or as bits
that differ from seed to seed. The table says which.
"""

from __future__ import annotations

import pytest

from qflash.testing import Case, Rotary
from qflash.testing.faults import Fault

KERNEL, DTYPE, HEAD_DIM = "sm90_decode", "bfloat16", 128
SEEDS = range(24)
BLOCK, TILES, ATTEND, MERGE = (
    "kernels/attention/sm90_decode/kernel.cuh", "attn/decode/tma_tiles.cuh", "attn/decode/attend.cuh",
    "attn/decode/merge.cuh",
)  # fmt: skip

# Both warps of a team multiply keys whose values the other clears.
NONFINITE_V = (("v", (0, 450, 0, 3), "nan"), ("v", (0, 451, 0, 70), "inf"), ("v", (0, 20, 0, 9), "inf"))
CASES = {
    # One unit for three blocks, the ring several times round in each.
    "long": Case("long", 1, 3000, 4, 1, HEAD_DIM, dtype=DTYPE),
    # Many units of one tile, which no block shares, and whose unseen keys are cleared; sums in two halves of the rows.
    "short": Case("short", 3, 64, 8, 2, HEAD_DIM, batch=12, dtype=DTYPE, kv_lens=(60,) * 12),
    # As many units as there can be.
    "units": Case("units", 1, 8, 4, 1, HEAD_DIM, batch=90, dtype=DTYPE),
    # Units that several blocks share, others before and after them.
    "cut": Case("cut", 4, 400, 4, 1, HEAD_DIM, batch=8, dtype=DTYPE, kv_lens=(400, 130, 7, 333, 0, 290, 65, 222)),
    # Keys that only some rows see, and what is not finite at them.
    "causal": Case("causal", 4, 453, 4, 1, HEAD_DIM, causal=True, dtype=DTYPE, plant=NONFINITE_V),
    # A launch before, which rotates K.
    "rope": Case("rope", 2, 300, 4, 1, HEAD_DIM, dtype=DTYPE, rope=Rotary(HEAD_DIM)),
}
EITHER = "complaint or contract"  # what comes of it depends on who is late: the barriers jam, or outputs are wrong
WRONG = "contract or bits"
_RELEASE = "if (threadIdx.x % 32 == 0) mbarrier_arrive(&ring_.barriers->empty[at_.stage]);"
_RELEASE_UNIT = "if (threadIdx.x % 32 == 0) unit_at_.release(ring_.barriers->unit);"
_FILL = "at.fill(ring.barriers->unit);"

# name: the fault, the case, how it shows, and a part of what is said
FAULTS = {
    "block: barriers in place": (
        Fault(BLOCK, "__syncthreads();", within="__syncthreads();           // the barriers are in place"),
        "long", "complaint", "no mbarrier was initialised",
    ),
    "block: barriers known to the copy engine": (
        Fault(TILES, "fence_mbarrier_init();"),
        "long", "complaint", 'no fence (fence_mbarrier_init) since the mbarrier "K full, stage 0"',
    ),
    "K: full": (
        Fault(TILES, "mbarrier_wait(&ring_.barriers->k_full[at_.stage], at_.parity);"), "long", EITHER, "",
    ),
    "V: full": (
        Fault(TILES, "mbarrier_wait(&ring_.barriers->v_full[at_.stage], at_.parity);"), "long", EITHER, "",
    ),
    "K and V: bytes not expected": (
        Fault(TILES, "mbarrier_arrive_expect(full, tile.kBytes);"), "long", "complaint", "",
    ),
    "K and V: empty": (
        Fault(TILES, "mbarrier_wait(&barriers.empty[at.stage], at.parity ^ 1);"), "long", EITHER, "",
    ),
    "K and V: not released": (
        Fault(TILES, "mbarrier_arrive(&ring_.barriers->empty[at_.stage]);", within=_RELEASE),
        "long", "complaint", '"empty, stage',
    ),
    "K and V: released twice": (
        Fault(TILES, "mbarrier_arrive(&ring_.barriers->empty[at_.stage]);",
              "mbarrier_arrive(&ring_.barriers->empty[at_.stage]), mbarrier_arrive(&ring_.barriers->empty[at_.stage]);",
              within=_RELEASE),
        "long", EITHER, "",
    ),
    # The assertion on kStages keeps this from being compiled: three stages for four teams.
    "K and V: a stage is not always the same team's": (
        Fault(TILES, "if (++stage == kStages) stage = 0, parity ^= 1;",
              "if (++stage == kStages - 1) stage = 0, parity ^= 1;"),
        "long", EITHER, "",
    ),
    "V: zeros not in place": (
        Fault(ATTEND, "source.meet_team();", within="source.meet_team();  // the zeros are in place"),
        "causal", WRONG, "",
    ),
    "V: zeros written over by the copy engine, without a fence": (
        Fault(TILES, "fence_proxy_async();"),
        "short", "complaint", "a copy writes over what a thread wrote, without a fence between",
    ),
    "V: what some rows do not see is not cleared": (
        Fault(ATTEND, "clear_unseen<Config>(s_v, key0, unit.seen.any, unit.seen.all);"), "causal", "contract", "NaN",
    ),
    "masks: none": (
        Fault(ATTEND, "mask_scores(p, unit.seen.mask, S, row0 + lane / 4, key0 + first + step + lane % 4 * 2);"),
        "causal", "contract", "",
    ),
    "masks: none in the last tile": (
        Fault(ATTEND, "mask_scores(p, unit.seen.mask, S, row0 + lane / 4, key0 + first + step + lane % 4 * 2);",
              "mask_scores(p, {-1, -1, p.q_len, 1 << 20}, S, row0 + lane / 4, key0 + first + step + lane % 4 * 2);"),
        "long", "contract", "",
    ),
    "unit: full": (Fault(TILES, "unit_at_.wait_full(ring_.barriers->unit);"), "short", EITHER, ""),
    "unit: never filled": (Fault(TILES, _FILL), "short", "complaint", '"unit full, stage 0"'),
    "unit: not filled, at the end": (
        Fault(TILES, _FILL, f"if (!over) {_FILL}"), "short", "complaint", '"unit full, stage 0"',
    ),
    "unit: filled twice": (Fault(TILES, _FILL, f"{_FILL} {_FILL}"), "short", EITHER, ""),
    "unit: filled by one lane, before all have written q": (
        Fault(TILES, _FILL, f"if (threadIdx.x % 32 == 0) for (int i = 0; i < 32; ++i) {_FILL}"), "units", EITHER, "",
    ),
    "unit: empty": (Fault(TILES, "at.wait_empty(ring.barriers->unit);"), "short", EITHER, ""),
    "unit: not released": (
        Fault(TILES, "unit_at_.release(ring_.barriers->unit);", within=_RELEASE_UNIT),
        "short", "complaint", '"unit empty, stage 0"',
    ),
    "unit: released twice": (
        Fault(TILES, "unit_at_.release(ring_.barriers->unit);",
              "unit_at_.release(ring_.barriers->unit), unit_at_.release(ring_.barriers->unit);", within=_RELEASE_UNIT),
        "short", EITHER, "",
    ),
    "area: read before all warps have written": (
        Fault(ATTEND, "source.meet();", within="source.meet();  // all sums are in the area"), "short", WRONG, "",
    ),
    "area: written again before all warps have read": (
        Fault(ATTEND, "source.meet();", within="source.meet();  // the area may be written again"), "short", WRONG, "",
    ),
    "parts: not announced": (
        Fault(MERGE, "st_release(flag_of(part, part.index), 1);"), "long", "complaint", "a block before it",
    ),
    "parts: not stored": (
        Fault(ATTEND, "partials.store(part, Config::kBatchInvariant && !part.begins() ? split : 0, row, d, merged);"),
        "long", "complaint", "a block before it",
    ),
    "parts: merged in another order than their keys'": (
        Fault(MERGE, "g_row = g_next, g_next += apart;", "g_next += apart;"), "long", EITHER, "",
    ),
}  # fmt: skip

# What the emulator cannot see, and a GPU may: so these stay.
COVERED = {
    # Lanes meet at ldmatrix in any case, which all of them start together; a GPU promises no order of memory there.
    "K and V: released before all lanes have read them": (
        Fault(TILES, "__syncwarp();", within=f"__syncwarp();  // all lanes have read\n    {_RELEASE}"), "long",
    ),
    # Warps have met since they read it, at the end of merge_warps.
    "unit: released before all lanes have read it": (
        Fault(TILES, "__syncwarp();", within=f"__syncwarp();  // all lanes have read\n    {_RELEASE_UNIT}"), "cut",
    ),
    # Blocks come one after another: all that one stores is there before the next looks for it, and memory that nobody
    # wrote reads as absent.
    "parts: not cleared": (Fault(TILES, "partials.clear(part);"), "long"),
    "parts: announced before all lanes have cleared": (
        Fault(MERGE, "__syncwarp();", within="__syncwarp();  // all lanes have cleared"), "long",
    ),
    "parts: announcements not waited for": (
        Fault(MERGE, "while (ld_acquire(flag) == 0) wait_for_blocks_before();"), "long",
    ),
    "parts: flags not 0 again after a launch": (Fault(MERGE, "*flag = 0;"), "long"),
    # So do launches.
    "block: the grid before not waited for": (Fault(BLOCK, "wait_for_previous_grid();"), "rope"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_reported(faults, name):
    _, case, kind, said = FAULTS[name]
    found = faults.provoke(name, CASES[case], SEEDS)
    assert found.kind in kind.split(" or ") and said in found.text, found


@pytest.mark.parametrize("name", COVERED)
def test_what_the_emulator_cannot_see(faults, name):
    """Should it ever see a difference, the fault belongs into the table above."""
    assert faults.provoke(name, CASES[COVERED[name][1]], range(4)).kind == ""


@pytest.mark.parametrize("case", CASES)
def test_without_a_fault_nothing_is_reported(faults, case):
    assert faults.provoke("", CASES[case], range(2)).kind == ""
