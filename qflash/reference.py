"""The oracle: every operation of qflash defined in NumPy float64.

Written to be read, not to be fast: one head at a time, a block of query rows at a time, no online softmax. It takes
NumPy arrays of any real dtype and returns float64. A key that a row does not see takes no part in that row at all:
NaN or Inf standing there cannot reach the result. What is seen follows IEEE arithmetic (docs/numerics.md).
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from qflash.rope import Rope

_BLOCK_SCORES = 1 << 22  # scores held at once: bounds memory to a few times 32 MiB at any length


@dataclass(frozen=True)
class _Words:
    """The options of one call with their defaults filled in."""

    left: int
    right: int
    softcap: float
    scale: float

    @classmethod
    def of(cls, head_dim: int, causal: bool, window: Sequence[int] | None, softcap: float | None, scale: float | None):
        left, right = (-1, -1) if window is None else window
        return cls(left, 0 if causal else right, softcap or 0.0, 1.0 / math.sqrt(head_dim) if scale is None else scale)


@dataclass(frozen=True)
class _Sequence:
    """One sequence of a batch: float64 [length, heads, head_dim], rope applied, keys cut to those that exist."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    positions_q: np.ndarray | None
    positions_k: np.ndarray | None


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
) -> tuple[np.ndarray, np.ndarray]:
    """`qflash.attention` as a definition: (out `[B, Tq, Hq, D]`, lse `[B, Hq, Tq]`), float64."""
    words = _Words.of(q.shape[-1], causal, window, softcap, scale)
    out = np.zeros(q.shape, np.float64)
    lse = np.full((q.shape[0], q.shape[2], q.shape[1]), -np.inf)
    for b in range(q.shape[0]):
        sequence = _sequence(q[b], k[b], v[b], _length(kv_lens, b, k.shape[1]), _rope_of(rope, b))
        out[b], lse[b] = _forward(sequence, words)
    return out, lse


def attention_varlen(
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
    """`qflash.attention_varlen` as a definition: (out `[total_q, Hq, D]`, lse `[Hq, total_q]`), float64."""
    words = _Words.of(q.shape[-1], causal, window, softcap, scale)
    out = np.zeros(q.shape, np.float64)
    lse = np.full((q.shape[1], q.shape[0]), -np.inf)
    for b, (rows, keys) in enumerate(_packed(cu_seqlens_q, cu_seqlens_k, q.shape[0], k.shape[0])):
        length = _length(kv_lens, b, keys.stop - keys.start)
        sequence = _sequence(q[rows], k[keys], v[keys], length, _rope_of_packed(rope, rows, keys))
        out[rows], lse[:, rows] = _forward(sequence, words)
    return out, lse


def attention_backward(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    dout: np.ndarray,
    dlse: np.ndarray | None = None,
    *,
    causal: bool = False,
    window: Sequence[int] | None = None,
    kv_lens: np.ndarray | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    rope: Rope | None = None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(dq, dk, dv) of `sum(out * dout) + sum(lse * dlse)`, float64. A row that sees no key has no gradient."""
    words = _Words.of(q.shape[-1], causal, window, softcap, scale)
    dq, dk, dv = (np.zeros(x.shape, np.float64) for x in (q, k, v))
    for b in range(q.shape[0]):
        sequence_rope = _rope_of(rope, b)
        sequence = _sequence(q[b], k[b], v[b], _length(kv_lens, b, k.shape[1]), sequence_rope)
        grads = _backward(sequence, words, dout[b], None if dlse is None else dlse[b])
        length = sequence.k.shape[0]
        dq[b], dk[b, :length], dv[b, :length] = _unrotate(grads, sequence, sequence_rope)
    return dq, dk, dv


def attention_varlen_backward(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    cu_seqlens_q: np.ndarray,
    cu_seqlens_k: np.ndarray,
    dout: np.ndarray,
    dlse: np.ndarray | None = None,
    *,
    causal: bool = False,
    window: Sequence[int] | None = None,
    kv_lens: np.ndarray | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    rope: Rope | None = None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """`attention_backward` over packed sequences."""
    words = _Words.of(q.shape[-1], causal, window, softcap, scale)
    dq, dk, dv = (np.zeros(x.shape, np.float64) for x in (q, k, v))
    for b, (rows, keys) in enumerate(_packed(cu_seqlens_q, cu_seqlens_k, q.shape[0], k.shape[0])):
        sequence_rope = _rope_of_packed(rope, rows, keys)
        length = _length(kv_lens, b, keys.stop - keys.start)
        sequence = _sequence(q[rows], k[keys], v[keys], length, sequence_rope)
        grads = _backward(sequence, words, dout[rows], None if dlse is None else dlse[:, rows])
        exists = slice(keys.start, keys.start + length)
        dq[rows], dk[exists], dv[exists] = _unrotate(grads, sequence, sequence_rope)
    return dq, dk, dv


def apply_rope(x: np.ndarray, positions: np.ndarray, rope: Rope, inverse: bool = False) -> np.ndarray:
    """Rotate x `[T, H, D]`, row t standing at `positions[t]`; float64. `inverse` turns the other way."""
    x = np.array(x, np.float64)
    cos, sin = np.asarray(rope.cos, np.float64), np.asarray(rope.sin, np.float64)
    rows = np.abs(np.asarray(positions, np.int64))
    if rows.size and rows.max() >= cos.shape[0]:
        t = int(rows.argmax())
        raise ValueError(f"position {int(positions[t])} of row {t}; allowed: up to {cos.shape[0] - 1} either way")
    backwards = (np.asarray(positions) < 0) != inverse
    c = cos[rows][:, None, :]
    s = np.where(backwards[:, None, None], -1.0, 1.0) * sin[rows][:, None, :]
    half = cos.shape[1]
    first, second = (
        (slice(0, 2 * half, 2), slice(1, 2 * half, 2)) if rope.interleaved else (slice(0, half), slice(half, 2 * half))
    )
    a, b = x[..., first].copy(), x[..., second].copy()
    x[..., first] = a * c - b * s
    x[..., second] = b * c + a * s
    return x


def visible(rows: np.ndarray, len_q: int, len_k: int, left: int = -1, right: int = -1) -> np.ndarray:
    """Which keys each query row sees: bool `[len(rows), len_k]`. The diagonal is `j = i + len_k - len_q`."""
    diagonal = rows[:, None] + (len_k - len_q)
    key = np.arange(len_k)[None, :]
    seen = np.ones((len(rows), len_k), bool)
    if left >= 0:
        seen &= key >= diagonal - left
    if right >= 0:
        seen &= key <= diagonal + right
    return seen


def scores(q: np.ndarray, k: np.ndarray, scale: float, softcap: float) -> tuple[np.ndarray, np.ndarray]:
    """Scaled and capped scores of q `[n, D]` against k `[m, D]`, and the cap's derivative there."""
    with np.errstate(invalid="ignore", over="ignore"):
        s = scale * (q @ k.T)
        if softcap == 0:
            return s, np.ones_like(s)
        x = s / softcap
        shrunk = np.exp(-2 * np.abs(x))
        return softcap * np.tanh(x), 4 * shrunk / (1 + shrunk) ** 2  # the slope is 1 - tanh^2, which would cancel


def __getattr__(name: str) -> Any:
    """The replays of the quantized pipelines belong to the oracle; the modules that have them are built on this one."""
    for kernel, module in (("int8", "replay"), ("fa_int8", "replay_fa_int8"), ("sm90_int8", "replay_sm90_int8")):
        if name in (f"attention_{kernel}", f"attention_varlen_{kernel}"):
            return getattr(importlib.import_module(f"qflash.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _forward(sequence: _Sequence, words: _Words) -> tuple[np.ndarray, np.ndarray]:
    """(out [Tq, Hq, D], lse [Hq, Tq]) of one sequence."""
    out = np.zeros(sequence.q.shape)
    lse = np.full((sequence.q.shape[1], sequence.q.shape[0]), -np.inf)
    for head, kv_head, rows in _blocks(sequence):
        seen, p, _, block_lse = _softmax(sequence, words, head, kv_head, rows)
        out[rows, head] = _product(p, seen, sequence.v[:, kv_head])
        lse[head, rows] = block_lse
    return out, lse


def _backward(sequence: _Sequence, words: _Words, dout: np.ndarray, dlse: np.ndarray | None):
    """Gradients of the rotated q and k, and of v."""
    dq, dk, dv = (np.zeros(x.shape) for x in (sequence.q, sequence.k, sequence.v))
    dout = np.asarray(dout, np.float64)
    for head, kv_head, rows in _blocks(sequence):
        seen, p, slope, _ = _softmax(sequence, words, head, kv_head, rows)
        q, k, v, g = sequence.q[rows, head], sequence.k[:, kv_head], sequence.v[:, kv_head], dout[rows, head]
        out = _product(p, seen, v)
        with np.errstate(invalid="ignore", over="ignore"):
            delta = (out * g).sum(-1) - (0.0 if dlse is None else np.asarray(dlse, np.float64)[head, rows])
            ds = np.where(seen, p * (g @ v.T - delta[:, None]) * slope * words.scale, 0.0)
        dq[rows, head] = _product(ds, seen, k)
        dk[:, kv_head] += _product(ds.T, seen.T, q)
        dv[:, kv_head] += _product(p.T, seen.T, g)
    return dq, dk, dv


def _blocks(sequence: _Sequence) -> Iterator[tuple[int, int, slice]]:
    """(query head, its key head, query rows) covering a sequence."""
    length, heads, _ = sequence.q.shape
    group = heads // sequence.k.shape[1]
    step = max(1, _BLOCK_SCORES // max(1, sequence.k.shape[0]))
    for head in range(heads):
        for start in range(0, length, step):
            yield head, head // group, slice(start, min(start + step, length))


def _softmax(sequence: _Sequence, words: _Words, head: int, kv_head: int, rows: slice):
    """(seen, weights, slope of the cap, lse) of a block of rows; weights are 0 where nothing is seen."""
    len_q, len_k = sequence.q.shape[0], sequence.k.shape[0]
    seen = visible(np.arange(rows.start, rows.stop), len_q, len_k, words.left, words.right)
    s, slope = scores(sequence.q[rows, head], sequence.k[:, kv_head], words.scale, words.softcap)
    sees_any = seen.any(-1)
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        # A row that sees only scores of -inf has m = -inf and so becomes NaN, as plain softmax does.
        m = np.where(seen, s, -np.inf).max(-1, initial=-np.inf)
        weights = np.where(seen, np.exp(s - m[:, None]), 0.0)
        total = weights.sum(-1)
        p = np.where(seen, weights / total[:, None], 0.0)
        lse = np.where(sees_any, m + np.log(total), -np.inf)
    return seen, p, slope, lse


def _product(weights: np.ndarray, seen: np.ndarray, values: np.ndarray) -> np.ndarray:
    """weights @ values over what is seen only: 0 · NaN of an unseen key must not happen, so it is kept out."""
    finite = np.isfinite(values)
    with np.errstate(invalid="ignore", over="ignore"):
        result = weights @ np.where(finite, values, 0.0)
        rest = np.where(finite, 0.0, values)
        for j in np.flatnonzero(~finite.all(-1)):
            result += np.where(seen[:, j, None], weights[:, j, None] * rest[j], 0.0)
    return result


def _sequence(q: np.ndarray, k: np.ndarray, v: np.ndarray, length: int, rope: Rope | None) -> _Sequence:
    q, k, v = (np.asarray(x, np.float64) for x in (q, k[:length], v[:length]))
    if rope is None or length == 0:  # with no keys a query has nothing to be turned against
        return _Sequence(q, k, v, None, None)
    positions_q = np.arange(len(q)) + (length - len(q)) if rope.positions_q is None else np.asarray(rope.positions_q)
    positions_k = np.arange(length) if rope.positions_k is None else np.asarray(rope.positions_k)[:length]
    return _Sequence(apply_rope(q, positions_q, rope), apply_rope(k, positions_k, rope), v, positions_q, positions_k)


def _unrotate(grads, sequence: _Sequence, rope: Rope | None):
    """Gradients of what was rotated become gradients of the inputs: turn back."""
    dq, dk, dv = grads
    if rope is None or sequence.positions_q is None or sequence.positions_k is None:
        return dq, dk, dv
    return apply_rope(dq, sequence.positions_q, rope, True), apply_rope(dk, sequence.positions_k, rope, True), dv


def _rope_of(rope: Rope | None, b: int) -> Rope | None:
    """The rope of sequence b: positions cut down to its own."""

    def row(positions: Any) -> np.ndarray | None:
        return None if positions is None else positions[b] if positions.ndim == 2 else positions

    if rope is None:
        return None
    return Rope(rope.cos, rope.sin, rope.interleaved, row(rope.positions_q), row(rope.positions_k))


def _rope_of_packed(rope: Rope | None, rows: slice, keys: slice) -> Rope | None:
    if rope is None:
        return None
    positions_q = None if rope.positions_q is None else np.asarray(rope.positions_q)[rows]
    positions_k = None if rope.positions_k is None else np.asarray(rope.positions_k)[keys]
    return Rope(rope.cos, rope.sin, rope.interleaved, positions_q, positions_k)


def _length(kv_lens: np.ndarray | None, b: int, longest: int) -> int:
    if kv_lens is None:
        return longest
    if not 0 <= kv_lens[b] <= longest:
        raise ValueError(f"kv_lens[{b}] is {int(kv_lens[b])}; allowed: 0 to {longest}")
    return int(kv_lens[b])


def _packed(cu_q: np.ndarray, cu_k: np.ndarray, total_q: int, total_k: int) -> list[tuple[slice, slice]]:
    for name, cu, total in (("cu_seqlens_q", cu_q, total_q), ("cu_seqlens_k", cu_k, total_k)):
        if cu[0] != 0 or cu[-1] != total or (np.diff(cu) < 0).any():
            raise ValueError(f"{name} is {np.asarray(cu).tolist()}; allowed: from 0 to {total}, never falling")
    starts_q, starts_k = [int(x) for x in cu_q], [int(x) for x in cu_k]
    return [
        (slice(starts_q[b], starts_q[b + 1]), slice(starts_k[b], starts_k[b + 1])) for b in range(len(starts_q) - 1)
    ]
