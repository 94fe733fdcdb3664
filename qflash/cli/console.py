"""The console of all commands, and progress that is also readable in a log."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

LOG_WIDTH = 132  # tables keep their shape if there is no terminal with a width
LOG_SECONDS = 30.0  # between lines of progress in a log


def make_console() -> Console:
    """A console that prints text verbatim: "qflash[cuda]" is not markup. Colours come with rich.text.Text."""
    console = Console(highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = LOG_WIDTH
    return console


class Steps(Protocol):
    """Progress through a number of steps."""

    def describe(self, text: str) -> None:
        """Set the description of the next steps."""

    def advance(self) -> None:
        """Count one more step as done."""


@contextmanager
def steps(console: Console, total: int) -> Iterator[Steps]:
    """A progress bar with the remaining time; without a terminal, a line per description and at intervals."""
    if not console.is_terminal:
        yield _Lines(console, total)
        return
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left:"),
        TimeRemainingColumn(),
    )
    # Steps may take a minute each, and rich discards samples older than its period.
    with Progress(*columns, console=console, transient=True, speed_estimate_period=600) as progress:
        yield _Bar(progress, total)


class _Bar:
    def __init__(self, progress: Progress, total: int):
        self._progress, self._task = progress, progress.add_task("", total=total)

    def describe(self, text: str) -> None:
        self._progress.update(self._task, description=text)

    def advance(self) -> None:
        self._progress.advance(self._task)


class _Lines:
    """Progress for a log."""

    def __init__(self, console: Console, total: int):
        self._console, self._total = console, total
        self._description, self._done = "", 0
        self._started = self._said = time.monotonic()

    def describe(self, text: str) -> None:
        self._description = text
        self._say(time.monotonic())

    def advance(self) -> None:
        self._done += 1
        now = time.monotonic()
        if now - self._said >= LOG_SECONDS and self._done < self._total:
            self._say(now)

    def _say(self, now: float) -> None:
        self._said = now
        left = ""
        if self._done:
            left = f", about {duration((now - self._started) / self._done * (self._total - self._done))} left"
        self._console.print(f"{self._description} ({self._done} of {self._total} done{left})")


def duration(seconds: float) -> str:
    """A time span in readable form."""
    minutes = round(seconds / 60)
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60} min"
