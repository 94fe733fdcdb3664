"""The replay of kernel `fa_int8`: docs/kernels/fa_int8.md step by step in NumPy.

Integers, scales and means are those of `qflash.reference.quantize`, bit for bit. Scores are computed in float32 and
rounded where the kernel rounds; weights are rounded to the arrays' dtype before they are multiplied by V. Sums over
keys, of softmax and PV, are computed in float64 here and in float32 in the kernel.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from qflash.reference.blocks import add_nonfinite, blocks, where_any, with_sink
from qflash.reference.float32 import LN2, LOG2E, fma
from qflash.reference.quantize import NONFINITE, quantize, tokens_of
from qflash.reference.rotary import positions_of, rotate
from qflash.reference.sequences import by_sequence

KEY_GROUP = 16  # keys that share a scale; every query has its own
MAGIC = np.float32(1.5 * 2**23)  # initial value of the kernel's dot products, which makes the result a float
STEEP = np.float32(1 / 2048)  # with slopes above this, the offset MAGIC is subtracted from dot products first


def attention_fa_int8(q: np.ndarray, k: np.ndarray, v: np.ndarray, **words: Any) -> tuple[np.ndarray, np.ndarray]:
    """`qflash.attention(..., kernel="fa_int8")`: (out, lse) before the last rounding.

    The keyword arguments and the shapes are those of `qflash.reference.attention`.
    """
    return by_sequence(_replay, q, k, v, **words)


def _replay(q, k, v, *, words, rope):
    """(out [Tq, Hq, D], lse [Hq, Tq]) of one sequence whose keys all exist."""
    positions_q = positions_k = None
    rotated = q.astype(np.float32)
    if rope is not None:
        positions_q, positions_k = (np.asarray(x)[None] for x in positions_of(rope, len(q), len(k)))
        rotated = rotate(rotated, positions_q[0], rope)
    queries = quantize(q[None], group=1, rope=rope, positions=positions_q)
    keys = quantize(k[None], group=KEY_GROUP, smooth=True, rope=rope, positions=positions_k)
    k_scales = tokens_of(keys.scale, keys.values.shape, KEY_GROUP)[0]  # [Tk, Hkv]
    q_scales = queries.scale[0].T * np.float32(abs(words.scale)) * LOG2E  # [Tq, Hq]
    v = v.astype(np.float32)
    finite = np.isfinite(v)
    v_finite, v_rest = np.where(finite, v, np.float32(0)), np.where(finite, np.float32(0), v)
    out, lse = np.zeros(q.shape), np.full((q.shape[1], len(q)), -np.inf)
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        for head, kv_head, rows, seen in blocks(q, k, words):
            dots = dots_of(queries.values[0, rows, head], keys.values[0, :, kv_head])
            q_dot_mean = (rotated[rows, head].astype(np.float64) @ keys.mean[0, kv_head]).astype(np.float32)
            weights, top, bias = _weights(dots, q_scales[rows, head], k_scales[:, kv_head], q_dot_mean, seen, words)
            total = weights.sum(-1, dtype=np.float64)
            product = weights.astype(q.dtype).astype(np.float64) @ v_finite[:, kv_head] / total[:, None]
            sink = words.empty_lse(head)
            product, joined = with_sink(product, LN2 * (top + np.log2(total)) + bias, sink)
            product = add_nonfinite(product, seen, v_rest[:, kv_head])
            out[rows, head], lse[head, rows] = where_any(seen, product, joined, sink)
    return out, lse


def dots_of(queries: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Dot products of int8 `[n, width]` and `[m, width]` as float32; NaN if the key was nonfinite."""
    dots = queries.astype(np.float32) @ keys.astype(np.float32).T  # exact: below 2^24
    dots[:, keys[:, 0] == NONFINITE] = np.nan
    return dots


def _weights(dots, q_scales, k_scales, q_dot_mean, seen, words):
    """Weights 2^(t - top) of base-2 scores t; top; and the row bias, which the scores omit and lse needs.

    For plain scores the kernel rounds the slope times the offset that dot products start at, which moves scores by less
    than 4e-4. For steep ones the offset is subtracted first, and they are rounded before top is subtracted. The kernel
    does the same for scores in a warp's tile with a steep one; tiles are not modelled here. top is the row's largest
    score rounded up to an integer; the kernel's may lag behind it by an integer, which does not change any rounding.
    """
    slope = q_scales[:, None] * k_scales
    steep = slope > STEEP
    if words.softcap == 0 and words.scale > 0:
        start = np.where(steep, np.float32(0), MAGIC)
        s, offset = np.where(steep, dots * slope, dots + start), -start * slope
        slope = np.where(steep, np.float32(1), slope)
        top = top_of(fma(s, slope, offset), seen)
        t = fma(s, slope, offset - top[:, None])
        bias = np.float32(words.scale) * q_dot_mean
    else:
        t, top = capped(dots, slope, q_dot_mean, seen, words)
        bias = np.zeros_like(q_dot_mean)
    return np.where(seen, np.exp2(t), np.float32(0)), top, bias


def capped(dots, slope, q_dot_mean, seen, words):
    """(t - top, top) of scores that include q_dot_mean: with a softcap, or a scale that is not positive."""
    scale = np.float32(words.scale)
    t = fma(dots, np.float32(np.sign(words.scale) or 1) * slope, (q_dot_mean * scale * LOG2E)[:, None])
    if words.softcap:
        most = np.float32(words.softcap) * LOG2E
        t = (most * np.tanh(t.astype(np.float64) / most)).astype(np.float32)
    top = top_of(t, seen)
    return t - top[:, None], top


def top_of(t, seen):
    """The largest seen score of a row, rounded up to an integer; 0 if there is none."""
    top = np.ceil(np.fmax.reduce(np.where(seen, t, np.float32(-np.inf)), axis=-1))
    return np.where(np.isinf(top), np.float32(0), top)
