"""The replay of precision="int8": the pipeline of docs/numerics.md, step by step in NumPy.

Every rounding that shapes the result happens here as it does in the CPU engine: rope and K smoothing in float32 in the
engine's order, the integers and their scales bit for bit, the exponential's polynomial, the weights' rounding. Only
the last sums, softmax's and PV's, are taken in float64 here and in float32 there. So an engine that differs from its
replay by more than such rounding has a bug, however large the quantization error itself may be.

`pv` says how the weights meet V: "float32", or "bfloat16" where the engine multiplies in matrix tiles (isa "amx").
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import ml_dtypes
import numpy as np

from qflash import reference
from qflash.rope import Rope

MEAN_CHUNK = 64  # keys whose sum is taken in float32 before it joins the float64 total
LEVELS = 127  # integers run from -127 to 127
NO_AMPLITUDE = np.float32(2.0**-100)  # a row whose largest value is below this quantizes to zeros
LOWEST_EXPONENT = np.float32(-125.0)  # weights below 2^-125 of the largest are not told apart
LOG2E = np.float32(1.4426950408889634)
LN2 = 0.6931471805599453
# 2^f for |f| <= 1/2, lowest power first; relative error below 2.7e-6
EXP2_COEFFICIENTS = tuple(
    np.float32(c)
    for c in (0.9999992847442627, 0.6931217908859253, 0.240247443318367, 0.05591785907745361, 0.009570102207362652)
)

Replay = Callable[..., tuple[np.ndarray, np.ndarray]]


def attention_int8(
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
    pv: str = "float32",
) -> tuple[np.ndarray, np.ndarray]:
    """`qflash.attention(..., precision="int8")`: (out `[B, Tq, Hq, D]`, lse `[B, Hq, Tq]`) before the last rounding."""
    words = reference._Words.of(q.shape[-1], causal, window, softcap, scale)
    return by_sequence(partial(_replay, words=words, pv=pv), q, k, v, kv_lens, rope)


def attention_varlen_int8(
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
    pv: str = "float32",
) -> tuple[np.ndarray, np.ndarray]:
    """`qflash.attention_varlen(..., precision="int8")`: (out `[total_q, Hq, D]`, lse `[Hq, total_q]`)."""
    words = reference._Words.of(q.shape[-1], causal, window, softcap, scale)
    one = partial(_replay, words=words, pv=pv)
    return by_packed_sequence(one, q, k, v, cu_seqlens_q, cu_seqlens_k, kv_lens, rope)


def by_sequence(one: Replay, q, k, v, kv_lens: np.ndarray | None, rope: Rope | None) -> tuple[np.ndarray, np.ndarray]:
    """(out, lse) of a batch, from the replay of one sequence: (q, k, v, rope) -> (out `[Tq, Hq, D]`, lse `[Hq, Tq]`).

    It is given the keys that exist and positions that are its own, and at least one row and one key.
    """
    out = np.zeros(q.shape, np.float64)
    lse = np.full((q.shape[0], q.shape[2], q.shape[1]), -np.inf)
    for b in range(q.shape[0]):
        length = reference._length(kv_lens, b, k.shape[1])
        if q.shape[1] and length:
            out[b], lse[b] = one(q[b], k[b, :length], v[b, :length], rope=reference._rope_of(rope, b))
    return out, lse


def by_packed_sequence(
    one: Replay,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    cu_seqlens_q: np.ndarray,
    cu_seqlens_k: np.ndarray,
    kv_lens: np.ndarray | None,
    rope: Rope | None,
) -> tuple[np.ndarray, np.ndarray]:
    """The same of packed sequences."""
    out = np.zeros(q.shape, np.float64)
    lse = np.full((q.shape[1], q.shape[0]), -np.inf)
    for b, (rows, keys) in enumerate(reference._packed(cu_seqlens_q, cu_seqlens_k, q.shape[0], k.shape[0])):
        length = reference._length(kv_lens, b, keys.stop - keys.start)
        exists = slice(keys.start, keys.start + length)
        if rows.stop > rows.start and length:
            rope_here = reference._rope_of_packed(rope, rows, keys)
            out[rows], lse[:, rows] = one(q[rows], k[exists], v[exists], rope=rope_here)
    return out, lse


def positions_of(rope: Rope, len_q: int, len_k: int) -> tuple[np.ndarray, np.ndarray]:
    """Where the queries and the keys of one sequence stand."""
    positions_q = np.arange(len_q) + (len_k - len_q) if rope.positions_q is None else np.asarray(rope.positions_q)
    positions_k = np.arange(len_k) if rope.positions_k is None else np.asarray(rope.positions_k)[:len_k]
    return positions_q, positions_k


def rotate(x: np.ndarray, positions: np.ndarray, rope: Rope) -> np.ndarray:
    """Rotate x `[T, H, D]` in float32: each product is rounded, then their sum."""
    x = np.array(x, np.float32)
    rows = np.abs(np.asarray(positions, np.int64))
    cos = np.asarray(rope.cos).astype(np.float32)[rows][:, None, :]
    sin = np.asarray(rope.sin).astype(np.float32)[rows][:, None, :]
    sin = np.where((np.asarray(positions) < 0)[:, None, None], -sin, sin)
    half = cos.shape[-1]
    first, second = (
        (slice(0, 2 * half, 2), slice(1, 2 * half, 2)) if rope.interleaved else (slice(0, half), slice(half, 2 * half))
    )
    a, b = x[..., first].copy(), x[..., second].copy()
    x[..., first] = a * cos - b * sin
    x[..., second] = a * sin + b * cos
    return x


def key_mean(k: np.ndarray) -> np.ndarray:
    """Mean of rotated keys `[T, H, D]` over the finite ones, float32 `[H, D]`; 0 where there is none.

    Keys are added one after another in float32 within chunks of MEAN_CHUNK, chunks one after another in float64.
    """
    finite = np.isfinite(k).all(-1)
    k = np.where(finite[..., None], k, np.float32(0))
    total = np.zeros(k.shape[1:], np.float64)
    for start in range(0, k.shape[0], MEAN_CHUNK):
        chunk = np.zeros(k.shape[1:], np.float32)
        for row in k[start : start + MEAN_CHUNK]:
            chunk += row
        total += chunk
    mean = (total / np.maximum(finite.sum(0), 1)[:, None]).astype(np.float32)
    return np.where(np.isfinite(mean), mean, np.float32(0))


def quantize(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Integers (as float32) and float32 scales of the rows of x `[..., D]`; the scale of a non-finite row is NaN."""
    amplitude = np.abs(x).max(-1, initial=0)
    finite = np.isfinite(x).all(-1)
    usable = finite & (amplitude >= NO_AMPLITUDE)
    levels = np.float32(LEVELS)
    inverse = np.where(usable, levels / np.where(usable, amplitude, levels), np.float32(0))
    integers = np.rint(np.where(finite[..., None], x, np.float32(0)) * inverse[..., None])
    scales = np.where(usable, amplitude / levels, np.where(finite, np.float32(0), np.float32(np.nan)))
    return integers.astype(np.float32), scales.astype(np.float32)


def exp2(x: np.ndarray) -> np.ndarray:
    """2^x of float32 x <= 0 as the engine computes it, float32."""
    x = np.maximum(x, LOWEST_EXPONENT)
    n = np.rint(x)
    f = x - n
    p = np.full_like(f, EXP2_COEFFICIENTS[-1])
    for c in EXP2_COEFFICIENTS[-2::-1]:
        p = fma(p, f, c)
    return (p * np.exp2(n)).astype(np.float32)


def fma(a, b, c) -> np.ndarray:
    """float32 a·b + c rounded once: the product is exact in float64."""
    return (np.asarray(a, np.float64) * b + np.asarray(c, np.float64)).astype(np.float32)


def _replay(q, k, v, *, words, rope, pv):
    """(out [Tq, Hq, D], lse [Hq, Tq]) of one sequence whose keys all exist."""
    limit = float(ml_dtypes.finfo(q.dtype).max)  # a mean of finite values stays finite when it is rounded
    q, k, v = (np.asarray(x).astype(np.float32) for x in (q, k, v))
    len_q, len_k = len(q), len(k)
    out = np.zeros(q.shape)
    lse = np.full((q.shape[1], len_q), -np.inf)
    if rope is not None:
        positions_q, positions_k = positions_of(rope, len_q, len_k)
        q, k = rotate(q, positions_q, rope), rotate(k, positions_k, rope)
    if words.scale < 0:
        q = -q
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        mean = key_mean(k)
        k_integers, k_scales = quantize(k - mean)
        q_integers, q_scales = quantize(q)
        v_finite = np.where(np.isfinite(v), v, np.float32(0))
        if pv == "bfloat16":
            largest = np.float32(ml_dtypes.finfo(ml_dtypes.bfloat16).max)
            v_finite = np.clip(v_finite, -largest, largest).astype(ml_dtypes.bfloat16).astype(np.float32)
        group = q.shape[1] // k.shape[1]
        step = max(1, reference._BLOCK_SCORES // len_k)
        for head in range(q.shape[1]):
            kv_head = head // group
            for start in range(0, len_q, step):
                rows = slice(start, min(start + step, len_q))
                seen = reference.visible(np.arange(rows.start, rows.stop), len_q, len_k, words.left, words.right)
                dots = q_integers[rows, head] @ k_integers[:, kv_head].T  # exact: below 2^24
                lifted = (q[rows, head].astype(np.float64) @ mean[kv_head]).astype(np.float32)
                weights, shift, total = _weights(dots * k_scales[:, kv_head], q_scales[rows, head], lifted, seen, words)
                if pv == "bfloat16":
                    weights = weights.astype(ml_dtypes.bfloat16)
                block = weights.astype(np.float64) @ v_finite[:, kv_head] / total[:, None]
                block = np.clip(block, -limit, limit)
                for j in np.flatnonzero(~np.isfinite(v[:, kv_head]).all(-1)):
                    rest = np.where(np.isfinite(v[j, kv_head]), np.float32(0), v[j, kv_head])
                    block += np.where(seen[:, j, None], rest, 0)
                sees_any = seen.any(-1)
                out[rows, head] = np.where(sees_any[:, None], block, 0)
                lse[head, rows] = np.where(sees_any, shift + LN2 * np.log2(total), -np.inf)
    return out, lse


def _weights(u, q_scales, lifted, seen, words):
    """Weights 2^(t - M) of scores t in base 2, what M stands for in lse, and the weights' sum.

    u is the dot product times the key's scale. M is the largest score of the row rounded up to an integer, so that
    moving from one M to another, as the engine does block by block, multiplies by a power of two and rounds nothing.
    """
    scale = np.float32(abs(words.scale))
    lift = scale * lifted
    if words.softcap:
        softcap = np.float32(words.softcap)
        s = fma(u, (q_scales * scale)[:, None], lift[:, None])
        t = np.tanh(s * (np.float32(1) / softcap)) * (softcap * LOG2E)
        lift = np.zeros_like(lift)
    else:
        t = u * (q_scales * (scale * LOG2E))[:, None]
    top = np.ceil(np.fmax.reduce(np.where(seen, t, -np.inf), axis=-1)).astype(np.float32)
    weights = np.where(seen, exp2(t - top[:, None]), np.float32(0))
    return weights, lift + LN2 * top.astype(np.float64), weights.sum(-1, dtype=np.float64)
