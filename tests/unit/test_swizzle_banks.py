"""The swizzle of csrc/smem/swizzle.cuh, modelled on the host: which bank groups the accesses of the mma kernels hit."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import qflash

SOURCE = (Path(qflash.__file__).parent / "csrc" / "smem" / "swizzle.cuh").read_text()
CHUNKS = (2, 4, 6, 8, 12, 16, 24, 32)  # of a row: 32 to 256 channels of one byte or two


def ways(chunks: int) -> int:
    return 8 if chunks % 8 == 0 else 4 if chunks % 4 == 0 else 2


def offset(chunks: int, row: int, chunk: int) -> int:
    phase = row // (8 // ways(chunks)) % ways(chunks)
    return row * 16 * chunks + ((chunk ^ phase) << 4)


def groups(offsets) -> set[int]:
    """Bank groups of 16 bytes, of which shared memory serves all eight in a clock."""
    return {at // 16 % 8 for at in offsets}


def test_the_model_is_the_source():
    assert "kChunks % 8 == 0 ? 8 : kChunks % 4 == 0 ? 4 : 2" in SOURCE
    assert re.search(r"return row / \(8 / kWays\) % kWays;", SOURCE)
    assert re.search(r"return row \* \(16 \* kChunks\) \+ \(\(chunk \^ phase\(row\)\) << 4\);", SOURCE)


@pytest.mark.parametrize("chunks", CHUNKS)
def test_a_row_keeps_its_chunks(chunks):
    for row in range(64):
        start = row * 16 * chunks
        assert {offset(chunks, row, c) for c in range(chunks)} == {start + 16 * c for c in range(chunks)}


@pytest.mark.parametrize("chunks", CHUNKS)
def test_ldmatrix_reads_eight_rows_of_a_column_in_one_clock(chunks):
    for first in range(0, 64, 8):
        for chunk in range(chunks):
            assert len(groups(offset(chunks, first + r, chunk) for r in range(8))) == 8


@pytest.mark.parametrize("chunks", CHUNKS)
def test_without_the_swizzle_it_would_take_several(chunks):
    assert len(groups(row * 16 * chunks for row in range(8))) == 8 // ways(chunks)


@pytest.mark.parametrize("chunks", CHUNKS)
def test_copies_of_eight_lanes_take_one_clock(chunks):
    """ChunkWalk: `across` lanes on a row, eight lanes at a time, each 16 bytes."""
    across = ways(chunks)
    for first in range(0, 64, 8 // across):
        lanes = [(first + lane // across, lane % across) for lane in range(8)]
        for column in range(0, chunks, across):
            assert len(groups(offset(chunks, row, column + chunk) for row, chunk in lanes)) == 8


@pytest.mark.parametrize("chunks", CHUNKS)
def test_outputs_are_written_without_conflicts(chunks):
    """round_rows: lane 4g + t writes word t of a chunk in row g: 32 words in 32 banks."""
    for chunk in range(chunks):
        words = {(offset(chunks, g, chunk) + 4 * t) // 4 % 32 for g in range(8) for t in range(4)}
        assert len(words) == 32
