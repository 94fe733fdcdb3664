"""How far quantized attention is from float64, side by side on the same inputs: qflash, 16 bits, and what others do.

python -m bench.int8_accuracy   on a Hopper GPU; writes bench/results/<machine>/int8-accuracy.jsonl and a plot.

Inputs: normal numbers; keys with a tenth of their channels offset; values with a mean of 3; one value in a thousand ten
times as large (the stress test of FlashAttention 3); long sequences, where errors could pile up. q, k and v are
bfloat16. The FP8 peers get them as E4M3: FlashAttention 3 with a scale for each head; "per-tensor FP8" is simulated in
float32, with one scale for each of q, k and v, and weights in E4M3, from 0 to 448.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import qflash
from bench import rows
from bench.peers import E4M3_MOST, Arrays, Unavailable, flash_attn_3, flash_attn_3_fp8, load, qflash_torch
from bench.run import refusal
from qflash.testing import Case

NAME = "int8-accuracy"
PER_TENSOR = "per-tensor FP8 (simulated)"
KERNELS = ("sm90_int8", "sm90_int8_fp8", "sm90_fwd")
METRICS = ("cosine", "rel_l1", "rel_l2", "rmse", "max")
_BLOCK = 1 << 26  # scores at a time


@dataclass(frozen=True)
class Problem:
    """An input by its name in the tables, and the case that draws it."""

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
    """out `[B, T, H, D]` of q, k, v, head by head and some rows at a time: `attend(scores, v)` for each."""
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
    """Attention in float64 where the arrays are."""
    tensors = [x.double() for x in arrays.torch]
    return _by_rows(tensors, arrays.case.causal, lambda scores, v: scores.softmax(-1) @ v)


def per_tensor_fp8(arrays: Arrays) -> Any:
    """What FP8 attention with one scale for each tensor gives, float32."""
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


def candidates(kernels: tuple[str, ...] = KERNELS) -> Iterator[tuple[str, str | None, Callable[[Arrays], Any]]]:
    """(name, qflash kernel, what computes out)."""
    for kernel in kernels:
        ours = qflash_torch(kernel)
        yield ours.name, kernel, lambda arrays, make=ours.make: make(arrays)()
    for peer in (flash_attn_3(), flash_attn_3_fp8()):
        yield peer.name, None, lambda arrays, make=peer.make: make(arrays)()
    yield PER_TENSOR, None, per_tensor_fp8


def measure(
    device: str = "cuda",
    problems: tuple[Problem, ...] = PROBLEMS,
    kernels: tuple[str, ...] = KERNELS,
    on_skip: Callable[[str], None] = print,
) -> Iterator[dict[str, Any]]:
    """Rows, problem by problem. Candidates that cannot run are told to `on_skip`."""
    shared = {"preset": NAME} | rows.provenance(device)
    for problem in problems:
        arrays = Arrays(problem.case, device)
        want = exact(arrays)
        for name, kernel, call in candidates(kernels):
            try:
                out = call(arrays)
            except (Unavailable, qflash.NoKernelError) as error:
                on_skip(f"{problem.name}: {name}: {refusal(error)}")
                continue
            about = {"input": problem.name, "candidate": name, "kernel": kernel}
            yield shared | rows.problem(problem.case, "accuracy") | about | metrics(out, want)


_NO_ROWS = "No rows are committed yet; `python -m bench.int8_accuracy` makes them."


def summary() -> str:
    """Relative L2 errors of the committed rows: one table per machine, an input per line."""
    from bench import report

    parts = []
    for found in rows.committed(NAME).values():
        candidates = list(dict.fromkeys(row["candidate"] for row in found))
        errors: dict[str, dict[str, float]] = {}
        for row in found:
            what = f"{row['input']}, T={row['Tk']} {'causal' if row['causal'] else 'full'}"
            errors.setdefault(what, {})[row["candidate"]] = row["rel_l2"]
        lines = [
            [what, *(f"{of[name]:.2g}" if name in of else "" for name in candidates)] for what, of in errors.items()
        ]
        parts.append(f"{report.source(found[0])}\n\n{report.markdown(['input', *candidates], lines)}")
    return "\n\n".join(parts) or _NO_ROWS


def table() -> str:
    """The committed rows: one table per machine, a candidate per line."""
    from bench import report

    parts = []
    for found in rows.committed(NAME).values():
        lines, previous = [], None
        for row in found:
            mask = "causal" if row["causal"] else "full"
            what = f"{row['input']}, T={row['Tk']} H={row['Hq']} D={row['D']} {mask}"
            name = f"**{row['candidate']}**" if row["kernel"] else row["candidate"]
            figures = [f"{row['cosine']:.5f}", *(f"{row[metric]:.2g}" for metric in METRICS[1:])]
            lines.append([what if what != previous else "", name, *figures])
            previous = what
        header = ["input", "candidate", "cosine", "relative L1", "relative L2", "RMSE", "largest error"]
        parts.append(f"{report.source(found[0])}\n\n{report.markdown(header, lines)}")
    return "\n\n".join(parts) or _NO_ROWS


def main(device: str) -> None:
    from bench import plot

    collected = []
    for row in measure(device):
        collected.append(row)
        mask = "causal" if row["causal"] else "full"
        print(f"{row['input']} {mask} {row['candidate']}: {', '.join(f'{name} {row[name]}' for name in METRICS)}")
    path = rows.RESULTS / collected[0]["machine"] / f"{NAME}.jsonl"
    rows.write(path, collected)
    plot.draw_errors(collected, path.with_suffix(".svg"))
    print(f"{len(collected)} rows in {path.relative_to(rows.ROOT)}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "cuda")
