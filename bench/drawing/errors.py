"""Errors by input: a line of the picture for each input, a marker on it for each candidate; further left is better."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bench import tables
from bench.drawing import legend
from bench.drawing.legend import paint
from bench.drawing.page import blank, plain_log_ticks
from bench.drawing.sections import short
from bench.drawing.style import looks

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.figure import Figure

Row = dict[str, Any]
LINE = 34  # pixels between two inputs
SPREAD = 0.5  # share of that distance over which an input's candidates are spread, to separate equal errors


def figure(rows: list[Row]) -> Figure:
    """The picture of accuracy rows: a panel per mask."""
    looked = looks(row["candidate"] for row in rows)
    inputs = list(dict.fromkeys(map(_input, rows)))
    masks = sorted({row["causal"] for row in rows})
    height = LINE * len(inputs) + 60
    title = f"Error of attention against float64, {rows[0]['dtype']}, D = {rows[0]['D']}"
    result = blank(height, title, tables.source(rows[0]), legend.height(list(looked)))
    axes = result.subplots(1, len(masks), sharey=True, squeeze=False)[0]
    handles: dict[str, Artist] = {}
    for axis, causal in zip(axes, masks, strict=True):
        for index, (name, look) in enumerate(looked.items()):
            aside = SPREAD * ((index + 0.5) / len(looked) - 0.5)
            own = [row for row in rows if row["candidate"] == name and row["causal"] == causal]
            places = [inputs.index(_input(row)) + aside for row in own]
            (handles[name],) = axis.plot([row["rel_l2"] for row in own], places, **paint(look, line=False))
        axis.set(xscale="log", title="causal" if causal else "full", xlabel="relative L2 error")
        plain_log_ticks(axis.xaxis, (1, 3))
        axis.set_yticks(range(len(inputs)), inputs)
        axis.set_ylim(len(inputs) - 0.5, -0.5)
        axis.tick_params(length=3)
    legend.add(result, handles)
    return result


def _input(row: Row) -> str:
    return f"{row['input']}, T = {short(row['Tk'])}"
