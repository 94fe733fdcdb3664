"""A Case whose keys and values stand in the pages of a cache."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from qflash import dispatch, reference
from qflash.call.array import Array
from qflash.call.op import Plan
from qflash.frontends import numpy as numpy_frontend
from qflash.ops.paged import ATTENTION_PAGED, PagedKV, paged_call
from qflash.ops.problem import Options
from qflash.rope import Rope
from qflash.testing.case import Case, Inputs
from qflash.testing.oracle import sequences

PAGE_SIZES = (16, 32, 64, 128, 256)
POOLS = ("phtd", "pthd", "gaps")  # how pools lie in memory; gaps: head-major with room between tokens and heads
_TIMES = 3  # pages of the pool, in pages that are needed


@dataclass(frozen=True)
class PagedInputs:
    """A Case's arrays on pages (NumPy). rope rotates q alone."""

    q: np.ndarray
    kv: PagedKV
    rope: Rope | None = None
    cu_seqlens_q: np.ndarray | None = None
    max_seqlen_q: int = 0


def on_pages(case: Case, inputs: Inputs, page_size: int | None = None, pool: str | None = None) -> PagedInputs:
    """The case's keys, rotated, and values in shuffled pages of a pool three times as large.

    Every slot that holds no token is NaN, and entries of the table that no token needs point outside the pool. None:
    one page size, one way to lie in memory by turns, by the case's seed.
    """
    page_size = page_size or PAGE_SIZES[case.seed % len(PAGE_SIZES)]
    pool = pool or POOLS[case.seed // len(PAGE_SIZES) % len(POOLS)]
    rng = np.random.default_rng([case.seed, 2])
    tokens = [_tokens(case, inputs, *where) for where in sequences(case, inputs)]
    lens = [len(k) for k, _ in tokens]
    needed = [-(-length // page_size) for length in lens]
    columns = max(needed, default=0) + 1
    pages = _TIMES * sum(needed) + 1
    k_pool, v_pool = (_pool(pages, case.kv_heads, page_size, case.head_dim, case.dtype, pool) for _ in range(2))
    order = rng.permutation(pages)
    table = rng.choice(np.array([-1, pages, 2**31 - 1], np.int32), (len(tokens), columns))
    taken = 0
    for b, (k, v) in enumerate(tokens):
        table[b, : needed[b]] = order[taken : taken + needed[b]]
        taken += needed[b]
        for first in range(0, lens[b], page_size):
            page, part = table[b, first // page_size], slice(first, first + page_size)
            k_pool[page, :, : len(k[part])] = k[part].swapaxes(0, 1)
            v_pool[page, :, : len(v[part])] = v[part].swapaxes(0, 1)
    layout = "phtd"
    if pool == "pthd":
        k_pool, v_pool, layout = k_pool.swapaxes(1, 2), v_pool.swapaxes(1, 2), "pthd"
    kv = PagedKV(k_pool, v_pool, table, np.array(lens, np.int32), layout=layout)
    rope = None if inputs.rope is None else replace(inputs.rope, positions_k=None)
    return PagedInputs(inputs.q, kv, rope, inputs.cu_seqlens_q, max(case.q_lens, default=0) if case.packed else 0)


def _tokens(case: Case, inputs: Inputs, b: int, rows: Any, keys: Any, length: int) -> tuple[np.ndarray, np.ndarray]:
    """The rotated keys and the values of one sequence, `[length, heads, head_dim]`."""
    k, v, rope = inputs.k[keys], inputs.v[keys], inputs.rope
    if rope is not None and length:
        given = rope.positions_k
        if given is None:
            positions = np.arange(length)
        else:
            positions = given[keys] if case.packed else (given[b] if given.ndim == 2 else given)[:length]
        with np.errstate(invalid="ignore", over="ignore"):
            k = reference.apply_rope(k.astype(np.float64), positions, rope).astype(case.dtype)
    return k, v


def _pool(pages: int, heads: int, page_size: int, head_dim: int, dtype: str, how: str) -> np.ndarray:
    """`[pages, heads, page_size, head_dim]` full of NaN."""
    if how == "pthd":
        return np.full((pages, page_size, heads, head_dim), np.nan, dtype).swapaxes(1, 2)
    if how == "phtd":
        return np.full((pages, heads, page_size, head_dim), np.nan, dtype)
    gap = 8  # rows stay whole chunks of 16 bytes, which is what copies in bulk need
    return np.full((pages, heads + 1, page_size + 1, head_dim + gap), np.nan, dtype)[:, :heads, :page_size, :head_dim]


def plan_of(case: Case, inputs: PagedInputs, kernel: str | None, device: str) -> tuple[Plan, dict[str, Any]]:
    """The plan of attention on it with lse, and its arrays by name. kernel: a variant's name."""
    name = None if kernel is None else dispatch.VARIANTS[kernel].kernel.name
    options = Options(**case.options(), precision=None, kernel=name)
    packed = (inputs.cu_seqlens_q, inputs.max_seqlen_q)
    arrays, words = paged_call(inputs.q, inputs.kv, None, options, None, inputs.rope, True, None, *packed)
    named = {name: x for name, x in zip(ATTENTION_PAGED.arrays, arrays, strict=True) if x is not None}
    described = {name: numpy_frontend.describe(name, x) for name, x in named.items()}
    on_device = {name: Array(x.shape, x.strides, x.dtype, device) for name, x in described.items()}
    return ATTENTION_PAGED.plan(*(on_device.get(name) for name in ATTENTION_PAGED.arrays), *words), named
