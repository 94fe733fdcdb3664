"""Decoding on pages: a problem's tokens as arrays and in pages of any size, and qflash's kernels on them.

Numbers are drawn on the device, because the largest problem has gigabytes of them; all candidates share them.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np

import qflash
from bench.arrays import Arrays, Candidate, load
from bench.run import Unavailable
from qflash import dispatch, reference
from qflash.testing import Case
from qflash.testing.runner import to_numpy
from qflash.testing.timing import Call

UNIT = 256  # tokens of the largest page; a sequence's tokens are drawn in full units, which smaller pages divide
MEAN_UNITS = 16  # units whose keys the mean of INT8 pages is computed from, like that of a prompt


class PagedArrays(Arrays):
    """One query for each sequence of a case: `kv_lens` tokens, or `k_len` each."""

    def __init__(self, case: Case, device: str):
        super().__init__(case, device)
        self.lens = case.kv_lens or (case.k_len,) * case.batch
        self._units = [-(-length // UNIT) for length in self.lens]
        self._pools: dict[tuple[int, str], tuple[Any, Any]] = {}

    @cached_property
    def q(self) -> Any:
        """`[B, 1, Hq, D]`."""
        return self._draw(0, self.case.batch, 1, self.case.q_heads)

    @cached_property
    def tokens(self) -> tuple[Any, Any]:
        """k and v, `[units, 256, Hkv, D]`, with sequences concatenated; data past the end of a sequence is not read."""
        k, v = (self._draw(seed, sum(self._units), UNIT, self.case.kv_heads) for seed in (1, 2))
        return k, v

    def _draw(self, seed: int, *shape: int) -> Any:
        torch = load("torch")
        generator = torch.Generator(self.device).manual_seed(self.case.seed + seed)
        dtype = getattr(torch, self.case.dtype)
        return torch.randn((*shape, self.case.head_dim), generator=generator, device=self.device, dtype=dtype)

    @cached_property
    def torch(self) -> tuple[Any, Any, Any]:
        """q, k and v as arrays, if all sequences have the same number of full units."""
        if len(set(self.lens)) > 1 or self.lens[0] % UNIT:
            raise Unavailable("it takes arrays, and these sequences have different lengths")
        k, v = (x.view(self.case.batch, self.lens[0], *x.shape[2:]) for x in self.tokens)
        return self.q, k, v

    @cached_property
    def torch_lens(self) -> Any:
        """int32 `[B]`."""
        return load("torch").tensor(self.lens, dtype=load("torch").int32, device=self.device)

    def pages_of(self, page_size: int) -> list[int]:
        """The number of pages that each sequence needs."""
        return [-(-length // page_size) for length in self.lens]

    def order(self, page_size: int) -> Any:
        """int64 `[pages]`: the shuffled position of each page of `tokens` in a pool."""
        torch = load("torch")
        count = sum(self._units) * (UNIT // page_size)
        return torch.randperm(count, generator=torch.Generator().manual_seed(self.case.seed)).to(self.device)

    def page_table(self, page_size: int) -> Any:
        """int32 `[B, columns]`, with 0 where a sequence has no page."""
        torch = load("torch")
        needed, order = self.pages_of(page_size), self.order(page_size).int()
        table = torch.zeros((len(needed), max(needed)), dtype=torch.int32, device=self.device)
        first = 0
        for row, (count, units) in enumerate(zip(needed, self._units, strict=True)):
            table[row, :count] = order[first : first + count]
            first += units * (UNIT // page_size)
        return table

    def pools(self, page_size: int, layout: str) -> tuple[Any, Any]:
        """k and v in shuffled pages: "phtd" `[pages, Hkv, page_size, D]`, "pthd" `[pages, page_size, Hkv, D]`."""
        found = self._pools.get((page_size, layout))
        if found is None:
            pools, order = [], self.order(page_size)
            for x in self.tokens:
                pages = x.view(-1, page_size, *x.shape[2:])
                pages = pages.transpose(1, 2) if layout == "phtd" else pages
                pools.append(pages.new_empty(pages.shape).index_copy_(0, order, pages))
            found = self._pools[page_size, layout] = (pools[0], pools[1])
        return found

    def kv(self, page_size: int, int8: bool) -> qflash.PagedKV:
        """The argument for `qflash.attention`."""
        table = self.page_table(page_size)
        if not int8:
            return qflash.PagedKV(*self.pools(page_size, "phtd"), table, self.torch_lens)
        k, v = (x.view(-1, page_size, *x.shape[2:]) for x in self.tokens)
        pages, _, heads, head_dim = k.shape
        torch = load("torch")
        pools = [torch.zeros((pages, heads, page_size, head_dim), dtype=torch.int8, device=self.device) for _ in "kv"]
        scales = [torch.zeros((pages, heads, page_size), device=self.device) for _ in "kv"]
        mean = self.tokens[0][:MEAN_UNITS].float().mean((0, 1))
        # Every page is written as a separate sequence, which is full.
        full = torch.full((pages,), page_size, dtype=torch.int32, device=self.device)
        alone = qflash.PagedKV(*pools, self.order(page_size).int()[:, None], full, *scales, k_mean=mean)
        qflash.paged_write(alone, k, v)
        return qflash.PagedKV(*pools, table, self.torch_lens, *scales, k_mean=mean)

    @cached_property
    def truth(self) -> np.ndarray:
        """The first head of the first sequence in float64."""
        k, v = (x[: self._units[0]].flatten(0, 1)[None, : self.lens[0], :1] for x in self.tokens)
        q, k, v = (to_numpy(x).astype(np.float64) for x in (self.q[:1, :, :1], k, v))
        return reference.attention(q, k, v)[0]


def qflash_pages(kernel: str, page_size: int) -> Candidate:
    """A kernel on pages that already contain the tokens."""
    variant = dispatch.VARIANTS[kernel]
    int8 = variant.kv == "pages_int8"

    def make(arrays: PagedArrays) -> Call:
        q, kv, name = arrays.q, arrays.kv(page_size, int8), variant.kernel.name
        return lambda: qflash.attention(q, kv, kernel=name)

    return Candidate(
        f"qflash {variant.kernel.name}, {'INT8 ' if int8 else ''}pages of {page_size}",
        make,
        kernel=kernel,
        precision="int8" if int8 else variant.precision,
        int8_pages=int8,
    )
