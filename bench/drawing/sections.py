"""How the rows of a preset are divided: sections with common axes, and in them a panel per head dim and mask."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from bench import limits, profiles

Row = dict[str, Any]
KINDS = ("forward", "backward", "train", "decode")
ROOMY = 5  # up to this many candidates, parts of a kernel's work ("kernel alone") are drawn too, else only tabulated
FAR = 2.5  # times the fastest row: a limit farther away would compress the rows
STEEP = 20  # fastest over slowest: above this a linear axis hides the slow ones
FEW = 2  # maximum number of lengths of a panel whose rows are bars, not lines


@dataclass(frozen=True)
class Section:
    """Rows of one preset, one kind of call and one dtype."""

    preset: str
    kind: str
    dtype: str
    rows: list[Row]

    @cached_property
    def panels(self) -> dict[str, list[Row]]:
        """Rows by the title of their panel. Panels of one length each would be nearly empty, so they are merged."""
        found: dict[str, list[Row]] = {}
        batched = self.kind == "decode"  # elsewhere the batch follows from the length
        for row in sorted(self.rows, key=lambda row: (row["D"], row["causal"], row["B"] if batched else 0)):
            found.setdefault(problem(row), []).append(row)
        if len(found) > 1 and all(len({row["Tk"] for row in rows}) == 1 for rows in found.values()):
            return {"": [row for rows in found.values() for row in rows]}
        return found

    @cached_property
    def columns(self) -> int:
        """Up to four panels are in one row. With more, the two masks of a head dim are in one column."""
        if len(self.panels) <= 4:
            return len(self.panels)
        return 4 if self.kind == "decode" else math.ceil(len(self.panels) / 2)

    def place(self, index: int) -> tuple[int, int]:
        """Row and column of a panel."""
        return divmod(index, self.columns) if self.kind == "decode" or self.depth == 1 else divmod(index, 2)[::-1]

    @cached_property
    def depth(self) -> int:
        """The number of rows of panels."""
        return math.ceil(len(self.panels) / self.columns)

    @cached_property
    def candidates(self) -> list[str]:
        return list(dict.fromkeys(row["candidate"] for row in self.rows))

    @cached_property
    def bars(self) -> bool:
        return max(len({row["Tk"] for row in rows}) for rows in self.panels.values()) <= FEW or "" in self.panels

    @cached_property
    def steep(self) -> bool:
        """Whether rates need a logarithmic axis, on which bars have no base."""
        rates = [self.rate(row) for row in self.rows]
        return not self.bars and max(rates) > STEEP * min(rates)

    @cached_property
    def unit(self) -> str:
        if self.kind == "decode":
            return "GB/s of K and V"
        return "TFLOP/s" if max(row["gflops"] for row in self.rows) >= 1e4 else "GFLOP/s"

    def rate(self, row: Row) -> float:
        if self.kind == "decode":
            return row["gbs"]
        return row["gflops"] / 1e3 if self.unit == "TFLOP/s" else row["gflops"]

    @cached_property
    def limits(self) -> list[limits.Limit]:
        """The hardware limits within reach: of arithmetic, or of memory for decoding."""
        gpu = profiles.folder_of(self.rows[0]["gpu"] or "")
        quantized = any(row["precision"] not in (None, "native") for row in self.rows)
        if self.kind == "decode":
            found = [replace(limit, rate=1e3 * limit.rate) for folder, limit in limits.MEMORY.items() if folder == gpu]
        else:
            found = limits.of_rows(gpu, self.dtype, quantized) if self.unit == "TFLOP/s" else []
        fastest = max(map(self.rate, self.rows))
        return [limit for limit in found if self.steep or limit.rate <= FAR * fastest]


def problem(row: Row) -> str:
    """What distinguishes a panel."""
    if row["kind"] == "decode":
        return f"B = {row['B']}, H = {row['Hq']}/{row['Hkv']}, D = {row['D']}"
    return f"D = {row['D']}, {'causal' if row['causal'] else 'full'}"


def short(length: int) -> str:
    """512, 1k, 16k."""
    return f"{length // 1024}k" if length % 1024 == 0 else str(length)


def is_part(row: Row) -> bool:
    """Whether it was measured without part of its work."""
    return row["kernel"] is not None and "(" in row["candidate"]


def sections(rows: list[Row]) -> list[Section]:
    """All sections that can be drawn from rows."""
    drawn = [row for row in rows if row["kind"] in KINDS]
    if len({row["candidate"] for row in drawn}) > ROOMY:
        drawn = [row for row in drawn if not is_part(row)]
    found: dict[tuple[str, str, str], list[Row]] = {}
    for row in drawn:
        found.setdefault((row["preset"], row["kind"], row["dtype"]), []).append(row)
    return [Section(*key, group) for key, group in found.items()]
