"""Provoked faults in what `decode` has of its own: teams that copy their own tiles, pages looked up a tile ahead, the
warp that describes units.

Each must show within a few seeds, as tests/emulated/test_faults_decode.py says.
"""

from __future__ import annotations

import pytest

from qflash.testing import Case
from qflash.testing.faults import Fault

KERNEL, DTYPE, HEAD_DIM = "decode_pages_int8", "float16", 64
SEEDS = range(12)
TILES, UNITS, WALK, COPY = (
    "attn/decode/own_tiles.cuh", "attn/decode/own_units.cuh", "attn/decode/team_walk.cuh", "attn/decode/team_copy.cuh",
)  # fmt: skip

pytestmark = pytest.mark.slow

CASES = {  # of 4096 values and more, which the contract's figures are for
    # One warp a team; rings go round in each of three blocks, and units are cut. Pages of 256 hold whole tiles.
    "long": Case("long", 1, 1900, 16, 1, HEAD_DIM, batch=4, dtype=DTYPE, seed=4),
    # Pages of 16, of which a tile has several.
    "small": Case("small", 1, 900, 16, 1, HEAD_DIM, batch=4, dtype=DTYPE, seed=0),
    # Many units, with rows that see different keys.
    "units": Case(
        "units", 2, 300, 16, 8, HEAD_DIM, batch=4, causal=True, dtype=DTYPE, kv_lens=(90, 270, 3, 300), seed=3
    ),
    # Two and four warps a team.
    "pairs": Case("pairs", 1, 2500, 24, 1, HEAD_DIM, batch=4, dtype=DTYPE, seed=4),
    "fours": Case("fours", 1, 2500, 60, 1, HEAD_DIM, batch=4, dtype=DTYPE, seed=4),
}
EITHER, WRONG = "complaint or contract or bits", "contract or bits"

_COPY_SCALE = "cp_async_4(s_k + kScaleRow + (chunk * Config::kBlockN + row0 + step * kStep) * 4, g_scale, found);"

# name: the fault, the case, how it shows, and a part of what is said
FAULTS = {
    "tile: not waited for": (
        Fault(TILES, "cp_async_wait<Config::kStages - 1>();"), "long", WRONG, "",
    ),
    "tile: the other warps' copies not waited for": (
        Fault(TILES, "meet_team();", within="meet_team();  // all of the tile is there"), "pairs", WRONG, "",
    ),
    "tile: groups not counted": (Fault(TILES, "cp_async_commit();"), "long", WRONG, ""),
    "pages: those of the first tile for all": (
        Fault(TILES, "if (!walk_.is_over()) copy_.look_up(walk_);",
              within="walk_.advance(p_, own_share());\n      if (!walk_.is_over()) copy_.look_up(walk_);"),
        "long", "contract", "",
    ),
    "pages: the first one for all rows of a tile": (
        Fault(COPY, "pages_[step] = key >= next.seen.begin && key < next.seen.end ? table.page_of(key) : -1;",
              "pages_[step] = table.page_of(max(next.key0, next.seen.begin));"),
        "small", "contract", "",
    ),
    "scales: not copied": (
        Fault(COPY, _COPY_SCALE),
        "long", "contract", "",
    ),
    "walk: the share is not kept": (Fault(WALK, "s_share = share;"), "units", EITHER, ""),
    "units: described while it is looked at": (
        Fault(TILES, "__syncthreads();", within="__syncthreads();  // the unit is described"), "units", EITHER, "",
    ),
    "units: the last one is not there for the merge": (
        Fault(UNITS, "memory_.state().ended = part;"), "long", EITHER, "",
    ),
    "units: parts not announced": (
        Fault(UNITS, "partials_.announce(part);"), "long", "complaint", "a block before it",
    ),
    "q: not in place": (
        Fault(TILES, "meet();", within="meet();  // q is in place"), "fours", EITHER, "",
    ),
}  # fmt: skip

# What the emulator cannot see, and a GPU may: copies arrive when they are waited for, which is two tiles later here,
# and warps of a team have met since.
COVERED = {
    "tile: copied over before all warps have read it": (
        Fault(TILES, "meet_team();", within="meet_team();  // all have read"), "pairs",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_reported(faults, name):
    _, case, kind, said = FAULTS[name]
    found = faults.provoke(name, CASES[case], SEEDS)
    assert found.kind in kind.split(" or ") and said in found.text, found


@pytest.mark.parametrize("name", COVERED)
def test_what_the_emulator_cannot_see(faults, name):
    """Should it ever see a difference, the fault belongs into the table above."""
    assert faults.provoke(name, CASES[COVERED[name][1]], range(3)).kind == ""


@pytest.mark.parametrize("case", CASES)
def test_without_a_fault_nothing_is_reported(faults, case):
    assert faults.provoke("", CASES[case], range(2)).kind == ""
