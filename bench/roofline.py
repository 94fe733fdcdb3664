"""The roofline of a GPU with every profiled kernel on it: FLOP per DRAM byte as ncu counted them, FLOP/s as timed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from bench import profiles
from bench import rows as store
from bench.presets import LADDER


@dataclass(frozen=True)
class Limit:
    """A roof. `rate` in TFLOP/s, or in TB/s for memory."""

    name: str
    rate: float
    source: str


# Roofs by the folder of profiles/. Measured ones were measured on that GPU; the others follow from its data sheet.
MEMORY = {"h200": Limit("DRAM, copy", 4.27, "measured, device-to-device copy, read and written bytes")}
COMPUTE = {
    "h200": (
        Limit("bf16 wgmma", 912, "measured, operands in shared memory, random data, sustained"),
        Limit("float32 FMA", 59, "132 SMs x 128 lanes x 2 FLOP at 1.755 GHz"),
    )
}


@dataclass(frozen=True)
class Point:
    """A kernel on the plot."""

    kernel: str
    flop_per_byte: float
    tflops: float
    timed: bool  # from a committed row; else from ncu's own duration


def points(folder: str) -> list[Point]:
    """Every rung with a profile in profiles/<folder>, in the order of the ladder."""
    case = profiles.CASE
    flop = store.flop(case, "forward")
    found = []
    for kernel in LADDER:
        profile = profiles.committed(kernel).get(folder)
        if profile is None or not profile.total(*profiles.DRAM):
            continue
        timed = timed_tflops(kernel, folder)
        rate = timed if timed is not None else flop / profile.total(profiles.DURATION) / 1e3
        found.append(Point(kernel, flop / profile.total(*profiles.DRAM), rate, timed is not None))
    return found


def timed_tflops(kernel: str, folder: str) -> float | None:
    """TFLOP/s of the profiled problem in the ladder's committed rows."""
    wanted = store.problem(profiles.CASE, "forward")
    for rows in store.committed("ladder").values():
        for row in rows:
            if row["kernel"] == kernel and profiles.folder_of(row["gpu"]) == folder and wanted.items() <= row.items():
                return row["gflops"] / 1e3
    return None


def draw(folder: str, path: Path) -> Path:
    """The roofline of profiles/<folder> as an SVG."""
    import matplotlib

    matplotlib.use("agg")
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "qflash", "font.size": 9})
    import matplotlib.pyplot as plt

    shown = points(folder)
    if not shown or folder not in MEMORY:
        raise ValueError(
            f"no roofline for {folder!r}: it needs profiles/{folder}/<kernel>.csv and limits in bench/roofline.py"
        )
    memory = MEMORY[folder].rate
    left, right = 1.0, max(1e4, 10 * max(point.flop_per_byte for point in shown))
    figure, axis = plt.subplots(figsize=(8, 5), layout="constrained")
    for limit in COMPUTE[folder]:
        ridge = limit.rate / memory
        axis.plot([ridge, right], [limit.rate, limit.rate], color="#475569", linewidth=1)
        axis.annotate(
            f"{limit.name}, {limit.rate:g} TFLOP/s", (right, limit.rate), ha="right", va="bottom", color="#475569"
        )
    top = max(limit.rate for limit in COMPUTE[folder])
    axis.plot([left, top / memory], [left * memory, top], color="#475569", linewidth=1)
    axis.annotate(
        f"{MEMORY[folder].name}, {memory:g} TB/s", (16 * left, 17 * left * memory), ha="right", color="#475569"
    )
    for index, point in enumerate(shown):
        axis.scatter(point.flop_per_byte, point.tflops, color="#c2410c", zorder=3)
        label = f"{point.kernel}, {point.tflops:.3g}" + ("" if point.timed else " under ncu")
        side = -1 if index % 2 else 1  # neighbours on the ladder often lie close: their names go to different sides
        place = {"xytext": (6 * side, 3), "textcoords": "offset points", "ha": "left" if side > 0 else "right"}
        axis.annotate(label, (point.flop_per_byte, point.tflops), color="#7c2d12", **place)
    axis.set(xscale="log", yscale="log", xlim=(left, right), ylim=(1, 2 * top))
    axis.set_xlabel("FLOP per byte of DRAM traffic (4·B·H·T²·D over the bytes ncu counted)")
    axis.set_ylabel("TFLOP/s")
    axis.set_title(f"{folder}: {profiles.describe(profiles.CASE)}", fontsize=9)
    axis.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
    return path
