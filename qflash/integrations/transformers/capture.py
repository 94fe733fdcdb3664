"""A step of fixed shapes as a CUDA graph, and the reason where there is none."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

logger = logging.getLogger(__name__)


def obstacle(device: torch.device, is_wanted: bool) -> str:
    """Why no step is captured on a device; "" where one may be."""
    if not is_wanted:
        return "capture is False"
    return "" if device.type == "cuda" else f"the model is on {device.type}"


def captured(step: Callable[[], None], generator: torch.Generator | None = None, pool: Any = None) -> tuple[Any, str]:
    """The graph of a step and "", or None and why there is none. The step has run before, which warms everything up.

    generator: what the step draws from. pool: memory that graphs share of which one at a time is replayed.
    """
    graph = torch.cuda.CUDAGraph()
    try:
        if generator is not None:
            graph.register_generator_state(generator)
        with torch.cuda.graph(graph) if pool is None else torch.cuda.graph(graph, pool=pool):
            step()
    except Exception as error:  # whatever the model does that a graph cannot hold: the step is made without one
        reason = f"the step was not captured: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
        logger.warning("%s", reason)
        return None, reason
    return graph, ""
