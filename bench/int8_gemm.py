"""Measure qflash.int8_matmul next to torch's INT8 and bfloat16 products: interleaved, on random integers, sums checked.

python -m bench.int8_gemm [cuda|cpu]   writes bench/results/<machine>/int8-gemm.jsonl; `qflash report` makes the tables.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import qflash
from bench import tables
from bench.run import Candidate, Row, Suite, device_asked_for, main, tried
from qflash.dispatch import kernels_of
from qflash.testing.timing import Call, Comparison

NAME = "int8-gemm"
CHECKED_ROWS = 64
OVER = ("torch._int_mm", "torch bf16", "torch float32")


@dataclass(frozen=True)
class Problem:
    """out [m, n] = a [m, k] b [k, n]; `layout` is the contiguous dimension of b."""

    m: int
    n: int
    k: int
    layout: str = "k"

    @property
    def operations(self) -> float:
        return 2.0 * self.m * self.n * self.k

    def as_dict(self) -> dict[str, Any]:
        return {"kind": "int8_gemm", "m": self.m, "n": self.n, "k": self.k, "b": self.layout}


# Squares, a projection of many tokens, few tokens, small k, and sizes that no vector divides.
PROBLEMS = {
    "cuda": (
        Problem(4096, 4096, 4096),
        Problem(4096, 4096, 4096, "n"),
        Problem(8192, 8192, 8192),
        Problem(8192, 8192, 8192, "n"),
        Problem(16384, 8192, 2048),
        Problem(1024, 1024, 1024),
        Problem(128, 4096, 4096),
        Problem(17, 4096, 4096),
        Problem(4095, 4097, 4093),
        Problem(4095, 4097, 4093, "n"),
    ),
    "cpu": (
        Problem(1024, 1024, 1024),
        Problem(1024, 1024, 1024, "n"),
        Problem(2048, 2048, 2048),
        Problem(16, 4096, 4096),
        Problem(255, 257, 1021),
    ),
}


class Arrays:
    """A problem's operands on a device: integers from all of int8, and scales like those of a linear layer."""

    def __init__(self, problem: Problem, device: str):
        import torch

        self.problem = problem
        generator = torch.Generator().manual_seed(1)

        def integers(*shape: int) -> Any:
            return torch.randint(-128, 128, shape, generator=generator, dtype=torch.int8).to(device)

        self.a = integers(problem.m, problem.k)
        along_k = problem.layout == "k"
        self.b = integers(problem.n, problem.k).T if along_k else integers(problem.k, problem.n)
        # The fastest dtype on a GPU after INT8; torch's bfloat16 products crash on some CPUs in virtual machines.
        wide = torch.bfloat16 if device == "cuda" else torch.float32
        self.wide_a, self.wide_b = self.a.to(wide), self.b.to(wide)
        self.a_scale = torch.rand(problem.m, generator=generator).to(device) * 0.01
        self.b_scale = torch.rand(problem.n, generator=generator).to(device) * 0.01
        self.bias = torch.randn(problem.n, generator=generator).to(device)

    def check(self, sums: Any) -> bool:
        """Whether the last rows are exact: float64 represents every sum."""
        want = self.a[-CHECKED_ROWS:].double() @ self.b.double()
        return bool((sums[-CHECKED_ROWS:].double() == want).all())


@dataclass(frozen=True)
class Product(Candidate):
    """One way to multiply."""

    dtype: str = "int32"  # of the result


def candidates(device: str) -> Iterator[Product]:
    """qflash's kernels with and without scales, then torch's."""
    import torch

    def called(call: Callable[[Arrays], Any]) -> Callable[[Arrays], Call]:
        return lambda arrays: lambda: call(arrays)

    def of_torch(call: Callable[[Arrays], Any]) -> Callable[[Arrays], Call]:
        return lambda arrays: tried(lambda: call(arrays))

    for row in (row for row in kernels_of("linear", device) if "int8" in row.precisions):
        sums = lambda x, kernel=row.name: qflash.int8_matmul(x.a, x.b, kernel=kernel)  # noqa: E731
        scaled = lambda x, kernel=row.name: qflash.int8_matmul(  # noqa: E731
            x.a, x.b, x.a_scale, x.b_scale, x.bias, torch.bfloat16, kernel=kernel
        )
        yield Product(f"qflash {row.name}", called(sums), row.name)
        yield Product(f"qflash {row.name}, scaled", called(scaled), row.name, "bfloat16")
    yield Product("torch._int_mm", of_torch(lambda x: torch._int_mm(x.a, x.b)))
    peer, dtype = ("torch bf16", "bfloat16") if device == "cuda" else ("torch float32", "float32")
    yield Product(peer, of_torch(lambda x: torch.matmul(x.wide_a, x.wide_b)), dtype=dtype)


class Gemm(Suite):
    name = NAME
    over = OVER

    def __init__(self, device: str):
        self.device, self.cases = device, PROBLEMS[device]

    def arrays(self, case: Problem) -> Arrays:
        return Arrays(case, self.device)

    def candidates(self, arrays: Arrays) -> Iterator[Product]:
        return candidates(self.device)

    def problem(self, arrays: Arrays) -> Row:
        return arrays.problem.as_dict()

    def check(self, arrays: Arrays, candidate: Product, call: Call, result: Any) -> bool | None:
        """Whether sums are exact; None if they are rounded."""
        exact = arrays.check(result) if candidate.dtype == "int32" else None
        if exact is False:
            raise SystemExit(f"{arrays.problem}: {candidate.name} gives wrong sums")
        return exact

    def row(self, arrays: Arrays, candidate: Product, checked: bool | None, timing: Comparison) -> Row:
        stats = timing.stats[candidate.name]
        about = {"candidate": candidate.name, "kernel": candidate.kernel, "dtype": candidate.dtype, "exact": checked}
        return about | {
            "us": stats.as_dict(),
            "tops": float(f"{arrays.problem.operations / stats.p50 / 1e6:.4g}"),
        }


def table(machine: str | None = None, **chosen: Any) -> str:
    """The committed rows: one table per machine, a candidate per line; `chosen`: by_machine's keep."""

    def of(found: list[Row]) -> str:
        peers = [peer for peer in OVER if any(peer in row["speedup"] for row in found)]
        lines = []
        for row in found:
            what = f"{row['m']} × {row['n']} × {row['k']}, b along {row['b']}"
            rate = f"{row['tops']:.1f} TOP/s" if row["tops"] >= 10 else f"{1e3 * row['tops']:.0f} GOP/s"
            ratios = [tables.ratio(row["speedup"].get(peer)) for peer in peers]
            lines.append([what, tables.candidate(row), row["dtype"], tables.time(row), rate, *ratios])
        header = ["m × n × k", "candidate", "out", "time", "rate", *(f"× {peer}" for peer in peers)]
        return tables.markdown(header, tables.unrepeated(lines))

    return tables.by_machine(NAME, of, "`python -m bench.int8_gemm` makes them.", machine, **chosen)


if __name__ == "__main__":
    main(Gemm(device_asked_for(PROBLEMS)))
