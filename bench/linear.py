"""Measure qflash.linear and qflash.swiglu next to PyTorch's ways to compute the same: interleaved, results checked.

python -m bench.linear [cuda|cpu]   writes bench/results/<machine>/linear.jsonl; `qflash report` makes the tables.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import qflash
from bench import tables
from bench.compiled import compiled
from bench.run import Candidate, Row, Suite, device_asked_for, main, tried
from qflash.dispatch import kernels_of
from qflash.testing.timing import Call, Comparison

NAME = "linear"
CHECKED_ROWS = 64
# Candidates that speed-ups are computed over. "torch product" is the matrix product alone, the best possible time.
EAGER, COMPILED, EPILOGUE, PRODUCT = "torch", "torch.compile", "torch._addmm_activation", "torch product"
OVER = (EAGER, COMPILED, EPILOGUE, PRODUCT)
# Relative L2 errors of the result: from rounding to the dtype, or from quantizing both operands.
LARGEST_ERROR = {"float32": 1e-5, "bfloat16": 5e-3}
LARGEST_INT8_ERROR = 3e-2


@dataclass(frozen=True)
class Problem:
    """out [m, n] of x [m, k] and weights [n, k], PyTorch's layout; n columns of each, if there are two."""

    m: int
    n: int
    k: int
    activation: str | None = None  # None, "gelu_tanh" or "swiglu"; with an activation there is a bias, too

    @property
    def operations(self) -> float:
        return 2.0 * self.m * self.n * self.k * (2 if self.activation == "swiglu" else 1)

    def as_dict(self) -> dict[str, Any]:
        return {"kind": "linear", "m": self.m, "n": self.n, "k": self.k, "activation": self.activation}


_LARGE = ((8192, 8192, 8192), (4096, 4096, 4096), (16384, 8192, 2048))
# n x k of model layers: Llama 3 8B and 70B (qkv, o, gate and up, down), then Qwen 2.5 7B (up, down).
_LLM = (
    (6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (10240, 8192), (8192, 8192), (57344, 8192),
    (8192, 28672), (18944, 3584), (3584, 18944),
)  # fmt: skip
_ON_A_GPU = (
    *(Problem(*shape, activation) for activation in (None, "gelu_tanh") for shape in _LARGE),
    *(Problem(4096, n, k) for n, k in _LLM),
    *(Problem(m, 14336, 4096, "swiglu") for m in (4096, 16384)),
    *(Problem(m, n, k) for n, k in ((4096, 4096), (8192, 28672)) for m in (1, 16, 64)),
    Problem(4095, 4097, 4093, "gelu_tanh"),
)
PROBLEMS = {
    "cuda": tuple(dict.fromkeys(_ON_A_GPU)),  # one of the layers is one of the large products
    "cpu": (
        Problem(1024, 1024, 1024),
        Problem(1024, 1024, 1024, "gelu_tanh"),
        Problem(512, 1024, 512, "swiglu"),
        Problem(1, 4096, 4096),
    ),
}


class Arrays:
    """A problem's operands on a device: normal numbers, with weights such that results are near 1."""

    def __init__(self, problem: Problem, device: str):
        import torch

        self.problem = problem
        # torch's bfloat16 products crash on some CPUs in virtual machines.
        self.dtype = torch.bfloat16 if device == "cuda" else torch.float32
        generator = torch.Generator(device).manual_seed(1)

        def normal(*shape: int, scale: float = 1.0) -> Any:
            drawn = torch.randn(*shape, generator=generator, device=device, dtype=torch.float32)
            return (drawn * scale).to(self.dtype)

        gated = problem.activation == "swiglu"
        self.x = normal(problem.m, problem.k)
        self.weight = normal(problem.n * (2 if gated else 1), problem.k, scale=problem.k**-0.5)
        self.w, self.up = self.weight[: problem.n].T, self.weight[problem.n :].T if gated else None
        self.bias = normal(problem.n) if problem.activation == "gelu_tanh" else None

    def error(self, out: Any) -> float:
        """The relative L2 error of the last rows, against float64."""
        import torch.nn.functional as F

        x = self.x[-CHECKED_ROWS:].double()
        h = x @ self.w.double()
        if self.bias is not None:
            h = h + self.bias.double()
        want = F.gelu(h, approximate="tanh") if self.problem.activation == "gelu_tanh" else h
        if self.up is not None:
            want = F.silu(h) * (x @ self.up.double())
        return float((out[-CHECKED_ROWS:].double() - want).norm() / want.norm())


@dataclass(frozen=True)
class Layer(Candidate):
    """One way to compute a layer."""

    int8: bool = False
    product: bool = False  # without the epilogue


def of_torch(problem: Problem) -> Callable[[Any, Any, Any], Any]:
    """The layer in plain PyTorch, a function of x, weight and bias."""
    import torch.nn.functional as F

    if problem.activation == "swiglu":

        def layer(x: Any, weight: Any, bias: Any) -> Any:
            gate, up = F.linear(x, weight).chunk(2, dim=-1)
            return F.silu(gate) * up
    elif problem.activation == "gelu_tanh":

        def layer(x: Any, weight: Any, bias: Any) -> Any:
            return F.gelu(F.linear(x, weight, bias), approximate="tanh")
    else:

        def layer(x: Any, weight: Any, bias: Any) -> Any:
            return F.linear(x, weight, bias)

    return layer


def _ours(arrays: Arrays, kernel: str | None, int8: bool = False) -> Call:
    weights = [w for w in (arrays.w, arrays.up) if w is not None]
    layers = [qflash.quantize_linear(w) for w in weights] if int8 else weights
    if arrays.up is not None:
        return lambda: qflash.swiglu(arrays.x, *layers, kernel=kernel)
    return lambda: qflash.linear(arrays.x, layers[0], arrays.bias, activation=arrays.problem.activation, kernel=kernel)


def candidates(problem: Problem, device: str) -> Iterator[Layer]:
    """qflash's kernels, including the quantization of x for INT8; then torch's."""
    import torch
    import torch.nn.functional as F

    for row in kernels_of("linear", device):
        for precision in row.precisions:
            int8, what = precision == "int8", "" if precision == row.precision else ", INT8"
            make = lambda x, kernel=row.name, int8=int8: _ours(x, kernel, int8)  # noqa: E731
            yield Layer(f"qflash {row.name}{what}", make, row.name, int8)
    layer = of_torch(problem)
    if problem.activation:  # else both are the matrix product, and the compiler takes half a minute to find that out
        yield Layer(EAGER, lambda x: tried(lambda: layer(x.x, x.weight, x.bias)))
        made = compiled(layer)
        yield Layer(COMPILED, lambda x: tried(lambda: made(x.x, x.weight, x.bias)))
    if problem.activation == "gelu_tanh" and device == "cuda":  # cuBLASLt's GELU is the one with tanh
        yield Layer(EPILOGUE, lambda x: tried(lambda: torch._addmm_activation(x.bias, x.x, x.w, use_gelu=True)))
    yield Layer(PRODUCT, lambda x: tried(lambda: F.linear(x.x, x.weight)), product=True)


class Linear(Suite):
    name = NAME
    over = OVER
    budget = 1.0

    def __init__(self, device: str):
        self.device, self.cases = device, PROBLEMS[device]

    def arrays(self, case: Problem) -> Arrays:
        return Arrays(case, self.device)

    def candidates(self, arrays: Arrays) -> Iterator[Layer]:
        return candidates(arrays.problem, self.device)

    def problem(self, arrays: Arrays) -> Row:
        return arrays.problem.as_dict()

    def check(self, arrays: Arrays, candidate: Layer, call: Call, result: Any) -> float | None:
        """The error; None for a candidate that omits something."""
        if candidate.product and arrays.problem.activation:
            return None
        error = arrays.error(result)
        dtype = str(arrays.dtype).removeprefix("torch.")
        if not error <= (LARGEST_INT8_ERROR if candidate.int8 else LARGEST_ERROR[dtype]):
            raise SystemExit(f"{arrays.problem}: {candidate.name} is off by {error:.2g}")
        return error

    def row(self, arrays: Arrays, candidate: Layer, checked: float | None, timing: Comparison) -> Row:
        stats = timing.stats[candidate.name]
        return {
            "candidate": candidate.name,
            "kernel": candidate.kernel,
            "dtype": "int8" if candidate.int8 else str(arrays.dtype).removeprefix("torch."),
            "rel_l2": None if checked is None else float(f"{checked:.3g}"),
            "us": stats.as_dict(),
            "gflops": float(f"{arrays.problem.operations / stats.p50 / 1e3:.4g}"),
        }


def table(
    machine: str | None = None,
    preset: str = NAME,
    module: str = "linear",
    over: Sequence[str] = OVER,
    **chosen: Any,
) -> str:
    """The committed rows: one table per machine, a candidate per line; `chosen`: by_machine's keep."""

    def of(found: list[Row]) -> str:
        peers = [peer for peer in over if any(peer in row["speedup"] for row in found)]
        lines = []
        for row in found:
            what = f"{row['m']} × {row['n']} × {row['k']}" + (f", {row['activation']}" if row["activation"] else "")
            ratios = [tables.ratio(row["speedup"].get(peer)) for peer in peers]
            cells = (tables.candidate(row), row["dtype"], tables.error(row), tables.time(row), tables.rate(row))
            lines.append([what, *cells, *ratios])
        header = ["m × n × k", "candidate", "operands", "error", "time", "rate", *(f"× {peer}" for peer in peers)]
        return tables.markdown(header, tables.unrepeated(lines))

    return tables.by_machine(preset, of, f"`python -m bench.{module}` makes them.", machine, **chosen)


if __name__ == "__main__":
    main(Linear(device_asked_for(PROBLEMS)))
