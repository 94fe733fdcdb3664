"""The one console of all commands, and progress that also shows in a log."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

T = TypeVar("T")
LOG_WIDTH = 132  # tables keep their shape where no terminal says how wide it is


def make_console() -> Console:
    """A console that prints text as it is: "qflash[cuda]" is no markup. Colours come with rich.text.Text."""
    console = Console(highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = LOG_WIDTH
    return console


@contextmanager
def bar(console: Console, description: str, total: int) -> Iterator[Callable[[], None]]:
    """A progress bar and the function that moves it; without a terminal, a line at the start."""
    if not console.is_terminal:
        console.print(f"{description} ({total})")
        yield lambda: None
        return
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(description, total=total)
        yield lambda: progress.advance(task)


def track(console: Console, description: str, items: Iterable[T], total: int) -> Iterator[T]:
    """Pass `items` on under a progress bar."""
    with bar(console, description, total) as advance:
        for item in items:
            advance()
            yield item
