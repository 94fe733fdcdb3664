"""Tables of the README and the kernel pages, made from committed rows between `<!-- qflash:NAME -->` markers."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from bench import rows as store
from bench.presets import PRESETS
from qflash.dispatch import KERNELS

PAGES = (store.ROOT / "README.md", *sorted((store.ROOT / "docs" / "kernels").glob("*.md")))
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
    header = ["problem", *(head for name in ours for head in (name, "× SDPA", "error")), *peers]
    lines = []
    for (what, dtype), by_name in grouped.items():
        cells = [f"{what} {dtype}"]
        for name in ours:
            row = by_name.get(name)
            cells += [rate(row), f"**{ratio(row['speedup'].get('torch SDPA'))}**", error(row)] if row else ["–"] * 3
        cells += [rate(by_name[name]) if name in by_name else "–" for name in peers]
        lines.append(cells)
    return markdown(header, lines)


def kernel_table(name: str) -> str:
    """Every committed row of one kernel, machine by machine."""
    parts = []
    for preset in PRESETS.values():
        if name not in preset.kernels or preset.kind == "overhead":
            continue
        for rows in store.committed(preset.name).values():
            lines = [
                [problem(row), row["dtype"], time(row), rate(row), error(row)]
                + [ratio(row["speedup"].get(peer)) for peer in ("torch SDPA", "torch naive")]
                for row in rows
                if row["kernel"] == name
            ]
            header = ["problem", "dtype", "time", "rate", "error", "× SDPA", "× naive"]
            parts.append(f"{source(rows[0])}\n\n{markdown(header, lines)}")
    return "\n\n".join(parts) or "No rows are committed yet."


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
    **{f"kernel-{row.name}": (lambda name=row.name: kernel_table(name)) for row in KERNELS},
}


def rewrite(text: str) -> tuple[str, list[str]]:
    """`text` with every marked section made anew, and the names of those that changed."""
    changed = []

    def fill(match: re.Match[str]) -> str:
        name = match["name"]
        if name not in SECTIONS:
            raise ValueError(f"a page has a section {name!r}; allowed: {', '.join(SECTIONS)}")
        fresh = f"\n{SECTIONS[name]()}\n"
        if fresh != match["body"]:
            changed.append(name)
        return f"<!-- qflash:{name} -->{fresh}<!-- /qflash:{name} -->"

    pattern = r"<!-- qflash:(?P<name>[a-z0-9_-]+) -->(?P<body>.*?)<!-- /qflash:(?P=name) -->"
    return re.sub(pattern, fill, text, flags=re.DOTALL), changed


def update(check_only: bool = False) -> list[str]:
    """Bring every page up to date (or only look); "page: section" for those that were not."""
    stale = []
    for page in PAGES:
        text, changed = rewrite(page.read_text())
        stale += [f"{page.relative_to(store.ROOT)}: {name}" for name in changed]
        if changed and not check_only:
            page.write_text(text)
    return stale
