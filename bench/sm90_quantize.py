"""Measure qflash.quantize_kv next to a copy of as many bytes: interleaved, its result checked by the replay.

python -m bench.sm90_quantize   on a Hopper GPU; writes bench/results/<machine>/sm90_quantize.jsonl.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import qflash
from bench.quantize import BesideACopy
from bench.run import Candidate, Row, main

NAME = "sm90_quantize"
KERNEL = "sm90_quantize"


@dataclass(frozen=True)
class Problem:
    """An operation on normal k and v."""

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
        # Read once in 16 bits, written once in 8: k, and v if it becomes E4M3.
        self.bytes = bytes_of(problem)
        self.source = torch.empty(self.bytes // 2, dtype=torch.uint8, device="cuda")
        self.target = torch.empty_like(self.source)

    def run(self) -> Any:
        return qflash.quantize_kv(self.k, self.v, **self.words)

    def copy(self) -> Any:
        return self.target.copy_(self.source)

    def same_as_the_replay(self) -> bool:
        """Whether the first two heads of the first sequence, alone, are quantized as by the replay."""
        import numpy as np

        from qflash.reference import sm90_quantize
        from qflash.testing.runner import to_numpy

        k, v = (x[:1, :, :2] for x in (self.k, self.v))
        kv = qflash.quantize_kv(k, v, **self.words)
        k, v = to_numpy(k), to_numpy(v) if self.problem.precision == "int8_fp8" else None
        rope = qflash.Rope(*qflash.rope_tables(k.shape[1], k.shape[3])) if self.problem.rope else None
        want = sm90_quantize.quantize_kv(k, v, rope=rope, seed=self.problem.words.get("seed"))
        parts = (*sm90_quantize.OF_KEYS, *(sm90_quantize.OF_VALUES if v is not None else ()))
        return all(np.array_equal(to_numpy(getattr(kv, part)), getattr(want, part)) for part in parts)


def bytes_of(problem: Problem) -> int:
    """The minimum number of bytes moved."""
    batch, length, heads, head_dim = problem.shape
    return 3 * batch * length * heads * head_dim * (2 if problem.precision == "int8_fp8" else 1)


class QuantizeKV(BesideACopy):
    name = NAME
    device = "cuda"
    cases = PROBLEMS

    def arrays(self, case: Problem) -> Arrays:
        return Arrays(case)

    def ours(self, arrays: Arrays) -> Candidate:
        return Candidate("qflash quantize_kv", lambda arrays: arrays.run, KERNEL)

    def problem(self, arrays: Arrays) -> Row:
        case = arrays.problem
        what = f"{'k and v' if case.precision == 'int8_fp8' else 'k'}, {case.precision}{case.name}"
        return {"kind": NAME, "what": what, "shape": list(case.shape), "dtype": case.dtype}


if __name__ == "__main__":
    main(QuantizeKV())
