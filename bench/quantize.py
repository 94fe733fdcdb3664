"""Measure qflash.quantize and dequantize beside a copy of as many bytes: interleaved, integers checked by the replay.

python -m bench.quantize [cuda|cpu]   writes bench/results/<machine>/quantize.jsonl; `qflash report` makes the tables.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import qflash
from bench import rows
from qflash.testing.timing import CudaClock, WallClock, compare

NAME = "quantize"
COPY = "copy"
SHAPES = {"cuda": (4, 4096, 16, 128), "cpu": (1, 2048, 8, 128)}
MATRIX = {"cuda": (16384, 8192), "cpu": (1024, 4096)}
GROUP = {"granularity": "group", "group": 16}


@dataclass(frozen=True)
class Problem:
    """What is done to an array of normal numbers."""

    name: str
    words: dict[str, Any] = field(default_factory=dict)
    dtype: str = "bfloat16"
    rope: bool = False
    matrix: bool = False
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
    Problem("matrix, per row", {"granularity": "token"}, matrix=True),
    Problem("dequantize, per group of 16", GROUP, back=True),
)


class Arrays:
    """A problem's arrays on a device, and the call that is timed."""

    def __init__(self, problem: Problem, device: str):
        import torch

        self.problem = problem
        shape = (MATRIX if problem.matrix else SHAPES)[device]
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
        """Whether the integers of the last sequence's first head are the replay's; per tensor, of the whole."""
        import numpy as np

        from qflash.reference import quantize
        from qflash.rope import Rope

        words, rope = dict(self.problem.words), None
        x = self.x.float().cpu().numpy()
        x = x[None, :, None] if self.problem.matrix else x
        values = self.quantized.values.cpu().numpy().reshape(x.shape)
        granularity, rounding = words.pop("granularity", "tensor"), words.pop("rounding", None)
        group = {"tensor": None, "token": 1, "group": words.pop("group", None)}[granularity]
        seed = words.pop("seed", 0) if rounding else None
        if self.problem.rope:
            rope = Rope(*qflash.rope_tables(x.shape[1], x.shape[-1]))
        if group is not None and seed is None:  # a head's integers depend on no other's
            x, values = x[-1:, :, :1], values[-1:, :, :1]
        return bool(np.array_equal(quantize.quantize(x, group=group, seed=seed, rope=rope, **words).values, values))


def measure(device: str, budget: float = 2.0) -> Iterator[dict[str, Any]]:
    """Rows, problem by problem: ours, and a copy that moves as many bytes."""
    shared = {"preset": NAME} | rows.provenance(device)
    clock = CudaClock(graph=True) if device == "cuda" else WallClock()
    for problem in PROBLEMS:
        arrays = Arrays(problem, device)
        if not arrays.same_as_the_replay():
            raise SystemExit(f"{problem.name}, {problem.dtype}: integers differ from the replay's")
        ours = "qflash dequantize" if problem.back else "qflash quantize"
        timing = compare({ours: arrays.run, COPY: arrays.copy}, clock=clock, budget=budget, min_rounds=7)
        for name in (ours, COPY):
            stats = timing.stats[name]
            yield (
                shared
                | {"kind": NAME, "what": problem.name, "shape": list(arrays.x.shape), "dtype": problem.dtype}
                | {"candidate": name, "kernel": None if name == COPY else name.split()[1], "bytes": arrays.bytes}
                | {"us": stats.as_dict(), "gbps": round(arrays.bytes / stats.p50 / 1e3, 1)}
                | {"speedup": {} if name == COPY else {COPY: round(timing.speedup(name, over=COPY), 3)}}
            )


def table(preset: str = NAME) -> str:
    """The committed rows: one table per machine, a problem per line."""
    from bench import report

    parts = []
    for found in rows.committed(preset).values():
        lines = [
            [row["what"], " × ".join(map(str, row["shape"])), row["dtype"], report.time(row), f"{row['gbps']:.0f} GB/s",
             report.ratio(row["speedup"][COPY])]
            for row in found if row["candidate"] != COPY
        ]  # fmt: skip
        header = ["what", "shape", "type", "time", "rate of x and integers", "of a copy's"]
        parts.append(f"{report.source(found[0])}\n\n{report.markdown(header, lines)}")
    return "\n\n".join(parts) or f"No rows are committed yet; `python -m bench.{preset}` makes them."


def main(device: str) -> None:
    collected = []
    for row in measure(device):
        collected.append(row)
        rate = f"{row['us']['p50']} µs {row['gbps']} GB/s {row['speedup']}"
        print(f"{row['what']} {row['dtype']} {row['candidate']}: {rate}")
    path = rows.RESULTS / collected[0]["machine"] / f"{NAME}.jsonl"
    rows.write(path, collected)
    print(f"{len(collected)} rows in {path.relative_to(rows.ROOT)}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "cuda")
