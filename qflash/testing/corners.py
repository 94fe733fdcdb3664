"""scale and softcap at the limits of attention, on the CPU: for this process, and for one with other settings."""

from __future__ import annotations

import numpy as np

import qflash
from qflash import _native, reference

# (scale, softcap) at limits that `check_options` allows, so that no product overflows, and none that matters
# underflows;
ENDS = [(None, 2.0**100), (2.0**-26, 2.0**100), (1.0, 2.0**-100), (2.0**100, 1.0), (2.0**100, 2.0**100)]
# at all corners, and large softcaps among usual ones.
CORNERS = [
    *ENDS,
    (2.0**100, None),
    (-(2.0**100), None),
    (2.0**-140, None),
    (None, 2.0**-100),
    (0.0, 2.0**-100),
    (None, 1e6),
]


def arrays(length: int = 40) -> tuple[np.ndarray, ...]:
    """q with a row of zeros, k, v."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, length, 2, 16)).astype(np.float32) for _ in range(3))
    q[0, 3] = 0
    return q, k, v


def weights_dtype(precision: str | None, dtype: str) -> str:
    """What the weights are rounded to before they are multiplied by v: with AMX, cpu_int8 multiplies in bfloat16."""
    return "bfloat16" if precision == "int8" and _native.cpu_isa() == "amx" else dtype


def check_corners(precision: str | None) -> None:
    """Check that every corner gives the result of the definition, and that a query of zeros gives the mean of v."""
    q, k, v = arrays()
    for scale, softcap in CORNERS:
        where = f"scale {scale}, softcap {softcap}"
        out, lse = qflash.attention(q, k, v, scale=scale, softcap=softcap, precision=precision, return_lse=True)
        assert np.isfinite(out).all() and np.isfinite(lse).all(), where
        # Equal weights are exactly 1 until the sum is known, so only v is rounded: by at most 2^-9 of itself.
        atol = 1e-6 if weights_dtype(precision, "float32") == "float32" else 2**-9 * float(np.abs(v).mean())
        np.testing.assert_allclose(out[0, 3], v[0].mean(0), atol=atol, err_msg=where)
        np.testing.assert_allclose(lse[0, :, 3], np.log(40), rtol=1e-6, err_msg=where)
        if scale is not None and abs(scale) > 1e9:
            continue  # one step of float32 in a score is more than a softmax can resolve
        want, want_lse = reference.attention(q, k, v, scale=scale, softcap=softcap)
        error = np.linalg.norm(out - want) / np.linalg.norm(want)
        assert error <= (2e-6 if precision is None else 2e-2), f"{where}: error {error:.3g}"
        np.testing.assert_allclose(lse, want_lse, atol=2e-5 if precision is None else 0.1, err_msg=where)
