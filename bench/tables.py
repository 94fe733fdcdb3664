"""Cells and tables of Markdown, made from rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from bench import rows as store

Row = dict[str, Any]


def time(row: Row) -> str:
    us = row["us"]["p50"]
    return f"{us:.1f} µs" if us < 1e3 else f"{us / 1e3:.2f} ms"


def ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}×"


def candidate(row: Row) -> str:
    """Ours in bold."""
    return f"**{row['candidate']}**" if row["kernel"] else row["candidate"]


def markdown(header: list[str], lines: list[list[str]]) -> str:
    rule = ["---", *("---:" for _ in header[1:])]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (header, rule, *lines))


def unrepeated(lines: Iterable[list[str]]) -> list[list[str]]:
    """Lines whose first cell is empty where it says what the line before says."""
    found, previous = [], None
    for first, *others in lines:
        found.append([first if first != previous else "", *others])
        previous = first
    return found


def source(row: Row) -> str:
    """Where rows come from, in a sentence."""
    where = row["gpu"] or f"{row['cpu']} ({row['isa']}, {row['threads']} threads)"
    driver = f", driver {row['driver']}" if row["driver"] else ""
    peers = ", ".join(f"{name} {row['versions'][name]}" for name in ("torch", "jax") if name in row["versions"])
    return f"{where}{driver}; {peers}; commit {row['commit']}."


def by_machine(preset: str, table: Callable[[list[Row]], str], none: str) -> str:
    """The committed rows of a preset, one table per machine; `none` where there are none."""
    parts = [f"{source(found[0])}\n\n{table(found)}" for found in store.committed(preset).values()]
    return "\n\n".join(parts) or f"No rows are committed yet; {none}"
