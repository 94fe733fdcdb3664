"""The claims of csrc/smem/lanes.cuh and csrc/attn/wmma, held against the model of banks in qflash/testing/banks.py."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import qflash
from qflash.testing.banks import clocks, lane_xy, load8, load16, store4

CSRC = Path(qflash.__file__).parent / "csrc"
SOURCE = (CSRC / "smem" / "lanes.cuh").read_text()


LANES = [8, 16]
IDEAL = 2  # one pass for each half-warp


@pytest.mark.parametrize("lanes_x", LANES)
def test_the_model_deals_lanes_out_once_and_as_the_header_does(lanes_x):
    places = {lane_xy(lanes_x, lane) for lane in range(32)}
    assert places == {(x, y) for x in range(lanes_x) for y in range(32 // lanes_x)}
    # The expressions above are the header's own.
    for text in (
        r"\(lane & 1\) \| \(\(lane >> 1\) & 6\)",
        r"\(lane >> 1\) & 8",
        r"\(lane >> 1\) & 1",
        r"\(lane >> 3\) & 2",
    ):
        assert re.search(text, SOURCE), text
    assert "return columns + 4;" in SOURCE and "return columns + lanes_x;" in SOURCE


@pytest.mark.parametrize("lanes_x", LANES)
@pytest.mark.parametrize("columns", [32, 64, 96, 128, 192, 256])
def test_q_and_k_rows_padded_by_four_floats(lanes_x, columns):
    """Q is read along y, K along x; without the padding K costs eight times as much."""
    places = [lane_xy(lanes_x, lane) for lane in range(32)]
    for step in range(0, columns, 4):
        assert load16([y * (columns + 4) + step for _, y in places]) == IDEAL
        assert load16([x * (columns + 4) + step for x, _ in places]) == IDEAL
    assert load16([x * columns for x, _ in places]) == 8 * IDEAL


@pytest.mark.parametrize("lanes_x", LANES)
@pytest.mark.parametrize("keys", [32, 64])
def test_p_rows_padded_by_the_lanes_across(lanes_x, keys):
    """P is written a float at a time and read along y, 16 bytes at a time."""
    places = [lane_xy(lanes_x, lane) for lane in range(32)]
    stride = keys + lanes_x
    assert store4([y * stride + x for x, y in places]) == 1
    assert all(load16([y * stride + n for _, y in places]) == IDEAL for n in range(0, keys, 4))
    assert store4([y * keys + x for x, y in places]) > 1


@pytest.mark.parametrize("lanes_x", LANES)
@pytest.mark.parametrize("columns", [32, 64, 96, 128, 192, 256])
def test_16_bit_k_rows_padded_by_eight_elements(lanes_x, columns):
    """fa_warps keeps K in the arrays' type and reads four 16-bit elements at a time."""
    places = [lane_xy(lanes_x, lane) for lane in range(32)]
    stride = (columns + 8) // 2
    assert all(load8([x * stride + step for x, _ in places]) == IDEAL for step in range(0, columns // 2, 2))
    assert load8([x * columns // 2 for x, _ in places]) > IDEAL
    assert load8([2 * x for x, _ in places]) == IDEAL  # V, along the row


@pytest.mark.parametrize("lanes_x", LANES)
def test_v_needs_no_padding(lanes_x):
    places = [lane_xy(lanes_x, lane) for lane in range(32)]
    assert load16([4 * x for x, _ in places]) == IDEAL


@pytest.mark.parametrize("lanes_x", LANES)
def test_plain_lane_order_would_cost_more(lanes_x):
    """With x = lane mod X, no neighbours agree on a column: every half-warp of a K load is cut in two."""
    assert load16([lane % lanes_x * 36 for lane in range(32)]) == 2 * IDEAL


def store16(addresses: list[int]) -> int:
    """Clocks of a 16-byte store of distinct words: eight lanes at a time; addresses in floats."""
    return sum(clocks([tuple(range(a, a + 4)) for a in addresses[i : i + 8]]) for i in range(0, 32, 8))


WMMA = (CSRC / "attn" / "wmma" / "tile.cuh").read_text()
FA_TC = (CSRC / "kernels" / "attention" / "fa_tc" / "config.h").read_text()


def test_the_model_has_the_strides_of_fa_tc():
    assert "return columns + kPerChunk;" in WMMA
    for text in ("kScoreStride = kWarpRows + 4;", "kFactorStride = 24;", "kPStride = padded_stride(kBlockN);"):
        assert text in FA_TC, text


@pytest.mark.parametrize("columns", [32, 64, 96, 128, 192, 256])
def test_wmma_fragments_of_rows_padded_by_16_bytes(columns):
    """Eight rows of 16 bytes at a time, of Q, K, V (columns: channels) and of P (columns: keys)."""
    for stride, ideal in (((columns + 8) // 2, True), (columns // 2, False)):
        for step in range(0, columns // 2, 4):
            taken = clocks([tuple(range(row * stride + step, row * stride + step + 4)) for row in range(8)])
            assert (taken == 1) == ideal


@pytest.mark.parametrize("rows", [16, 32])
def test_scores_by_columns(rows):
    """Stored from fragments (lane 4g + t has row g, column 2t), then read key by key, a lane per row."""
    stride = rows + 4
    assert store4([2 * (lane % 4) * stride + lane // 4 for lane in range(32)]) == 1
    assert store4([2 * (lane % 4) * rows + lane // 4 for lane in range(32)]) > 1
    parts = 32 // rows
    for i in range(32):
        keys = [i if parts == 1 else i // 4 * 8 + 4 * (lane // rows) + i % 4 for lane in range(32)]
        assert store4([key * stride + lane % rows for lane, key in enumerate(keys)]) == 1


@pytest.mark.parametrize("keys", [32, 64])
def test_weights_and_factors(keys):
    """P of 32 rows without conflicts, of 16 rows with one: rows r and r + 8 start in the same bank."""
    stride = (keys + 8) // 2
    assert store16([lane * stride for lane in range(32)]) == 4
    assert load8([lane % 16 * stride + lane // 16 * 2 for lane in range(32)]) == 2 * IDEAL
    assert load8([lane // 4 * 24 + lane % 4 * 2 for lane in range(32)]) == IDEAL
    assert load8([lane // 4 * 16 + lane % 4 * 2 for lane in range(32)]) > IDEAL
