"""Accuracy against speed: what kernels of fewer bits gain and lose; a panel per head dim.

Speed is relative to the fastest 16-bit peer on the same problem, for long sequences. Errors are those of the same rows.
A bar extends to the largest error on other inputs, if those were measured.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from bench import tables
from bench.drawing import legend
from bench.drawing.legend import paint
from bench.drawing.page import blank, plain_log_ticks
from bench.drawing.style import QUIET, looks

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Row = dict[str, Any]
Point = tuple[float, float]  # (error, speed)
LONG = 4096  # number of keys from which quantized kernels should be faster
HEIGHT = 380
EVEN = "as fast as the fastest 16-bit peer"
ALONE = "(kernel alone)"  # no user can call a kernel this way; with "kv ready" they can


def points(rows: list[Row]) -> dict[int, dict[str, list[Point]]]:
    """Head dim -> candidate -> a point per long problem."""
    long = [row for row in rows if row["Tk"] >= LONG and ALONE not in row["candidate"] and row["rel_l2"]]
    fastest: dict[tuple[Any, ...], float] = {}
    for row in long:
        if row["kernel"] is None and row["candidate"] != tables.FP8:
            fastest[_problem(row)] = min(row["us"]["p50"], fastest.get(_problem(row), math.inf))
    found: dict[int, dict[str, list[Point]]] = {}
    for row in sorted(long, key=lambda row: row["D"]):
        point = row["rel_l2"], fastest[_problem(row)] / row["us"]["p50"]
        found.setdefault(row["D"], {}).setdefault(row["candidate"], []).append(point)
    return found


def _problem(row: Row) -> tuple[Any, ...]:
    return tuple(row[name] for name in ("B", "Tq", "Tk", "Hq", "Hkv", "D", "dtype", "causal"))


def _mean(values: Iterable[float]) -> float:
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs))


def worst(rows: list[Row]) -> dict[tuple[int, str], float]:
    """(head dim, candidate) -> the largest error of accuracy rows."""
    found: dict[tuple[int, str], float] = {}
    for row in rows:
        key = row["D"], row["candidate"]
        found[key] = max(row["rel_l2"], found.get(key, 0.0))
    return found


def figure(speed_rows: list[Row], accuracy_rows: list[Row]) -> Figure:
    """The picture of both sets of rows."""
    by_head_dim, largest = points(speed_rows), worst(accuracy_rows)
    looked = looks(row["candidate"] for row in speed_rows if ALONE not in row["candidate"])
    title = f"Accuracy against speed, {speed_rows[0]['dtype']}, T ≥ {LONG}, full and causal"
    caption = "Large: geometric mean. Small: each problem. Bar: to the largest error on the inputs of int8-accuracy."
    caption += f"\n{tables.source(speed_rows[0])}"
    result = blank(HEIGHT, title, caption, legend.height([*looked, EVEN]))
    axes = result.subplots(1, len(by_head_dim), sharex=True, sharey=True, squeeze=False)[0]
    handles: dict[str, Any] = {}
    for axis, (head_dim, candidates) in zip(axes, by_head_dim.items(), strict=True):
        handles[EVEN] = axis.axhline(1, color=QUIET.light, linestyle="-.", linewidth=1.2)
        for name, found in candidates.items():
            mean = _mean(error for error, _ in found), _mean(speed for _, speed in found)
            style = paint(looked[name], line=False)
            axis.plot(*zip(*found, strict=True), **style | {"markersize": 2.2, "alpha": 0.6})
            if (head_dim, name) in largest:
                _bar(axis, mean, largest[head_dim, name], style["color"])
            (handles[name],) = axis.plot(*mean, **style | {"markersize": 7})
        axis.set(xscale="log", title=f"D = {head_dim}", xlabel="relative L2 error against float64")
        plain_log_ticks(axis.xaxis, (1, 3))
        axis.tick_params(length=3)
    axes[0].set_ylabel("speed, × the fastest 16-bit peer")
    legend.add(result, {name: handles[name] for name in (*looked, EVEN)})
    return result


def _bar(axis: Axes, start: Point, error: float, colour: str) -> None:
    if error > start[0]:
        axis.plot([start[0], error], [start[1]] * 2, color=colour, linewidth=1.2)
        axis.plot(error, start[1], color=colour, marker="|", markersize=9)
