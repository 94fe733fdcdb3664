"""The replay of kernel `fa_int8`: docs/kernels/fa_int8.md step by step in NumPy.

Integers, scales and means are those of qflash/replay_quantize.py, to the bit. Scores follow in float32, rounded where
the kernel rounds; weights are rounded to the arrays' dtype before they meet V. Sums over keys, softmax's and PV's, are
taken in float64 here and in float32 there.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from qflash import reference
from qflash.replay import LN2, LOG2E, by_packed_sequence, by_sequence, fma, positions_of
from qflash.replay_quantize import WILD, quantize, tokens_of, turned
from qflash.rope import Rope

KEY_GROUP = 16  # keys that share a scale; every query has its own
MAGIC = np.float32(1.5 * 2**23)  # what the kernel's dot products start at, to be floats when done
STEEP = np.float32(1 / 2048)  # where a score gains more than this for each 1 of its dot product, that comes off first


def attention_fa_int8(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    *,
    causal: bool = False,
    window: Sequence[int] | None = None,
    kv_lens: np.ndarray | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    rope: Rope | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """`qflash.attention(..., kernel="fa_int8")`: (out `[B, Tq, Hq, D]`, lse `[B, Hq, Tq]`) before the last rounding."""
    words = reference._Words.of(q.shape[-1], causal, window, softcap, scale)
    return by_sequence(partial(_replay, words=words), q, k, v, kv_lens, rope)


def attention_varlen_fa_int8(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    cu_seqlens_q: np.ndarray,
    cu_seqlens_k: np.ndarray,
    *,
    causal: bool = False,
    window: Sequence[int] | None = None,
    kv_lens: np.ndarray | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    rope: Rope | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """`qflash.attention_varlen(..., kernel="fa_int8")`: (out `[total_q, Hq, D]`, lse `[Hq, total_q]`)."""
    words = reference._Words.of(q.shape[-1], causal, window, softcap, scale)
    return by_packed_sequence(partial(_replay, words=words), q, k, v, cu_seqlens_q, cu_seqlens_k, kv_lens, rope)


def _replay(q, k, v, *, words, rope):
    """(out [Tq, Hq, D], lse [Hq, Tq]) of one sequence whose keys all exist."""
    len_q, len_k = len(q), len(k)
    positions_q = positions_k = None
    rotated = q.astype(np.float32)
    if rope is not None:
        positions_q, positions_k = (np.asarray(x)[None] for x in positions_of(rope, len_q, len_k))
        rotated = turned(rotated, positions_q[0], rope)
    queries = quantize(q[None], group=1, rope=rope, positions=positions_q)
    keys = quantize(k[None], group=KEY_GROUP, smooth=True, rope=rope, positions=positions_k)
    k_scales = tokens_of(keys.scale, keys.values.shape, KEY_GROUP)[0]  # [Tk, Hkv]
    q_scales = queries.scale[0].T * np.float32(abs(words.scale)) * LOG2E  # [Tq, Hq]
    v32 = v.astype(np.float32)
    finite = np.isfinite(v32)
    v_finite, v_rest = np.where(finite, v32, np.float32(0)), np.where(finite, np.float32(0), v32)
    out = np.zeros(q.shape)
    lse = np.full((q.shape[1], len_q), -np.inf)
    group = q.shape[1] // k.shape[1]
    step = max(1, reference._BLOCK_SCORES // len_k)
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        for head in range(q.shape[1]):
            kv_head = head // group
            spoiled = keys.values[0, :, kv_head, 0] == WILD
            for start in range(0, len_q, step):
                rows = slice(start, min(start + step, len_q))
                seen = reference.visible(np.arange(rows.start, rows.stop), len_q, len_k, words.left, words.right)
                integers = queries.values[0, rows, head].astype(np.float32)
                dots = integers @ keys.values[0, :, kv_head].astype(np.float32).T  # exact: below 2^24
                dots[:, spoiled] = np.nan
                lift = (rotated[rows, head].astype(np.float64) @ keys.mean[0, kv_head]).astype(np.float32)
                weights, top, lift = _weights(dots, q_scales[rows, head], k_scales[:, kv_head], lift, seen, words)
                total = weights.sum(-1, dtype=np.float64)
                product = weights.astype(q.dtype).astype(np.float64) @ v_finite[:, kv_head] / total[:, None]
                for j in np.flatnonzero(~finite[:, kv_head].all(-1)):
                    product += np.where(seen[:, j, None], v_rest[j, kv_head], 0)
                sees_any = seen.any(-1)
                out[rows, head] = np.where(sees_any[:, None], product, 0)
                lse[head, rows] = np.where(sees_any, LN2 * (top + np.log2(total)) + lift, -np.inf)
    return out, lse


def _weights(dots, q_scales, k_scales, lift, seen, words):
    """Weights 2^(t - top) of base-2 scores t, top, and what the scores are without for lse.

    Where a score is a product alone, the kernel rounds the offset that dot products start at times the slope, which
    moves scores by less than 4e-4. Steep ones lose the offset first and are rounded before top is taken off. So are
    those that share a warp's tile with a steep one; tiles are not known here. top is the row's largest score rounded up
    to an integer; the kernel may be behind it by whole numbers, which rounds nothing differently.
    """
    slope = q_scales[:, None] * k_scales
    steep = slope > STEEP
    if words.softcap == 0 and words.scale > 0:
        start = np.where(steep, np.float32(0), MAGIC)
        s, offset = np.where(steep, dots * slope, dots + start), -start * slope
        slope = np.where(steep, np.float32(1), slope)
        top = _top(fma(s, slope, offset), seen)
        t = fma(s, slope, offset - top[:, None])
        lift = np.float32(words.scale) * lift
    else:
        t, top = _capped(dots, slope, lift, seen, words)
        lift = np.zeros_like(lift)
    return np.where(seen, np.exp2(t), np.float32(0)), top, lift


def _capped(dots, slope, lift, seen, words):
    """(t - top, top) of scores that are more than a product, lift among them: softcap, or a scale not positive."""
    scale = np.float32(words.scale)
    t = fma(dots, np.float32(np.sign(words.scale) or 1) * slope, (lift * scale * LOG2E)[:, None])
    if words.softcap:
        most = np.float32(words.softcap) * LOG2E
        t = (most * np.tanh(t.astype(np.float64) / most)).astype(np.float32)
    top = _top(t, seen)
    return t - top[:, None], top


def _top(t, seen):
    top = np.ceil(np.fmax.reduce(np.where(seen, t, np.float32(-np.inf)), axis=-1))
    return np.where(np.isinf(top), np.float32(0), top)
