"""Results of qflash.rope against its definition: the allowed number of roundings (docs/numerics.md)."""

from __future__ import annotations

import numpy as np

from qflash import reference
from qflash.rotary import Rope

UNIT = 2.0**-24  # of float32, in which channels are rotated
STORED_UNIT = {"float32": 0.0, "float16": 2.0**-11, "bfloat16": 2.0**-8}  # of rounding to the result's dtype
_LEAST = 2.0**-25  # half a step between float16 subnormals


def check_rotated(
    got: np.ndarray, x: np.ndarray, rope: Rope, positions: np.ndarray | None = None, inverse: bool = False
) -> None:
    """A rotated channel a cos - b sin is within 2u (|a cos| + |b sin|) and one rounding; the others are x's."""
    assert (got.shape, got.dtype) == (x.shape, x.dtype)
    exact = reference.rope(x, rope, positions, inverse)
    places = positions if positions is not None else rope.positions_k
    size = _magnitudes(x, rope, None if places is None else np.abs(np.asarray(places, np.int64)))
    error = np.abs(got.astype(np.float64) - exact)
    bound = 2 * UNIT * size + STORED_UNIT[x.dtype.name] * np.abs(exact) + _LEAST
    assert (error <= bound).all(), f"{(error / bound).max():.3g} times what is allowed"
    rest = 2 * rope.cos.shape[1]
    np.testing.assert_array_equal(got[..., rest:], x[..., rest:])


def _magnitudes(x: np.ndarray, rope: Rope, places: np.ndarray | None) -> np.ndarray:
    """|a cos| + |b sin| of each channel. In each pair, one direction of rotation gives the terms of the first channel,
    the other those of the second."""
    cos, sin = (np.abs(np.asarray(table, np.float64)) for table in (rope.cos, rope.sin))
    there, back = (Rope(cos, sign * sin, rope.interleaved) for sign in (1, -1))
    whole = np.abs(x.astype(np.float64))
    return np.maximum(reference.rope(whole, there, places), reference.rope(whole, back, places))
