"""Every picture of bench/results and profiles: its rows, its form, and its file."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench import int8_accuracy, limits, profiles, roofline
from bench import rows as store
from bench.drawing import bars, errors, page, speed, tradeoff
from bench.drawing.sections import sections
from qflash import machine

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Row = dict[str, Any]
QUANTIZED, TRADEOFF = "sm90_int8", "accuracy-speed"
UNCOMMITTED = "run"  # written by `qflash run`


@dataclass(frozen=True)
class Picture:
    """A file, and the data it is made from."""

    path: Path
    sources: tuple[Path, ...]
    make: Callable[[], Figure]

    @property
    def digest(self) -> str:
        return page.digest(self.sources)

    @property
    def stale(self) -> bool:
        """Whether it is missing, or was drawn from other rows."""
        said = re.search(r"<dc:source>(.*?)</dc:source>", self.path.read_text()) if self.path.exists() else None
        return said is None or said[1] != self.digest

    def draw(self) -> bool:
        """Draw the file if needed. Returns whether it was written."""
        return page.write(self.path, page.render(self.make, self.digest))


def _form(rows: list[Row]) -> Callable[[], Figure] | None:
    """How rows are drawn; None: they are only for tables."""
    if rows[0]["kind"] == "accuracy":
        return partial(errors.figure, rows)
    if rows[0]["kind"] == "models":
        return partial(bars.figure, rows)
    return partial(speed.figure, rows) if sections(rows) else None


def of_folder(folder: Path) -> Iterator[Picture]:
    """The pictures of one machine's rows."""
    for path in sorted(folder.glob("*.jsonl")):
        form = _form(store.read(path))
        if form is not None:
            yield Picture(path.with_suffix(".svg"), (path,), form)
    both = tuple(folder / f"{name}.jsonl" for name in (QUANTIZED, int8_accuracy.NAME))
    if all(path.exists() for path in both):
        yield Picture(folder / f"{TRADEOFF}.svg", both, partial(tradeoff.figure, *map(store.read, both)))


def everything() -> Iterator[Picture]:
    """All pictures of committed rows and profiles."""
    for folder in sorted(path for path in store.RESULTS.iterdir() if path.is_dir()):
        yield from (picture for picture in of_folder(folder) if picture.path.stem != UNCOMMITTED)
    for gpu in limits.MEMORY:
        if roofline.points(gpu):
            yield Picture(profiles.PROFILES / gpu / "roofline.svg", roofline.sources(gpu), roofline.maker(gpu))


def draw_from(rows_path: Path) -> list[Path]:
    """Draw the pictures that show the rows of a file, if matplotlib is installed."""
    if machine.version("matplotlib") is None:
        return []
    pictures = [picture for picture in of_folder(rows_path.parent) if rows_path in picture.sources]
    for picture in pictures:
        picture.draw()
    return [picture.path for picture in pictures]


def update(check_only: bool = False) -> list[str]:
    """Draw every picture (or only check whether its rows have changed). Returns the files that were not up to date."""
    if check_only:
        stale = [picture.path for picture in everything() if picture.stale]
    elif machine.version("matplotlib") is None:
        stale = []
    else:
        stale = [picture.path for picture in everything() if picture.draw()]
    return [str(path.relative_to(store.ROOT)) for path in stale]
