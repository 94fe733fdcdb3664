"""Measure qflash.quantize_kv beside a copy of as many bytes: interleaved, what it leaves checked by the replay.

python -m bench.sm90_quantize   on a Hopper GPU; writes bench/results/<machine>/sm90_quantize.jsonl.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import qflash
from bench import rows
from bench.quantize import COPY
from qflash.testing.timing import CudaClock, compare

NAME = "sm90_quantize"
KERNEL = "sm90_quantize"
PARTS = ("k", "k_scale", "k_mean", "k_wild", "v", "v_scale", "v_lift", "v_wild", "v_mean")


@dataclass(frozen=True)
class Problem:
    """What is done to normal k and v."""

    name: str
    precision: str
    shape: tuple[int, int, int, int] = (4, 4096, 16, 128)
    rope: bool = False
    words: dict[str, Any] = field(default_factory=dict)
    dtype: str = "bfloat16"


PROBLEMS = tuple(
    Problem(name, precision, shape, rope, words)
    for precision in ("int8", "int8_fp8")
    for name, shape, rope, words in (
        ("", (4, 4096, 16, 128), False, {}),
        (", rope", (4, 4096, 16, 128), True, {}),
        (", stochastic", (4, 4096, 16, 128), False, {"rounding": "stochastic", "seed": 1}),
        ("", (4, 4096, 32, 64), False, {}),
        ("", (4, 4096, 8, 256), False, {}),
        ("", (1, 16384, 16, 128), False, {}),
    )
)


class Arrays:
    """A problem's arrays on the GPU, and the call that is timed."""

    def __init__(self, problem: Problem):
        import torch

        generator = torch.Generator().manual_seed(1)
        dtype = getattr(torch, problem.dtype)
        self.problem = problem
        self.k, self.v = (torch.randn(problem.shape, generator=generator).to(dtype).cuda() for _ in range(2))
        self.words = {"precision": problem.precision, **problem.words}
        if problem.rope:
            tables = qflash.rope_tables(problem.shape[1], problem.shape[3])
            self.words["rope"] = qflash.Rope(*(torch.from_numpy(table).cuda() for table in tables))
        # Read once in 16 bits, written once in 8: k, and v where that becomes E4M3.
        self.bytes = bytes_of(problem)
        self.source = torch.empty(self.bytes // 2, dtype=torch.uint8, device="cuda")
        self.target = torch.empty_like(self.source)

    def run(self) -> Any:
        return qflash.quantize_kv(self.k, self.v, **self.words)

    def copy(self) -> Any:
        return self.target.copy_(self.source)

    def same_as_the_replay(self) -> bool:
        """Whether the first two heads of the first sequence, by themselves, become what the replay makes of them."""
        import numpy as np

        from qflash.reference import sm90_quantize
        from qflash.testing.runner import to_numpy

        k, v = (x[:1, :, :2] for x in (self.k, self.v))
        kv = qflash.quantize_kv(k, v, **self.words)
        k, v = to_numpy(k), to_numpy(v) if self.problem.precision == "int8_fp8" else None
        rope = qflash.Rope(*qflash.rope_tables(k.shape[1], k.shape[3])) if self.problem.rope else None
        want = sm90_quantize.quantize_kv(k, v, rope=rope, seed=self.problem.words.get("seed"))
        parts = [part for part in PARTS if getattr(want, part) is not None]
        return all(np.array_equal(to_numpy(getattr(kv, part)), getattr(want, part)) for part in parts)


def bytes_of(problem: Problem) -> int:
    """What must be moved at least."""
    batch, length, heads, head_dim = problem.shape
    return 3 * batch * length * heads * head_dim * (2 if problem.precision == "int8_fp8" else 1)


def measure(budget: float = 2.0) -> Iterator[dict[str, Any]]:
    """Rows, problem by problem: ours, and a copy that moves as many bytes."""
    shared = {"preset": NAME} | rows.provenance("cuda")
    clock = CudaClock(graph=True)
    for problem in PROBLEMS:
        arrays = Arrays(problem)
        if not arrays.same_as_the_replay():
            raise SystemExit(f"{problem.precision}{problem.name}, {problem.shape}: differs from the replay")
        ours = "qflash quantize_kv"
        timing = compare({ours: arrays.run, COPY: arrays.copy}, clock=clock, budget=budget, min_rounds=7)
        for name in (ours, COPY):
            stats = timing.stats[name]
            what = f"{'k and v' if problem.precision == 'int8_fp8' else 'k'}, {problem.precision}{problem.name}"
            yield (
                shared
                | {"kind": NAME, "what": what, "shape": list(problem.shape), "dtype": problem.dtype}
                | {"candidate": name, "kernel": None if name == COPY else KERNEL, "bytes": arrays.bytes}
                | {"us": stats.as_dict(), "gbps": round(arrays.bytes / stats.p50 / 1e3, 1)}
                | {"speedup": {} if name == COPY else {COPY: round(timing.speedup(name, over=COPY), 3)}}
            )


def main() -> None:
    collected = []
    for row in measure():
        collected.append(row)
        rate = f"{row['us']['p50']} µs {row['gbps']} GB/s {row['speedup']}"
        print(f"{row['what']} {row['shape']} {row['candidate']}: {rate}")
    path = rows.RESULTS / collected[0]["machine"] / f"{NAME}.jsonl"
    rows.write(path, collected)
    print(f"{len(collected)} rows in {path.relative_to(rows.ROOT)}")


if __name__ == "__main__":
    main()
