"""The replay of precision="int8": the pipeline of docs/numerics.md, step by step in NumPy.

Every rounding that affects the result is the same as in the CPU engine: rope and K smoothing in float32 in the engine's
order, the integers and their scales bit for bit, the exponential's polynomial, the rounding of weights. Only the last
sums, of softmax and PV, are computed in float64 here and in float32 in the engine. So an engine that differs from its
replay by more than such rounding has a bug, however large the quantization error itself may be.

`pv` is the type in which weights are multiplied by V: "float32", or "bfloat16" if the engine uses matrix tiles (isa
"amx").
"""

from __future__ import annotations

from functools import partial
from typing import Any

import ml_dtypes
import numpy as np

from qflash.reference.blocks import add_nonfinite, blocks, where_any, with_sink
from qflash.reference.float32 import LEVELS, LN2, LOG2E, fma, inverse_of
from qflash.reference.quantize import key_mean
from qflash.reference.rotary import positions_of, rotate
from qflash.reference.sequences import by_sequence

LOWEST_EXPONENT = np.float32(-125.0)  # weights below 2^-125 of the largest are not distinguished
# 2^f for |f| <= 1/2, lowest power first; relative error below 2.7e-6
EXP2_COEFFICIENTS = tuple(
    np.float32(c)
    for c in (0.9999992847442627, 0.6931217908859253, 0.240247443318367, 0.05591785907745361, 0.009570102207362652)
)


def attention_int8(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, *, pv: str = "float32", **words: Any
) -> tuple[np.ndarray, np.ndarray]:
    """`qflash.attention(..., precision="int8")`: (out, lse) before the last rounding.

    The keyword arguments and the shapes are those of `qflash.reference.attention`.
    """
    return by_sequence(partial(_replay, pv=pv), q, k, v, **words)


def quantize(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Integers (as float32) and float32 scales of the rows of x `[..., D]`; the scale of a nonfinite row is NaN."""
    finite = np.isfinite(x).all(-1)
    x = np.where(finite[..., None], x, np.float32(0))
    amplitude = np.abs(x).max(-1, initial=0)
    usable, inverse = inverse_of(amplitude)
    scales = np.where(usable, amplitude / np.float32(LEVELS), np.where(finite, np.float32(0), np.float32(np.nan)))
    return np.rint(x * inverse[..., None]).astype(np.float32), scales.astype(np.float32)


def exp2(x: np.ndarray) -> np.ndarray:
    """2^x of float32 x <= 0 as the engine computes it, float32."""
    x = np.maximum(x, LOWEST_EXPONENT)
    n = np.rint(x)
    f = x - n
    p = np.full_like(f, EXP2_COEFFICIENTS[-1])
    for c in EXP2_COEFFICIENTS[-2::-1]:
        p = fma(p, f, c)
    return (p * np.exp2(n)).astype(np.float32)


def _replay(q, k, v, *, words, rope, pv):
    """(out [Tq, Hq, D], lse [Hq, Tq]) of one sequence whose keys all exist."""
    limit = float(ml_dtypes.finfo(q.dtype).max)  # a mean of finite values stays finite when it is rounded
    q, k, v = (np.asarray(x).astype(np.float32) for x in (q, k, v))
    out, lse = np.zeros(q.shape), np.full((q.shape[1], q.shape[0]), -np.inf)
    if rope is not None:
        positions_q, positions_k = positions_of(rope, len(q), len(k))
        q, k = rotate(q, positions_q, rope), rotate(k, positions_k, rope)
    if words.scale < 0:
        q = -q
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        mean = key_mean(k)
        k_integers, k_scales = quantize(k - mean)
        q_integers, q_scales = quantize(q)
        finite = np.isfinite(v)
        v_finite, v_rest = np.where(finite, v, np.float32(0)), np.where(finite, np.float32(0), v)
        if pv == "bfloat16":
            largest = np.float32(ml_dtypes.finfo(ml_dtypes.bfloat16).max)
            v_finite = np.clip(v_finite, -largest, largest).astype(ml_dtypes.bfloat16).astype(np.float32)
        for head, kv_head, rows, seen in blocks(q, k, words):
            dots = q_integers[rows, head] @ k_integers[:, kv_head].T  # exact: below 2^24
            q_dot_mean = (q[rows, head].astype(np.float64) @ mean[kv_head]).astype(np.float32)
            weights, shift, total = _weights(dots * k_scales[:, kv_head], q_scales[rows, head], q_dot_mean, seen, words)
            if pv == "bfloat16":
                weights = weights.astype(ml_dtypes.bfloat16)
            product = weights.astype(np.float64) @ v_finite[:, kv_head] / total[:, None]
            sink = words.empty_lse(head)
            product, joined = with_sink(np.clip(product, -limit, limit), shift + LN2 * np.log2(total), sink)
            product = add_nonfinite(product, seen, v_rest[:, kv_head])
            out[rows, head], lse[head, rows] = where_any(seen, product, joined, sink)
    return out, lse


def _weights(u, q_scales, q_dot_mean, seen, words):
    """Weights 2^(t - M) of base-2 scores t; the contribution of M and the row bias to lse; and the weights' sum.

    u is the dot product times the key's scale. M is the largest score of the row rounded up to an integer, so changing
    M, as the engine does from block to block, multiplies by a power of two and does not change any rounding.
    """
    scale = np.float32(abs(words.scale))
    bias = scale * q_dot_mean
    if words.softcap:
        softcap = np.float32(words.softcap)
        s = fma(u, (q_scales * scale)[:, None], bias[:, None])
        t = np.tanh(s * (np.float32(1) / softcap)) * (softcap * LOG2E)
        bias = np.zeros_like(bias)
    else:
        t = u * (q_scales * (scale * LOG2E))[:, None]
    top = np.ceil(np.fmax.reduce(np.where(seen, t, -np.inf), axis=-1)).astype(np.float32)
    weights = np.where(seen, exp2(t - top[:, None]), np.float32(0))
    return weights, bias + LN2 * top.astype(np.float64), weights.sum(-1, dtype=np.float64)
