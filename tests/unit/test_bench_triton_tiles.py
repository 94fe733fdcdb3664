"""bench.triton_tiles: candidates of other tiles are the kernel with these tiles, and what they compute is looked at."""

from __future__ import annotations

from dataclasses import replace

import pytest

from qflash import backends, dispatch
from qflash.backends import triton as backend
from qflash.call.spec import Spec
from qflash.cli.bench import load
from qflash.testing.timing import WallClock

pytestmark = pytest.mark.skipif(bool(backend.why_not()), reason=backend.why_not())

presets, rows, run, tiles = (load(name) for name in ("presets", "rows", "run", "triton_tiles"))
sections = load("drawing.sections").sections


@pytest.mark.parametrize("head_dim", tiles.TILES)
def test_a_tile_takes_the_place_of_the_tables(head_dim):
    from qflash.triton import triton_fwd

    spec = Spec("cuda", 90, "bfloat16", head_dim)
    assert triton_fwd.launches(spec) == triton_fwd.launches(spec, triton_fwd.tile_of(spec))
    for tile in tiles.TILES[head_dim]:
        aligned, odd = triton_fwd.launches(spec, tile).choices
        (one,) = aligned.passes
        found = (one.constants["BLOCK_M"], one.constants["BLOCK_N"], one.num_warps, one.num_stages)
        assert found == tile and odd == triton_fwd.launches(spec).choices[1]


def test_the_race_has_the_tables_tile_for_every_problem():
    cases = tiles.Tiles().cases
    assert {case.head_dim for case in cases} == set(tiles.TILES) and {case.causal for case in cases} == {True, False}
    assert {case.dtype for case in cases} == {"float16", "bfloat16"}


def test_rows_of_a_race(monkeypatch):
    """Here the CPU's kernel is launched in the place of each: it takes the same struct."""
    pytest.importorskip("torch")
    asked = []

    def entry_of(launches, arch):
        asked.append(launches.choices[0].passes[0].constants["BLOCK_M"])
        return backends.load(dispatch.BY_NAME["cpu"], Spec("cpu", 0, "bfloat16", 64))

    monkeypatch.setattr(backend, "entry_of", entry_of)
    monkeypatch.setattr(run.Suite, "clock", lambda self: (WallClock(settle=0), 1e-5))
    case = replace(presets._square(96, 64, causal=True, heads=2), dtype="bfloat16")
    (found,) = run.measure(tiles.Tiles("cpu"), cases=(case,), budget=0, min_rounds=1)
    assert [row["candidate"] for row in found][:2] == [tiles.TABLES_OWN, "128 × 64 × 8 × 3"]
    assert asked[1:] == [tile[0] for tile in tiles.TILES[64]] and len(found) == 1 + len(tiles.TILES[64])
    for row in found:
        assert row["rel_l2"] < 5e-3 and row["gflops"] > 0 and row["kernel"] == "triton_fwd"
    assert found[1]["speedup"][tiles.TABLES_OWN] > 0
    assert not sections(found)  # no picture: `qflash report` makes a table of them
    shared = {"gpu": "A GPU", "driver": "1", "commit": "abc", "versions": {"torch": "2"}}
    monkeypatch.setattr(rows, "committed", lambda name, machine=None: {"m": [row | shared for row in found]})
    assert "| B=1 T=96 H=2 D=64 causal bfloat16 | the table's |" in tiles.table()
    assert "|  | 128 × 128 × 8 × 3 |" in tiles.table()
