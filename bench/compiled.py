"""PyTorch's compiler as a peer: a function compiled for the shapes of one problem, with maximum effort."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

# The timer makes CUDA graphs: the compiler's own cannot be captured in another graph.
MOST_EFFORT = "max-autotune-no-cudagraphs"


def compiled(function: Callable[..., Any], mode: str | None = MOST_EFFORT) -> Callable[..., Any]:
    """`function` for the shapes of its first call, whatever was compiled before.

    The compiler caches results by a function's code. Suites make a new function for each problem, always from the same
    code: the second shape would be compiled for any shape, and the ninth not at all. So it gets a copy of the code.
    """
    import torch

    plain: Any = function
    own = FunctionType(
        plain.__code__.replace(), plain.__globals__, plain.__name__, plain.__defaults__, plain.__closure__
    )
    ready: Callable[..., Any] = torch.compile(own, mode=mode, dynamic=False)
    return ready
