"""A host-side model of shared-memory banks.

32 banks of 4 bytes serve one word each per cycle. A 16-byte load runs as two half-warps; a half-warp takes one pass if
lanes i and i^1 agree on their address for all i, or i and i^2 do, otherwise it is split in two. A pass costs as many
cycles as the busiest bank has different words.
"""

from __future__ import annotations


def lane_xy(lanes_x: int, lane: int) -> tuple[int, int]:
    """Lanes<X>::x and ::y, as in the header."""
    x = (lane & 1) | ((lane >> 1) & 6)
    y = (lane >> 1) & 1
    return (x | ((lane >> 1) & 8), y) if lanes_x == 16 else (x, y | ((lane >> 3) & 2))


def clocks(words: list[tuple[int, ...]]) -> int:
    """Cycles for lanes that each access these 4-byte words together."""
    asked: dict[int, set[int]] = {}
    for lane in words:
        for word in lane:
            asked.setdefault(word % 32, set()).add(word)
    return max(len(found) for found in asked.values())


def load16(addresses: list[int]) -> int:
    """Cycles of a 16-byte load; addresses in floats."""
    total = 0
    for half in (addresses[:16], addresses[16:]):
        paired = any(all(half[i] == half[i ^ step] for i in range(16)) for step in (1, 2))
        for part in [half] if paired else [half[:8], half[8:]]:
            total += clocks([tuple(range(a, a + 4)) for a in part])
    return total


def load8(addresses: list[int]) -> int:
    """Cycles of an 8-byte load: two half-warps, one pass each; addresses in 4-byte words."""
    return sum(clocks([(a, a + 1) for a in half]) for half in (addresses[:16], addresses[16:]))


def store4(addresses: list[int]) -> int:
    """Cycles of a 4-byte store of distinct words."""
    return clocks([(a,) for a in addresses])
