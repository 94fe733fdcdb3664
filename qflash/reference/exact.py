"""Attention and its gradients in float64: the definition of `qflash.attention`.

Written to be read, not to be fast: one head at a time, a block of query rows at a time, no online softmax. It takes
NumPy arrays of any real dtype and returns float64. A key that a row does not see has no effect on that row at all: NaN
or Inf in it cannot reach the result. What is seen follows IEEE arithmetic (docs/numerics.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from qflash.reference.blocks import blocks
from qflash.reference.rotary import apply_rope, positions_of
from qflash.reference.sequences import CuSeqlens, Words, by_sequence, ends_of, packed, packed_lse, packed_rope, parts
from qflash.rotary import Rope

Gradients = tuple[np.ndarray, np.ndarray, np.ndarray]


def attention(
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
    sinks: np.ndarray | None = None,
    cu_seqlens: CuSeqlens | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """`qflash.attention` as a definition: (out `[B, Tq, Hq, D]`, lse `[B, Hq, Tq]`), float64.

    With `cu_seqlens`, a pair for q and k, arrays are packed: out `[total_q, Hq, D]`, lse `[Hq, total_q]`.
    """
    words = {"causal": causal, "window": window, "softcap": softcap, "scale": scale, "sinks": sinks}
    return by_sequence(_forward, q, k, v, cu_seqlens=cu_seqlens, kv_lens=kv_lens, rope=rope, **words)


def attention_varlen(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, cu_seqlens_q: np.ndarray, cu_seqlens_k: np.ndarray, **words: Any
) -> tuple[np.ndarray, np.ndarray]:
    """`qflash.attention_varlen` as a definition: (out `[total_q, Hq, D]`, lse `[Hq, total_q]`), float64."""
    return attention(q, k, v, cu_seqlens=(cu_seqlens_q, cu_seqlens_k), **words)


def attention_backward(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    dout: np.ndarray,
    dlse: np.ndarray | None = None,
    *,
    kv_lens: np.ndarray | None = None,
    rope: Rope | None = None,
    cu_seqlens: CuSeqlens | None = None,
    **words: Any,
) -> Gradients:
    """(dq, dk, dv) of `sum(out * dout) + sum(lse * dlse)`, float64; the keyword arguments are those of `attention`.

    A row that sees no key has no gradient. `sink_gradient` computes that of sinks.
    """
    if cu_seqlens is None:
        words |= {"kv_lens": kv_lens, "rope": packed_rope(rope, q, k), "cu_seqlens": (ends_of(q), ends_of(k))}
        grads = (packed(dout), None if dlse is None else packed_lse(dlse))
        dq, dk, dv = attention_backward(packed(q), packed(k), packed(v), *grads, **words)
        return dq.reshape(q.shape), dk.reshape(k.shape), dv.reshape(v.shape)
    meaning = Words.of(q.shape[-1], **words)
    dq, dk, dv = (np.zeros(x.shape, np.float64) for x in (q, k, v))
    for part in parts(cu_seqlens, len(q), len(k), kv_lens, rope):
        rows, keys = part.rows, part.keys
        arrays = (q[rows], k[keys], v[keys], dout[rows], None if dlse is None else dlse[:, rows])
        dq[rows], dk[keys], dv[keys] = _backward(*arrays, words=meaning, rope=part.rope)
    return dq, dk, dv


def sink_gradient(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    dout: np.ndarray,
    dlse: np.ndarray | None = None,
    *,
    kv_lens: np.ndarray | None = None,
    rope: Rope | None = None,
    cu_seqlens: CuSeqlens | None = None,
    **words: Any,
) -> np.ndarray:
    """dsinks `[Hq]` of `sum(out * dout) + sum(lse * dlse)`, float64; the keyword arguments are those of `attention`.

    A sink is a key without a value: with its weight P = exp(sink - lse) a row contributes P (dlse - out . dout). The
    lse of a row that sees no key is its sink, which does not affect out. A sink of -inf is none, with gradient 0.
    """
    if cu_seqlens is None:
        words |= {"kv_lens": kv_lens, "rope": packed_rope(rope, q, k), "cu_seqlens": (ends_of(q), ends_of(k))}
        grads = (packed(dout), None if dlse is None else packed_lse(dlse))
        return sink_gradient(packed(q), packed(k), packed(v), *grads, **words)
    meaning = Words.of(q.shape[-1], **words)
    total = np.zeros(q.shape[1])
    for part in parts(cu_seqlens, len(q), len(k), kv_lens, rope):
        rows, keys = part.rows, part.keys
        arrays = (q[rows], k[keys], v[keys], dout[rows], None if dlse is None else dlse[:, rows])
        total += _of_sinks(*arrays, words=meaning, rope=part.rope)
    return total


def attention_varlen_backward(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    cu_seqlens_q: np.ndarray,
    cu_seqlens_k: np.ndarray,
    dout: np.ndarray,
    dlse: np.ndarray | None = None,
    **words: Any,
) -> Gradients:
    """`attention_backward` over packed sequences."""
    return attention_backward(q, k, v, dout, dlse, cu_seqlens=(cu_seqlens_q, cu_seqlens_k), **words)


def _forward(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, *, words: Words, rope: Rope | None
) -> tuple[np.ndarray, np.ndarray]:
    """(out [Tq, Hq, D], lse [Hq, Tq]) of one sequence."""
    q, k, v = _rotated(q, k, v, rope)
    out, lse = np.zeros(q.shape), np.full((q.shape[1], q.shape[0]), -np.inf)
    for head, kv_head, rows, seen in blocks(q, k, words):
        p, _, lse[head, rows] = _softmax(q[rows, head], k[:, kv_head], seen, words, head)
        out[rows, head] = _product(p, seen, v[:, kv_head])
    return out, lse


def _backward(q, k, v, dout, dlse, *, words: Words, rope: Rope | None) -> Gradients:
    """(dq, dk, dv) of one sequence."""
    q, k, v = _rotated(q, k, v, rope)
    dq, dk, dv = (np.zeros(x.shape) for x in (q, k, v))
    dout = np.asarray(dout, np.float64)
    for head, kv_head, rows, seen in blocks(q, k, words):
        p, slope, _ = _softmax(q[rows, head], k[:, kv_head], seen, words, head)
        keys, values, g = k[:, kv_head], v[:, kv_head], dout[rows, head]
        out = _product(p, seen, values)
        with np.errstate(invalid="ignore", over="ignore"):
            delta = (out * g).sum(-1) - (0.0 if dlse is None else np.asarray(dlse, np.float64)[head, rows])
            ds = np.where(seen, p * (g @ values.T - delta[:, None]) * slope * words.scale, 0.0)
        dq[rows, head] = _product(ds, seen, keys)
        dk[:, kv_head] += _product(ds.T, seen.T, q[rows, head])
        dv[:, kv_head] += _product(p.T, seen.T, g)
    if rope is None or not len(k):
        return dq, dk, dv
    # The inverse rotation turns gradients of rotated arrays into those of the inputs.
    positions_q, positions_k = positions_of(rope, len(q), len(k))
    return apply_rope(dq, positions_q, rope, True), apply_rope(dk, positions_k, rope, True), dv


def _of_sinks(q, k, v, dout, dlse, *, words: Words, rope: Rope | None) -> np.ndarray:
    """The contribution of one sequence to the gradient of sinks."""
    q, k, v = _rotated(q, k, v, rope)
    total, dout = np.zeros(q.shape[1]), np.asarray(dout, np.float64)
    for head, kv_head, rows, seen in blocks(q, k, words):
        sink = words.empty_lse(head)
        if sink == -np.inf:
            continue
        p, _, lse = _softmax(q[rows, head], k[:, kv_head], seen, words, head)
        out = _product(p, seen, v[:, kv_head])
        with np.errstate(invalid="ignore", over="ignore"):
            of_out = np.where(seen.any(-1), (out * dout[rows, head]).sum(-1), 0.0)
            of_lse = 0.0 if dlse is None else np.asarray(dlse, np.float64)[head, rows]
            weight = np.where(lse == sink, 1.0, np.exp(sink - lse))  # both may be infinite
            total[head] += (weight * (of_lse - of_out)).sum()
    return total


def _rotated(q: np.ndarray, k: np.ndarray, v: np.ndarray, rope: Rope | None) -> Gradients:
    """q, k and v of one sequence in float64, q and k rotated."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    if rope is None or not len(k):  # without keys a query has no position relative to them
        return q, k, v
    positions_q, positions_k = positions_of(rope, len(q), len(k))
    return apply_rope(q, positions_q, rope), apply_rope(k, positions_k, rope), v


def _softmax(q: np.ndarray, k: np.ndarray, seen: np.ndarray, words: Words, head: int):
    """(weights, slope of the cap, lse) of rows q `[n, D]` on keys k `[m, D]`; weights of unseen keys are 0."""
    s, slope = _scores(q, k, words.scale, words.softcap)
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        # A row that sees only scores of -inf, and no sink, has m = -inf and so becomes NaN, as in plain softmax.
        m = np.where(seen, s, -np.inf).max(-1, initial=-np.inf)
        sink = words.empty_lse(head)
        m = np.maximum(m, sink)
        weights = np.where(seen, np.exp(s - m[:, None]), 0.0)
        total = weights.sum(-1)
        if sink != -np.inf:
            total += np.where(m == sink, 1.0, np.exp(sink - m))
        p = np.where(seen, weights / total[:, None], 0.0)
        lse = np.where(seen.any(-1), m + np.log(total), sink)
    return p, slope, lse


def _scores(q: np.ndarray, k: np.ndarray, scale: float, softcap: float) -> tuple[np.ndarray, np.ndarray]:
    """Scaled and capped scores of q `[n, D]` against k `[m, D]`, and the cap's derivative there."""
    with np.errstate(invalid="ignore", over="ignore"):
        s = scale * (q @ k.T)
        if softcap == 0:
            return s, np.ones_like(s)
        x = s / softcap
        shrunk = np.exp(-2 * np.abs(x))
        return softcap * np.tanh(x), 4 * shrunk / (1 + shrunk) ** 2  # the slope is 1 - tanh^2, which would cancel


def _product(weights: np.ndarray, seen: np.ndarray, values: np.ndarray) -> np.ndarray:
    """weights @ values over seen keys only: the 0 · NaN of an unseen key must be excluded."""
    finite = np.isfinite(values)
    with np.errstate(invalid="ignore", over="ignore"):
        result = weights @ np.where(finite, values, 0.0)
        rest = np.where(finite, 0.0, values)
        for j in np.flatnonzero(~finite.all(-1)):
            result += np.where(seen[:, j, None], weights[:, j, None] * rest[j], 0.0)
    return result
