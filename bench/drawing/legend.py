"""One legend for all panels of a picture, above them, in as many columns as fit."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from bench.drawing.page import HEAD, LEFT, WIDTH
from bench.drawing.style import PAPER, Look

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.figure import Figure

LINE_HEIGHT = 18  # pixels
LETTER, HANDLE = 6.8, 60  # pixels of a letter, and of the handle next to a name


def paint(look: Look, line: bool = True) -> dict[str, Any]:
    """A look as matplotlib arguments; line: markers are joined."""
    colour = look.colour.light
    return {
        "color": colour,
        "marker": look.marker,
        "markerfacecolor": colour if look.filled else PAPER.light,
        "markeredgecolor": colour,
        "linestyle": look.line if line else "none",
    }


def lines(names: list[str]) -> int:
    """The fewest lines that all names fit into; names are ordered by column."""
    for count in range(1, len(names)):
        columns = [names[start : start + count] for start in range(0, len(names), count)]
        if sum(max(map(len, column)) * LETTER + HANDLE for column in columns) <= WIDTH:
            return count
    return len(names)


def height(names: list[str]) -> int:
    """The height in pixels."""
    return LINE_HEIGHT * lines(names) + 8


def add(figure: Figure, handles: dict[str, Artist]) -> None:
    """Add the legend of these names above the panels, below the title."""
    names = list(handles)
    below = 1 - HEAD / (figure.get_figheight() * 96)
    figure.legend(
        list(handles.values()),
        names,
        loc="upper left",
        bbox_to_anchor=(LEFT, below),
        ncols=math.ceil(len(names) / lines(names)),
        columnspacing=1.4,
        borderpad=0,
        borderaxespad=0.1,
    )
