"""Chooses the front end of an array by its class, without importing any framework."""

from __future__ import annotations

import sys
from types import ModuleType

_frontends: dict[type, ModuleType] = {}  # by array class, filled as classes are seen


def frontend_of(kind: type, argument: str) -> ModuleType:
    """The front end for an array class, that of `argument`."""
    if _is_traced(kind):
        return _find(kind, argument)
    found = _frontends.get(kind)
    if found is None:
        found = _frontends[kind] = _find(kind, argument)
    return found


def _is_traced(kind: type) -> bool:
    """Code traced by torch.compile must not use the tables: the compiled program would be guarded on their contents,
    and recompiled after the first call that fills them."""
    return kind.__module__ == "torch" and sys.modules["torch"].compiler.is_dynamo_compiling()


# With import statements, which torch.compile can trace in the first call of a program, unlike importlib.


def _find(kind: type, argument: str) -> ModuleType:
    package = _package(kind, argument)
    if package == "torch":
        from qflash.frontends import torch

        return torch
    if package == "numpy":
        from qflash.frontends import numpy

        return numpy
    from qflash.frontends import jax

    return jax


def _package(kind: type, argument: str) -> str:
    """From the modules of the class and its bases (a Parameter is a Tensor)."""
    for base in kind.__mro__:
        package = base.__module__.partition(".")[0]
        if package in ("torch", "numpy", "jax", "jaxlib"):
            return package
    raise TypeError(
        f"{argument} is {kind.__module__}.{kind.__qualname__}; allowed: numpy.ndarray, torch.Tensor, jax.Array"
    )
