"""The one console of all commands, and progress that also shows in a log."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

T = TypeVar("T")
LOG_WIDTH = 132  # tables keep their shape where no terminal says how wide it is


def make_console() -> Console:
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=LOG_WIDTH)


def track(console: Console, description: str, items: Iterable[T], total: int) -> Iterator[T]:
    """Pass `items` on under a progress bar; without a terminal, a line at the start."""
    if not console.is_terminal:
        console.print(f"{description} ({total})")
        yield from items
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(description, total=total)
        for item in items:
            progress.advance(task)
            yield item
