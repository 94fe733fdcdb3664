"""Names at the ends of lines, without overlap."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from bench.drawing.page import PX
from bench.drawing.style import INK, QUIET

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LINE = 16  # pixels from one name to the next
ASIDE = 26  # pixels from the end of a line to its name


def spread(places: Sequence[float], gap: float) -> list[float]:
    """Places near the given ones, in their order and `gap` apart. Those that are too close are centred together."""
    groups: list[tuple[float, list[int]]] = []  # (middle, members)
    for index in sorted(range(len(places)), key=lambda index: places[index]):
        middle, members = places[index], [index]
        while groups and middle - groups[-1][0] < gap * (len(members) + len(groups[-1][1])) / 2:
            other, others = groups.pop()
            middle = (middle * len(members) + other * len(others)) / (len(members) + len(others))
            members = others + members
        groups.append((middle, members))
    found = [0.0] * len(places)
    for middle, members in groups:
        for rank, index in enumerate(members):
            found[index] = middle + gap * (rank - (len(members) - 1) / 2)
    return found


def at_ends(axis: Axes, names: Sequence[str], ends: Sequence[tuple[float, float]]) -> None:
    """Place each name to the right of the end of its line. Axes must have their scales and limits."""
    axis.figure.draw_without_rendering()  # pixels are known only after this
    pixel = axis.figure.dpi / 96
    heights = [axis.transData.transform(end)[1] / pixel for end in ends]
    for name, end, old, new in zip(names, ends, heights, spread(heights, LINE), strict=True):
        axis.annotate(
            name,
            end,
            xytext=(ASIDE * PX, (new - old) * PX),
            textcoords="offset points",
            va="center",
            color=INK.light,
            arrowprops={"arrowstyle": "-", "color": QUIET.light, "linewidth": 0.6, "shrinkA": 1, "shrinkB": 5 * PX},
        )
