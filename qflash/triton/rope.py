"""Rotary embedding of rows as they are loaded. Pairs are (p, p + rotary_dim / 2) or, interleaved, (2p, 2p + 1).

A channel's partner is loaded as a second tile, from the cache that the first left it in: Triton has no way to move an
element to the lane that has its partner. A position whose row is outside the tables makes the row NaN, as in
csrc/attn/rope.cuh, and nothing outside is read.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rotated(
    x,
    rows,
    present,
    position,
    rope_cos,
    rope_sin,
    rope_rows,
    rotary_dim,
    BLOCK_D: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """The tile x in float32, rotated. rows: pointers to the first channels of its rows, [n, 1]; present and position
    of each row, [n, 1]."""
    channel = tl.arange(0, BLOCK_D)[None, :]
    half = rotary_dim // 2
    if INTERLEAVED:
        pair = channel // 2
        partner = channel ^ 1
        first = channel % 2 == 0
    else:
        first = channel < half
        pair = tl.where(first, channel, channel - half)
        partner = tl.where(first, channel + half, channel - half)
    rotates = channel < rotary_dim
    row = tl.abs(position)
    # The magnitude of the least int32 is no int32: it is negative, and outside like all others.
    inside = rotates & present & (row >= 0) & (row < rope_rows)
    at = row.to(tl.int64) * half + pair
    cosine = tl.load(rope_cos + at, mask=inside, other=float("nan"))
    sine = tl.load(rope_sin + at, mask=inside, other=0.0)
    cosine = tl.where(rotates, cosine, 1.0)
    sine = tl.where(first == (position >= 0), -sine, sine)
    y = tl.load(rows + partner, mask=rotates & present, other=0.0).to(tl.float32)
    return x.to(tl.float32) * cosine + y * sine
