"""Measure the gradients of qflash.linear and qflash.swiglu next to PyTorch's: interleaved, results checked.

python -m bench.linear_backward [cuda|cpu]   writes bench/results/<machine>/linear-backward.jsonl; `qflash report` makes
the tables. The forward pass ran once, beforehand, and is not counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property, partial
from typing import Any

from bench import linear
from bench.compiled import compiled
from bench.linear import Problem, of_torch
from bench.run import Candidate, Row, Suite, device_asked_for, main, tried
from qflash.dispatch import kernels_of
from qflash.ops.linear import LINEAR, SWIGLU
from qflash.ops.run import run
from qflash.testing.by_kernel import on_kernel
from qflash.testing.timing import Call, Comparison

NAME = "linear-backward"
CHECKED = 64  # rows of dx, columns of dw
# Candidates that speed-ups are computed over. "torch products" computes only dx and dw, from a given gradient: a lower
# bound for everything that also computes slopes and sums.
EAGER, COMPILED, PRODUCTS = "torch", "torch.compile", "torch products"
OVER = (EAGER, COMPILED, PRODUCTS)
# Relative L2 errors of dx and dw: h and dh are rounded to the dtype.
LARGEST_ERROR = {"float32": 1e-5, "bfloat16": 1e-2}
_LARGE = ((8192, 8192, 8192), (4096, 4096, 4096), (16384, 8192, 2048))
_LLM = ((6144, 4096), (4096, 4096), (4096, 14336), (10240, 8192), (3584, 18944))  # n x k, as in bench/linear.py
PROBLEMS = {
    "cuda": (
        *(Problem(*shape, activation) for activation in (None, "gelu_tanh") for shape in _LARGE),
        *(Problem(16384, n, k) for n, k in _LLM),
        *(Problem(m, 14336, 4096, "swiglu") for m in (4096, 16384)),
        Problem(4095, 4097, 4093, "gelu_tanh"),
    ),
    "cpu": (Problem(1024, 1024, 1024, "gelu_tanh"), Problem(512, 1024, 512, "swiglu")),
}


class Arrays(linear.Arrays):
    """The operands of a layer, and the gradient of its result."""

    @cached_property
    def dout(self) -> Any:
        import torch

        generator = torch.Generator(self.x.device).manual_seed(2)
        shape = (self.problem.m, self.problem.n)
        return torch.randn(shape, generator=generator, device=self.x.device, dtype=torch.float32).to(self.dtype)

    @cached_property
    def layer(self) -> tuple[Any, list[Any], tuple[Any, ...]]:
        """The operation, its arrays, and the other arguments of a call that saves what the gradient needs."""
        if self.up is not None:
            return SWIGLU, [self.x, self.w, self.up, None, None, None], (None, True, None)
        return LINEAR, [self.x, self.w, self.bias, None], (self.problem.activation, None, True, None)

    @cached_property
    def given(self) -> list[Any]:
        """The arguments of the gradient operation."""
        op, arrays, words = self.layer
        _, *kept = run(op, arrays, words)
        named = op.named(arrays) | dict(zip(op.results[1:], kept, strict=False)) | {"dout": self.dout}
        return [named.get(name) for name in op.gradient.op.arrays]

    def gradient_error(self, dx: Any, dw: Any) -> float:
        """The relative L2 error of the last rows of dx and last columns of dw (of swiglu, gate's), against float64."""
        wants = self._dx(slice(-CHECKED, None)), self._dw(slice(-CHECKED, None))
        parts = dx[-CHECKED:], dw[:, -CHECKED:]
        return max(float((part.double() - want).norm() / want.norm()) for part, want in zip(parts, wants, strict=True))

    def _slopes(self, rows: slice, columns: slice) -> list[Any]:
        """These rows and columns of dh and, for swiglu, of du."""
        import torch

        x, weights = self.x[rows].double(), [self.w, *([] if self.up is None else [self.up])]
        pres = [(x @ w[:, columns].double()).requires_grad_() for w in weights]
        biased = pres if self.bias is None else [pres[0] + self.bias[columns].double()]
        h = biased[0]
        out = {
            None: lambda: h * 1.0,
            "gelu_tanh": lambda: torch.nn.functional.gelu(h, approximate="tanh"),
            "swiglu": lambda: torch.nn.functional.silu(h) * biased[-1],
        }[self.problem.activation]()
        return list(torch.autograd.grad(out, pres, self.dout[rows, columns].double()))

    def _dx(self, rows: slice) -> Any:
        every = slice(None)
        weights = (self.w, self.up)
        return sum(dh @ w.double().T for dh, w in zip(self._slopes(rows, every), weights, strict=False))

    def _dw(self, columns: slice) -> Any:
        return self.x.double().T @ self._slopes(slice(None), columns)[0]


def _ours(arrays: Arrays, kernel: str) -> Call:
    op, _, words = arrays.layer
    return partial(run, on_kernel(op.gradient.op, kernel), arrays.given, words)


def _compiled(problem: Problem) -> Callable[[Any, Any, Any], Any]:
    import torch._functorch.config

    torch._functorch.config.donated_buffer = False  # otherwise a backward pass can run only once
    return compiled(of_torch(problem))


def _autograd(arrays: Arrays, layer: Callable[[Any, Any, Any], Any]) -> Call:
    import torch

    leaves = [None if x is None else x.detach().requires_grad_() for x in (arrays.x, arrays.weight, arrays.bias)]
    wanted = [x for x in leaves if x is not None]
    out = layer(*leaves)

    def call() -> list[Any]:
        dx, dweight, *rest = torch.autograd.grad(out, wanted, arrays.dout, retain_graph=True)
        return [dx, dweight[: arrays.problem.n].T, *rest]

    return call


def _products(arrays: Arrays) -> Call:
    """dx and the weight's gradient, in PyTorch's layout, from an arbitrary gradient of the product."""
    import torch

    dh = torch.cat([arrays.dout] * (1 if arrays.up is None else 2), dim=1)
    return lambda: [dh @ arrays.weight, dh.T @ arrays.x]


def candidates(arrays: Arrays, device: str) -> Iterator[Candidate]:
    """qflash's kernels, then torch's."""
    for row in kernels_of("linear_backward", device):
        yield Candidate(f"qflash {row.name}", partial(_ours, kernel=row.name), row.name)
    layer = of_torch(arrays.problem)
    yield Candidate(EAGER, lambda x: tried(_autograd(x, layer)))
    if arrays.problem.activation:  # else both are the products
        yield Candidate(COMPILED, lambda x: tried(_autograd(x, _compiled(x.problem))))
    yield Candidate(PRODUCTS, lambda x: tried(_products(x)))


class LinearBackward(Suite):
    name = NAME
    over = OVER
    budget = 1.0
    graph = False  # autograd computes on the stream of its forward pass, which a graph cannot capture

    def __init__(self, device: str):
        self.device, self.cases = device, PROBLEMS[device]

    def arrays(self, case: Problem) -> Arrays:
        return Arrays(case, self.device)

    def candidates(self, arrays: Arrays) -> Iterator[Candidate]:
        return candidates(arrays, self.device)

    def problem(self, arrays: Arrays) -> Row:
        return arrays.problem.as_dict() | {"kind": "linear backward"}

    def check(self, arrays: Arrays, candidate: Candidate, call: Call, result: Any) -> float | None:
        """The larger error of dx and dw; None for the products alone."""
        if candidate.name == PRODUCTS:
            return None
        error = arrays.gradient_error(*result[:2])
        dtype = str(arrays.dtype).removeprefix("torch.")
        if not error <= LARGEST_ERROR[dtype]:
            raise SystemExit(f"{arrays.problem}: the gradients of {candidate.name} are off by {error:.2g}")
        return error

    def row(self, arrays: Arrays, candidate: Candidate, checked: float | None, timing: Comparison) -> Row:
        stats = timing.stats[candidate.name]
        return {
            "candidate": candidate.name,
            "kernel": candidate.kernel,
            "dtype": str(arrays.dtype).removeprefix("torch."),
            "rel_l2": None if checked is None else float(f"{checked:.3g}"),
            "us": stats.as_dict(),
            "gflops": float(f"{2 * arrays.problem.operations / stats.p50 / 1e3:.4g}"),
        }


def table(machine: str | None = None) -> str:
    """The committed rows: one table per machine, a candidate per line."""
    return linear.table(machine, NAME, "linear_backward", OVER)


if __name__ == "__main__":
    main(LinearBackward(device_asked_for(PROBLEMS)))
