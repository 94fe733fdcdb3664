"""A step of fixed shapes as a CUDA graph, and the reason where there is none."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Any

import torch

logger = logging.getLogger(__name__)


def obstacle(device: torch.device, is_wanted: bool) -> str:
    """Why no step is captured on a device; "" where one may be."""
    if not is_wanted:
        return "capture is False"
    return "" if device.type == "cuda" else f"the model is on {device.type}"


def captured(
    step: Callable[[], None], device: torch.device, generator: torch.Generator | None = None, pool: Any = None
) -> tuple[Any, str]:
    """The graph of a step and "", or None and why there is none. The step has run before, which warms everything up.

    device: where the step runs, whichever device is current. generator: what the step draws from. pool: memory that
    graphs share of which one at a time is replayed.
    """
    graph, failure = torch.cuda.CUDAGraph(), None
    try:
        with _one_at_a_time(graph, device, generator, pool):
            try:
                step()
            except Exception as error:  # the end of a capture that failed is another error, which hides this one
                failure = error
                raise
    except Exception as error:  # whatever the model does that a graph cannot hold: the step is made without one
        failure = failure or error
        reason = f"the step was not captured: {type(failure).__name__}: {str(failure).partition(chr(10))[0]}"
        logger.warning("%s", reason)
        return None, reason
    return graph, ""


_lock = Lock()
_streams: dict[torch.device, Any] = {}  # that captures happen on: PyTorch's own is on the device that came first


@contextmanager
def _one_at_a_time(graph: Any, device: torch.device, generator: torch.Generator | None, pool: Any) -> Iterator[None]:
    """A capture on a device. Other threads go on meanwhile, and their captures wait."""
    with _lock, torch.cuda.device(device):
        if generator is not None:
            graph.register_generator_state(generator)  # which keeps numbers on the current device
        if device not in _streams:
            _streams[device] = torch.cuda.Stream(device)
        words = {} if pool is None else {"pool": pool}
        # By default whatever another thread does, such as to allocate memory, would end the capture. A capture that
        # fails leaves its stream the current one, unless somebody puts the one before back.
        with (
            torch.cuda.stream(torch.cuda.current_stream()),
            torch.cuda.graph(graph, stream=_streams[device], capture_error_mode="thread_local", **words),
        ):
            yield
