"""Errors of quantized attention against float64, on the same inputs: qflash, 16 bits, and other implementations.

python -m bench.int8_accuracy   on a Hopper GPU; writes bench/results/<machine>/int8-accuracy.jsonl and its plots.

Inputs: normal numbers; keys with a tenth of their channels offset; values with a mean of 3; one value in a thousand ten
times as large (the stress test of FlashAttention 3); long sequences, where errors could accumulate. q, k and v are
bfloat16. The FP8 peers get them as E4M3: FlashAttention 3 with a scale per head; "per-tensor FP8" is simulated in
float32, with one scale for each of q, k and v, and weights in E4M3, from 0 to 448.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from bench import rows, tables
from bench.arrays import Arrays, load
from bench.peers import E4M3_MOST, flash_attn_3, flash_attn_3_fp8, qflash_torch
from bench.run import Candidate, Row, Suite, main
from qflash.testing import Case
from qflash.testing.timing import Call, Comparison

NAME = "int8-accuracy"
PER_TENSOR = "per-tensor FP8 (simulated)"
KERNELS = ("sm90_int8", "sm90_int8_fp8", "sm90_fwd")
METRICS = ("cosine", "rel_l1", "rel_l2", "rmse", "max")
_BLOCK = 1 << 26  # scores at a time


@dataclass(frozen=True)
class Problem:
    """An input by its name in the tables, and the case that generates it."""

    name: str
    case: Case


def _problems(length: int = 4096, heads: int = 8, longest: int = 32768, head_dim: int = 128) -> tuple[Problem, ...]:
    return tuple(
        Problem(name, Case(name, t, t, h, h, head_dim, dtype="bfloat16", data=data, causal=causal))
        for name, data, t, h in (
            *((data, data, length, heads) for data in ("normal", "biased_k", "biased_v", "outlier")),
            ("long", "normal", longest, 2),
            ("long_biased_v", "biased_v", longest, 2),
        )
        for causal in (False, True)
    )


PROBLEMS = _problems()


def _by_rows(tensors: Sequence[Any], causal: bool, attend: Callable[[Any, Any], Any]) -> Any:
    """out `[B, T, H, D]` of q, k, v, one head and some rows at a time: `attend(scores, v)` for each."""
    torch = load("torch")
    q, k, v = (x.transpose(1, 2) for x in tensors)
    out = torch.empty_like(q)
    length, keys, scale = q.shape[2], k.shape[2], 1 / math.sqrt(q.shape[3])
    step = max(1, _BLOCK // keys)
    for b in range(q.shape[0]):
        for head in range(q.shape[1]):
            for start in range(0, length, step):
                block = slice(start, min(start + step, length))
                scores = (q[b, head, block] @ k[b, head].T) * scale
                if causal:
                    hidden = torch.ones(scores.shape, dtype=torch.bool, device=q.device)
                    scores = scores.masked_fill(hidden.triu_(1 + keys - length + start), -math.inf)
                out[b, head, block] = attend(scores, v[b, head])
    return out.transpose(1, 2)


def exact(arrays: Arrays) -> Any:
    """Attention in float64 on the device of the arrays."""
    tensors = [x.double() for x in arrays.torch]
    return _by_rows(tensors, arrays.case.causal, lambda scores, v: scores.softmax(-1) @ v)


def per_tensor_fp8(arrays: Arrays) -> Any:
    """The result of FP8 attention with one scale per tensor, float32."""
    torch = load("torch")

    def rounded(x: Any) -> Any:
        scale = x.float().abs().max().clamp(min=1e-30) / E4M3_MOST
        return (x.float() / scale).to(torch.float8_e4m3fn).float() * scale

    def attend(scores: Any, v: Any) -> Any:
        weights = torch.exp(scores - scores.amax(-1, keepdim=True))
        coarse = (weights * E4M3_MOST).to(torch.float8_e4m3fn).float() / E4M3_MOST
        return coarse @ v / weights.sum(-1, keepdim=True)

    return _by_rows([rounded(x) for x in arrays.torch], arrays.case.causal, attend)


def metrics(got: Any, want: Any) -> dict[str, float]:
    """Every figure of a row, against float64."""
    got, want = got.double().flatten(), want.flatten()
    error = got - want
    figures = {
        "cosine": float((got @ want) / (got.norm() * want.norm())),
        "rel_l1": float(error.abs().sum() / want.abs().sum()),
        "rel_l2": float(error.norm() / want.norm()),
        "rmse": float(error.square().mean().sqrt()),
        "max": float(error.abs().max()),
    }
    return {name: float(f"{value:.6f}" if name == "cosine" else f"{value:.3g}") for name, value in figures.items()}


class CheckedArrays(Arrays):
    """A problem's arrays and the exact result, on their device."""

    def __init__(self, problem: Problem, device: str):
        super().__init__(problem.case, device)
        self.input = problem.name
        self.truth = exact(self)


class Accuracy(Suite):
    """Only errors: nothing is timed."""

    name = NAME
    timed = False

    def __init__(self, device: str, cases: Sequence[Problem] = PROBLEMS, kernels: tuple[str, ...] = KERNELS):
        self.device, self.cases, self.kernels = device, cases, kernels

    def arrays(self, case: Problem) -> CheckedArrays:
        return CheckedArrays(case, self.device)

    def candidates(self, arrays: Arrays) -> tuple[Candidate, ...]:
        simulated = Candidate(PER_TENSOR, lambda arrays: lambda: per_tensor_fp8(arrays))
        return (*map(qflash_torch, self.kernels), flash_attn_3(), flash_attn_3_fp8(), simulated)

    def problem(self, arrays: CheckedArrays) -> Row:
        return rows.problem(arrays.case, "accuracy") | {"input": arrays.input}

    def check(self, arrays: CheckedArrays, candidate: Candidate, call: Call, result: Any) -> Row:
        return metrics(result, arrays.truth)

    def row(self, arrays: Arrays, candidate: Candidate, checked: Row, timing: Comparison | None) -> Row:
        return {"candidate": candidate.name, "kernel": candidate.kernel} | checked


def _mask(row: Row) -> str:
    return "causal" if row["causal"] else "full"


def _by_machine(table: Callable[[list[Row]], str], machine: str | None) -> str:
    return tables.by_machine(NAME, table, "`python -m bench.int8_accuracy` makes them.", machine)


def summary(machine: str | None = None) -> str:
    """Relative L2 errors of the committed rows: one table per machine, an input per line."""

    def of(found: list[Row]) -> str:
        names = list(dict.fromkeys(row["candidate"] for row in found))
        by_input: dict[str, dict[str, float]] = {}
        for row in found:
            by_input.setdefault(f"{row['input']}, T={row['Tk']} {_mask(row)}", {})[row["candidate"]] = row["rel_l2"]
        lines = [
            [what, *(f"{errors[name]:.2g}" if name in errors else "" for name in names)]
            for what, errors in by_input.items()
        ]
        return tables.markdown(["input", *names], lines)

    return _by_machine(of, machine)


def table(machine: str | None = None) -> str:
    """The committed rows: one table per machine, a candidate per line."""

    def of(found: list[Row]) -> str:
        lines = []
        for row in found:
            what = f"{row['input']}, T={row['Tk']} H={row['Hq']} D={row['D']} {_mask(row)}"
            figures = [f"{row['cosine']:.5f}", *(f"{row[metric]:.2g}" for metric in METRICS[1:])]
            lines.append([what, tables.candidate(row), *figures])
        header = ["input", "candidate", "cosine", "relative L1", "relative L2", "RMSE", "largest error"]
        return tables.markdown(header, tables.unrepeated(lines))

    return _by_machine(of, machine)


if __name__ == "__main__":
    from bench import plot  # which recognizes this module by its rows

    collected = main(Accuracy(sys.argv[1] if len(sys.argv) > 1 else "cuda"))
    plot.draw_from(rows.RESULTS / collected[0]["machine"] / f"{NAME}.jsonl")
