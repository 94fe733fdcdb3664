"""The roofline of a GPU with every rung of the ladder on it, at several lengths.

A rung's line shows all lengths of its rows, at the FLOP per byte of a problem: q, k, v and the output, each moved once.
A hollow marker shows one of these problems at the FLOP per byte of DRAM that ncu counted: its distance from the line
shows how much more than that the kernel moves.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench import limits, profiles, tables
from bench import rows as store
from bench.drawing import labels, page
from bench.drawing.legend import paint
from bench.drawing.page import plain_log_ticks
from bench.drawing.sections import short
from bench.drawing.style import PAPER, QUIET, looks
from bench.presets import LADDER
from qflash.testing import Case

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Row = dict[str, Any]
HEIGHT = 520


@dataclass(frozen=True)
class Point:
    """A kernel on the plot."""

    kernel: str
    flop_per_byte: float
    tflops: float
    timed: bool  # from a committed row; else from ncu's own duration
    length: int


def points(folder: str) -> list[Point]:
    """Every rung with a profile in profiles/<folder>, in the order of the ladder."""
    case = profiles.CASE
    flop = store.flop(case, "forward")
    wanted = store.problem(case, "forward")
    found = []
    for kernel in LADDER:
        profile = profiles.committed(kernel).get(folder)
        if profile is None or not profile.total(*profiles.DRAM):
            continue
        timed = [row["gflops"] / 1e3 for row in timed_rows(kernel, folder) if wanted.items() <= row.items()]
        rate = timed[0] if timed else flop / profile.total(profiles.DURATION) / 1e3
        found.append(Point(kernel, flop / profile.total(*profiles.DRAM), rate, bool(timed), case.k_len))
    return found


def timed_rows(kernel: str, folder: str) -> list[Row]:
    """The ladder's committed rows of a kernel that differ from the profiled problem only in their lengths."""
    wanted = {name: getattr(profiles.CASE, field) for name, field in (("D", "head_dim"), ("dtype", "dtype"))}
    wanted |= {"causal": profiles.CASE.causal, "kernel": kernel}
    every = (row for rows in store.committed("ladder").values() for row in rows)
    return [row for row in every if profiles.folder_of(row["gpu"]) == folder and wanted.items() <= row.items()]


def allowed(row: Row) -> float:
    """FLOP per byte of a row's problem if q, k, v and the output are moved once."""
    sizes = {"q_len": row["Tq"], "k_len": row["Tk"], "q_heads": row["Hq"], "kv_heads": row["Hkv"]}
    case = Case("row", batch=row["B"], head_dim=row["D"], dtype=row["dtype"], causal=row["causal"], **sizes)
    return store.flop(case, "forward") / store.moved_bytes(case)


def lines(folder: str) -> dict[str, list[Point]]:
    """Kernel -> a point per length, in the order of the ladder."""
    found = {}
    for kernel in LADDER:
        own = [Point(kernel, allowed(row), row["gflops"] / 1e3, True, row["Tk"]) for row in timed_rows(kernel, folder)]
        if own:
            found[kernel] = sorted(own, key=lambda point: point.flop_per_byte)
    return found


def sources(folder: str) -> tuple[Path, ...]:
    """The files that the roofline of profiles/<folder> is made from."""
    counted = [profiles.PROFILES / folder / f"{kernel}.csv" for kernel in LADDER]
    return (*filter(Path.exists, counted), *sorted(store.RESULTS.glob("*/ladder.jsonl")))


def maker(folder: str) -> Callable[[], Figure]:
    """A function that draws the roofline of profiles/<folder>; ValueError if there is no data for it."""
    if folder not in limits.MEMORY or not points(folder):
        raise ValueError(
            f"no roofline for {folder!r}: it needs profiles/{folder}/<kernel>.csv and limits in bench/limits.py"
        )
    return lambda: figure(folder)


def draw(folder: str, path: Path) -> Path:
    """The roofline of profiles/<folder> as an SVG."""
    page.write(path, page.render(maker(folder), page.digest(sources(folder))))
    return path


def figure(folder: str) -> Figure:
    """The picture of a GPU's profiles and rows."""
    counted, measured = points(folder), lines(folder)
    case = profiles.CASE
    title = f"Roofline of {folder}: D = {case.head_dim}, {'causal' if case.causal else 'full'}, {case.dtype}"
    caption = f"Lines: T of the ladder's rows. Hollow: {profiles.describe(case)}, DRAM bytes as ncu counted them."
    source = next((tables.source(row) for kernel in measured for row in timed_rows(kernel, folder)), "")
    result = page.blank(HEIGHT, title, f"{caption}\n{source}" if source else caption)
    axis = result.subplots()
    axis.set(xscale="log", yscale="log", xlabel="FLOP per byte of DRAM", ylabel="TFLOP/s")
    axis.tick_params(length=3)
    everything = [*counted, *(point for line in measured.values() for point in line)]
    plain_log_ticks(axis.xaxis, (1,))
    plain_log_ticks(axis.yaxis, (1, 3))
    _roofs(axis, folder, max(point.flop_per_byte for point in everything), min(point.tflops for point in everything))
    looked = looks(f"qflash {kernel}" for kernel in LADDER)
    ends = {point.kernel: point for point in counted} | {kernel: line[-1] for kernel, line in measured.items()}
    for kernel, line in measured.items():
        axis.plot([p.flop_per_byte for p in line], [p.tflops for p in line], **paint(looked[f"qflash {kernel}"]))
    for point in counted:
        style = paint(looked[f"qflash {point.kernel}"], line=False) | {"markerfacecolor": PAPER.light, "markersize": 6}
        axis.plot(point.flop_per_byte, point.tflops, **style)
        if point.kernel in measured:
            _join(axis, point, measured[point.kernel], style["color"])
    names = [f"{kernel}, {point.tflops:.3g}" + ("" if point.timed else " under ncu") for kernel, point in ends.items()]
    _lengths(axis, min(measured.values(), key=lambda line: line[-1].tflops, default=[]))
    labels.at_ends(axis, names, [(point.flop_per_byte, point.tflops) for point in ends.values()])
    return result


def _lengths(axis: Axes, line: list[Point]) -> None:
    """The lengths, below the lowest line."""
    for index, point in enumerate(line):
        text = f"T = {short(point.length)}" if index == 0 else short(point.length)
        place = {"xytext": (0, -7), "textcoords": "offset points", "ha": "center", "va": "top"}
        axis.annotate(text, (point.flop_per_byte, point.tflops), **place, color=QUIET.light)


def _join(axis: Axes, counted: Point, line: list[Point], colour: str) -> None:
    """A faint line from ncu's figure to the same problem on its rung's line."""
    for point in (point for point in line if point.length == counted.length):
        ends = [counted.flop_per_byte, point.flop_per_byte]
        axis.plot(ends, [counted.tflops] * 2, color=colour, linewidth=0.8, linestyle=":")


def _roofs(axis: Axes, folder: str, right: float, low: float) -> None:
    memory, roofs = limits.MEMORY[folder], limits.compute(folder)
    top = roofs[0].rate
    left, low = low / memory.rate / 1.5, low / 2
    axis.set(xlim=(left, 6 * right), ylim=(low, 1.6 * top))  # with space for names on the right
    axis.plot([left, top / memory.rate], [left * memory.rate, top], color=QUIET.light, linewidth=1.2)
    for roof in roofs:
        axis.plot([roof.rate / memory.rate, 1.1 * right], [roof.rate] * 2, color=QUIET.light, linewidth=1.2)
        place = {"xy": (roof.rate / memory.rate, roof.rate), "xytext": (10, 3), "textcoords": "offset points"}
        axis.annotate(f"{roof.name}, {roof.rate:g} TFLOP/s", **place, color=QUIET.light)
    middle = (left * top / memory.rate) ** 0.5
    place = {"xy": (middle, middle * memory.rate), "xytext": (-8, 0), "textcoords": "offset points"}
    axis.annotate(f"{memory.name}, {memory.rate:g} TB/s", **place, ha="right", color=QUIET.light)
