"""Cells and tables of Markdown, made from rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

from bench import rows as store

Row = dict[str, Any]
FP8 = "FlashAttention 3 FP8"  # a peer of fewer bits: never the best peer of quantized kernels


def problem(row: Row) -> str:
    """A row's problem in a few words."""
    if row["kind"] == "decode":
        return f"B={row['B']} Tq=1 Tk={row['Tk']} Hq={row['Hq']} Hkv={row['Hkv']} D={row['D']}"
    if row["kind"] == "mixed":
        return f"B={row['B']} Tq=1 Tk={row['shortest']}–{row['longest']} Hq={row['Hq']} Hkv={row['Hkv']} D={row['D']}"
    if row["kind"] == "write":
        return f"B={row['B']} T={row['Tq']} Hkv={row['Hkv']} D={row['D']}"
    if row["kind"] == "overhead":
        return f"B={row['B']} T={row['Tq']} H={row['Hq']} D={row['D']}"
    return f"B={row['B']} T={row['Tq']} H={row['Hq']} D={row['D']} {'causal' if row['causal'] else 'full'}"


def rate(row: Row) -> str:
    if "gbs" in row:
        return f"{row['gbs']:.1f} GB/s"
    if "gflops" in row:
        return f"{row['gflops'] / 1e3:.1f} TFLOP/s" if row["gflops"] >= 1e4 else f"{row['gflops']:.0f} GFLOP/s"
    return ""


def error(row: Row) -> str:
    return "" if row["rel_l2"] is None else f"{row['rel_l2']:.0e}"


def time(row: Row) -> str:
    us = row["us"]["p50"]
    return f"{us:.1f} µs" if us < 1e3 else f"{us / 1e3:.2f} ms"


def ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}×"


def candidate(row: Row) -> str:
    """The candidate's name, in bold for qflash."""
    return f"**{row['candidate']}**" if row["kernel"] else row["candidate"]


def markdown(header: list[str], lines: list[list[str]]) -> str:
    rule = ["---", *("---:" for _ in header[1:])]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (header, rule, *lines))


def unrepeated(lines: Iterable[list[str]]) -> list[list[str]]:
    """Lines whose first cell is empty if it repeats that of the line before."""
    found, previous = [], None
    for first, *others in lines:
        found.append([first if first != previous else "", *others])
        previous = first
    return found


def source(row: Row) -> str:
    """The provenance of rows, in a sentence."""
    where = row["gpu"] or f"{row['cpu']} ({row['isa']}, {row['threads']} threads)"
    driver = f", driver {row['driver']}" if row["driver"] else ""
    peers = ", ".join(f"{name} {row['versions'][name]}" for name in ("torch", "jax") if name in row["versions"])
    return f"{where}{driver}; {peers}; commit {row['commit']}."


def best_peer(row: Row) -> tuple[str, float] | None:
    """The fastest peer of at least 16 bits for a row of ours, and how many times faster ours is."""
    peers = {peer: value for peer, value in row["speedup"].items() if not peer.startswith("qflash") and peer != FP8}
    return min(peers.items(), key=lambda item: item[1]) if peers else None


def peers_of(rows: list[Row]) -> list[str]:
    """The peers that the rows have speed-ups over, in the order of bench.attention.OVER."""
    return list(dict.fromkeys(peer for row in rows for peer in row["speedup"]))


def geometric_means(rows: list[Row]) -> list[str]:
    """A sentence per kernel and peer: the speed-up over all problems that both ran."""
    sentences = []
    for name in dict.fromkeys(row["candidate"] for row in rows if row["kernel"]):
        for peer in peers_of(rows):
            ratios = [row["speedup"][peer] for row in rows if row["candidate"] == name and peer in row["speedup"]]
            if len(ratios) > 1:
                mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
                among = f"geometric mean of {len(ratios)} problems, {min(ratios):.2f} to {max(ratios):.2f}"
                sentences.append(f"{name}: {ratio(mean)} {peer} ({among})")
    return sentences


def left_out(rows: list[Row]) -> str:
    """The candidates that did not run all problems, and why, in a sentence; empty if all did."""
    absent = dict.fromkeys(f"{name} ({why})" for row in rows for name, why in row.get("left_out", {}).items())
    return f"Left out: {'; '.join(absent)}." if absent else ""


def by_machine(
    preset: str,
    table: Callable[[list[Row]], str],
    none: str,
    machine: str | None = None,
    keep: Callable[[Row], bool] = lambda row: True,
) -> str:
    """The committed rows of a preset that `keep` selects, one table per machine that has some; `none` without any."""
    chosen = ([row for row in found if keep(row)] for found in store.committed(preset, machine).values())
    parts = [f"{source(found[0])}\n\n{table(found)}" for found in chosen if found]
    return "\n\n".join(parts) or f"No rows are committed yet; {none}"
