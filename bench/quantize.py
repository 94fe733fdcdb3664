"""Measure qflash.quantize and dequantize next to a copy of as many bytes: interleaved, integers checked by the replay.

python -m bench.quantize [cuda|cpu]   writes bench/results/<machine>/quantize.jsonl; `qflash report` makes the tables.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field
from typing import Any

import qflash
from bench import tables
from bench.run import Candidate, Row, Suite, device_asked_for, main
from qflash.testing.timing import Call, Comparison

NAME = "quantize"
COPY = "copy"
SHAPES = {"cuda": (4, 4096, 16, 128), "cpu": (1, 2048, 8, 128)}
# Inputs that linear(precision="int8") quantizes: x of a long prompt, of a decoding batch, and of one token before the
# widest layer, where the launch is most of the time.
MATRICES = {
    "long": {"cuda": (16384, 8192), "cpu": (1024, 4096)},
    "batch": {"cuda": (64, 8192), "cpu": (64, 4096)},
    "one row": {"cuda": (1, 28672), "cpu": (1, 28672)},
}
GROUP = {"granularity": "group", "group": 16}


@dataclass(frozen=True)
class Problem:
    """An operation on an array of normal numbers."""

    name: str
    words: dict[str, Any] = field(default_factory=dict)
    dtype: str = "bfloat16"
    rope: bool = False
    matrix: str = ""  # one of MATRICES
    back: bool = False


PROBLEMS = (
    Problem("per token", {"granularity": "token"}),
    Problem("per group of 16", GROUP),
    Problem("per group of 16", GROUP, dtype="float32"),
    Problem("per group of 128", GROUP | {"group": 128}),
    Problem("per group of 16, rope", GROUP, rope=True),
    Problem("per group of 16, smoothed", GROUP | {"smooth": True}),
    Problem("per group of 16, rope, smoothed", GROUP | {"smooth": True}, rope=True),
    Problem("per group of 16, stochastic", GROUP | {"rounding": "stochastic", "seed": 1}),
    Problem("per tensor"),
    Problem("per tensor, asymmetric", {"symmetric": False}),
    *(Problem("matrix, per row", {"granularity": "token"}, matrix=matrix) for matrix in MATRICES),
    Problem("matrix, per row", {"granularity": "token"}, dtype="float32", matrix="long"),
    Problem("dequantize, per group of 16", GROUP, back=True),
)


class Arrays:
    """A problem's arrays on a device, and the call that is timed."""

    def __init__(self, problem: Problem, device: str):
        import torch

        self.problem = problem
        shape = (MATRICES[problem.matrix] if problem.matrix else SHAPES)[device]
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(shape, generator=generator).to(getattr(torch, problem.dtype)).to(device)
        words = dict(problem.words)
        if problem.rope:
            tables = (torch.from_numpy(table).to(device) for table in qflash.rope_tables(shape[1], shape[-1]))
            words["rope"] = qflash.Rope(*tables)
        self.words = words
        self.quantized = qflash.quantize(self.x, **words)
        # A copy of n bytes reads and writes n: as many as the smallest traffic of the problem, x and its integers.
        self.bytes = self.x.numel() * (self.x.element_size() + 1)
        self.source = torch.empty(self.bytes // 2, dtype=torch.uint8, device=device)
        self.target = torch.empty_like(self.source)

    def run(self) -> Any:
        if self.problem.back:
            return qflash.dequantize(self.quantized)
        return qflash.quantize(self.x, **self.words)

    def copy(self) -> Any:
        return self.target.copy_(self.source)

    def same_as_the_replay(self) -> bool:
        """Whether the integers of the last sequence's first head equal the replay's; per tensor, all of them."""
        import numpy as np

        from qflash.reference import quantize
        from qflash.rotary import Rope

        words, rope = dict(self.problem.words), None
        x = self.x.float().cpu().numpy()
        x = x[None, :, None] if self.problem.matrix else x
        values = self.quantized.values.cpu().numpy().reshape(x.shape)
        granularity, rounding = words.pop("granularity", "tensor"), words.pop("rounding", None)
        group = {"tensor": None, "token": 1, "group": words.pop("group", None)}[granularity]
        seed = words.pop("seed", 0) if rounding else None
        if self.problem.rope:
            rope = Rope(*qflash.rope_tables(x.shape[1], x.shape[-1]))
        if group is not None and seed is None:  # a head's integers do not depend on other heads
            x, values = x[-1:, :, :1], values[-1:, :, :1]
        return bool(np.array_equal(quantize.quantize(x, group=group, seed=seed, rope=rope, **words).values, values))


class BesideACopy(Suite):
    """A pass over memory next to a copy of as many bytes: `run` and `copy` of arrays that have `bytes`."""

    over = (COPY,)
    budget = 2.0

    @abstractmethod
    def ours(self, arrays: Any) -> Candidate:
        """The measured candidate."""

    def candidates(self, arrays: Any) -> tuple[Candidate, ...]:
        return self.ours(arrays), Candidate(COPY, lambda arrays: arrays.copy)

    def check(self, arrays: Any, candidate: Candidate, call: Call, result: Any) -> None:
        if candidate.kernel and not arrays.same_as_the_replay():
            raise SystemExit(f"{self.problem(arrays)}: differs from the replay")

    def row(self, arrays: Any, candidate: Candidate, checked: None, timing: Comparison) -> Row:
        stats = timing.stats[candidate.name]
        about = {"candidate": candidate.name, "kernel": candidate.kernel, "bytes": arrays.bytes}
        return about | {"us": stats.as_dict(), "gbps": round(arrays.bytes / stats.p50 / 1e3, 1)}


class Quantize(BesideACopy):
    name = NAME
    cases = PROBLEMS

    def __init__(self, device: str):
        self.device = device

    def arrays(self, case: Problem) -> Arrays:
        return Arrays(case, self.device)

    def ours(self, arrays: Arrays) -> Candidate:
        kernel = "dequantize" if arrays.problem.back else "quantize"
        return Candidate(f"qflash {kernel}", lambda arrays: arrays.run, kernel)

    def problem(self, arrays: Arrays) -> Row:
        case = arrays.problem
        return {"kind": NAME, "what": case.name, "shape": list(arrays.x.shape), "dtype": case.dtype}


def table(preset: str = NAME, machine: str | None = None, **chosen: Any) -> str:
    """The committed rows: one table per machine, a problem per line; `chosen`: by_machine's keep."""

    def of(found: list[Row]) -> str:
        lines = [
            [row["what"], " × ".join(map(str, row["shape"])), row["dtype"], tables.time(row), f"{row['gbps']:.0f} GB/s",
             tables.ratio(row["speedup"][COPY])]
            for row in found if row["candidate"] != COPY
        ]  # fmt: skip
        return tables.markdown(["what", "shape", "type", "time", "rate of x and integers", "of a copy's"], lines)

    return tables.by_machine(preset, of, f"`python -m bench.{preset}` makes them.", machine, **chosen)


if __name__ == "__main__":
    main(Quantize(device_asked_for(SHAPES)))
