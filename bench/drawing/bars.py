"""Tokens per second of whole models: a panel for each point, a bar for each contender; longer is better."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bench import tables
from bench.drawing.page import PX, blank
from bench.drawing.style import looks

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Row = dict[str, Any]
BAR, GAP, AROUND = 19, 0.24, 64  # pixels of a bar with its gap; the gap's share of it; pixels of a title and an axis


def figure(rows: list[Row]) -> Figure:
    """The picture of rows of bench.models that have figures."""
    rows = [row for row in rows if "skipped" not in row]
    points: dict[str, list[Row]] = {}
    for row in rows:
        points.setdefault(_point(row), []).append(row)
    heights = [BAR * len(found) for found in points.values()]
    result = blank(
        sum(heights) + AROUND * len(points),
        f"Text from models with random weights, {rows[0]['dtype']}: tokens a second, decoding",
        tables.source(rows[0]),
    )
    axes = result.subplots(len(points), 1, squeeze=False, height_ratios=heights)[:, 0]
    colours = {name: look.colour.light for name, look in looks(row["candidate"] for row in rows).items()}
    for axis, (point, found) in zip(axes, points.items(), strict=True):
        names, rates = [row["candidate"] for row in found], [row["decode_tokens_s"] for row in found]
        places = range(len(found))
        axis.barh(places, rates, height=1 - GAP, color=[colours[name] for name in names])
        for place, rate in zip(places, rates, strict=True):
            axis.annotate(f"{rate:.0f}", (rate, place), (4 * PX, 0), textcoords="offset points", va="center")
        axis.set(title=point, xlim=(0, 1.12 * max(rates)), ylim=(len(found) - 0.5, -0.5))
        axis.set_yticks(places, names)
        axis.tick_params(length=0)
        axis.grid(axis="y", visible=False)
    return result


def _point(row: Row) -> str:
    return f"{row['model']}, batch of {row['B']}, prompts of {row['prompt']} tokens"
