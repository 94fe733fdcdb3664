"""Rotary embedding, of arrays and of one sequence: in float64 for the oracle, in float32 with the kernels' rounding for
the replays."""

from __future__ import annotations

from typing import Any

import numpy as np

from qflash.rotary import Rope


def positions_of(rope: Rope, len_q: int, len_k: int) -> tuple[np.ndarray, np.ndarray]:
    """The positions of the queries and the keys of one sequence."""
    positions_q = np.arange(len_q) + (len_k - len_q) if rope.positions_q is None else np.asarray(rope.positions_q)
    positions_k = np.arange(len_k) if rope.positions_k is None else np.asarray(rope.positions_k)[:len_k]
    return positions_q, positions_k


def apply_rope(
    x: np.ndarray, positions: np.ndarray, rope: Rope, inverse: bool = False, dtype: Any = np.float64
) -> np.ndarray:
    """Rotate x `[T, H, D]`, row t at position `positions[t]`; `inverse` rotates the other way.

    Each product is rounded to `dtype`, then their sum.
    """
    x = np.array(x, dtype)
    cos, sin = (np.asarray(table).astype(dtype) for table in (rope.cos, rope.sin))
    rows = np.abs(np.asarray(positions, np.int64))
    if rows.size and rows.max() >= cos.shape[0]:
        t = int(rows.argmax())
        raise ValueError(f"position {int(positions[t])} of row {t}; allowed: up to {cos.shape[0] - 1} either way")
    backwards = (np.asarray(positions) < 0) != inverse
    c, s = cos[rows][:, None, :], sin[rows][:, None, :]
    s = np.where(backwards[:, None, None], -s, s)
    half = cos.shape[1]
    first, second = (
        (slice(0, 2 * half, 2), slice(1, 2 * half, 2)) if rope.interleaved else (slice(0, half), slice(half, 2 * half))
    )
    a, b = x[..., first].copy(), x[..., second].copy()
    x[..., first] = a * c - b * s
    x[..., second] = b * c + a * s
    return x


def rope(
    x: np.ndarray, rope: Rope, positions: np.ndarray | None = None, inverse: bool = False, dtype: Any = np.float64
) -> np.ndarray:
    """`qflash.rope`: x `[B, T, H, D]` or packed `[total, H, D]`, rotated, or with `inverse` rotated back."""
    given = rope.positions_k if positions is None else positions
    places = np.arange(x.shape[-3]) if given is None else np.asarray(given)
    if x.ndim == 3:
        return apply_rope(x, places, rope, inverse, dtype)
    everywhere = np.broadcast_to(places, x.shape[:2])
    rotated = np.empty(x.shape, dtype)
    for sequence, where, result in zip(x, everywhere, rotated, strict=True):
        result[:] = apply_rope(sequence, where, rope, inverse, dtype)
    return rotated


def rotate(x: np.ndarray, positions: np.ndarray, rope: Rope) -> np.ndarray:
    """`apply_rope` in float32; NaN for a token whose position is outside the tables."""
    inside = np.abs(np.asarray(positions, np.int64)) < len(rope.cos)
    result = apply_rope(x, np.where(inside, positions, 0), rope, dtype=np.float32)
    result[~inside] = np.nan
    return result
