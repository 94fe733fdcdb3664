"""Rotary position embedding: the tables and how they are read."""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Generic

import numpy as np
from numpy.typing import NDArray

from qflash.problem import require_flag
from qflash.typing import ArrayT_co, Flag, Integer, Number


@dataclass(frozen=True, slots=True, eq=False)
class Rope(Generic[ArrayT_co]):
    """Rotary embedding that `attention` applies to q and k while it loads them.

    cos, sin: `[positions, rotary_dim / 2]`, of the same framework and device as q. Channels from `rotary_dim` on
    pass through. `interleaved=False` pairs channel p with p + rotary_dim/2 (Llama, NeoX); True pairs 2p with 2p+1
    (GPT-J). Key j stands at position j and query i at `i + Tk - Tq` (with `kv_lens`, at `i + kv_lens[b] - Tq`);
    `positions_q`/`positions_k`, int32 `[T]` or `[B, T]` (`[total]` for packed tensors), override that. A negative
    position turns backwards.
    """

    cos: ArrayT_co
    sin: ArrayT_co
    interleaved: Flag = False
    positions_q: ArrayT_co | None = None
    positions_k: ArrayT_co | None = None

    def __post_init__(self) -> None:
        require_flag("interleaved", self.interleaved)
        # JAX must know this class before jit sees an instance, which may be before the first call of attention.
        if type(self.cos).__module__.partition(".")[0] in ("jax", "jaxlib"):
            import qflash.frontends.jax  # noqa: F401


def rope_tables(
    positions: Integer, rotary_dim: Integer, base: Number = 10000.0
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """The usual tables (cos, sin), float32 `[positions, rotary_dim / 2]`: angle position · base^(-2p/rotary_dim)."""
    for name, value in (("positions", positions), ("rotary_dim", rotary_dim)):
        if isinstance(value, bool) or not isinstance(value, Integral):
            raise TypeError(f"{name} is {value!r}; allowed: an int")
    if isinstance(base, bool) or not isinstance(base, Real):
        raise TypeError(f"base is {base!r}; allowed: a number above 0")
    if not 0 < base < math.inf:
        raise ValueError(f"base is {base}; allowed: a number above 0")
    if positions < 0:
        raise ValueError(f"positions is {positions}; allowed: 0 or more")
    if rotary_dim < 2 or rotary_dim % 2:
        raise ValueError(f"rotary_dim is {rotary_dim}; allowed: an even number, 2 or more")
    frequency = base ** (-np.arange(0, rotary_dim, 2, dtype=np.float64) / rotary_dim)
    angle = np.arange(positions, dtype=np.float64)[:, None] * frequency
    return np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
