"""New tokens into the pages of a cache: `qflash.paged_write` of one rotated token per sequence, and a plain scatter.

The written pages are checked against the replay, bit by bit, before timing.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import qflash
from bench import rows, tables
from bench.arrays import Candidate, load
from bench.presets import WRITE, Preset
from bench.run import Row, Suite
from qflash import dispatch
from qflash.testing import Case
from qflash.testing.page_writes import PageWrite, WriteArrays, arrays_of, check_pools, on_device, words_of
from qflash.testing.runner import to_torch
from qflash.testing.timing import Call, Comparison

NAME = "kv_write"
SCATTER = "torch index_put"


class Tokens:
    """A token for each sequence of a case; the last pages of sequences are filled to different positions."""

    def __init__(self, case: Case, device: str, page_size: int):
        self.case, self.device, self.page_size = case, device, page_size
        self._lens = tuple(page_size - 7 * index % page_size for index in range(case.batch))
        self._made: dict[bool, WriteArrays] = {}

    def written(self, int8: bool) -> WriteArrays:
        """The call's arrays (NumPy), before it."""
        if int8 not in self._made:
            sizes = {"page_size": self.page_size, "head_dim": self.case.head_dim, "heads": self.case.kv_heads}
            words = {"lens": self._lens, "new": 1, "rope": "half", "mean": int8}
            self._made[int8] = arrays_of(PageWrite(self.case.dtype, int8, **sizes, **words))
        return self._made[int8]

    @cached_property
    def scattered(self) -> tuple[Any, ...]:
        """Pools, tokens, and the page and slot of each token, for a scatter."""
        torch, x = load("torch"), self.written(False)
        kv = on_device(x, self.to_device)
        last = torch.tensor([length - 1 for length in self._lens], device=self.device)
        pages = kv.page_table.gather(1, (last // self.page_size)[:, None])[:, 0].long()
        return kv.k_pages, kv.v_pages, *map(self.to_device, (x.k[:, 0], x.v[:, 0])), pages, last % self.page_size

    def to_device(self, x: Any) -> Any:
        return to_torch(x, self.device)


def writes(kernel: str, page_size: int) -> Candidate:
    variant = dispatch.VARIANTS[kernel]
    int8 = variant.kv == "pages_int8"

    def make(tokens: Tokens) -> Call:
        x = tokens.written(int8)
        kv, k, v = on_device(x, tokens.to_device), *map(tokens.to_device, (x.k, x.v))
        words = words_of(x, tokens.to_device) | {"kernel": variant.kernel.name}
        return lambda: qflash.paged_write(kv, k, v, **words)

    name = f"qflash {variant.kernel.name}, {'INT8 ' if int8 else ''}pages of {page_size}"
    return Candidate(name, make, kernel=kernel, precision="int8" if int8 else variant.precision, int8_pages=int8)


def scatter() -> Candidate:
    """Two launches that store k and v unchanged: neither rotated nor quantized."""

    def make(tokens: Tokens) -> Call:
        k_pages, v_pages, k, v, pages, slots = tokens.scattered

        def run() -> None:
            k_pages[pages, :, slots] = k
            v_pages[pages, :, slots] = v

        return run

    return Candidate(SCATTER, make)


class KvWrite(Suite):
    over = (SCATTER,)

    def __init__(self, preset: Preset):
        self.name, self.device, self.cases, self.graph = preset.name, preset.device, preset.cases, preset.graph
        (self._page_size,) = preset.page_sizes
        self._candidates = [*(writes(kernel, self._page_size) for kernel in preset.kernels), scatter()]

    def arrays(self, case: Case) -> Tokens:
        return Tokens(case, self.device, self._page_size)

    def candidates(self, arrays: Tokens) -> list[Candidate]:
        return self._candidates

    def problem(self, arrays: Tokens) -> Row:
        return rows.problem(arrays.case, WRITE)

    def check(self, arrays: Tokens, candidate: Candidate, call: Call, result: Any) -> None:
        if candidate.kernel is None:
            return
        try:
            check_pools(result, arrays.written(candidate.int8_pages).replay())
        except AssertionError as error:
            raise SystemExit(f"{candidate.name} differs from the replay: {error}") from None

    def row(self, arrays: Tokens, candidate: Candidate, checked: None, timing: Comparison) -> Row:
        return {
            "candidate": candidate.name,
            "framework": candidate.framework,
            "kernel": candidate.kernel,
            "precision": candidate.precision,
            "us": timing.stats[candidate.name].as_dict(),
            "rel_l2": None,
        }


def table(machine: str | None = None) -> str:
    """One table per machine with committed rows: a line per batch and candidate."""

    def of(found: list[Row]) -> str:
        lines = [
            [tables.problem(row), tables.candidate(row), tables.time(row), tables.ratio(row["speedup"].get(SCATTER))]
            for row in found
        ]
        return tables.markdown(["new tokens", "candidate", "time", f"× {SCATTER}"], tables.unrepeated(lines))

    return tables.by_machine(NAME, of, f"`qflash bench {NAME}` makes them.", machine)
