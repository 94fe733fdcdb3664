"""The bank claims of the GEMM kernels (csrc/gemm, kernels/linear), counted on the host.

32 banks of 4 bytes serve one word each per clock; lanes that ask for the same word share it. A 16-byte access runs
eight lanes at a time, an 8-byte one sixteen, a 4-byte one all 32.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import qflash
from qflash.testing.banks import lane_xy, load16

CSRC = Path(qflash.__file__).parent / "csrc"


def clocks(addresses: list[int], size: int) -> int:
    """Clocks of an access of `size` bytes by 32 lanes at byte addresses."""
    lanes = 128 // size
    total = 0
    for first in range(0, len(addresses), lanes):
        words = {address // 4 + i for address in addresses[first : first + lanes] for i in range(size // 4)}
        banks = [word % 32 for word in words]
        total += max(map(banks.count, banks))
    return total


def plain(row: int, chunk: int) -> int:
    return row * 128 + chunk * 16


def swizzled(row: int, chunk: int) -> int:
    return row * 128 + ((chunk ^ row ^ (row // 16 * 2)) & 7) * 16


def source(path: str) -> str:
    return re.sub(r"\s+", " ", (CSRC / path).read_text())


def test_the_model_is_the_header():
    assert "row * kSwizzledRow + ((chunk ^ row ^ (row / 16 * 2)) & 7) * 16" in source("gemm/swizzle.cuh")
    assert "(offset ^ ((i ^ j) % 4 * 32)) + i * 16 * kSwizzledRow" in source("gemm/swizzle.cuh")
    place = "group * kTiledBlock + (row ^ (group / 4 % 4 * 8) ^ (row / 32 % 4 * 4))"
    assert place in source("gemm/tiled/load.cuh")
    assert "kSlabStride = kWarpN + 8" in source("gemm/slab.cuh")
    panels = "swizzled(lane % 8 + lane / 16 * 8, row % 64 / 8 + lane / 8 % 2)", "swizzled(lane % 16, lane / 16)"
    assert all(first in source("gemm/mma/fragments.cuh") for first in panels)
    wmma = source("kernels/linear/gelu_linear_wmma/config.h")
    assert all(f"k{name} = kBlock{of} + kPadding" in wmma for name, of in (("Stride", "K"), ("DownStride", "")))
    assert "kBlock = 128, kBlockK = 32" in wmma and "kPadding = 8" in wmma


def test_offsets_further_on_follow_from_the_first():
    """swizzled_further: rows 16 i and chunks 2 j further, where neither carries."""
    for row in range(0, 256):
        for chunk in (0, 1):
            first = swizzled(row, chunk)
            for i in range(4):
                if row // 16 & i:
                    continue
                for j in range(4):
                    assert (first ^ ((i ^ j) % 4 * 32)) + i * 2048 == swizzled(row + 16 * i, chunk + 2 * j)
    for row in range(16):  # panels: rows 16 i further down k, chunks 2 j further along, of either half of a panel
        for chunk, tiles in ((0, 4), (1, 4), (4, 2), (5, 2)):
            for i in range(4):
                for j in range(tiles):
                    further = (swizzled(row, chunk) ^ ((i ^ j) % 4 * 32)) + i * 2048
                    assert further == swizzled(row + 16 * i, chunk + 2 * j)
    for row in range(32):  # what copies use: rows 32 i further
        for chunk in range(8):
            for i in range(8):
                assert (swizzled(row, chunk) ^ (2 * i % 4 * 32)) + i * 4096 == swizzled(row + 32 * i, chunk)


def test_ldmatrix_reads_without_conflicts():
    """Four matrices of eight rows, for a (16 rows, chunks 2q and 2q + 1) and b (the same, dealt otherwise)."""
    for first in range(0, 256, 16):
        for quarter in range(4):
            a = [(first + lane % 16, 2 * quarter + lane // 16) for lane in range(32)]
            b = [(first + lane % 8 + lane // 16 * 8, 2 * quarter + lane // 8 % 2) for lane in range(32)]
            for lanes in (a, b):
                assert clocks([swizzled(*place) for place in lanes], 16) == 4  # one for each matrix
                assert clocks([plain(*place) for place in lanes], 16) == 4 * 8


def test_transposing_ldmatrix_reads_panels_without_conflicts():
    """Four matrices of eight k, for a (chunks 2i and 2i + 1, then the next eight k) and b (the other way round)."""
    for quarter in range(4):
        for tile in range(4):
            a = [(16 * quarter + lane % 8 + lane // 16 * 8, 2 * tile + lane // 8 % 2) for lane in range(32)]
            b = [(16 * quarter + lane % 16, 2 * tile + lane // 16) for lane in range(32)]
            for lanes in (a, b):
                assert clocks([swizzled(*place) for place in lanes], 16) == 4  # one for each matrix
                assert clocks([plain(*place) for place in lanes], 16) == 4 * 8


def test_copies_write_without_conflicts():
    for first in range(0, 256, 4):
        assert clocks([swizzled(first + lane // 8, lane % 8) for lane in range(32)], 16) == 4


def test_transposed_columns_are_written_without_conflicts():
    """HeldColumns: lanes are 8 words of k x 4 patches of 16 columns; each of 16 stores writes one column a patch."""
    for warp in range(8):
        for j in range(16):
            cost = {}
            for layout in (plain, swizzled):
                addresses = []
                for lane in range(32):
                    group, column = warp % 4 * 8 + lane // 4, warp // 4 * 64 + lane % 4 * 16 + j
                    addresses.append(layout(column, group // 4) + group % 4 * 4)
                cost[layout] = clocks(addresses, 4)
            assert cost == {plain: 4, swizzled: 1}


@pytest.mark.parametrize("stride, expected", [(64, 4), (72, 1)])
def test_sums_on_their_way_out(stride, expected):
    """8-byte stores in the layout of mma: 4 rows x 4 lanes a half-warp. 72 words a row, not 64."""
    for column in range(0, 64, 8):
        addresses = [4 * (lane // 4 * stride + column + lane % 4 * 2) for lane in range(32)]
        assert clocks(addresses, 8) == 2 * expected
    rows = [4 * (lane // 16 * 72 + lane % 16 * 4) for lane in range(32)]  # two rows of 16 lanes
    assert clocks(rows, 16) == 4


# gemm_tiled and int8_gemm_tiled --------------------------------------------------------------------------------------


def placed(group: int, row: int) -> int:
    return group * 128 + (row ^ (group // 4 % 4 * 8) ^ (row // 32 % 4 * 4))


def in_order(group: int, row: int) -> int:
    return group * 128 + row


def test_places_are_a_permutation_that_keeps_fours_together():
    assert sorted(placed(g, r) for g in range(16) for r in range(128)) == list(range(2048))
    for group in range(16):
        for row in range(0, 128, 4):
            assert [placed(group, row + i) for i in range(4)] == [placed(group, row) + i for i in range(4)]


def test_fetched_rows_are_stashed_without_conflicts():
    for first in range(0, 128, 8):
        for j in range(4):
            lanes = [(lane % 4 * 4 + j, first + lane // 4) for lane in range(32)]
            assert clocks([4 * placed(*place) for place in lanes], 4) == 1
            assert clocks([4 * in_order(*place) for place in lanes], 4) == 4


def test_converted_rows_are_stashed_without_conflicts():
    """RowsTile of 16-bit elements: a warp has 16 rows x 2 chunks of eight words."""
    for first in range(0, 128, 16):
        for j in range(8):
            lanes = [(lane % 2 * 8 + j, first + lane // 2) for lane in range(32)]
            assert clocks([4 * placed(*place) for place in lanes], 4) == 1
            assert clocks([4 * in_order(*place) for place in lanes], 4) == 2


def test_columns_are_stashed_without_conflicts():
    """ColumnsTile: a warp has 32 chunks of four floats of one k, or 16 of eight converted elements of two."""
    for group in range(16):
        floats = [(group, 4 * lane) for lane in range(32)]
        assert clocks([4 * placed(*place) for place in floats], 16) == 4
    for group in range(0, 16, 2):
        for j in (0, 4):
            halves = [(group + lane // 16, lane % 16 * 8 + j) for lane in range(32)]
            assert clocks([4 * placed(*place) for place in halves], 16) == 4
            assert clocks([4 * in_order(*place) for place in halves], 16) == 4 * 2


def test_transposed_columns_are_stashed_without_conflicts():
    for warp in range(4):
        for i in range(4):
            lanes = [((warp * 32 + lane) // 8, lane % 8 * 16 + 4 * i) for lane in range(32)]
            assert clocks([4 * placed(*place) for place in lanes], 16) == 4
            assert clocks([4 * in_order(*place) for place in lanes], 16) == 4 * 4


def test_products_read_without_conflicts():
    """Both operands as 16-byte words, lanes dealt by smem/lanes.cuh: two clocks each, the least there is."""
    for group in range(16):
        for half in (0, 64):
            for warp in range(8):
                rows = [4 * (warp % 4 * 4 + lane_xy(8, lane)[1]) + half for lane in range(32)]
                columns = [4 * (warp // 4 * 8 + lane_xy(8, lane)[0]) + half for lane in range(32)]
                for lanes in (rows, columns):
                    assert load16([placed(group, row) for row in lanes]) == 2


# gelu_linear_wmma ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("columns", [32, 128])
def test_fragments_of_padded_tiles_are_read_without_conflicts(columns):
    """wmma reads eight rows at one column at a time, a chunk of each."""
    for padding, expected in ((8, 1), (0, 4 if columns == 32 else 8)):
        stride = 2 * (columns + padding)
        for column in range(0, columns, 8):
            assert clocks([row * stride + 2 * column for row in range(8)], 16) == expected


def test_padded_tiles_are_stashed_without_conflicts():
    """RowsTile: eight lanes have a chunk of eight rows; DownTile: eight chunks of a row."""
    rows = [lane % 8 * 80 + lane // 8 * 16 for lane in range(32)]
    down = [lane // 16 * 272 + lane % 16 * 16 for lane in range(32)]
    assert clocks(rows, 16) == clocks(down, 16) == 4
