"""softmax, layer_norm and cross_entropy beside PyTorch, and beside a plain copy of the same memory.

python -m bench.reductions [cpu|cuda]   writes bench/results/<machine>/reductions[-cpu].jsonl (default: the GPU, if any)

Rows have microseconds, GB/s of the bytes an operation must move (x in, results out, each once), and that rate's share
of the rate at which `copy_` moves x to another array in the same process and the same rounds.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

import qflash
from bench import rows as store
from qflash import reference
from qflash.testing.compare import errors
from qflash.testing.timing import CudaClock, WallClock, compare

OPERATIONS = ("softmax", "layer_norm", "cross_entropy")
EAGER, COMPILED, COPY = "torch", "torch.compile", "copy"
CHECKED_ROWS = 64
SHAPES = {
    "cuda": ((16384, 8192), (131072, 1024), (1048576, 128), (4096, 32768), (2048, 131072)),
    "cpu": ((4096, 1024), (1024, 8192)),
}
DTYPES = {"cuda": ("bfloat16", "float32"), "cpu": ("float32",)}
PRESET = {"cuda": "reductions", "cpu": "reductions-cpu"}


@dataclass(frozen=True)
class Candidate:
    """One way to compute an operation."""

    name: str
    call: Callable[[], Any]
    kernel: str | None = None


def _bytes(operation: str, rows: int, columns: int, item: int) -> int:
    if operation == "cross_entropy":
        return rows * columns * item + rows * 8  # targets and losses
    vectors = 2 * columns * item if operation == "layer_norm" else 0
    return 2 * rows * columns * item + vectors


def _candidates(operation: str, x: Any, device: str) -> tuple[list[Candidate], np.ndarray]:
    """The ways to compute `operation` of x, and the first rows of it in float64."""
    import torch
    from torch.nn import functional

    columns = x.shape[1]
    weight, bias = (torch.randn(columns, device=x.device, dtype=x.dtype) for _ in range(2))
    targets = torch.randint(0, columns, (x.shape[0],), device=x.device, dtype=torch.int64)
    narrow = targets.to(torch.int32)  # what the kernel reads: torch wants 64 bits
    first = x[:CHECKED_ROWS].double().cpu().numpy()
    if operation == "softmax":
        ours, theirs = (lambda: qflash.softmax(x)), (lambda x: torch.softmax(x, -1))
        exact = reference.softmax(first)
    elif operation == "layer_norm":
        ours = lambda: qflash.layer_norm(x, weight, bias)  # noqa: E731
        theirs = lambda x: functional.layer_norm(x, (columns,), weight, bias)  # noqa: E731
        exact = reference.layer_norm(first, weight.double().cpu().numpy(), bias.double().cpu().numpy())[0]
    else:
        ours = lambda: qflash.cross_entropy(x, narrow, reduction="none")  # noqa: E731
        theirs = lambda x: functional.cross_entropy(x, targets, reduction="none")  # noqa: E731
        exact = reference.cross_entropy(first, targets[:CHECKED_ROWS].cpu().numpy())[0]
    compiled = torch.compile(theirs)
    other = torch.empty_like(x)
    kernel = operation if device == "cuda" else f"cpu_{operation}"
    return [
        Candidate(f"qflash {kernel}", ours, kernel),
        Candidate(EAGER, lambda: theirs(x)),
        Candidate(COMPILED, lambda: compiled(x)),
        Candidate(COPY, lambda: other.copy_(x)),
    ], exact


def measure(device: str, *, shapes=None, dtypes=None, budget: float = 2.0, min_rounds: int = 7) -> Iterator[list[dict]]:
    """One list of rows per operation, shape and dtype."""
    import torch

    shared = {"preset": PRESET[device]} | store.provenance(device)
    clock = CudaClock() if device == "cuda" else WallClock()
    for rows, columns in shapes or SHAPES[device]:
        for dtype in dtypes or DTYPES[device]:
            x = torch.randn(rows, columns, device=device, dtype=getattr(torch, dtype))
            for operation in OPERATIONS:
                yield [
                    shared | {"kind": operation, "rows": rows, "columns": columns, "dtype": dtype} | row
                    for row in _measure(operation, x, device, clock, budget, min_rounds)
                ]


def _measure(operation: str, x: Any, device: str, clock: Any, budget: float, min_rounds: int) -> list[dict[str, Any]]:
    candidates, exact = _candidates(operation, x, device)
    result = {c.name: c.call()[:CHECKED_ROWS].double().cpu().numpy() for c in candidates if c.name != COPY}
    timing = compare({c.name: c.call for c in candidates}, clock=clock, budget=budget, min_rounds=min_rounds)
    copied = 2 * x.numel() * x.element_size()
    moved = _bytes(operation, *x.shape, x.element_size())
    found = []
    for candidate in candidates:
        name, stats = candidate.name, timing.stats[candidate.name]
        count = copied if name == COPY else moved
        row = {
            "candidate": name,
            "framework": None if name == COPY else "torch",
            "kernel": candidate.kernel,
            "us": stats.as_dict(),
            "gbs": round(count / stats.p50 / 1e3, 1),
            "copy_share": round(timing.speedup(name, over=COPY) * count / copied, 3),
            "rel_l2": None if name == COPY else float(f"{errors(result[name], exact).relative_l2:.3g}"),
        }
        peers = [peer for peer in (EAGER, COMPILED) if candidate.kernel]
        found.append(row | {"speedup": {peer: round(timing.speedup(name, over=peer), 3) for peer in peers}})
    return found


def table(preset: str) -> str:
    """One table per machine with committed rows: an operation and shape per line."""
    from bench.report import markdown, ratio, source, time  # which lists this table among its sections

    parts = []
    for rows in store.committed(preset).values():
        grouped: dict[tuple[str, ...], dict[str, dict]] = {}
        for row in rows:
            key = (row["kind"], f"{row['rows']} × {row['columns']}", row["dtype"])
            grouped.setdefault(key, {})[row["candidate"] if row["kernel"] is None else "qflash"] = row
        lines = []
        for (operation, shape, dtype), by_name in grouped.items():
            ours = by_name["qflash"]
            cells = [f"`{operation}`", shape, dtype, time(ours), f"{ours['gbs'] / 1e3:.2f} TB/s"]
            cells += [f"**{ours['copy_share']:.1%}**", f"{ours['rel_l2']:.0e}"]
            lines.append(cells + [ratio(ours["speedup"].get(peer)) for peer in (EAGER, COMPILED)])
        header = ["operation", "rows × columns", "dtype", "time", "rate", "of copy's rate", "error", f"× {EAGER}"]
        parts.append(f"{source(rows[0])}\n\n{markdown([*header, f'× {COMPILED}'], lines)}")
    return "\n\n".join(parts) or f"No rows are committed yet; `python -m bench.reductions` makes them ({preset})."


def main(device: str | None = None) -> None:
    import torch

    from bench.run import set_threads

    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cpu":
        set_threads(None)
    collected = []
    for part in measure(device):
        collected += part
        for row in part:
            print(
                f"{row['kind']:14}{row['rows']:8} x {row['columns']:<7}{row['dtype']:9} {row['candidate']:22}"
                f"{row['us']['p50']:10.1f} us {row['gbs']:8.1f} GB/s {row['copy_share']:6.1%} of copy {row['speedup']}"
            )
    path = store.RESULTS / collected[0]["machine"] / f"{PRESET[device]}.jsonl"
    store.write(path, collected)
    print(f"{len(collected)} rows in {path.relative_to(store.ROOT)}")


if __name__ == "__main__":
    main(*sys.argv[1:])
