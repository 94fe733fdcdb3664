"""What the replays share of float32 arithmetic and of integers."""

from __future__ import annotations

import numpy as np

LEVELS = 127  # integers run from -127 to 127
NO_AMPLITUDE = np.float32(2.0**-100)  # what is below this in magnitude throughout quantizes to zeros
LOG2E = np.float32(1.4426950408889634)
LN2 = 0.6931471805599453


def fma(a, b, c) -> np.ndarray:
    """float32 a·b + c rounded once: the product is exact in float64."""
    return (np.asarray(a, np.float64) * b + np.asarray(c, np.float64)).astype(np.float32)


def inverse_of(amplitude: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(whether anything but zeros is there, LEVELS / amplitude where it is, else 0)."""
    usable = amplitude >= NO_AMPLITUDE
    levels = np.float32(LEVELS)
    return usable, np.where(usable, levels / np.where(usable, amplitude, levels), np.float32(0))
