"""float32 and integer arithmetic that the replays share."""

from __future__ import annotations

import numpy as np

LEVELS = 127  # integers run from -127 to 127
NO_AMPLITUDE = np.float32(2.0**-100)  # if all magnitudes are below this, everything quantizes to 0
LOG2E = np.float32(1.4426950408889634)
LN2 = 0.6931471805599453


def fma(a, b, c) -> np.ndarray:
    """float32 a·b + c rounded once: the product is exact in float64."""
    return (np.asarray(a, np.float64) * b + np.asarray(c, np.float64)).astype(np.float32)


def inverse_of(amplitude: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(whether anything is nonzero, LEVELS / amplitude if so, else 0)."""
    usable = amplitude >= NO_AMPLITUDE
    levels = np.float32(LEVELS)
    return usable, np.where(usable, levels / np.where(usable, amplitude, levels), np.float32(0))
