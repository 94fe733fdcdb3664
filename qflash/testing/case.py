"""Case: one attention problem with its data, small enough to print and to build again anywhere."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import MISSING, dataclass, fields, replace
from functools import lru_cache
from typing import Any

import ml_dtypes  # noqa: F401  (registers the name "bfloat16" with NumPy)
import numpy as np

from qflash.rotary import Rope, rope_tables

LAYOUTS = ("bthd", "bhtd", "fused", "gaps", "one_batch")
DATA = ("normal", "biased_k", "biased_v", "outlier", "large", "uniform", "rising", "hills")
POSITIONS = (None, "shared", "per_batch", "negative")


class _ShortRepr:
    """repr() as a one-line call with only the non-default arguments; it can be evaluated."""

    def __repr__(self) -> str:
        given = []
        for field in fields(self):
            value = getattr(self, field.name)
            if field.default is MISSING or value != field.default:
                given.append(f"{field.name}={value!r}")
        return f"{type(self).__name__}({', '.join(given)})"


@dataclass(frozen=True, repr=False)
class Rotary(_ShortRepr):
    """Rope of a Case. positions: None (implied), "shared" [T], "per_batch" [B, T], or "negative" [B, T]."""

    dim: int
    interleaved: bool = False
    positions: str | None = None


@dataclass(frozen=True)
class Inputs:
    """A Case's arrays (NumPy)."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    kv_lens: np.ndarray | None = None
    rope: Rope | None = None
    cu_seqlens_q: np.ndarray | None = None
    cu_seqlens_k: np.ndarray | None = None
    sinks: np.ndarray | None = None


@dataclass(frozen=True, repr=False)
class Case(_ShortRepr):
    """Shapes, options and data of one problem. Equal cases have equal bits.

    layout: "bthd" contiguous; "bhtd" a transposed view; "fused" q, k, v sliced from one array; "gaps" rows with NaN
    between heads; "one_batch" batch stride 0. packed: q_lens and k_lens are the sequences of `attention_varlen`, and
    batch, q_len, k_len are unused. sinks: as text ("inf"), repeated if there are more heads. plant: (array, index,
    value) triples written over the data, value as text ("nan").
    """

    name: str = "case"
    q_len: int = 64
    k_len: int = 64
    q_heads: int = 2
    kv_heads: int = 2
    head_dim: int = 64
    batch: int = 1
    dtype: str = "float32"
    causal: bool = False
    window: tuple[int, int] | None = None
    kv_lens: tuple[int, ...] | None = None
    softcap: float | None = None
    scale: float | None = None
    rope: Rotary | None = None
    sinks: tuple[str, ...] | None = None
    q_lens: tuple[int, ...] | None = None
    k_lens: tuple[int, ...] | None = None
    layout: str = "bthd"
    data: str = "normal"
    plant: tuple[tuple[str, tuple[int, ...], str], ...] = ()
    seed: int = 0
    tags: tuple[str, ...] = ("full",)

    @property
    def packed(self) -> bool:
        return self.q_lens is not None

    @property
    def finite(self) -> bool:
        """Whether no NaN or infinity was planted."""
        return all(np.isfinite(float(value)) for value in (*(self.sinks or ()), *(value for _, _, value in self.plant)))

    def options(self) -> dict[str, Any]:
        """The keyword arguments that are not arrays."""
        return {"causal": self.causal, "window": self.window, "softcap": self.softcap, "scale": self.scale}

    def make_inputs(self) -> Inputs:
        """Build new arrays, which the caller may modify."""
        # Without planted values: an index may contain a slice, which has no hash before Python 3.12.
        q, k, v, rope = _drawn(replace(self, plant=()))
        arrays, rope = {"q": q.copy(), "k": k.copy(), "v": v.copy()}, deepcopy(rope)
        for name, index, value in self.plant:
            arrays[name][index] = float(value)
        q, k, v = _laid_out(arrays["q"], arrays["k"], arrays["v"], self.layout)
        cu_q, cu_k = (_cumulative(lens) if self.packed else None for lens in (self.q_lens, self.k_lens))
        kv_lens = None if self.kv_lens is None else np.array(self.kv_lens, np.int32)
        sinks = None if self.sinks is None else np.resize(np.array(self.sinks, np.float32), self.q_heads)
        return Inputs(q, k, v, kv_lens, rope, cu_q, cu_k, sinks)

    def make_gradients(self) -> tuple[np.ndarray, np.ndarray]:
        """(dout like out, dlse like lse) for the backward pass."""
        rng = np.random.default_rng([self.seed, 1])
        shape_q, _ = self._shapes()
        shape_lse = shape_q[1::-1] if self.packed else (shape_q[0], shape_q[2], shape_q[1])
        dout = rng.standard_normal(shape_q, np.float32).astype(self.dtype)
        return dout, rng.standard_normal(shape_lse, np.float32)

    def _shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        if self.packed:
            return (sum(self.q_lens), self.q_heads, self.head_dim), (sum(self.k_lens), self.kv_heads, self.head_dim)
        return (
            (self.batch, self.q_len, self.q_heads, self.head_dim),
            (self.batch, self.k_len, self.kv_heads, self.head_dim),
        )

    def _make_rope(self, rng: np.random.Generator) -> Rope | None:
        if self.rope is None:
            return None
        (*lead_q, _, _), (*lead_k, _, _) = self._shapes()
        rows = max([1, *self.q_lens, *self.k_lens] if self.packed else [1, self.q_len, self.k_len])
        how = self.rope.positions
        if how is None:
            return Rope(*rope_tables(rows, self.rope.dim), self.rope.interleaved)
        rows = rows + 7  # explicit positions may be anywhere in a table longer than the sequence
        lowest = 1 - rows if how == "negative" else 0
        shapes = [lead[-1:] if how == "shared" else lead for lead in (lead_q, lead_k)]
        positions = [rng.integers(lowest, rows, shape).astype(np.int32) for shape in shapes]
        return Rope(*rope_tables(rows, self.rope.dim), self.rope.interleaved, *positions)


@lru_cache(maxsize=8)
def _drawn(case: Case) -> tuple[np.ndarray, np.ndarray, np.ndarray, Rope | None]:
    """A case's q, k, v before anything is planted, and rope. Cached: the oracle and each kernel request them again."""
    rng = np.random.default_rng(case.seed)
    shape_q, shape_k = case._shapes()
    q, k, v = (rng.standard_normal(shape, np.float32) for shape in (shape_q, shape_k, shape_k))
    q, k, v = (x.astype(case.dtype) for x in _DISTRIBUTIONS[case.data](rng, q, k, v))
    return q, k, v, case._make_rope(rng)


def _biased_k(rng: np.random.Generator, q, k, v):
    """A tenth of k's channels have a constant offset, like keys of trained models."""
    channels = k.shape[-1]
    offset = np.zeros(channels, np.float32)
    offset[rng.permutation(channels)[: max(1, channels // 10)]] = 8.0
    return q, k + offset * rng.standard_normal(channels).astype(np.float32), v


def _biased_v(rng: np.random.Generator, q, k, v):
    """All of v's channels have a mean: sums over keys grow with it, and rounding errors of a sum accumulate."""
    return q, k, v + 3


def _outlier(rng: np.random.Generator, q, k, v):
    """One value in a thousand is ten times as large."""
    return tuple(x + 10 * (rng.random(x.shape) < 1e-3) * rng.standard_normal(x.shape, np.float32) for x in (q, k, v))


def _large(rng: np.random.Generator, q, k, v):
    """Scores of about +-1e4: every softmax is all but one-hot."""
    return 100 * q, 100 * k, v


def _uniform(rng: np.random.Generator, q, k, v):
    """All q equal, so all rows have the same scores; v has a mean, so nothing cancels."""
    return np.ones_like(q), k, v + 1


def _sloping(rng: np.random.Generator, q, k, v, height):
    """Scores follow height(key) in one row of four, up or down, each at its own rate: slowly, by more from tile to tile
    than float16 weights could represent, or by more than float32 ones could."""
    rates = np.array([1 / 64, 1 / 8, 2.0], np.float32)  # per unit of height, in units of the score
    chosen = rng.choice(np.concatenate([rates, -rates]), q.shape[:-1]) * (rng.random(q.shape[:-1]) < 0.25)
    q[..., 0] = chosen * np.sqrt(q.shape[-1])
    k[..., 0] = height(np.arange(k.shape[-3]))[:, None]
    return q, k, v


def _rising(rng: np.random.Generator, q, k, v):
    """Rows whose scores rise, or fall, from the first key to the last."""
    return _sloping(rng, q, k, v, lambda keys: keys)


def _hills(rng: np.random.Generator, q, k, v):
    """Rows whose scores rise for 200 keys and fall for 200, or the reverse, repeatedly."""
    return _sloping(rng, q, k, v, lambda keys: 200 - np.abs(keys % 400 - 200))


_DISTRIBUTIONS = {
    "normal": lambda rng, q, k, v: (q, k, v),
    "biased_k": _biased_k,
    "biased_v": _biased_v,
    "outlier": _outlier,
    "large": _large,
    "uniform": _uniform,
    "rising": _rising,
    "hills": _hills,
}


def _cumulative(lens: tuple[int, ...]) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lens)]).astype(np.int32)


def _laid_out(q: np.ndarray, k: np.ndarray, v: np.ndarray, layout: str):
    """The same values with other strides."""
    if layout == "bthd":
        return q, k, v
    if layout == "bhtd":  # [H, T, D] for packed arrays
        return tuple(np.ascontiguousarray(x.swapaxes(-3, -2)).swapaxes(-3, -2) for x in (q, k, v))
    if layout == "gaps":
        return tuple(_with_gaps(x) for x in (q, k, v))
    if layout == "one_batch":
        return tuple(np.broadcast_to(x[:1], x.shape) for x in (q, k, v))
    if layout == "fused":
        whole = np.concatenate([q, k, v], axis=-2)
        hq, hkv = q.shape[-2], k.shape[-2]
        return whole[..., :hq, :], whole[..., hq : hq + hkv, :], whole[..., hq + hkv :, :]
    raise ValueError(f"layout is {layout!r}; allowed: {', '.join(LAYOUTS)}")


def _with_gaps(x: np.ndarray) -> np.ndarray:
    """Odd strides in every dimension but the last, NaN in the gaps: a read past a row is detected."""
    roomy = np.full([*(n + 1 for n in x.shape[:-1]), x.shape[-1] + 3], np.nan, x.dtype)
    view = roomy[tuple(slice(0, n) for n in x.shape)]
    view[...] = x
    return view
