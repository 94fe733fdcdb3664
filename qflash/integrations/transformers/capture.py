"""Captures a step of fixed shapes as a CUDA graph, or returns the reason why it cannot."""

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

# PyTorch has no public names for these. Without the first, memory that cuBLAS works in may belong to another graph;
# without the second, memory is not freed after an interrupted capture.
_clear_cublas_workspaces = getattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None)
_end_allocation = getattr(torch._C, "_cuda_endAllocateToPool", lambda index, pool: None)


class Pool:
    """Memory shared by graphs that are replayed one at a time."""

    def __init__(self) -> None:
        self._graphs: WeakSet[Any] = WeakSet()
        self._handle: Any = None

    @property
    def handle(self) -> Any:
        """PyTorch's handle of the pool: a new one once all graphs are gone, because PyTorch does not reuse a pool."""
        if not self._graphs:
            self._handle = torch.cuda.graph_pool_handle()
        return self._handle

    def keep(self, graph: Any) -> None:
        """Record that `graph` was captured in this memory, which lasts as long as the graph."""
        self._graphs.add(graph)


def obstacle(device: torch.device, is_wanted: bool) -> str:
    """Why steps are not captured on a device, or ""."""
    if not is_wanted:
        return "capture is False"
    return "" if device.type == "cuda" else f"the model is on {device.type}"


def captured(
    step: Callable[[], None], device: torch.device, pool: Pool, generator: torch.Generator | None = None
) -> tuple[Any, str]:
    """The graph of a step and "", or None and the reason why there is none.

    The step has already run in this thread, which warms everything up: kernels are loaded and the thread has its cuBLAS
    handle, neither of which can happen in a capture. device: where the step runs, whichever device is current.
    generator: what the step samples with.
    """
    graph, handle, failure = torch.cuda.CUDAGraph(), pool.handle, None
    try:
        with _one_at_a_time(graph, device, handle, generator):
            try:
                step()
            except Exception as error:  # ending a failed capture raises another error, which hides this one
                failure = error
                raise
    except Exception as error:  # the model does something that a graph cannot hold: run the step without one
        if failure is not error:
            _clean_up(graph, device, handle)
        failure = failure or error
        reason = f"the step was not captured: {type(failure).__name__}: {str(failure).partition(chr(10))[0]}"
        logger.warning("%s", reason)
        return None, reason
    finally:
        failure = None  # its traceback references this call, and the step
    pool.keep(graph)
    return graph, ""


_lock = Lock()
_streams: dict[torch.device, Any] = {}  # for captures: PyTorch's own is on the first device that was used
_cut_off: list[Any] = []  # graphs whose capture failed: PyTorch's allocators still ask them which memory is theirs


@contextmanager
def _no_collection() -> Iterator[None]:
    """Disable garbage collection: it may find an unreferenced graph, and CUDA cannot destroy one during a capture."""
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
    """Capture on a device. Other threads continue meanwhile; their captures wait."""
    with _lock, torch.cuda.device(device), _no_collection():
        if generator is not None:
            graph.register_generator_state(generator)  # which allocates on the current device
        if device not in _streams:
            _streams[device] = torch.cuda.Stream(device)
        # PyTorch keeps cuBLAS workspaces per thread and stream. A workspace found by a capture would be in the pool of
        # the previous graph, which may be freed first.
        _clear_cublas_workspaces()
        # In the default mode anything that another thread does, such as allocating memory, would end the capture. A
        # failed capture leaves its stream current, unless the previous one is restored.
        with (
            torch.cuda.stream(torch.cuda.current_stream()),
            torch.cuda.graph(graph, pool=pool, stream=_streams[device], capture_error_mode="thread_local"),
        ):
            yield


def _clean_up(graph: Any, device: torch.device, pool: Any) -> None:
    """Do what PyTorch before 2.12 leaves undone when CUDA aborts a capture: its allocator still considers the capture
    in progress and does not free memory, and its default generator works only in captures, until one succeeds."""
    _cut_off.append(graph)
    with suppress(RuntimeError):  # it has already ended
        _end_allocation(device.index, pool)
    try:
        with _one_at_a_time(torch.cuda.CUDAGraph(), device, torch.cuda.graph_pool_handle()):
            torch.zeros(1, device=device)
    except Exception as error:
        logger.warning("PyTorch may draw no random numbers on %s: %s", device, error)
