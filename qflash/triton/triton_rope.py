"""triton_rope: every head of a token rotated by the token's position, or rotated back.

    one program = 16 tokens and 4 heads; cosines and sines are loaded once for the heads

A program holds complete pairs: (p, p + rotary_dim / 2) are two tiles, (2p, 2p + 1) are one tile that is split along its
last dimension and joined again. Channels past rotary_dim are copied.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from qflash.call.spec import Spec
from qflash.triton.launches import TYPES, VECTOR_BYTES, Choice, Launches, Pass, size, vectors

TOKENS, PAIRS, HEADS = 16, 64, 4  # per program: tokens, pairs at a time, heads


@triton.jit
def qf_triton_rope_kernel(
    x, x_stride_b, x_stride_t, x_stride_h, out, out_stride_b, out_stride_t, out_stride_h,
    positions, has_positions, stride_positions_b, rope_positions_k, has_rope_positions_k, rope_stride_positions_k_b,
    rope_cos, rope_sin, rope_rows, rope_rotary_dim, length, heads, head_dim, inverse,
    TOKENS: tl.constexpr, PAIRS: tl.constexpr, HEADS: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    groups = tl.cdiv(heads, HEADS)
    tiles = tl.cdiv(length, TOKENS)
    first_head = tl.program_id(0) % groups * HEADS
    token = tl.program_id(0) // groups % tiles * TOKENS + tl.arange(0, TOKENS)
    b = (tl.program_id(0) // groups // tiles).to(tl.int64)
    present = (token < length)[:, None]
    position = token
    if has_positions != 0:
        position = tl.load(positions + b * stride_positions_b + token, mask=token < length, other=0)
    elif has_rope_positions_k != 0:
        position = tl.load(rope_positions_k + b * rope_stride_positions_k_b + token, mask=token < length, other=0)
    row = tl.abs(position)  # negative for the lowest int32, whose magnitude is not an int32: out of range
    inside = present & ((row >= 0) & (row < rope_rows))[:, None]
    backwards = ((position < 0) != (inverse != 0))[:, None]
    half = rope_rotary_dim // 2
    x += b * x_stride_b + token[:, None] * x_stride_t
    out += b * out_stride_b + token[:, None] * out_stride_t
    for first in range(0, half, PAIRS):
        pair = first + tl.arange(0, PAIRS)[None, :]
        at = row.to(tl.int64)[:, None] * half + pair
        cosine = tl.load(rope_cos + at, mask=inside & (pair < half), other=float("nan"))
        sine = tl.load(rope_sin + at, mask=inside & (pair < half), other=0.0)
        sine = tl.where(backwards, -sine, sine)
        for head in range(first_head, tl.minimum(first_head + HEADS, heads)):
            x_head = x + head * x_stride_h
            out_head = out + head * out_stride_h
            if INTERLEAVED:
                channel = 2 * first + tl.arange(0, 2 * PAIRS)[None, :]
                there = present & (channel < 2 * half)
                both = tl.load(x_head + channel, mask=there, other=0.0).to(tl.float32)
                a, c = tl.split(tl.reshape(both, [TOKENS, PAIRS, 2]))
                rotated = tl.join(a * cosine - c * sine, c * cosine + a * sine)
                rotated = tl.reshape(rotated, [TOKENS, 2 * PAIRS]).to(out.dtype.element_ty)
                tl.store(out_head + channel, rotated, mask=there)
            else:
                there = present & (pair < half)
                a = tl.load(x_head + pair, mask=there, other=0.0).to(tl.float32)
                c = tl.load(x_head + half + pair, mask=there, other=0.0).to(tl.float32)
                tl.store(out_head + pair, (a * cosine - c * sine).to(out.dtype.element_ty), mask=there)
                tl.store(out_head + half + pair, (c * cosine + a * sine).to(out.dtype.element_ty), mask=there)
    for first in range(rope_rotary_dim, head_dim, PAIRS):
        channel = first + tl.arange(0, PAIRS)[None, :]
        there = present & (channel < head_dim)
        for head in range(first_head, tl.minimum(first_head + HEADS, heads)):
            kept = tl.load(x + head * x_stride_h + channel, mask=there, other=0.0)
            tl.store(out + head * out_stride_h + channel, kept, mask=there)


def launches(spec: Spec) -> Launches:
    """What a call of `spec` launches."""
    element = TYPES[spec.dtype]
    types = {"x": element, "out": element, "positions": "i32", "rope_positions_k": "i32"}
    types |= {"rope_cos": "fp32", "rope_sin": "fp32"}
    vector = VECTOR_BYTES // (4 if spec.dtype == "float32" else 2)
    whole = vectors(spec.dtype, "x", "out") | {"rope_cos": VECTOR_BYTES, "rope_sin": VECTOR_BYTES}
    whole |= {"rope_rotary_dim": 2 * vector, "head_dim": vector}
    grid = size("length").ceil_div(TOKENS) * size("heads").ceil_div(HEADS) * size("batch")

    def choice(interleaved: bool, multiples: dict[str, int]) -> Choice:
        constants: dict[str, Any] = {"TOKENS": TOKENS, "PAIRS": PAIRS, "HEADS": HEADS, "INTERLEAVED": interleaved}
        when = () if interleaved else (size("rope.interleaved").up_to(0),)
        return Choice((Pass(qf_triton_rope_kernel, grid, constants),), when, multiples)

    choices = tuple(choice(interleaved, multiples) for interleaved in (False, True) for multiples in (whole, {}))
    return Launches("QfRopeParams", types, choices)
