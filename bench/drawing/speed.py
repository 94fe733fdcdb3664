"""Speed over length: a panel per head dim and mask, a line or bar per candidate, and the hardware's limit."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

from bench import tables
from bench.drawing import legend
from bench.drawing.legend import paint
from bench.drawing.page import blank, plain_log_ticks
from bench.drawing.sections import Row, Section, is_part, problem, sections, short
from bench.drawing.style import QUIET, Look, looks
from bench.limits import Limit
from bench.presets import PRESETS

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PANEL, BUSY_PANEL, STEEP_PANEL = 225, 275, 350  # pixels of height, by the contents of a panel
BUSY = 5  # candidates
DASHES = ("-.", (0, (1, 1.5)))


def figure(rows: list[Row]) -> Figure:
    """The picture of a preset's rows."""
    found = sections(rows)
    looked = looks(name for section in found for name in section.candidates)
    heights = [_height(section) for section in found for _ in range(section.depth)]
    names = [*looked, *dict.fromkeys(_limit(section, limit) for section in found for limit in section.limits)]
    preset = PRESETS.get(found[0].preset) if len({section.preset for section in found}) == 1 else None
    title = preset.title if preset else "qflash and what one would use instead"
    result = blank(sum(heights), title, _caption(rows, looked), legend.height(names))
    wide = math.lcm(*(section.columns for section in found))
    grid = result.add_gridspec(len(heights), wide, height_ratios=heights)
    handles: dict[str, Artist] = {}
    top = 0
    for section in found:
        span = wide // section.columns
        first = None
        for index, (panel, part) in enumerate(section.panels.items()):
            down, across = section.place(index)
            axis = result.add_subplot(grid[top + down, across * span : (across + 1) * span], sharey=first)
            first = first or axis
            axis.set_title(panel)
            (_bars if section.bars else _lines)(axis, section, part, looked, handles)
            _limits(axis, section, across == section.columns - 1, handles)
            axis.tick_params(labelleft=across == 0, length=3)
            if across == 0:
                several = f"{section.dtype if preset else section.preset + ', ' + section.dtype}\n"
                axis.set_ylabel(f"{several if len(found) > 1 else ''}{section.unit}")
            if down == section.depth - 1 and not section.bars:
                axis.set_xlabel("T, keys" if section.kind == "decode" else "T, queries and keys")
        _scale(first, section)
        top += section.depth
    legend.add(result, {name: handles[name] for name in names})
    return result


def _height(section: Section) -> int:
    return STEEP_PANEL if section.steep else BUSY_PANEL if len(section.candidates) > BUSY else PANEL


def _caption(rows: list[Row], drawn: Iterable[str]) -> str:
    left_out = {row["candidate"] for row in rows if is_part(row)}.difference(drawn)
    return tables.source(rows[0]) + (" Kernels without their quantization are in the tables." if left_out else "")


def _limit(section: Section, limit: Limit) -> str:
    return f"limit: {limit.name}, {limit.rate:g} {section.unit.split()[0]}"


def _lines(axis: Axes, section: Section, rows: list[Row], looked: dict[str, Look], handles: dict[str, Artist]) -> None:
    for name in section.candidates:
        own = {row["Tk"]: section.rate(row) for row in rows if row["candidate"] == name}
        if own:
            (handles[name],) = axis.plot(list(own), list(own.values()), **paint(looked[name]))
    lengths = sorted({row["Tk"] for row in section.rows})
    axis.set_xscale("log", base=2)
    axis.set_xlim(lengths[0] / 1.3, lengths[-1] * 1.3)
    axis.set_xticks(lengths, map(short, lengths))
    axis.minorticks_off()


def _bars(axis: Axes, section: Section, rows: list[Row], looked: dict[str, Look], handles: dict[str, Artist]) -> None:
    one_panel = len(section.panels) == 1

    def group_of(row: Row) -> str:
        return f"{problem(row)}\nT = {short(row['Tk'])}" if one_panel else f"T = {short(row['Tk'])}"

    groups = list(dict.fromkeys(map(group_of, rows)))
    width = 0.8 / len(section.candidates)
    for index, name in enumerate(section.candidates):
        own = {group_of(row): section.rate(row) for row in rows if row["candidate"] == name}
        places = [groups.index(group) + (index - (len(section.candidates) - 1) / 2) * width for group in own]
        colour = looked[name].colour.light
        filled = {"color": colour} if looked[name].filled else {"edgecolor": colour, "fill": False, "hatch": "///"}
        handles.setdefault(name, axis.bar(places, list(own.values()), 0.9 * width, **filled))
    axis.set_xticks(range(len(groups)), groups)
    axis.grid(axis="x", visible=False)


def _limits(axis: Axes, section: Section, last: bool, handles: dict[str, Artist]) -> None:
    for limit, dashes in zip(section.limits, DASHES, strict=False):
        handles[_limit(section, limit)] = axis.axhline(limit.rate, color=QUIET.light, linestyle=dashes, linewidth=1.2)
        if last:
            place = {"xy": (1, limit.rate), "xycoords": ("axes fraction", "data"), "textcoords": "offset points"}
            axis.annotate(f"{limit.rate:g}", **place, xytext=(3, 0), va="center", color=QUIET.light)


def _scale(axis: Axes, section: Section) -> None:
    rates = [*map(section.rate, section.rows), *(limit.rate for limit in section.limits)]
    if section.steep:
        axis.set_yscale("log")
        axis.set_ylim(min(rates) / 1.4, max(rates) * 1.3)
        plain_log_ticks(axis.yaxis, (1, 2, 5))
    else:
        axis.set_ylim(0, max(rates) * 1.06)
