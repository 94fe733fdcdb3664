"""The ladder in docs/learn.md: one problem, every rung, its rate and the utilization of each unit."""

from __future__ import annotations

from bench import profiles
from bench import rows as store
from bench.tables import Row, markdown, rate, ratio

# Rung -> the one it is compared with.
BELOW = {
    "unfused": None,
    "fa": "unfused",
    "fa_warps": "fa",
    "fa_tc": "fa_warps",
    "fa_mma": "fa_tc",
    "fa_int8": "fa_mma",
    "sm90_fwd": "fa_mma",
    "sm90_int8": "sm90_fwd",
}
CASE = profiles.CASE
UNITS = ("FMA pipe", "tensor pipe", "DRAM throughput")
NONE = "No rows are committed yet; `qflash bench ladder` makes them."


def _rows() -> dict[str, dict[str, Row]]:
    """By machine and kernel: the rows of the ladder on the problem that is also profiled."""
    problem = (CASE.batch, CASE.q_len, CASE.head_dim, CASE.causal)
    found = {}
    for machine, rows in store.committed("ladder").items():
        same = [row for row in rows if (row["B"], row["Tq"], row["D"], row["causal"]) == problem]
        found[machine] = {row["candidate"].removeprefix("qflash "): row for row in same if row["kernel"]}
    return found


def _longest(kernel: str, machine: str) -> dict[str, tuple[float, str]] | None:
    """The profile of a kernel's longest launch."""
    profile = profiles.committed(kernel).get(profiles.folder_of(machine))
    if profile is None:
        return None
    return max(profile.launches.values(), key=lambda values: values[profiles.DURATION][0])


def _busy(values: dict[str, tuple[float, str]] | None, unit: str) -> str:
    found = values.get(profiles.FIGURES[unit]) if values else None
    return f"{found[0]:.0f} %" if found else "–"


def _over(kernel: str, rows: dict[str, Row]) -> str | None:
    """How many times faster a rung is than the one below, by their medians."""
    below = BELOW[kernel]
    if below is None or below not in rows:
        return None
    return ratio(rows[below]["us"]["p50"] / rows[kernel]["us"]["p50"])


def table() -> str:
    """Every rung on one problem."""
    parts = []
    for machine, rows in _rows().items():
        lines = []
        for kernel, below in BELOW.items():
            if kernel not in rows:
                continue
            values, over = _longest(kernel, machine), _over(kernel, rows)
            busy = [_busy(values, unit) for unit in UNITS]
            lines.append([f"[{kernel}](#{kernel})", rate(rows[kernel]), f"{over} {below}" if over else "", *busy])
        where = next(iter(rows.values()))["gpu"] if rows else machine
        header = ["rung", "rate", "faster than the rung below", *UNITS]
        parts.append(f"{where}, {profiles.describe(CASE)}:\n\n{markdown(header, lines)}")
    return "\n\n".join(parts) or NONE


def sentence(kernel: str) -> str:
    """A rung's rate, and what its warps wait for."""
    parts = []
    for machine, rows in _rows().items():
        if kernel not in rows:
            continue
        over = _over(kernel, rows)
        faster = f", {over} the rate of `{BELOW[kernel]}`" if over else ""
        said = f"It reaches **{rate(rows[kernel])}**{faster} ({rows[kernel]['gpu']}, {profiles.describe(CASE)})."
        values = _longest(kernel, machine)
        if values:
            busy = ", ".join(f"{unit} {_busy(values, unit)}" for unit in UNITS)
            said += f" ncu measures: {busy}. Its warps stall most on: {profiles.stalls(values, 3)} (cycles)."
        parts.append(said)
    return "\n\n".join(parts) or NONE
