"""Training steps with qflash compared with PyTorch's SDPA, from curves of examples/train_stdlib_model.py.

python -m bench.training FOLDER   on the machine that trained, writes bench/results/<machine>/training.jsonl.

The curves in FOLDER are from runs that alternated, step by step, in one process. A ratio is the median of ratios, each
of two steps on the same batch; the first steps, in which kernels are compiled and memory is allocated, do not count.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from bench import rows, tables

Row = dict[str, Any]
NAME = "training"
OVER = "sdpa"
FIRST = 10  # steps that do not count
SAME = ("device", "size", "parameters", "length", "batch", "seed")  # columns that the curves of one process share


def read(folder: Path) -> dict[str, list[Row]]:
    """The curves of a folder by attention, ours first."""
    curves = {path.stem: rows.read(path) for path in sorted(folder.glob("*.jsonl"))}
    if OVER not in curves or len(curves) < 2:
        raise ValueError(
            f"folder {folder} has curves of {sorted(curves) or 'nothing'}; allowed: of {OVER} and of another"
        )
    first = {name: curve[0] for name, curve in curves.items()}
    if any(one[column] != first[OVER][column] for one in first.values() for column in SAME):
        raise ValueError(
            f"folder {folder} has curves of different runs; allowed: curves with the same {', '.join(SAME)}"
        )
    if len({len(curve) for curve in curves.values()}) > 1 or len(curves[OVER]) <= FIRST:
        counts = {name: len(curve) for name, curve in curves.items()}
        raise ValueError(
            f"folder {folder} has curves of {counts} steps; allowed: as many of each, and more than {FIRST}"
        )
    return curves


def summary(curves: dict[str, list[Row]]) -> list[Row]:
    """A row per curve, without provenance."""
    times = {name: [row["ms"] for row in curve[FIRST:]] for name, curve in curves.items()}
    found = []
    for name, curve in curves.items():
        about = {column: curve[0][column] for column in SAME} | {"kind": NAME, "candidate": name, "steps": len(curve)}
        ratios = [theirs / ours for ours, theirs in zip(times[name], times[OVER], strict=True)]
        figures = {"ms": round(statistics.median(times[name]), 3), "speedup": round(statistics.median(ratios), 3)}
        last = curve[-len(curve) // 10 :]
        losses = {"loss": round(statistics.mean(row["loss"] for row in last), 5), "held_out": curve[-1]["held_out"]}
        found.append(about | figures | losses)
    return found


def table(machine: str | None = None) -> str:
    """The committed rows: one table per machine, a curve per line."""

    def of(found: list[Row]) -> str:
        lines = [
            [
                f"{row['parameters'] / 1e6:.1f} M, {row['batch']} × {row['length']} bytes, {row['steps']} steps",
                row["candidate"],
                f"{row['ms']:.1f} ms",
                f"{row['speedup']:.3f}×",
                f"{row['loss']:.4f}",
                f"{row['held_out']:.4f}",
            ]
            for row in found
        ]
        header = [
            "model and batch",
            "attention",
            "a step",
            f"speed-up over {OVER}",
            "loss, last tenth",
            "held-out loss",
        ]
        return tables.markdown(header, tables.unrepeated(lines))

    return tables.by_machine(NAME, of, "`python -m bench.training` makes them.", machine)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description="Make rows of training's curves.")
    parser.add_argument("folder", type=Path, help="what examples/train_stdlib_model.py --out was given")
    folder = parser.parse_args().folder
    try:
        found = summary(read(folder))
    except ValueError as error:
        parser.error(str(error))
    shared = {"preset": NAME} | rows.provenance(found[0]["device"])
    collected = [shared | row for row in found]
    print("\n".join(json.dumps(row) for row in found))
    print(rows.save(NAME, collected).relative_to(rows.ROOT))


if __name__ == "__main__":
    main()
