"""The cost or gain of an option of a call: attention with it next to the same attention without it, in the same rounds.

python -m bench.words [cuda|cpu]   writes bench/results/<machine>/words.jsonl; `qflash report` makes the table.

return_lse=True on prompts, as in a forward pass that will be differentiated; batch_invariant=True on decode steps; and
`share_prefix` on paged sequences that begin with the same tokens, each with OWN tokens of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import qflash
from bench import tables
from bench.arrays import load
from bench.run import Candidate, Row, Suite, device_asked_for, main
from qflash.testing.timing import Call, Comparison

NAME = "words"
WITHOUT = "without"
OWN, PAGE = 256, 256
HEADS = {"cuda": (32, 8, 128), "cpu": (4, 2, 64)}  # of q, of k and v, head dim
DTYPES = {"cuda": "bfloat16", "cpu": "float32"}
LARGEST_DIFFERENCE = {"cuda": 8e-3, "cpu": 2e-6}  # relative L2: two results, each rounded once or twice


@dataclass(frozen=True)
class Problem:
    """Sequences of q_len queries and k_len keys, or of `prefix` tokens that all of them share and OWN more."""

    word: str
    batch: int
    q_len: int
    k_len: int
    prefix: int = 0


def _problems(lengths: tuple[int, ...], caches: tuple[tuple[int, int], ...], shared: tuple[tuple[int, int], ...]):
    return (
        *(Problem("return_lse", max(1, lengths[-1] // length), length, length) for length in lengths),
        *(Problem("batch_invariant", batch, 1, keys) for batch, keys in caches),
        *(Problem("share_prefix", batch, 1, prefix + OWN, prefix) for batch, prefix in shared),
    )


PROBLEMS = {
    "cuda": _problems(
        (1024, 4096, 16384),
        ((1, 1024), (1, 8192), (1, 32768), (8, 8192), (32, 8192), (128, 1024)),
        tuple((batch, prefix) for batch in (4, 16, 64) for prefix in (512, 2048, 8192, 32768)),
    ),
    "cpu": _problems((256, 1024), ((1, 4096), (8, 4096)), ((4, 512), (16, 4096))),
}


class Arrays:
    """A problem's arrays, and both calls."""

    def __init__(self, problem: Problem, device: str):
        torch = load("torch")
        self.problem = problem
        (q_heads, kv_heads, dim), dtype = HEADS[device], getattr(torch, DTYPES[device])
        generator = torch.Generator(device).manual_seed(1)
        draw = partial(torch.randn, generator=generator, device=device, dtype=dtype)
        self.q = draw(problem.batch, problem.q_len, q_heads, dim)
        if problem.prefix:
            self.kv: tuple[Any, ...] = (self._pages(draw, kv_heads, dim, device),)
        else:
            self.kv = tuple(draw(problem.batch, problem.k_len, kv_heads, dim) for _ in "kv")

    def _pages(self, draw: Callable[..., Any], heads: int, dim: int, device: str) -> qflash.PagedKV[Any]:
        """Pages of the prefix, which come first in every sequence, and then those of each."""
        torch, of = load("torch"), self.problem
        shared, own = of.prefix // PAGE, OWN // PAGE
        pools = (draw(shared + of.batch * own, heads, PAGE, dim) for _ in "kv")
        ids = dict(dtype=torch.int32, device=device)
        first = torch.arange(shared, **ids).expand(of.batch, shared)
        table = torch.cat([first, shared + torch.arange(of.batch * own, **ids).view(of.batch, own)], 1)
        return qflash.PagedKV(*pools, table, lens=torch.full((of.batch,), of.k_len, **ids))

    def without(self) -> Any:
        return qflash.attention(self.q, *self.kv, causal=True)

    def call_with(self) -> Call:
        """The call with the option. A prefix is shared once for all layers of a step, so this is not timed."""
        if self.problem.prefix:
            kv = qflash.share_prefix(self.kv[0], self.problem.prefix // PAGE)
            return lambda: qflash.attention(self.q, kv, causal=True)
        return partial(qflash.attention, self.q, *self.kv, causal=True, **{self.problem.word: True})

    def difference(self, result: Any) -> float:
        out, want = (result[0] if isinstance(result, tuple) else result).double(), self.without().double()
        return float((out - want).norm() / want.norm())


class Words(Suite):
    name = NAME
    over = (WITHOUT,)
    budget = 1.0

    def __init__(self, device: str):
        self.device, self.cases = device, PROBLEMS[device]

    def arrays(self, case: Problem) -> Arrays:
        return Arrays(case, self.device)

    def candidates(self, arrays: Arrays) -> tuple[Candidate, ...]:
        with_it = Candidate(arrays.problem.word, lambda arrays: arrays.call_with(), "attention")
        return with_it, Candidate(WITHOUT, lambda arrays: arrays.without)

    def check(self, arrays: Arrays, candidate: Candidate, call: Call, result: Any) -> float:
        found = arrays.difference(result)
        if not found <= LARGEST_DIFFERENCE[self.device]:
            raise SystemExit(f"{self.problem(arrays)}: {candidate.name} is off by {found:.2g}")
        return found

    def problem(self, arrays: Arrays) -> Row:
        of, (q_heads, kv_heads, dim) = arrays.problem, HEADS[self.device]
        sizes = {"B": of.batch, "Tq": of.q_len, "Tk": of.k_len, "prefix": of.prefix}
        return {"kind": of.word} | sizes | {"Hq": q_heads, "Hkv": kv_heads, "D": dim, "dtype": DTYPES[self.device]}

    def row(self, arrays: Arrays, candidate: Candidate, checked: float, timing: Comparison) -> Row:
        stats = timing.stats[candidate.name]
        about = {"candidate": candidate.name, "kernel": candidate.kernel, "us": stats.as_dict()}
        return about | {"difference": float(f"{checked:.2g}")}


def table(machine: str | None = None) -> str:
    """One table per machine with committed rows: an option and problem per line."""

    def of(found: list[Row]) -> str:
        alone = {_key(row): row for row in found if row["candidate"] == WITHOUT}
        lines = [
            [f"`{row['kind']}`", _words(row), tables.time(alone[_key(row)]), tables.time(row),
             f"{100 / row['speedup'][WITHOUT] - 100:+.1f} %"]
            for row in found if row["candidate"] != WITHOUT
        ]  # fmt: skip
        return tables.markdown(["argument", "problem", "without", "with", "time"], tables.unrepeated(lines))

    return tables.by_machine(NAME, of, "`python -m bench.words` makes them.", machine)


def _key(row: Row) -> tuple[Any, ...]:
    return tuple(row[name] for name in ("kind", "B", "Tq", "Tk", "prefix"))


def _words(row: Row) -> str:
    keys = (
        f"{row['prefix']} shared keys, {row['Tk'] - row['prefix']} of its own" if row["prefix"] else f"Tk={row['Tk']}"
    )
    return f"B={row['B']} Tq={row['Tq']} {keys}"


if __name__ == "__main__":
    main(Words(device_asked_for(PROBLEMS)))
