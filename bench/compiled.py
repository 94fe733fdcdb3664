"""PyTorch's compiler as a peer: a function compiled for the shapes of one problem, with the most effort."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

# CUDA graphs are the timer's affair: the compiler's own cannot be recorded into another graph.
MOST_EFFORT = "max-autotune-no-cudagraphs"


def compiled(function: Callable[..., Any], mode: str | None = MOST_EFFORT) -> Callable[..., Any]:
    """`function` for the shapes that it is called with first, whatever was compiled before.

    The compiler keeps its results by a function's code. Suites make a function anew for each problem, always from the
    same code: the second shape would be compiled for any shape, and the ninth not at all. So it gets code of its own.
    """
    import torch

    plain: Any = function
    own = FunctionType(
        plain.__code__.replace(), plain.__globals__, plain.__name__, plain.__defaults__, plain.__closure__
    )
    ready: Callable[..., Any] = torch.compile(own, mode=mode, dynamic=False)
    return ready
