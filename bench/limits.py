"""Upper bounds of a GPU's performance: the roofs in rooflines and speed plots."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Limit:
    """A roof. `rate` in TFLOP/s, or in TB/s for memory."""

    name: str
    rate: float
    source: str


# By the folder of profiles/. Measured ones were measured on that GPU; the others follow from its data sheet.
_WGMMA = "measured, m64n128 wgmma, operands in shared memory, two warpgroups per SM, random data, sustained"
MEMORY = {"h200": Limit("DRAM, copy", 4.27, "measured, device-to-device copy, read and written bytes")}
INT8 = {"h200": Limit("INT8 tensor cores", 1761, _WGMMA)}
SIXTEEN_BITS = {"h200": Limit("16-bit tensor cores", 912, _WGMMA)}
FLOAT32 = {"h200": Limit("float32 FMA", 59, "132 SMs x 128 lanes x 2 FLOP at 1.755 GHz")}


def compute(folder: str) -> list[Limit]:
    """Every roof of a GPU's arithmetic, the highest first."""
    return [roofs[folder] for roofs in (INT8, SIXTEEN_BITS, FLOAT32) if folder in roofs]


def of_rows(folder: str, dtype: str, quantized: bool) -> list[Limit]:
    """The roofs for rows of one dtype; quantized: some of them multiply in 8 bits."""
    kinds = [FLOAT32] if dtype == "float32" else [SIXTEEN_BITS, *([INT8] if quantized else [])]
    return [roofs[folder] for roofs in kinds if folder in roofs]
