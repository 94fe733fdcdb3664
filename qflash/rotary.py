"""Rotary position embedding: the tables and their layout."""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, Generic

import numpy as np
from numpy.typing import NDArray

from qflash.call.words import check_flag
from qflash.typing import ArrayT_co, Flag, Integer, Lengths, Number


@dataclass(frozen=True, slots=True, eq=False)
class Rope(Generic[ArrayT_co]):
    """Rotary position embedding, applied by `attention` to q and k as it loads them, or by `rope` to one array.

    Args:
        cos: `[positions, rotary_dim / 2]`, in the framework and on the device of q. Channels from `rotary_dim` on are
            unchanged. Contiguous float32 tables are read directly; others are converted in every call.
        sin: the same.
        interleaved: False pairs channel p with p + rotary_dim/2 (Llama, NeoX), True pairs 2p with 2p+1 (GPT-J).
        positions_q: int32 `[T]` or `[B, T]` (`[total]` for packed sequences), replaces the default position of query
            i, `i + Tk - Tq` (with `kv_lens`, `i + kv_lens[b] - Tq`). A negative position rotates backwards.
        positions_k: the same for keys. By default key j is at position j.

    Example:
        >>> import numpy as np
        >>> import qflash
        >>> rope = qflash.Rope(*qflash.rope_tables(128, 64))
        >>> q = np.random.default_rng(0).standard_normal((1, 128, 2, 64), np.float32)
        >>> qflash.attention(q, q, q, causal=True, rope=rope).shape
        (1, 128, 2, 64)
    """

    cos: ArrayT_co
    sin: ArrayT_co
    interleaved: Flag = False
    positions_q: Lengths | None = None
    positions_k: Lengths | None = None

    def __post_init__(self) -> None:
        check_flag("interleaved", self.interleaved)
        # JAX must have this class registered before jit sees an instance, possibly before the first attention call.
        if type(self.cos).__module__.partition(".")[0] in ("jax", "jaxlib"):
            import qflash.frontends.jax  # noqa: F401

    @classmethod
    def from_hf(cls, cos: Any, sin: Any, *, interleaved: Flag = False) -> Rope[Any]:
        """A Rope from tables as Hugging Face models make them, `[positions, rotary_dim]` or with a batch of 1 before.

        Those contain every angle twice: in adjacent channels if `interleaved`, else again in the second half, as in
        Llama. Row t becomes position t, so the tables must be those of positions 0, 1, 2 and so on.
        """
        check_flag("interleaved", interleaved)
        halves = []
        for name, table in (("cos", cos), ("sin", sin)):
            shape = tuple(getattr(table, "shape", ()))
            if len(shape) == 3 and shape[0] == 1:
                table = table[0]
            elif len(shape) != 2:
                raise ValueError(
                    f"{name} has shape {shape}; allowed: [positions, rotary_dim] or [1, positions, rotary_dim]"
                )
            if shape[-1] < 2 or shape[-1] % 2:
                raise ValueError(f"{name} has {shape[-1]} columns; allowed: an even number, each angle twice")
            halves.append(table[:, ::2] if interleaved else table[:, : shape[-1] // 2])
        return cls(halves[0], halves[1], interleaved)


def rope_tables(
    positions: Integer, rotary_dim: Integer, base: Number = 10000.0
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """The standard tables (cos, sin), float32 `[positions, rotary_dim / 2]`: angle position · base^(-2p/rotary_dim).

    Example:
        >>> import qflash
        >>> cos, sin = qflash.rope_tables(4096, 64)
        >>> cos.shape, float(cos[0, 0]), float(sin[0, 0])
        ((4096, 32), 1.0, 0.0)
    """
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
