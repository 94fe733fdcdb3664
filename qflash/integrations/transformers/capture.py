"""A step of fixed shapes as a CUDA graph, and the reason where there is none."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from threading import Lock
from typing import Any
from weakref import WeakSet

import torch

logger = logging.getLogger(__name__)

# What PyTorch has no public name for. Without the first one memory that cuBLAS works in may be another graph's, and
# without the second one memory is not given back after a capture that was cut off.
_clear_cublas_workspaces = getattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None)
_end_allocation = getattr(torch._C, "_cuda_endAllocateToPool", lambda index, pool: None)


class Pool:
    """Memory that graphs share of which one at a time is replayed."""

    def __init__(self) -> None:
        self._graphs: WeakSet[Any] = WeakSet()
        self._handle: Any = None

    @property
    def handle(self) -> Any:
        """What PyTorch knows it by: another one once all graphs are gone, because PyTorch takes no pool up again."""
        if not self._graphs:
            self._handle = torch.cuda.graph_pool_handle()
        return self._handle

    def keep(self, graph: Any) -> None:
        """`graph` was captured in this memory, which lasts as long as it does."""
        self._graphs.add(graph)


def obstacle(device: torch.device, is_wanted: bool) -> str:
    """Why no step is captured on a device; "" where one may be."""
    if not is_wanted:
        return "capture is False"
    return "" if device.type == "cuda" else f"the model is on {device.type}"


def captured(
    step: Callable[[], None], device: torch.device, pool: Pool, generator: torch.Generator | None = None
) -> tuple[Any, str]:
    """The graph of a step and "", or None and why there is none.

    The step has run before, in this thread, which warms everything up: kernels are loaded, and the thread has its
    cuBLAS handle, neither of which can happen in a capture. device: where the step runs, whichever device is current.
    generator: what the step draws from.
    """
    graph, handle, failure = torch.cuda.CUDAGraph(), pool.handle, None
    try:
        with _one_at_a_time(graph, device, handle, generator):
            try:
                step()
            except Exception as error:  # the end of a capture that failed is another error, which hides this one
                failure = error
                raise
    except Exception as error:  # whatever the model does that a graph cannot hold: the step is made without one
        if failure is not error:
            _clean_up(graph, device, handle)
        failure = failure or error
        reason = f"the step was not captured: {type(failure).__name__}: {str(failure).partition(chr(10))[0]}"
        logger.warning("%s", reason)
        return None, reason
    pool.keep(graph)
    return graph, ""


_lock = Lock()
_streams: dict[torch.device, Any] = {}  # that captures happen on: PyTorch's own is on the device that came first
_cut_off: list[Any] = []  # graphs whose capture failed, which PyTorch's allocators ask whose some memory is


@contextmanager
def _no_collection() -> Iterator[None]:
    """The collector may find a graph that somebody dropped, and CUDA destroys none during a capture."""
    is_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if is_on:
            gc.enable()


@contextmanager
def _one_at_a_time(
    graph: Any, device: torch.device, pool: Any, generator: torch.Generator | None = None
) -> Iterator[None]:
    """A capture on a device. Other threads go on meanwhile, and their captures wait."""
    with _lock, torch.cuda.device(device), _no_collection():
        if generator is not None:
            graph.register_generator_state(generator)  # which keeps numbers on the current device
        if device not in _streams:
            _streams[device] = torch.cuda.Stream(device)
        # cuBLAS works in memory that PyTorch keeps for each thread and stream. What a capture finds there would be in
        # the pool of the graph before it, which may go first.
        _clear_cublas_workspaces()
        # By default whatever another thread does, such as to allocate memory, would end the capture. A capture that
        # fails leaves its stream the current one, unless somebody puts the one before back.
        with (
            torch.cuda.stream(torch.cuda.current_stream()),
            torch.cuda.graph(graph, pool=pool, stream=_streams[device], capture_error_mode="thread_local"),
        ):
            yield


def _clean_up(graph: Any, device: torch.device, pool: Any) -> None:
    """What PyTorch, before 2.12, leaves undone where CUDA cuts a capture off: its allocator takes the capture for one
    under way and refuses to free memory, and its default generator draws in captures alone, until one succeeds."""
    _cut_off.append(graph)
    with suppress(RuntimeError):  # it was ended
        _end_allocation(device.index, pool)
    try:
        with _one_at_a_time(torch.cuda.CUDAGraph(), device, torch.cuda.graph_pool_handle()):
            torch.zeros(1, device=device)
    except Exception as error:
        logger.warning("PyTorch may draw no random numbers on %s: %s", device, error)
