"""The words of a call (causal, scale, window, ...): plain Python values, because they select and configure a kernel."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax


def require_known(words: Mapping[str, Any]) -> None:
    """Reject a word that is or contains a jax.Array, with an error that says how to pass a plain value."""
    for name, value in words.items():
        arrays = [x for x in (value if isinstance(value, (tuple, list)) else [value]) if isinstance(x, jax.Array)]
        if not arrays:
            continue
        if any(isinstance(x, jax.core.Tracer) for x in arrays):
            raise TypeError(
                f"{name} is traced; allowed: a plain value that is known when the program is traced, for instance an "
                f"argument that is static, jax.jit(..., static_argnames={name!r})"
            )
        raise TypeError(f"{name} is a jax.Array; allowed: a plain value, for instance {name}.tolist()")
