"""shard_map's varying mesh axes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax


def vary_alike(operands: Sequence[Any]) -> list[Any]:
    """Under shard_map: mark every operand as varying over each mesh axis that any of them varies over.

    This is done outside the differentiable function, so JAX sums the gradient of an operand that all devices share.
    """
    varying = [_varying_axes(x) for x in operands]
    everywhere = frozenset().union(*varying)
    return [
        _vary(x, tuple(everywhere - axes)) if axes != everywhere else x
        for x, axes in zip(operands, varying, strict=True)
    ]


def _varying_axes(x: Any) -> frozenset:
    aval = jax.typeof(x)
    return aval.vma if hasattr(aval, "vma") else aval.manual_axis_type.varying  # JAX before 0.10; later versions


def _vary(x: Any, axes: tuple) -> Any:
    if hasattr(jax.lax, "pcast"):  # JAX 0.8
        return jax.lax.pcast(x, axes, to="varying")
    return jax.lax.pvary(x, axes)
