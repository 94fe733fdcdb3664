"""The README's tables, made from committed rows between `<!-- qflash:NAME -->` and `<!-- /qflash:NAME -->`."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from bench import rows as store
from bench.presets import PRESETS
from qflash.dispatch import KERNELS

README = store.ROOT / "README.md"
Row = dict[str, Any]


# Cells


def problem(row: Row) -> str:
    """A row's problem in a few words."""
    if row["kind"] == "decode":
        return f"B={row['B']} Tq=1 Tk={row['Tk']} Hq={row['Hq']} Hkv={row['Hkv']} D={row['D']}"
    if row["kind"] == "overhead":
        return f"B={row['B']} T={row['Tq']} H={row['Hq']} D={row['D']}"
    return f"B={row['B']} T={row['Tq']} H={row['Hq']} D={row['D']} {'causal' if row['causal'] else 'full'}"


def time(row: Row) -> str:
    us = row["us"]["p50"]
    return f"{us:.1f} µs" if us < 1e3 else f"{us / 1e3:.2f} ms"


def rate(row: Row) -> str:
    if "gbs" in row:
        return f"{row['gbs']:.1f} GB/s"
    if "gflops" in row:
        return f"{row['gflops'] / 1e3:.1f} TFLOP/s" if row["gflops"] >= 1e4 else f"{row['gflops']:.0f} GFLOP/s"
    return ""


def error(row: Row) -> str:
    return "" if row["rel_l2"] is None else f"{row['rel_l2']:.0e}"


def ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}×"


def markdown(header: list[str], lines: list[list[str]]) -> str:
    rule = ["---", *("---:" for _ in header[1:])]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (header, rule, *lines))


# Tables


def kernels_table() -> str:
    lines = []
    for kernel in KERNELS:
        where = "CPU" if kernel.device == "cpu" else f"CUDA, compute capability ≥ {kernel.min_arch / 10}"
        passes = "forward, backward" if kernel.backward else "forward"
        chosen = "" if kernel.automatic else " Only by name."
        lines.append([f"`{kernel.name}`", where, kernel.precision, passes, f"{kernel.summary}.{chosen}"])
    header = ["kernel", "runs on", "precision", "passes", "what it is"]
    return markdown(header, lines).replace("---:", "---")


def preset_table(name: str) -> str:
    """One table per machine with committed rows: a problem per line, qflash's kernels beside their peers."""
    parts = []
    for rows in store.committed(name).values():
        parts.append(f"{source(rows[0])}\n\n{_lines(rows)}")
    return "\n\n".join(parts) or f"No rows are committed yet; `qflash bench {name}` makes them."


def source(row: Row) -> str:
    """Where rows come from, in a sentence."""
    where = row["gpu"] or f"{row['cpu']} ({row['isa']}, {row['threads']} threads)"
    driver = f", driver {row['driver']}" if row["driver"] else ""
    peers = ", ".join(f"{name} {row['versions'][name]}" for name in ("torch", "jax") if name in row["versions"])
    return f"{where}{driver}; {peers}; commit {row['commit']}."


def _lines(rows: list[Row]) -> str:
    candidates = list(dict.fromkeys(row["candidate"] for row in rows))
    if rows[0]["kind"] == "overhead":
        lines = [[row["candidate"], time(row), f"{row['us']['min']:.1f} µs", _peer_ratio(row)] for row in rows]
        return markdown(["one call", "median", "best", "speed-up"], lines)
    peers = [name for name in candidates if not name.startswith("qflash")]
    ours = [name for name in candidates if name.startswith("qflash")]
    grouped: dict[tuple[str, str], dict[str, Row]] = {}
    for row in rows:
        grouped.setdefault((problem(row), row["dtype"]), {})[row["candidate"]] = row
    header = ["problem", *(head for name in ours for head in (name, "÷ SDPA", "error")), *peers]
    lines = []
    for (what, dtype), by_name in grouped.items():
        cells = [f"{what} {dtype}"]
        for name in ours:
            row = by_name.get(name)
            cells += [rate(row), f"**{ratio(row['speedup'].get('torch SDPA'))}**", error(row)] if row else ["–"] * 3
        cells += [rate(by_name[name]) if name in by_name else "–" for name in peers]
        lines.append(cells)
    return markdown(header, lines)


def _peer_ratio(row: Row) -> str:
    return ", ".join(f"{ratio(value)} over {peer}" for peer, value in row["speedup"].items())


def plots() -> str:
    """The speed plots of machines with committed rows."""
    found = sorted(store.RESULTS.glob("*/cpu.svg")) + sorted(store.RESULTS.glob("*/cuda.svg"))
    return "\n".join(f"![speed on {path.parent.name}]({path.relative_to(store.ROOT)})" for path in found)


SECTIONS: dict[str, Callable[[], str]] = {
    "kernels": kernels_table,
    "plots": plots,
    **{name: (lambda name=name: preset_table(name)) for name in PRESETS},
}


def rewrite(text: str) -> tuple[str, list[str]]:
    """`text` with every marked section made anew, and the names of those that changed."""
    changed = []

    def fill(match: re.Match[str]) -> str:
        name = match["name"]
        if name not in SECTIONS:
            raise ValueError(f"README.md has a section {name!r}; allowed: {', '.join(SECTIONS)}")
        fresh = f"\n{SECTIONS[name]()}\n"
        if fresh != match["body"]:
            changed.append(name)
        return f"<!-- qflash:{name} -->{fresh}<!-- /qflash:{name} -->"

    pattern = r"<!-- qflash:(?P<name>[a-z-]+) -->(?P<body>.*?)<!-- /qflash:(?P=name) -->"
    return re.sub(pattern, fill, text, flags=re.DOTALL), changed


def update(check_only: bool = False) -> list[str]:
    """Bring README.md up to date (or only look); the names of the sections that were not."""
    text, changed = rewrite(README.read_text())
    if changed and not check_only:
        README.write_text(text)
    return changed
