"""A Case whose keys and values are in the pages of a cache."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from qflash import dispatch, reference
from qflash.call.array import Array
from qflash.call.op import Plan
from qflash.frontends import numpy as numpy_frontend
from qflash.ops.paged import ATTENTION_PAGED, PagedKV, paged_call
from qflash.ops.problem import Options
from qflash.reference.kv_write import mixed_keys, quantize_tokens
from qflash.reference.pages_int8 import attention_pages_int8
from qflash.rotary import Rope
from qflash.testing.case import Case, Inputs
from qflash.testing.oracle import sequences

PAGE_SIZES = (16, 32, 64, 128, 256)
POOLS = ("phtd", "pthd", "gaps")  # memory layouts of pools; gaps: head-major with space between tokens and heads
_TIMES = 3  # size of the pool, in multiples of the pages needed


@dataclass(frozen=True)
class PagedInputs:
    """A Case's arrays on pages (NumPy). rope rotates only q."""

    q: np.ndarray
    kv: PagedKV
    rope: Rope | None = None
    cu_seqlens_q: np.ndarray | None = None
    max_seqlen_q: int = 0
    sinks: np.ndarray | None = None


def is_paged(kernel: str) -> bool:
    """Whether a variant of a kernel takes pages."""
    return dispatch.VARIANTS[kernel].kv in ("pages", "pages_int8")


def on_pages(
    case: Case, inputs: Inputs, kernel: str | None = None, page_size: int | None = None, pool: str | None = None
) -> PagedInputs:
    """The case's keys, rotated, and values in shuffled pages of a pool three times as large as needed. kernel: the
    variant that takes them; None takes the case's dtype.

    Every slot without a token is NaN (in int8 any number, with a scale of NaN), and entries of the table that no token
    needs are out of range. page_size and pool are chosen by the case's seed if they are None.
    """
    int8 = kernel is not None and dispatch.VARIANTS[kernel].kv == "pages_int8"
    page_size = page_size or PAGE_SIZES[case.seed % len(PAGE_SIZES)]
    pool = pool or POOLS[case.seed // len(PAGE_SIZES) % len(POOLS)]
    rng = np.random.default_rng([case.seed, 2])
    tokens = [_tokens(case, inputs, *where, "float32" if int8 else case.dtype) for where in sequences(case, inputs)]
    lens = [len(k) for k, _ in tokens]
    needed = [-(-length // page_size) for length in lens]
    columns = max(needed, default=0) + 1
    pages = _TIMES * sum(needed) + 1
    dtype = "int8" if int8 else case.dtype
    k_pool, v_pool = (_pool(pages, case.kv_heads, page_size, case.head_dim, dtype, pool) for _ in range(2))
    k_scale, v_scale, k_mean = None, None, None
    if int8:
        k_pool[...], v_pool[...] = rng.integers(-128, 128, (2, *k_pool.shape), np.int8)
        gap = 4 * (pool == "gaps")  # planes are multiples of 16 bytes apart
        planes = np.full((2, pages, case.kv_heads + gap, page_size + gap), np.nan, np.float32)
        k_scale, v_scale = planes[:, :, : case.kv_heads, :page_size]
        if tokens and (case.data != "normal" or case.seed % 2):
            k_mean = _mean(np.concatenate([k for k, _ in tokens]))
    order = rng.permutation(pages)
    table = rng.choice(np.array([-1, pages, 2**31 - 1], np.int32), (len(tokens), columns))
    taken = 0
    for b, (k, v) in enumerate(tokens):
        table[b, : needed[b]] = order[taken : taken + needed[b]]
        taken += needed[b]
        for first in range(0, lens[b], page_size):
            page, part = table[b, first // page_size], slice(first, first + page_size)
            at = (page, slice(None), slice(len(k[part])))
            if k_scale is None or v_scale is None:
                k_pool[at], v_pool[at] = k[part].swapaxes(0, 1), v[part].swapaxes(0, 1)
                continue
            keys, values = mixed_keys(k[part], k_mean), v[part].astype(np.float32)
            for x, to, scale in ((keys, k_pool, k_scale), (values, v_pool, v_scale)):
                integers, scales = quantize_tokens(x)
                to[at], scale[at] = integers.swapaxes(0, 1), scales.T
    layout = "phtd"
    if pool == "pthd":
        k_pool, v_pool, layout = k_pool.swapaxes(1, 2), v_pool.swapaxes(1, 2), "pthd"
    kv = PagedKV(k_pool, v_pool, table, np.array(lens, np.int32), k_scale, v_scale, k_mean, layout)
    rope = None if inputs.rope is None else replace(inputs.rope, positions_k=None)
    longest = max(case.q_lens, default=0) if case.packed else 0
    return PagedInputs(inputs.q, kv, rope, inputs.cu_seqlens_q, longest, inputs.sinks)


@lru_cache(maxsize=64)
def replayed(case: Case, kernel: str) -> tuple[np.ndarray, np.ndarray] | None:
    """(out, lse) of the replay of a decode kernel on INT8 pages, float64; None for a kernel without a replay."""
    if dispatch.VARIANTS[kernel].kv != "pages_int8" or dispatch.VARIANTS[kernel].device == "cpu":
        return None
    return replay_of(case, on_pages(case, case.make_inputs(), kernel))


def replay_of(case: Case, inputs: PagedInputs) -> tuple[np.ndarray, np.ndarray]:
    """The same for pages that were made in another way."""
    kv = inputs.kv
    pools = (x if kv.layout == "phtd" else x.swapaxes(1, 2) for x in (kv.k_pages, kv.v_pages))
    pages = (*pools, kv.k_scale, kv.v_scale, kv.page_table, kv.lens)
    words = {"k_mean": kv.k_mean, "rope": inputs.rope, "cu_seqlens_q": inputs.cu_seqlens_q, "sinks": inputs.sinks}
    return attention_pages_int8(inputs.q, *pages, **words, **case.options())


def _mean(k: np.ndarray) -> np.ndarray:
    """The mean of the finite keys, `[heads, head_dim]`."""
    finite = np.isfinite(k).all(-1, keepdims=True)
    return (np.where(finite, k, 0).sum(0) / np.maximum(finite.sum(0), 1)).astype(np.float32)


def _tokens(
    case: Case, inputs: Inputs, b: int, rows: Any, keys: Any, length: int, dtype: str
) -> tuple[np.ndarray, np.ndarray]:
    """The rotated keys, rounded to `dtype`, and the values of one sequence, `[length, heads, head_dim]`."""
    k, v, rope = inputs.k[keys], inputs.v[keys], inputs.rope
    if rope is not None and length:
        given = rope.positions_k
        if given is None:
            positions = np.arange(length)
        else:
            positions = given[keys] if case.packed else (given[b] if given.ndim == 2 else given)[:length]
        with np.errstate(invalid="ignore", over="ignore"):
            k = reference.apply_rope(k.astype(np.float64), positions, rope)
    return k.astype(dtype), v


def _pool(pages: int, heads: int, page_size: int, head_dim: int, dtype: str, how: str) -> np.ndarray:
    """`[pages, heads, page_size, head_dim]` filled with NaN, or with zeros."""
    nothing = 0 if dtype == "int8" else np.nan
    if how == "pthd":
        return np.full((pages, page_size, heads, head_dim), nothing, dtype).swapaxes(1, 2)
    if how == "phtd":
        return np.full((pages, heads, page_size, head_dim), nothing, dtype)
    gap = 16  # rows stay multiples of 16 bytes, as bulk copies require
    return np.full((pages, heads + 1, page_size + 1, head_dim + gap), nothing, dtype)[:, :heads, :page_size, :head_dim]


def plan_of(case: Case, inputs: PagedInputs, kernel: str | None, device: str) -> tuple[Plan, dict[str, Any]]:
    """The plan of attention on it with lse, and its arrays by name. kernel: a variant's name."""
    name = None if kernel is None else dispatch.VARIANTS[kernel].kernel.name
    options = Options(**case.options(), precision=None, kernel=name)
    packed = (inputs.cu_seqlens_q, inputs.max_seqlen_q)
    arrays, words = paged_call(inputs.q, inputs.kv, None, options, None, inputs.rope, True, inputs.sinks, *packed)
    named = {name: x for name, x in zip(ATTENTION_PAGED.arrays, arrays, strict=True) if x is not None}
    described = {name: numpy_frontend.describe(name, x) for name, x in named.items()}
    on_device = {name: Array(x.shape, x.strides, x.dtype, device) for name, x in described.items()}
    return ATTENTION_PAGED.plan(*(on_device.get(name) for name in ATTENTION_PAGED.arrays), *words), named
