"""q and k to integers, as docs/kernels/quantize.md defines them bit for bit: qflash/reference/fa_int8.py is the replay.

    sums   a program adds 64 keys of a head serially, in float32
    mean   a program adds the chunks of a head in float64: the mean that smoothing subtracts
    k      16 neighbouring keys share a scale; it is stored for each key, NaN if the key is nonfinite
    q      every query has a scale, and its product with the mean, which scores omit and which is added back in lse

No product may be fused with a sum here, so these passes are compiled without fusion.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from qflash.call.spec import Spec
from qflash.triton.launches import Pass, Region, size
from qflash.triton.rope import rotated, tokens_of
from qflash.triton.sequence import read_sequence

CHUNK = 64  # keys that are summed in float32
GROUP = 16  # keys that share a scale
TILE = 4096  # values that a program quantizes, a multiple of the group size in tokens
LEVELS = tl.constexpr(127.0)
NO_AMPLITUDE = tl.constexpr(2.0**-100)
MAGIC = tl.constexpr(1.5 * 2**23)  # added and subtracted: the nearest integer, ties to even


@triton.jit
def load_tokens(
    x, x_stride_t, token, length, first_position, given, has_given, rope_cos, rope_sin, rope_rows, rotary_dim,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, ROPE: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Tokens of a head of a sequence that begins at x, in float32, rotated; 0 if there is none."""
    channel = tl.arange(0, BLOCK_D)[None, :]
    present = (token < length)[:, None]
    rows = x + token[:, None] * x_stride_t
    tile = tl.load(rows + channel, mask=present & (channel < HEAD_DIM), other=0.0).to(tl.float32)
    if ROPE:
        position = first_position + token
        if has_given != 0:
            position = tl.load(given + token, mask=token < length, other=0)
        tile = rotated(
            tile, rows, present, position[:, None], rope_cos, rope_sin, rope_rows, rotary_dim, BLOCK_D, INTERLEAVED
        )
        tile = tl.where(present, tile, 0.0)
    return tile


@triton.jit
def is_finite(x):
    """Whether every value of each row, [n, 1], is finite."""
    return tl.min((tl.abs(x) < float("inf")).to(tl.int32), 1)[:, None] != 0


@triton.jit
def integers_of(x, inverse):
    """int8: x times inverse, rounded to the nearest, within the levels."""
    y = (x * inverse + MAGIC) - MAGIC
    return tl.minimum(tl.maximum(y, -LEVELS), LEVELS).to(tl.int8)


@triton.jit
def scale_of(amplitude):
    """(scale, inverse) for this amplitude; both 0 if it is below NO_AMPLITUDE."""
    usable = amplitude >= NO_AMPLITUDE
    scale = tl.where(usable, tl.div_rn(amplitude, amplitude * 0.0 + LEVELS), 0.0)
    inverse = tl.where(usable, tl.div_rn(amplitude * 0.0 + LEVELS, tl.where(usable, amplitude, LEVELS)), 0.0)
    return scale, inverse


@triton.jit
def qf_triton_int8_sums_kernel(
    kv_k, kv_k_stride_b, kv_k_stride_t, kv_k_stride_h, sums, counts,
    batch, q_len, k_len, kv_heads, total_q, total_k, cu_seqlens_q, cu_seqlens_k, kv_lens,
    rope_cos, rope_sin, rope_rows, rope_rotary_dim, rope_positions_k, has_rope_positions_k, rope_stride_positions_k_b,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, CHUNK: tl.constexpr,
    PACKED: tl.constexpr, KV_LENS: tl.constexpr, ROPE: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    chunks = tl.cdiv(k_len, CHUNK)
    chunk = tl.program_id(0) % chunks
    head = tl.program_id(0) // chunks % kv_heads
    b = tl.program_id(0) // chunks // kv_heads
    _, k0, _, len_k, good = read_sequence(
        b, batch, q_len, k_len, total_q, total_k, cu_seqlens_q, cu_seqlens_k, kv_lens, PACKED, KV_LENS
    )
    b64 = b.to(tl.int64)
    k = kv_k + b64 * kv_k_stride_b + head * kv_k_stride_h + k0 * kv_k_stride_t
    given = rope_positions_k + b64 * rope_stride_positions_k_b + k0
    total = tl.zeros([1, BLOCK_D], tl.float32)
    count = tl.zeros([1, 1], tl.int32)
    end = tl.where(good, tl.minimum(chunk * CHUNK + CHUNK, len_k), 0)
    for first in range(chunk * CHUNK, end):
        token = first + tl.arange(0, 1)
        x = load_tokens(
            k, kv_k_stride_t, token, len_k, len_k * 0, given, has_rope_positions_k,
            rope_cos, rope_sin, rope_rows, rope_rotary_dim, HEAD_DIM, BLOCK_D, ROPE, INTERLEAVED,
        )  # fmt: skip
        finite = is_finite(x)
        total += tl.where(finite, x, 0.0)
        count += finite.to(tl.int32)
    at = tl.program_id(0).to(tl.int64)
    tl.store(sums + at * BLOCK_D + tl.arange(0, BLOCK_D)[None, :], total)
    tl.store(counts + at + tl.arange(0, 1)[:, None], count)


@triton.jit
def qf_triton_int8_mean_kernel(sums, counts, mean, k_len, BLOCK_D: tl.constexpr, CHUNK: tl.constexpr):
    chunks = tl.cdiv(k_len, CHUNK)
    head = tl.program_id(0).to(tl.int64)  # over all sequences
    channel = tl.arange(0, BLOCK_D)
    total = tl.zeros([BLOCK_D], tl.float64)
    count = tl.zeros([BLOCK_D], tl.int32)
    for chunk in range(0, chunks):
        at = head * chunks + chunk
        total += tl.load(sums + at * BLOCK_D + channel).to(tl.float64)
        count += tl.load(counts + at)
    found = (total / tl.maximum(count, 1).to(tl.float64)).to(tl.float32)
    tl.store(mean + head * BLOCK_D + channel, tl.where(tl.abs(found) < float("inf"), found, 0.0))


@triton.jit
def qf_triton_int8_k_kernel(
    kv_k, kv_k_stride_b, kv_k_stride_t, kv_k_stride_h, mean, k_values, k_scales,
    batch, q_len, k_len, kv_heads, total_q, total_k, cu_seqlens_q, cu_seqlens_k, kv_lens,
    rope_cos, rope_sin, rope_rows, rope_rotary_dim, rope_positions_k, has_rope_positions_k, rope_stride_positions_k_b,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_T: tl.constexpr, GROUP: tl.constexpr,
    PACKED: tl.constexpr, KV_LENS: tl.constexpr, ROPE: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0) % kv_heads
    tiles = tl.cdiv(k_len, BLOCK_T)
    token = tl.program_id(0) // kv_heads % tiles * BLOCK_T + tl.arange(0, BLOCK_T)
    b = tl.program_id(0) // kv_heads // tiles
    _, k0, _, len_k, good = read_sequence(
        b, batch, q_len, k_len, total_q, total_k, cu_seqlens_q, cu_seqlens_k, kv_lens, PACKED, KV_LENS
    )
    length = tl.where(good, len_k, 0)  # a sequence whose description is out of range is neither read nor written
    b64 = b.to(tl.int64)
    channel = tl.arange(0, BLOCK_D)
    x = load_tokens(
        kv_k + b64 * kv_k_stride_b + head * kv_k_stride_h + k0 * kv_k_stride_t, kv_k_stride_t, token, length, len_k * 0,
        rope_positions_k + b64 * rope_stride_positions_k_b + k0, has_rope_positions_k,
        rope_cos, rope_sin, rope_rows, rope_rotary_dim, HEAD_DIM, BLOCK_D, ROPE, INTERLEAVED,
    )  # fmt: skip
    x = x - tl.load(mean + (b64 * kv_heads + head) * BLOCK_D + channel)[None, :]
    present = (token < length)[:, None]
    finite = is_finite(x) & present
    x = tl.where(finite, x, 0.0)
    of_token = tl.max(tl.abs(x), 1)
    of_group = tl.max(tl.reshape(of_token, [BLOCK_T // GROUP, GROUP]), 1)
    amplitude = tl.reshape(tl.broadcast_to(of_group[:, None], [BLOCK_T // GROUP, GROUP]), [BLOCK_T])[:, None]
    scale, inverse = scale_of(amplitude)
    at = b64 * (0 if PACKED else k_len) + k0 + token[:, None]
    tl.store(k_values + (at * kv_heads + head) * BLOCK_D + channel[None, :], integers_of(x, inverse), mask=present)
    tokens = total_k if PACKED else b64 * 0 + batch.to(tl.int64) * k_len
    tl.store(k_scales + head * tokens + at, tl.where(finite, scale, float("nan")), mask=present)


@triton.jit
def qf_triton_int8_q_kernel(
    q, q_stride_b, q_stride_t, q_stride_h, mean, q_values, q_scales, q_dots,
    batch, q_len, k_len, q_heads, kv_heads, total_q, total_k, cu_seqlens_q, cu_seqlens_k, kv_lens,
    rope_cos, rope_sin, rope_rows, rope_rotary_dim, rope_positions_q, has_rope_positions_q, rope_stride_positions_q_b,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_T: tl.constexpr,
    PACKED: tl.constexpr, KV_LENS: tl.constexpr, ROPE: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0) % q_heads
    tiles = tl.cdiv(q_len, BLOCK_T)
    token = tl.program_id(0) // q_heads % tiles * BLOCK_T + tl.arange(0, BLOCK_T)
    b = tl.program_id(0) // q_heads // tiles
    q0, _, len_q, len_k, good = read_sequence(
        b, batch, q_len, k_len, total_q, total_k, cu_seqlens_q, cu_seqlens_k, kv_lens, PACKED, KV_LENS
    )
    length = tl.where(good, len_q, 0)
    b64 = b.to(tl.int64)
    channel = tl.arange(0, BLOCK_D)
    x = load_tokens(
        q + b64 * q_stride_b + head * q_stride_h + q0 * q_stride_t, q_stride_t, token, length, len_k - len_q,
        rope_positions_q + b64 * rope_stride_positions_q_b + q0, has_rope_positions_q,
        rope_cos, rope_sin, rope_rows, rope_rotary_dim, HEAD_DIM, BLOCK_D, ROPE, INTERLEAVED,
    )  # fmt: skip
    kv_head = head // (q_heads // kv_heads)
    k_mean = tl.load(mean + (b64 * kv_heads + kv_head) * BLOCK_D + channel)[None, :]
    dot = tl.sum(x * k_mean, 1)[:, None]
    present = (token < length)[:, None]
    finite = is_finite(x)
    x = tl.where(finite, x, 0.0)
    scale, inverse = scale_of(tl.max(tl.abs(x), 1)[:, None])
    at = b64 * (0 if PACKED else q_len) + q0 + token[:, None]
    tl.store(q_values + (at * q_heads + head) * BLOCK_D + channel[None, :], integers_of(x, inverse), mask=present)
    tokens = total_q if PACKED else b64 * 0 + batch.to(tl.int64) * q_len
    tl.store(q_scales + head * tokens + at, tl.where(finite, scale, float("nan")), mask=present)
    tl.store(q_dots + head * tokens + at, dot, mask=present)


def passes(spec: Spec, block_d: int) -> tuple[Pass, ...]:
    """The passes that quantize k and q."""
    each: dict[str, Any] = {"HEAD_DIM": spec.head_dim, "BLOCK_D": block_d}
    each |= {"PACKED": spec.packed, "KV_LENS": spec.kv_lens, "ROPE": spec.rope is not None}
    each |= {"INTERLEAVED": spec.rope == "interleaved"}
    block_t = max(GROUP, min(2 * GROUP, TILE // block_d))
    heads = size("kv_heads") * size("batch")
    chunks = size("k_len").ceil_div(CHUNK) * heads
    k_tiles, q_tiles = (size(length).ceil_div(block_t) for length in ("k_len", "q_len"))
    return (
        Pass(qf_triton_int8_sums_kernel, chunks, {**each, "CHUNK": CHUNK}, 1, fuses=False),
        Pass(qf_triton_int8_mean_kernel, heads, {"BLOCK_D": block_d, "CHUNK": CHUNK}, 1, fuses=False),
        Pass(qf_triton_int8_k_kernel, k_tiles * heads, {**each, "BLOCK_T": block_t, "GROUP": GROUP}, fuses=False),
        Pass(
            qf_triton_int8_q_kernel, q_tiles * size("q_heads") * size("batch"), {**each, "BLOCK_T": block_t},
            fuses=False,
        ),
    )  # fmt: skip


def regions(spec: Spec, block_d: int) -> tuple[Region, ...]:
    """Their results and intermediate arrays. Rows of integers have block_d channels."""
    keys, queries = tokens_of(spec, "k") * size("kv_heads"), tokens_of(spec, "q") * size("q_heads")
    heads = size("kv_heads") * size("batch")
    chunks = size("k_len").ceil_div(CHUNK) * heads
    return (
        Region("sums", "fp32", chunks * block_d),
        Region("counts", "i32", chunks),
        Region("mean", "fp32", heads * block_d),
        Region("k_values", "i8", keys * block_d),
        Region("k_scales", "fp32", keys),
        Region("q_values", "i8", queries * block_d),
        Region("q_scales", "fp32", queries),
        Region("q_dots", "fp32", queries),
    )
