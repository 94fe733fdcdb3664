"""Bar charts of rows: problems along the axis, one colour per candidate, taller is faster."""

from __future__ import annotations

from itertools import cycle
from pathlib import Path
from typing import Any

from bench import tables
from qflash import machine

# qflash in strong colours, peers in quiet ones.
OURS = ("#c2410c", "#f59e0b", "#7c2d12")
PEERS = ("#475569", "#94a3b8", "#cbd5e1", "#64748b", "#a1a1aa", "#d4d4d8", "#e2e8f0")


def draw(rows: list[dict[str, Any]], path: Path) -> Path | None:
    """An SVG of `rows` at `path`; None where matplotlib is not installed, or no row has a rate to draw."""
    # What is measured without a part of its work ("kernel alone") is for the tables.
    drawn = [row for row in rows if row["kind"] in ("forward", "train", "decode") and "(" not in row["candidate"]]
    panels = list(dict.fromkeys((row["kind"], row["dtype"]) for row in drawn))
    if not panels or machine.version("matplotlib") is None:
        return None
    import matplotlib

    matplotlib.use("agg")
    # Text stays text and ids are stable: small files that differ only when the rows do.
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "qflash", "font.size": 9})
    import matplotlib.pyplot as plt

    problems = max(len({_label(row) for row in drawn if _panel(row) == panel}) for panel in panels)
    size = (max(10, 1.0 * problems), 3.2 * len(panels))
    figure, axes = plt.subplots(len(panels), 1, figsize=size, squeeze=False, layout="constrained")
    for axis, panel in zip(axes[:, 0], panels, strict=True):
        _bars(axis, [row for row in drawn if _panel(row) == panel], *panel)
    figure.suptitle(tables.source(rows[0]), fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
    return path


def _panel(row: dict[str, Any]) -> tuple[str, str]:
    return row["kind"], row["dtype"]


def _bars(axis, rows: list[dict[str, Any]], kind: str, dtype: str) -> None:
    unit = _unit(rows, kind)
    _grouped(axis, list(dict.fromkeys(map(_label, rows))), rows, _label, lambda row: _height(row, kind, unit))
    axis.set_ylabel(f"{dtype}, {unit}")


def _grouped(axis, groups: list[str], rows: list[dict[str, Any]], group_of, height_of) -> None:
    """A bar per row, those of a group side by side, one colour per candidate."""
    names = list(dict.fromkeys(row["candidate"] for row in rows))
    ours = [name for name in names if name.startswith("qflash")]
    peers = [name for name in names if name not in ours]
    colours = dict(zip(ours, cycle(OURS), strict=False)) | dict(zip(peers, cycle(PEERS), strict=False))
    width = 0.85 / len(names)
    for index, name in enumerate(names):
        heights = {group_of(row): height_of(row) for row in rows if row["candidate"] == name}
        places = [groups.index(group) + (index - (len(names) - 1) / 2) * width for group in heights]
        axis.bar(places, list(heights.values()), width, label=name, color=colours[name])
    axis.set_xticks(range(len(groups)), groups)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, ncols=min(len(names), 7), loc="lower center", bbox_to_anchor=(0.5, 1.0))


def _label(row: dict[str, Any]) -> str:
    if row["kind"] == "decode":
        return f"Tk={row['Tk']}"
    return f"T={row['Tq']}\nD={row['D']}\n{'causal' if row['causal'] else 'full'}"


def _unit(rows: list[dict[str, Any]], kind: str) -> str:
    if kind == "decode":
        return "GB/s of K and V"
    return "TFLOP/s" if max(row["gflops"] for row in rows) >= 1e4 else "GFLOP/s"


def _height(row: dict[str, Any], kind: str, unit: str) -> float:
    if kind == "decode":
        return row["gbs"]
    return row["gflops"] / 1e3 if unit == "TFLOP/s" else row["gflops"]


def draw_errors(rows: list[dict[str, Any]], path: Path) -> Path | None:
    """An SVG of accuracy rows at `path`: inputs along the axis, shorter is better; None where matplotlib is absent."""
    if machine.version("matplotlib") is None:
        return None
    import matplotlib

    matplotlib.use("agg")
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "qflash", "font.size": 9})
    import matplotlib.pyplot as plt

    inputs = list(dict.fromkeys(_input(row) for row in rows))
    figure, axis = plt.subplots(figsize=(10, 3.2), layout="constrained")
    _grouped(axis, inputs, rows, _input, lambda row: row["rel_l2"])
    axis.set(yscale="log", ylabel="relative L2 error, bfloat16 inputs")
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
    return path


def _input(row: dict[str, Any]) -> str:
    return f"{row['input']}\n{'causal' if row['causal'] else 'full'}"
