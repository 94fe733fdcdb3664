"""Tokens per second of many requests of different lengths: a Batcher, padded batches of `generate`, and one by one.

python -m bench.serving [cuda|cpu]   writes bench/results/<machine>/serving.jsonl; `qflash report` makes the tables.

All requests are there from the start, so throughput is measured, prompts included. Their lengths are seeded: prompts
and answers are exponential around a mean, as in real traffic. Weights are random: no answer ends early.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from bench import tables
from bench.model_shapes import SEED, SHAPES, build
from bench.run import Candidate, Row, Suite, device_asked_for, main
from qflash.testing.timing import Call, Comparison, WallClock

NAME = "serving"
BATCHER, PADDED, SINGLE = "Batcher", "generate, padded batches", "generate, one by one"
DTYPES = {"cuda": "bfloat16", "cpu": "float32"}
PAGES = {"cuda": 64, "cpu": 16}  # tokens per page
# Share of tokens that may differ from those of a prompt alone: none in float32; in 16 bits near ties go either way.
LARGEST_SHARE = {"cuda": 1.0, "cpu": 0.0}

Tokens = list[list[int]]


@dataclass(frozen=True)
class Problem:
    """Requests to a model. prompt, answer: the means of their lengths. slots: how many run concurrently."""

    model: str
    requests: int
    slots: int
    prompt: int
    answer: int


PROBLEMS = {
    "cuda": (Problem("llama-1b", 64, 32, 400, 120), Problem("llama-1b", 64, 8, 400, 120)),
    "cpu": (Problem("gpt2", 12, 4, 24, 12),),
}


class Workload:
    """The model, the requests, and the ways to serve them. There are enough pages for all concurrent requests."""

    def __init__(self, problem: Problem, device: str):
        from qflash.integrations.transformers import Batcher, Decoder

        dice = random.Random(SEED)
        shape = SHAPES[problem.model]
        self.problem, self.device = problem, device
        self.model = build(shape, device, DTYPES[device])
        self.requests = []
        for _ in range(problem.requests):
            prompt, answer = (
                1 + min(int(dice.expovariate(1 / mean)), 4 * mean) for mean in (problem.prompt, problem.answer)
            )
            ids = [dice.randrange(self.model.config.vocab_size) for _ in range(prompt)]
            self.requests.append((ids, min(answer, shape.positions - prompt)))
        longest = max(map(len, (ids for ids, _ in self.requests))) + max(new for _, new in self.requests)
        sizes: dict[str, Any] = {"pages": problem.slots * -(-longest // PAGES[device]), "page_size": PAGES[device]}
        self.decoder = Decoder(self.model, **sizes)
        self.batcher = Batcher(self.model, **sizes, slots=problem.slots, share_prefixes=False)
        self.reference: Tokens = []

    @property
    def tokens(self) -> int:
        return sum(new for _, new in self.requests)

    def by_batcher(self) -> Tokens:
        made = [self.batcher.submit(ids, max_new_tokens=new, eos_token_id=()) for ids, new in self.requests]
        self.batcher.run()
        for request in made:
            if request.error is not None:
                raise request.error
        return [request.tokens for request in made]

    def in_batches(self, size: int) -> Tokens:
        """In batches of this size, in order of arrival: all requests of a batch wait for the longest."""
        import torch

        found: Tokens = []
        for at in range(0, len(self.requests), size):
            batch = self.requests[at : at + size]
            longest, most = max(len(ids) for ids, _ in batch), max(new for _, new in batch)
            ids = torch.tensor([[0] * (longest - len(ids)) + ids for ids, _ in batch], device=self.device)
            mask = torch.tensor([[0] * (longest - len(ids)) + [1] * len(ids) for ids, _ in batch], device=self.device)
            new = self.decoder.generate(ids, mask, max_new_tokens=most, eos_token_id=()).new_tokens.tolist()
            found += [row[:count] for row, (_, count) in zip(new, batch, strict=True)]
        return found

    def share_of_others(self, found: Tokens) -> float:
        """The share of tokens that differ from those of each prompt alone."""
        wrong = sum(
            a != b for got, want in zip(found, self.reference, strict=True) for a, b in zip(got, want, strict=True)
        )
        return wrong / self.tokens


class Serving(Suite):
    name = NAME
    over = (PADDED, SINGLE)
    min_rounds = 3  # a call serves all requests, which takes many seconds

    def __init__(self, device: str):
        self.device, self.cases = device, PROBLEMS[device]

    def arrays(self, case: Problem) -> Workload:
        return Workload(case, self.device)

    def candidates(self, arrays: Workload) -> tuple[Candidate, ...]:
        return (
            Candidate(SINGLE, lambda work: lambda: work.in_batches(1)),
            Candidate(PADDED, lambda work: lambda: work.in_batches(work.problem.slots)),
            Candidate(BATCHER, lambda work: work.by_batcher, "attention"),
        )

    def check(self, arrays: Workload, candidate: Candidate, call: Call, result: Tokens) -> float:
        if candidate.name == SINGLE:
            arrays.reference = result
        share = arrays.share_of_others(result)
        if share > LARGEST_SHARE[self.device]:
            raise SystemExit(f"{candidate.name}: {share:.2g} of the tokens are not those of each prompt alone")
        return share

    def clock(self) -> tuple[WallClock, float]:
        """The host's, which has read every token when a call ends."""
        return WallClock(), 1e-3

    def problem(self, arrays: Workload) -> Row:
        one = arrays.problem
        sizes = {"model": one.model, "requests": one.requests, "slots": one.slots, "dtype": DTYPES[self.device]}
        means = {"prompt": one.prompt, "answer": one.answer, "new_tokens": arrays.tokens}
        return {"kind": NAME} | sizes | means

    def row(self, arrays: Workload, candidate: Candidate, checked: float, timing: Comparison) -> Row:
        stats = timing.stats[candidate.name]
        rate = round(arrays.tokens / stats.p50 * 1e6, 1)
        captured = {"captured": arrays.batcher.is_captured} if candidate.kernel else {}
        return {
            "candidate": candidate.name, "other_tokens": round(checked, 4), "tokens_s": rate, "us": stats.as_dict(),
        } | captured  # fmt: skip


def table(machine: str | None = None, **chosen: Any) -> str:
    """The committed rows: one table per machine, a way to serve per line; `chosen`: by_machine's keep."""

    def of(found: list[Row]) -> str:
        lines = [
            [f"{row['model']}, {row['requests']} requests, {row['slots']} at a time", row["candidate"],
             f"{row['tokens_s']:.0f}", tables.ratio(row["speedup"].get(SINGLE))]
            for row in found
        ]  # fmt: skip
        return tables.markdown(["requests", "served by", "tokens a second", "one by one"], tables.unrepeated(lines))

    return tables.by_machine(NAME, of, "`python -m bench.serving` makes them.", machine, **chosen)


if __name__ == "__main__":
    main(Serving(device_asked_for(PROBLEMS)))
