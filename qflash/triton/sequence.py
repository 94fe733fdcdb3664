"""One sequence of the batch: the start of its rows and its length, read from device memory and checked there.

The rules are those of csrc/attn/sequence.cuh: a kernel cannot report a bad value, and must not use one as an address.
Rows of a sequence whose description is out of range are NaN, and so are packed rows that belong to no sequence.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def packed_rows_fall(cu_seqlens_q, batch):
    """Whether cu_seqlens_q decreases anywhere, so that rows cannot be assigned to sequences."""
    falls = (tl.load(cu_seqlens_q) < 0).to(tl.int32)
    for first in range(0, batch, 128):
        at = first + tl.arange(0, 128)
        begin = tl.load(cu_seqlens_q + at, mask=at < batch, other=0)
        end = tl.load(cu_seqlens_q + at + 1, mask=at < batch, other=0)
        falls = tl.maximum(falls, tl.max((end < begin).to(tl.int32), 0))
    return falls != 0


@triton.jit
def read_sequence(
    b,
    batch,
    q_len,
    k_len,
    total_q,
    total_k,
    cu_seqlens_q,
    cu_seqlens_k,
    kv_lens,
    PACKED: tl.constexpr,
    KV_LENS: tl.constexpr,
):
    """(q0, k0, len_q, len_k, good): first rows in q and in k, lengths, and whether they are in range. If they are not,
    rows q0 to q0 + len_q - 1 must be NaN."""
    if PACKED:
        q0 = tl.load(cu_seqlens_q + b).to(tl.int64)
        q1 = tl.load(cu_seqlens_q + b + 1).to(tl.int64)
        k0 = tl.load(cu_seqlens_k + b).to(tl.int64)
        k1 = tl.load(cu_seqlens_k + b + 1).to(tl.int64)
        falls = packed_rows_fall(cu_seqlens_q, batch)
        good = (q1 <= total_q) & (q1 - q0 <= q_len) & (k0 >= 0) & (k0 <= k1) & (k1 <= total_k) & (k1 - k0 <= k_len)
        good = good & (falls == 0)
        end = tl.where(falls, tl.where(b == 0, total_q, 0), tl.minimum(q1, total_q))
        q0 = tl.where(falls, 0, tl.minimum(q0, end))
        len_q = (end - q0).to(tl.int32)
        len_k = tl.where(good, k1 - k0, 0).to(tl.int32)
    else:
        q0 = (b * 0).to(tl.int64)
        k0 = q0
        len_q = q_len
        len_k = k_len
        good = b >= 0
    if KV_LENS:
        existing = tl.load(kv_lens + b)
        good = good & (existing >= 0) & (existing <= len_k)
        len_k = existing
    return q0, k0, len_q, len_k, good


@triton.jit
def fill_nan(
    out,
    out_stride_t,
    lse,
    has_lse,
    begin,
    end,
    tile,
    tiles,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Write NaN to this program's share of rows begin .. end - 1 of a head, in out and in lse."""
    channel = tl.arange(0, BLOCK_D)[None, :]
    for first in range(begin + tile * BLOCK_M, end, tiles * BLOCK_M):
        row = first + tl.arange(0, BLOCK_M)
        nothing = tl.full([BLOCK_M, BLOCK_D], float("nan"), tl.float32).to(out.dtype.element_ty)
        present = (row[:, None] < end) & (channel < HEAD_DIM)
        tl.store(out + row[:, None] * out_stride_t + channel, nothing, mask=present)
        missing = tl.full([BLOCK_M], float("nan"), tl.float32)
        tl.store(lse + row, missing, mask=(row < end) & (has_lse != 0))


@triton.jit
def fill_unserved_rows(
    out,
    out_stride_t,
    lse,
    has_lse,
    q0,
    len_q,
    good,
    b,
    batch,
    total_q,
    cu_seqlens_q,
    tile,
    tiles,
    PACKED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Fill a head's rows that belong to no valid sequence: those of an invalid one, and packed rows outside all."""
    end = tl.where(good, q0, q0 + len_q)
    fill_nan(out, out_stride_t, lse, has_lse, q0, end, tile, tiles, HEAD_DIM, BLOCK_M, BLOCK_D)
    if PACKED:
        before = tl.minimum(tl.load(cu_seqlens_q).to(tl.int64), total_q)
        before = tl.where(b == 0, before, 0)
        fill_nan(out, out_stride_t, lse, has_lse, q0 * 0, before, tile, tiles, HEAD_DIM, BLOCK_M, BLOCK_D)
        after = tl.maximum(tl.load(cu_seqlens_q + batch).to(tl.int64), 0)
        after = tl.where(b == batch - 1, after, total_q)
        fill_nan(out, out_stride_t, lse, has_lse, after, total_q, tile, tiles, HEAD_DIM, BLOCK_M, BLOCK_D)
