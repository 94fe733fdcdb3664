"""How far a linear layer in INT8 is from float64, beside other ways to quantize it, on the same inputs.

python -m bench.linear_accuracy   on a CPU, whose integers and bits are those of every GPU; writes
bench/results/<machine>/linear-accuracy.jsonl, of which `qflash report` makes the tables.

x and the weight are bfloat16; weights are normal. Inputs: normal numbers; one channel in a hundred of x 20 times as
large, as in trained models; one value in a thousand 10 times as large; one token in a hundred 100 times as large. The
other ways are computed in float64 from the same integers that a library would have: dynamic quantization of torchao's
kind, which has a scale for each token and one for each output channel; one scale for the weight; one for each operand.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import qflash
from bench import tables
from bench.arrays import load
from bench.int8_accuracy import METRICS, metrics
from bench.run import Candidate, Row, Suite, main
from qflash.testing.timing import Call, Comparison

NAME = "linear-accuracy"
OURS, ROUNDED = "qflash INT8", "bfloat16 (rounded)"
# Over which dimensions of x [m, k] and of the weight [n, k] a scale is taken.
SIMULATED = {
    "per token, per channel (torchao's way)": (1, 1),
    "per token, one scale for w": (1, None),
    "one scale for each": (None, None),
}
MOST = 127  # of the integers


@dataclass(frozen=True)
class Problem:
    """out [m, n] of x [m, k], drawn as `data` says."""

    data: str
    m: int = 512
    n: int = 1024
    k: int = 4096


PROBLEMS = tuple(map(Problem, ("normal", "outlier channels", "outlier values", "outlier tokens")))


class Arrays:
    """A problem's operands in bfloat16, and the product in float64."""

    def __init__(self, problem: Problem):
        torch = load("torch")
        self.problem = problem
        generator = torch.Generator().manual_seed(1)

        def chosen(share: float, *shape: int) -> Any:
            return torch.rand(shape, generator=generator) < share

        x = torch.randn(problem.m, problem.k, generator=generator)
        factor = {
            "normal": lambda: 1.0,
            "outlier channels": lambda: 1 + 19 * chosen(0.01, 1, problem.k),
            "outlier values": lambda: 1 + 9 * chosen(0.001, problem.m, problem.k),
            "outlier tokens": lambda: 1 + 99 * chosen(0.01, problem.m, 1),
        }[problem.data]()
        weight = torch.randn(problem.n, problem.k, generator=generator) * problem.k**-0.5
        self.x, self.weight = (x * factor).bfloat16(), weight.bfloat16()
        self.truth = self.x.double() @ self.weight.double().T


def ours(arrays: Arrays) -> Any:
    return qflash.linear(arrays.x, qflash.quantize_linear(arrays.weight.T))


def rounded(arrays: Arrays) -> Any:
    """What is left of a layer that is not quantized: the rounding of its result."""
    return arrays.truth.bfloat16()


def simulated(arrays: Arrays, dims: tuple[int | None, int | None]) -> Any:
    """Of integers with a scale for each row, or for a whole operand; rounded to bfloat16 in the end."""

    def dequantized(operand: Any, dim: int | None) -> Any:
        exact = operand.double()
        most = exact.abs().amax() if dim is None else exact.abs().amax(dim, keepdim=True)
        scale = most / MOST
        return (exact / scale).round() * scale

    x, weight = (dequantized(*pair) for pair in zip((arrays.x, arrays.weight), dims, strict=True))
    return (x @ weight.T).bfloat16()


class LinearAccuracy(Suite):
    """Errors alone: nothing is timed."""

    name = NAME
    device = "cpu"
    timed = False

    def __init__(self, cases: Sequence[Problem] = PROBLEMS):
        self.cases = cases

    def arrays(self, case: Problem) -> Arrays:
        return Arrays(case)

    def candidates(self, arrays: Arrays) -> list[Candidate]:
        ways: dict[str, Callable[[Arrays], Any]] = {ROUNDED: rounded}
        ways |= {name: lambda x, dims=dims: simulated(x, dims) for name, dims in SIMULATED.items()}
        peers = [Candidate(name, lambda x, way=way: lambda: way(x)) for name, way in ways.items()]
        return [Candidate(OURS, lambda x: lambda: ours(x), "cpu_int8_matmul"), *peers]

    def problem(self, arrays: Arrays) -> Row:
        problem = arrays.problem
        return {"kind": NAME, "input": problem.data, "m": problem.m, "n": problem.n, "k": problem.k}

    def check(self, arrays: Arrays, candidate: Candidate, call: Call, result: Any) -> Row:
        return metrics(result, arrays.truth)

    def row(self, arrays: Arrays, candidate: Candidate, checked: Row, timing: Comparison | None) -> Row:
        return {"candidate": candidate.name, "kernel": candidate.kernel} | checked


def table(machine: str | None = None) -> str:
    """The committed rows: one table per machine, a candidate per line."""

    def of(found: list[Row]) -> str:
        lines = []
        for row in found:
            figures = [f"{row['cosine']:.5f}", *(f"{row[metric]:.2g}" for metric in METRICS[1:])]
            lines.append([f"{row['input']}, {row['m']} × {row['n']} × {row['k']}", tables.candidate(row), *figures])
        header = ["input, m × n × k", "candidate", "cosine", "relative L1", "relative L2", "RMSE", "largest error"]
        return tables.markdown(header, tables.unrepeated(lines))

    return tables.by_machine(NAME, of, "`python -m bench.linear_accuracy` makes them.", machine)


if __name__ == "__main__":
    main(LinearAccuracy())
