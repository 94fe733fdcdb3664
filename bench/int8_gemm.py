"""Measure qflash.int8_matmul beside torch's INT8 and bfloat16 products: interleaved, on random integers, sums checked.

python -m bench.int8_gemm [cuda|cpu]   writes bench/results/<machine>/int8-gemm.jsonl; `qflash report` makes the tables.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import qflash
from bench import rows
from qflash.dispatch import kernels_of
from qflash.testing.timing import CudaClock, WallClock, compare

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


# Squares, a projection of many tokens, few tokens, few sums a product, and what no vector divides.
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
    """A problem's operands on a device: integers drawn from all of int8, and scales like those of a linear layer."""

    def __init__(self, problem: Problem, device: str):
        import torch

        generator = torch.Generator().manual_seed(1)

        def integers(*shape: int) -> Any:
            return torch.randint(-128, 128, shape, generator=generator, dtype=torch.int8).to(device)

        self.a = integers(problem.m, problem.k)
        along_k = problem.layout == "k"
        self.b = integers(problem.n, problem.k).T if along_k else integers(problem.k, problem.n)
        # What a GPU multiplies fastest beside INT8; torch's bfloat16 products die on some CPUs in virtual machines.
        wide = torch.bfloat16 if device == "cuda" else torch.float32
        self.wide_a, self.wide_b = self.a.to(wide), self.b.to(wide)
        self.a_scale = torch.rand(problem.m, generator=generator).to(device) * 0.01
        self.b_scale = torch.rand(problem.n, generator=generator).to(device) * 0.01
        self.bias = torch.randn(problem.n, generator=generator).to(device)

    def check(self, sums: Any) -> bool:
        """Whether the last rows are exact: float64 holds every sum."""
        want = self.a[-CHECKED_ROWS:].double() @ self.b.double()
        return bool((sums[-CHECKED_ROWS:].double() == want).all())


def candidates(device: str) -> Iterator[tuple[str, str | None, str, Callable[[Arrays], Any]]]:
    """(name, qflash kernel, type of out, call)."""
    import torch

    def ours(kernel: str) -> Callable[[Arrays], Any]:
        return lambda x: qflash.int8_matmul(x.a, x.b, kernel=kernel)

    def scaled(kernel: str) -> Callable[[Arrays], Any]:
        return lambda x: qflash.int8_matmul(x.a, x.b, x.a_scale, x.b_scale, x.bias, torch.bfloat16, kernel=kernel)

    for row in kernels_of("int8_matmul", device):
        yield f"qflash {row.name}", row.name, "int32", ours(row.name)
        yield f"qflash {row.name}, scaled", row.name, "bfloat16", scaled(row.name)
    yield "torch._int_mm", None, "int32", lambda x: torch._int_mm(x.a, x.b)
    peer, dtype = ("torch bf16", "bfloat16") if device == "cuda" else ("torch float32", "float32")
    yield peer, None, dtype, lambda x: torch.matmul(x.wide_a, x.wide_b)


def measure(device: str, budget: float = 3.0, on_skip: Callable[[str], None] = print) -> Iterator[dict[str, Any]]:
    """Rows, problem by problem. Candidates that refuse a problem are told to `on_skip`."""
    import torch

    shared = {"preset": NAME} | rows.provenance(device)
    clock = CudaClock(graph=True) if device == "cuda" else WallClock()
    for problem in PROBLEMS[device]:
        arrays = Arrays(problem, device)
        calls, facts = {}, {}
        for name, kernel, dtype, call in candidates(device):
            try:
                out = call(arrays)
            except RuntimeError as error:
                on_skip(f"{problem}: {name}: {str(error).splitlines()[0]}")
                continue
            exact = arrays.check(out) if out.dtype == torch.int32 else None
            if exact is False:
                raise SystemExit(f"{problem}: {name} gives wrong sums")
            calls[name] = lambda call=call, arrays=arrays: call(arrays)
            facts[name] = {"candidate": name, "kernel": kernel, "dtype": dtype, "exact": exact}
        timing = compare(calls, clock=clock, budget=budget, min_rounds=7)
        for name, known in facts.items():
            stats = timing.stats[name]
            over = [peer for peer in OVER if peer in calls and peer != name]
            yield (
                shared
                | problem.as_dict()
                | known
                | {
                    "us": stats.as_dict(),
                    "tops": float(f"{problem.operations / stats.p50 / 1e6:.4g}"),
                    "speedup": {peer: round(timing.speedup(name, over=peer), 3) for peer in over},
                }
            )


def table() -> str:
    """The committed rows: one table per machine, a candidate per line."""
    from bench import report

    parts = []
    for found in rows.committed(NAME).values():
        lines, previous = [], None
        peers = [peer for peer in OVER if any(peer in row["speedup"] for row in found)]
        for row in found:
            what = f"{row['m']} × {row['n']} × {row['k']}, b along {row['b']}"
            ratios = [report.ratio(row["speedup"].get(peer)) for peer in peers]
            name = f"**{row['candidate']}**" if row["kernel"] else row["candidate"]
            rate = f"{row['tops']:.1f} TOP/s" if row["tops"] >= 10 else f"{1e3 * row['tops']:.0f} GOP/s"
            lines.append([what if what != previous else "", name, row["dtype"], report.time(row), rate, *ratios])
            previous = what
        header = ["m × n × k", "candidate", "out", "time", "rate", *(f"× {peer}" for peer in peers)]
        parts.append(f"{report.source(found[0])}\n\n{report.markdown(header, lines)}")
    return "\n\n".join(parts) or "No rows are committed yet; `python -m bench.int8_gemm` makes them."


def main(device: str) -> None:
    collected = []
    for row in measure(device):
        collected.append(row)
        print(f"{row['m']}x{row['n']}x{row['k']} b:{row['b']} {row['candidate']}: {row['tops']} TOP/s {row['speedup']}")
    path = rows.RESULTS / collected[0]["machine"] / f"{NAME}.jsonl"
    rows.write(path, collected)
    print(f"{len(collected)} rows in {path.relative_to(rows.ROOT)}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "cuda")
