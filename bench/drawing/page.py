"""A picture as a file: an SVG of 900 px that is readable on white and on dark pages.

It is one file, with its own background, and a media query switches its colours. Two files would need different Markdown
on GitHub and on a MkDocs site; with a transparent background no text colour has a contrast of 4.5 on both pages.
"""

from __future__ import annotations

import hashlib
import io
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from bench.drawing.style import GRID, INK, PAPER, QUIET, every_colour

if TYPE_CHECKING:
    from matplotlib.axis import XAxis, YAxis
    from matplotlib.figure import Figure

WIDTH = 900  # CSS pixels
PX = 72 / 96  # points in one
HEAD, FOOT = 34, 17  # pixels of the title and of a line of the caption
LEFT = 0.012  # left edge of both
TITLE, TEXT, SMALL = 14 * PX, 12 * PX, 11 * PX

# Text stays text and ids are stable: files are small and differ only when the rows do. DejaVu Sans, which matplotlib
# includes, is wider than browsers' substitutes, so text that does not overlap here overlaps nowhere.
SETTINGS = {
    "svg.fonttype": "none",
    "svg.hashsalt": "qflash",
    "font.family": ["DejaVu Sans"],
    "font.size": SMALL,
    "axes.titlesize": TEXT,
    "axes.labelsize": SMALL,
    "xtick.labelsize": SMALL,
    "ytick.labelsize": SMALL,
    "legend.fontsize": SMALL,
    "figure.facecolor": PAPER.light,
    "savefig.facecolor": PAPER.light,
    "axes.facecolor": "none",
    "text.color": INK.light,
    "axes.labelcolor": INK.light,
    "axes.titlecolor": INK.light,
    "axes.edgecolor": QUIET.light,
    "xtick.color": QUIET.light,
    "ytick.color": QUIET.light,
    "xtick.labelcolor": INK.light,
    "ytick.labelcolor": INK.light,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID.light,
    "grid.linewidth": 0.6,
    "axes.linewidth": 0.8,
    "lines.linewidth": 1.6,
    "lines.markersize": 4.5,
    "legend.frameon": False,
    "legend.handlelength": 2.6,
}


def blank(panels: float, title: str, caption: str, legend: float = 0) -> Figure:
    """An empty picture with `panels` and `legend` pixels of height for these, a title above and a caption below."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    below = FOOT * (caption.count("\n") + 1) + 7
    height = HEAD + legend + panels + below
    figure = Figure(figsize=(WIDTH / 96, height / 96), layout="constrained")
    FigureCanvasAgg(figure)  # to measure text
    padding = {"w_pad": 6 * PX / 72, "h_pad": 4 * PX / 72, "wspace": 0.02, "hspace": 0.03}
    foot, head = below / height, HEAD / height
    figure.get_layout_engine().set(rect=(0, foot, 1, panels / height), **padding)
    figure.text(LEFT, 1 - head / 2, title, va="center", fontsize=TITLE, weight="bold")
    figure.text(LEFT, foot / 2, caption, va="center", fontsize=SMALL, color=QUIET.light)
    return figure


def plain_log_ticks(axis: XAxis | YAxis, subs: tuple[int, ...]) -> None:
    """Ticks of a logarithmic axis at `subs` times powers of ten, written as 0.01: exponents would be too small."""
    from matplotlib.ticker import LogLocator, NullLocator, StrMethodFormatter

    axis.set_major_locator(LogLocator(subs=subs))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(StrMethodFormatter("{x:g}"))


def render(make: Callable[[], Figure], source: str = "") -> str:
    """The SVG of the picture that `make` draws; source: the digest of what it is made from."""
    import matplotlib

    with matplotlib.rc_context(SETTINGS):
        text = io.StringIO()
        figure = make()
        _settle(figure)
        figure.savefig(text, format="svg", metadata={"Date": None, "Source": source or None})
    return themed(text.getvalue())


def _settle(figure: Figure) -> None:
    """Lay the panels out and round their positions: the solver's last bits, and so ids, differ from run to run."""
    figure.draw_without_rendering()
    figure.set_layout_engine("none")
    for axes in figure.axes:
        axes.set_position([round(side, 6) for side in axes.get_position().bounds])


def themed(svg: str) -> str:
    """The SVG with a style that replaces its colours with their dark variants on dark pages.

    Colours are still written out where they are used, so that programs without media queries show the light ones.
    """
    used = [colour for colour in every_colour() if colour.light in svg]
    rules = "".join(
        f'[style*="{what}: {colour.light}"]{{{what}:{colour.dark}!important}}\n'
        for colour in used
        for what in ("fill", "stroke")
    )
    style = f"<style>@media (prefers-color-scheme: dark) {{\n{rules}}}</style>\n"
    svg = svg.replace("'DejaVu Sans'", "'DejaVu Sans', Verdana, sans-serif")
    return re.sub(r"(<svg [^>]*>\n)", lambda match: match[1] + style, svg, count=1)


def digest(sources: Iterable[Path]) -> str:
    """A digest of the files that a picture is made from."""
    return hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:16]


def write(path: Path, svg: str) -> bool:
    """Write the file if it changed. Returns whether it did."""
    if path.exists() and path.read_text() == svg:
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(svg)
    return True
