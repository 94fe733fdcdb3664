"""The computation of strategy="ring" next to one call, without links: all ranks' parts, in sequence, on one device.

python -m bench.ring [cuda|cpu]   writes bench/results/<machine>/ring.jsonl; `qflash report` makes the tables.

The ranks run the code of qflash.parallel.torch on their own chunks, except for the hops: every block is already there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import qflash
from bench import tables
from bench.run import Candidate, Row, Suite, device_asked_for, main
from qflash.testing.timing import Call, Comparison

NAME = "ring"
ONE = "one call"
HEADS = {"cuda": (32, 8, 128), "cpu": (4, 2, 64)}  # of q, of k and v, head dim
DTYPES = {"cuda": "bfloat16", "cpu": "float32"}
# Relative L2 errors of out against one call's: from rounding to the dtype, with sums in another order.
LARGEST_ERROR = {"cuda": 4e-3, "cpu": 1e-6}


@dataclass(frozen=True)
class Problem:
    """A sequence over some ranks."""

    tokens: int
    ranks: int
    causal: bool


PROBLEMS = {
    "cuda": (*(Problem(131072, ranks, True) for ranks in (2, 4, 8)), Problem(32768, 8, True), Problem(32768, 8, False)),
    "cpu": (Problem(2048, 2, True), Problem(2048, 8, True)),
}


class Arrays:
    """q, k and v of the whole sequence, and each rank's part of them."""

    def __init__(self, problem: Problem, device: str):
        import torch

        from qflash.parallel.parts import Sequences
        from qflash.parallel.placement import Placement
        from qflash.parallel.torch import maths
        from qflash.parallel.torch.ring import steps_of
        from qflash.parallel.words import check_words

        self.problem, (q_heads, kv_heads, dim) = problem, HEADS[device]
        generator = torch.Generator(device).manual_seed(1)
        shapes = ((1, problem.tokens, heads, dim) for heads in (q_heads, kv_heads, kv_heads))
        self.q, self.k, self.v = (
            torch.randn(shape, generator=generator, device=device, dtype=getattr(torch, DTYPES[device]))
            for shape in shapes
        )
        words = check_words("ring", None, problem.causal, None, None, None, None, True, dim)
        at = Placement.of_whole(words.placement, problem.ranks, problem.tokens, "q", 1)
        self.of = Sequences(at, words, maths, self.q, wide=device == "cpu")
        self.indices = [self.of.tokens(rank).long() for rank in range(problem.ranks)]
        self.queries = [self.q[:, index] for index in self.indices]
        self.blocks = [torch.stack([self.k[:, index], self.v[:, index]]) for index in self.indices]
        self.steps = [steps_of(self.of, rank) for rank in range(problem.ranks)]

    def one_call(self) -> Any:
        return qflash.attention(self.q, self.k, self.v, causal=self.problem.causal)

    def all_ranks(self) -> list[Any]:
        from qflash.parallel.rounds import rounds_of
        from qflash.parallel.torch.ring import attend_blocks

        found = []
        for rank, (q, steps) in enumerate(zip(self.queries, self.steps, strict=True)):
            rounds = rounds_of(len(steps), self.of.at)
            blocks = ([self.blocks[(rank - hop) % self.problem.ranks] for hop in one.hops] for one in rounds)
            found.append(attend_blocks(q, None, self.of, steps, blocks)[0])
        return found

    def error(self, parts: list[Any]) -> float:
        want = self.one_call().float()
        wrong = sum(
            float((part.float() - want[:, index]).square().sum())
            for part, index in zip(parts, self.indices, strict=True)
        )
        return float((wrong / want.square().sum()) ** 0.5)


class Ring(Suite):
    name = NAME
    over = (ONE,)

    def __init__(self, device: str):
        self.device, self.cases = device, PROBLEMS[device]

    def arrays(self, case: Problem) -> Arrays:
        return Arrays(case, self.device)

    def candidates(self, arrays: Arrays) -> tuple[Candidate, ...]:
        ring = Candidate(f"ring of {arrays.problem.ranks}", lambda arrays: arrays.all_ranks, "attention")
        return ring, Candidate(ONE, lambda arrays: arrays.one_call)

    def check(self, arrays: Arrays, candidate: Candidate, call: Call, result: Any) -> float:
        error = arrays.error(result) if candidate.kernel else 0.0
        if not error <= LARGEST_ERROR[self.device]:
            raise SystemExit(f"{self.problem(arrays)}: off by {error:.2g}")
        return error

    def problem(self, arrays: Arrays) -> Row:
        one, (q_heads, kv_heads, dim) = arrays.problem, HEADS[self.device]
        sizes = {"T": one.tokens, "Hq": q_heads, "Hkv": kv_heads, "D": dim, "dtype": DTYPES[self.device]}
        return {"kind": NAME, "ranks": one.ranks, "causal": one.causal} | sizes

    def row(self, arrays: Arrays, candidate: Candidate, checked: float, timing: Comparison) -> Row:
        stats = timing.stats[candidate.name]
        return {"candidate": candidate.name, "rel_l2": float(f"{checked:.2g}"), "us": stats.as_dict()}


def table(machine: str | None = None, **chosen: Any) -> str:
    """The committed rows: one table per machine, a problem per line; `chosen`: by_machine's keep."""

    def of(found: list[Row]) -> str:
        lines = [
            [f"{row['T']}, {'causal' if row['causal'] else 'full'}", str(row["ranks"]), tables.time(row),
             f"{100 / row['speedup'][ONE] - 100:+.1f} %"]
            for row in found if row["candidate"] != ONE
        ]  # fmt: skip
        return tables.markdown(["tokens", "ranks", "all ranks' time", "over one call"], lines)

    return tables.by_machine(NAME, of, "`python -m bench.ring` makes them.", machine, **chosen)


if __name__ == "__main__":
    main(Ring(device_asked_for(PROBLEMS)))
