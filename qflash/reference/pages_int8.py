"""Attention on INT8 pages: the contents of pages, and the replay of the decode kernels that read them as integers.

`tokens_of` gathers a sequence's tokens. `attention_pages_int8` repeats the decode kernels of docs/kernels/decode.md:
q is rounded to its dtype after rope, multiplied by the Hadamard matrix and rounded to int8 with a scale for each row;
dot products are exact; a weight times V's scale is rounded to float16 once. Sums are computed in float64.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from qflash.reference.blocks import blocks, where_any, with_sink
from qflash.reference.float32 import LN2, LOG2E
from qflash.reference.rotary import positions_of, rotate
from qflash.reference.sequences import Words
from qflash.reference.sm90_quantize import quantize_q
from qflash.rotary import Rope

WEIGHT_EXPONENT = 7  # the largest weight of a row, times V's scale, is about 2^this: csrc/attn/decode/int8_sums.cuh


@dataclass(frozen=True, eq=False)
class Tokens:
    """The tokens of one sequence in int8."""

    k: np.ndarray  # int8 [T, Hkv, D]
    v: np.ndarray
    k_scale: np.ndarray  # float32 [T, Hkv]
    v_scale: np.ndarray


def tokens_of(
    k_pages: np.ndarray,
    v_pages: np.ndarray,
    k_scale: np.ndarray,
    v_scale: np.ndarray,
    table: np.ndarray,
    length: int,
) -> Tokens:
    """From pages `[pages, Hkv, page_size, D]`, scales `[pages, Hkv, page_size]` and one row of a page table."""
    page_size = k_pages.shape[2]
    token = np.arange(length)
    at = (np.asarray(table)[token // page_size], slice(None), token % page_size)
    return Tokens(k_pages[at], v_pages[at], k_scale[at], v_scale[at])


def attention_pages_int8(
    q: np.ndarray,
    k_pages: np.ndarray,
    v_pages: np.ndarray,
    k_scale: np.ndarray,
    v_scale: np.ndarray,
    page_table: np.ndarray,
    lens: np.ndarray,
    *,
    k_mean: np.ndarray | None = None,
    rope: Rope | None = None,
    sinks: np.ndarray | None = None,
    cu_seqlens_q: np.ndarray | None = None,
    **words: Any,
) -> tuple[np.ndarray, np.ndarray]:
    """(out, lse) of the decode kernels, before the last rounding.

    q `[B, Tq, Hq, D]`, or packed `[total, Hq, D]` with `cu_seqlens_q`; pages and scales as `tokens_of` takes them;
    keyword arguments: causal, window, softcap and scale.
    """
    packed = q if cu_seqlens_q is not None else q.reshape(-1, *q.shape[2:])
    meaning = Words.of(q.shape[-1], **words)
    out, lse = np.zeros(packed.shape), np.full((packed.shape[1], len(packed)), -np.inf)
    for b, rows, positions in _rows_of(q, rope, cu_seqlens_q):
        if rows.stop > rows.start and lens[b] > 0:
            tokens = tokens_of(k_pages, v_pages, k_scale, v_scale, page_table[b], int(lens[b]))
            own = None if rope is None else Rope(rope.cos, rope.sin, rope.interleaved, positions, None)
            out[rows], lse[:, rows] = _replay(packed[rows], tokens, k_mean, meaning, own)
    for head, sink in enumerate([] if sinks is None else np.asarray(sinks, np.float64)):
        sees_any = lse[head] != -np.inf
        joined, lse[head] = with_sink(out[:, head], lse[head], float(sink))
        out[:, head] = np.where(sees_any[:, None], joined, 0)
    if cu_seqlens_q is not None:
        return out, lse
    return out.reshape(q.shape), lse.reshape(q.shape[2], *q.shape[:2]).swapaxes(0, 1).copy()


def _replay(q, tokens, k_mean, words, rope):
    """(out [Tq, Hq, D], lse [Hq, Tq]) of one sequence."""
    if rope is not None:
        rotated = rotate(q.astype(np.float32), positions_of(rope, len(q), len(tokens.k))[0], rope)
        q = rotated.astype(q.dtype)
    mean = np.zeros(tokens.k.shape[1:], np.float32) if k_mean is None else k_mean
    queries = quantize_q(q, mean)
    slope = queries.scale.astype(np.float64) * words.scale * float(LOG2E)  # [Hq, Tq]
    bias = queries.q_dot_mean.astype(np.float64) * words.scale
    out, lse = np.zeros(q.shape), np.full((q.shape[1], len(q)), -np.inf)
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        for head, kv_head, rows, seen in blocks(q, tokens.k, words):
            dots = queries.values[rows, head].astype(np.float64) @ tokens.k[:, kv_head].T.astype(np.float64)
            t = dots * tokens.k_scale[:, kv_head] * slope[head, rows, None]
            shift = bias[head, rows]
            if words.softcap:
                most = words.softcap * float(LOG2E)
                t = most * np.tanh((t + shift[:, None] * float(LOG2E)) / most)
                shift = np.zeros_like(shift)
            weights, scaled, top = _weights(t, tokens.v_scale[:, kv_head], seen)
            total = weights.sum(-1)
            product = scaled @ tokens.v[:, kv_head].astype(np.float64) / total[:, None]
            sums = LN2 * (top + np.log2(total)) + shift
            out[rows, head], lse[head, rows] = where_any(seen, product, sums, -np.inf)  # sinks are added later
    return out, lse


def _weights(t, v_scale, seen):
    """Weights 2^(t - top) of base-2 scores t; the same times V's scales, rounded to float16; top.

    top is an integer for which the largest of the rounded ones is at 2^WEIGHT_EXPONENT. The kernel's may differ, which
    changes only the rounding of values far below the largest.
    """
    scale = v_scale.astype(np.float64)
    exponents = np.log2(np.where(scale > 0, scale, 2.0**-126))
    reach = np.where(seen & np.isfinite(t), t + exponents, -np.inf).max(-1, initial=-np.inf)
    top = np.where(np.isfinite(reach), np.ceil(reach) - WEIGHT_EXPONENT, 0.0)
    weights = np.where(seen, np.exp2(t - top[:, None]), 0.0)
    scaled = np.where(seen, weights * scale, 0.0).astype(np.float16).astype(np.float64)
    return weights, scaled, top


def _rows_of(
    q: np.ndarray, rope: Rope | None, cu_seqlens_q: np.ndarray | None
) -> Iterator[tuple[int, slice, np.ndarray | None]]:
    """(sequence, its rows of packed q, their positions from rope)."""
    given = None if rope is None or rope.positions_q is None else np.asarray(rope.positions_q)
    if cu_seqlens_q is None:
        given = None if given is None else np.broadcast_to(given, q.shape[:2]).reshape(-1)
        cu_seqlens_q = np.arange(q.shape[0] + 1) * q.shape[1]
    for b in range(len(cu_seqlens_q) - 1):
        rows = slice(int(cu_seqlens_q[b]), int(cu_seqlens_q[b + 1]))
        yield b, rows, None if given is None else given[rows]
