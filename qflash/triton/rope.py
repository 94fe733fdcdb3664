"""Rotary embedding. Pairs are (p, p + rotary_dim / 2) or, interleaved, (2p, 2p + 1).

q and k are rotated by separate passes, into the workspace. CUDA kernels rotate a tile as they load it; in Triton a
channel's partner may be in another lane's register, and is loaded as a second tile, whose addresses would take the
registers of a main loop. A position whose row is outside the tables makes a row NaN, as in csrc/attn/rope.cuh, and
nothing outside is read.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from qflash.call.spec import Spec
from qflash.triton.launches import TYPES, Pass, Region, Size, size
from qflash.triton.sequence import read_sequence

BLOCK_T = 16  # tokens per program


@triton.jit
def rotated(
    x, rows, present, position, rope_cos, rope_sin, rope_rows, rotary_dim,
    BLOCK_D: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
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
    # The magnitude of the lowest int32 is not an int32: it is negative, and out of range like all others.
    inside = rotates & present & (row >= 0) & (row < rope_rows)
    at = row.to(tl.int64) * half + pair
    cosine = tl.load(rope_cos + at, mask=inside, other=float("nan"))
    sine = tl.load(rope_sin + at, mask=inside, other=0.0)
    cosine = tl.where(rotates, cosine, 1.0)
    sine = tl.where(first == (position >= 0), -sine, sine)
    y = tl.load(rows + partner, mask=rotates & present, other=0.0).to(tl.float32)
    return x.to(tl.float32) * cosine + y * sine


@triton.jit
def rotate_tokens(
    x, x_stride_t, to, to_stride_t, token, length, first_position, given, has_given,
    rope_cos, rope_sin, rope_rows, rotary_dim,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Rotate tokens of one head of a sequence, from x to `to`, its first tokens. Token t is at position
    first_position + t, or at given[t]."""
    channel = tl.arange(0, BLOCK_D)[None, :]
    present = (token < length)[:, None]
    position = first_position + token
    if has_given != 0:
        position = tl.load(given + token, mask=token < length, other=0)
    rows = x + token[:, None] * x_stride_t
    tile = tl.load(rows + channel, mask=present & (channel < HEAD_DIM), other=0.0)
    tile = rotated(
        tile, rows, present, position[:, None], rope_cos, rope_sin, rope_rows, rotary_dim, BLOCK_D, INTERLEAVED
    )
    at = to + token[:, None] * to_stride_t + channel
    tl.store(at, tile.to(to.dtype.element_ty), mask=present & (channel < HEAD_DIM))


@triton.jit
def qf_triton_rope_q_kernel(
    q, q_stride_b, q_stride_t, q_stride_h, rotated_q,
    batch, q_len, k_len, q_heads, total_q, total_k, cu_seqlens_q, cu_seqlens_k, kv_lens,
    rope_cos, rope_sin, rope_rows, rope_rotary_dim,
    rope_positions_q, has_rope_positions_q, rope_stride_positions_q_b,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, ROW: tl.constexpr, BLOCK_T: tl.constexpr,
    PACKED: tl.constexpr, KV_LENS: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0) % q_heads
    tiles = tl.cdiv(q_len, BLOCK_T)
    token = tl.program_id(0) // q_heads % tiles * BLOCK_T + tl.arange(0, BLOCK_T)
    b = tl.program_id(0) // q_heads // tiles
    q0, _, len_q, len_k, good = read_sequence(
        b, batch, q_len, k_len, total_q, total_k, cu_seqlens_q, cu_seqlens_k, kv_lens, PACKED, KV_LENS
    )
    b64 = b.to(tl.int64)
    # A sequence whose description is out of range is not read or written here: its rows will be NaN.
    rotate_tokens(
        q + b64 * q_stride_b + head * q_stride_h + q0 * q_stride_t, q_stride_t,
        rotated_q + ((b64 * (0 if PACKED else q_len) + q0) * q_heads + head) * ROW, q_heads.to(tl.int64) * ROW,
        token, tl.where(good, len_q, 0), len_k - len_q,
        rope_positions_q + b64 * rope_stride_positions_q_b + q0, has_rope_positions_q,
        rope_cos, rope_sin, rope_rows, rope_rotary_dim, HEAD_DIM, BLOCK_D, INTERLEAVED,
    )  # fmt: skip


@triton.jit
def qf_triton_rope_k_kernel(
    kv_k, kv_k_stride_b, kv_k_stride_t, kv_k_stride_h, rotated_k,
    batch, q_len, k_len, kv_heads, total_q, total_k, cu_seqlens_q, cu_seqlens_k, kv_lens,
    rope_cos, rope_sin, rope_rows, rope_rotary_dim,
    rope_positions_k, has_rope_positions_k, rope_stride_positions_k_b,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, ROW: tl.constexpr, BLOCK_T: tl.constexpr,
    PACKED: tl.constexpr, KV_LENS: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0) % kv_heads
    tiles = tl.cdiv(k_len, BLOCK_T)
    token = tl.program_id(0) // kv_heads % tiles * BLOCK_T + tl.arange(0, BLOCK_T)
    b = tl.program_id(0) // kv_heads // tiles
    _, k0, _, len_k, good = read_sequence(
        b, batch, q_len, k_len, total_q, total_k, cu_seqlens_q, cu_seqlens_k, kv_lens, PACKED, KV_LENS
    )
    b64 = b.to(tl.int64)
    rotate_tokens(
        kv_k + b64 * kv_k_stride_b + head * kv_k_stride_h + k0 * kv_k_stride_t, kv_k_stride_t,
        rotated_k + ((b64 * (0 if PACKED else k_len) + k0) * kv_heads + head) * ROW, kv_heads.to(tl.int64) * ROW,
        token, tl.where(good, len_k, 0), len_k * 0,
        rope_positions_k + b64 * rope_stride_positions_k_b + k0, has_rope_positions_k,
        rope_cos, rope_sin, rope_rows, rope_rotary_dim, HEAD_DIM, BLOCK_D, INTERLEAVED,
    )  # fmt: skip


def row_of(spec: Spec) -> int:
    """The number of elements of a rotated row of a head: whole vectors."""
    return -(-spec.head_dim // 8) * 8


def tokens_of(spec: Spec, which: str) -> Size:
    """The number of rows of a head of q, or of k."""
    return size(f"total_{which}") if spec.packed else size("batch") * size(f"{which}_len")


def passes(spec: Spec, block_d: int, keys: bool = True) -> tuple[Pass, ...]:
    """The passes that rotate q and, unless `keys` are already rotated, k; none without a rope."""
    if spec.rope is None:
        return ()
    constants: dict[str, Any] = {
        "HEAD_DIM": spec.head_dim, "BLOCK_D": block_d, "ROW": row_of(spec), "BLOCK_T": BLOCK_T,
        "PACKED": spec.packed, "KV_LENS": spec.kv_lens, "INTERLEAVED": spec.rope == "interleaved",
    }  # fmt: skip
    functions = ((qf_triton_rope_q_kernel, "q_len", "q_heads"), (qf_triton_rope_k_kernel, "k_len", "kv_heads"))
    return tuple(
        Pass(function, size(length).ceil_div(BLOCK_T) * size(heads) * size("batch"), constants)
        for function, length, heads in functions[: 1 + keys]
    )


def regions(spec: Spec, keys: bool = True) -> tuple[Region, ...]:
    """Rotated q and k; empty without a rope."""
    names = (("rotated_q", "q", "q_heads"), ("rotated_k", "k", "kv_heads"))
    return tuple(
        Region(name, TYPES[spec.dtype], tokens_of(spec, which) * size(heads) * (row_of(spec) if spec.rope else 0))
        for name, which, heads in names[: 1 + keys]
    )
