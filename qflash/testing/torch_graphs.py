"""CUDA graphs of PyTorch without a GPU: a capture records operations, and a replay computes them again.

The recorded state is that of a real graph: host numbers by value, and tensors by address; the graph's own memory is
reused by others after it ran. PyTorch's requirements for captures are enforced, and what it leaves undone when CUDA
aborts a capture, before release 2.12, is left undone.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only

from qflash.testing.torch_steps import Recorder

Tensor = torch.Tensor

_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")  # computed by cuBLAS
_GARBAGE = 0xFF  # as bytes: NaN, and -1


class StandIn:
    """Replaces torch.cuda around captures, once it is installed: steps on the CPU are captured, too.

    log: the devices and streams that became current, and those that were left. draws: whether PyTorch's default
    generator works outside of captures.
    """

    def __init__(self) -> None:
        self.log: list[tuple[str, Any]] = []
        self.captures = self.replays = 0
        self.draws = True
        self.capturing: _Capture | None = None
        self._graphs_of: dict[Any, int] = {}  # the number of graphs by the pool of their memory
        self._allocating: list[Any] = []  # pools of captures in progress
        self._workspaces: dict[Any, Any] = {}  # the pool of cuBLAS's workspace, by thread and stream
        self._has_cublas: set[int] = set()  # threads that computed a matrix product outside of captures

    @contextmanager
    def installed(self, monkeypatch: Any) -> Iterator[StandIn]:
        """Active until the context ends, which must be before monkeypatch undoes the rest."""
        from qflash.integrations.transformers import capture, decoding, passes

        for user in (decoding, passes):
            monkeypatch.setattr(user, "obstacle", lambda device, is_wanted: "" if is_wanted else "capture is False")
        changed = {"_streams": {}, "_cut_off": [], "_clear_cublas_workspaces": self._workspaces.clear}
        for name, value in (changed | {"_end_allocation": self._end_allocation}).items():
            monkeypatch.setattr(capture, name, value)
        for name in ("graph", "device", "stream", "current_stream", "Stream", "CUDAGraph", "graph_pool_handle"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.capturing is not None)
        hook = torch.nn.modules.module.register_module_forward_pre_hook(self._note_thread)
        try:
            yield self
        finally:
            hook.remove()

    @property
    def held(self) -> int:
        """The number of graphs."""
        return sum(self._graphs_of.values())

    # The interface of torch.cuda.

    def CUDAGraph(self) -> _Graph:
        return _Graph(self)

    @contextmanager
    def graph(self, graph: _Graph, pool: Any, stream: Any, capture_error_mode: str) -> Iterator[None]:
        assert capture_error_mode == "thread_local", "whatever other threads do would end the capture"
        if self._allocating:
            raise RuntimeError("captures_underway.empty() INTERNAL ASSERT FAILED")
        if self._graphs_of.get(pool) == 0:
            raise RuntimeError("use_count > 0 INTERNAL ASSERT FAILED")
        self._graphs_of[pool] = self._graphs_of.get(pool, 0) + 1
        self._allocating.append(pool)
        self.draws = False
        self.capturing = _Capture(self, graph, pool, stream)
        try:
            with self.capturing:
                yield
        finally:
            done, self.capturing = self.capturing, None
            done.undo()
            if done.is_cut_off:
                raise RuntimeError("CUDA error: operation failed due to a previous error during capture")
            self._end_allocation(None, pool)
            self.draws = True
            graph.hold(done, pool)
            self.captures += 1

    def graph_pool_handle(self) -> Any:
        return object()

    def Stream(self, device: Any) -> str:
        return f"a stream of {device}"

    def current_stream(self) -> str:
        return "the stream before"

    @contextmanager
    def stream(self, one: Any) -> Iterator[None]:
        self.log.append(("enter", one))
        try:
            yield
        finally:
            self.log.append(("leave", one))

    device = stream

    # Internal effects.

    def _end_allocation(self, _: Any, pool: Any) -> None:
        if pool not in self._allocating:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self._allocating.remove(pool)

    def _note_thread(self, *_: Any) -> None:
        if self.capturing is None:
            self._has_cublas.add(threading.get_ident())

    def _compute_product(self, pool: Any, stream: Any) -> None:
        thread = threading.get_ident()
        if thread not in self._has_cublas:
            raise RuntimeError("CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`")
        assert self._workspaces.setdefault((thread, stream), pool) is pool, "cuBLAS works in another graph's memory"

    def release(self, pool: Any) -> None:
        """Note that a graph was destroyed."""
        self._graphs_of[pool] -= 1
        if self.capturing is not None:
            self.capturing.is_cut_off = True


class _Graph:
    def __init__(self, cuda: StandIn) -> None:
        self._cuda = cuda
        self._held: _Capture | None = None
        self.generators: list[torch.Generator] = []

    def register_generator_state(self, generator: torch.Generator) -> None:
        self.generators.append(generator)

    def hold(self, capture: _Capture, pool: Any) -> None:
        self._held = capture
        weakref.finalize(self, self._cuda.release, pool)

    def replay(self) -> None:
        assert self._held is not None, "there is no capture to replay"
        self._cuda.replays += 1
        self._held.compute()


class _Capture(TorchDispatchMode):
    """The operations of a step. They are computed, to determine the shapes of their results, and undone."""

    def __init__(self, cuda: StandIn, graph: _Graph, pool: Any, stream: Any) -> None:
        super().__init__()
        self.is_cut_off = False
        self._place = cuda, pool, stream
        self._generators = [(one, one.get_state()) for one in graph.generators]
        self._calls: list[tuple[Any, Any, Any, list[Any]]] = []  # operations, their inputs and outputs
        self._own: dict[int, Any] = {}  # newly allocated memory, by address
        self._before: dict[int, tuple[Any, Any]] = {}  # other memory that was written to, and its previous contents

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket.__name__
        if self.is_cut_off or name in Recorder.ASKS_FOR_VALUES:
            self.is_cut_off = True
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
        kwargs = kwargs or {}
        taken = tree_flatten((args, kwargs))[0]
        known = [one._cdata for one, _ in self._generators]  # the dispatcher wraps them in new objects
        drawn_from = [one._cdata for one in taken if isinstance(one, torch.Generator)]
        assert set(drawn_from) <= set(known), "the generator is not registered"
        if name in _PRODUCTS:
            cuda, pool, stream = self._place
            cuda._compute_product(pool, stream)
        self._save(function, args, kwargs)
        results = function(*args, **kwargs)
        given = tree_flatten(results)[0]
        places = {x.untyped_storage().data_ptr() for x in taken if isinstance(x, Tensor)}
        for x in given:
            if isinstance(x, Tensor) and x.untyped_storage().data_ptr() not in places:
                self._own[x.untyped_storage().data_ptr()] = x.untyped_storage()
        held = tree_map_only(Tensor, Tensor.detach, (args, kwargs))  # with their current storage, wherever they move
        self._calls.append((function, *held, given))
        return results

    def _save(self, function: Any, args: Any, kwargs: Any) -> None:
        for at, argument in enumerate(function._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            value = args[at] if at < len(args) else kwargs.get(argument.name)
            for x in tree_flatten(value)[0]:
                if isinstance(x, Tensor) and x.untyped_storage().data_ptr() not in self._own:
                    storage = x.untyped_storage()
                    self._before.setdefault(storage.data_ptr(), (storage, storage.clone()))

    def undo(self) -> None:
        """Restore the state before the capture."""
        for storage, values in self._before.values():
            storage.copy_(values)
        for generator, state in self._generators:
            generator.set_state(state)
        self._forget_own()

    def compute(self) -> None:
        """Run the same operations on the current contents of the same memory."""
        with torch.no_grad():
            for function, args, kwargs, given in self._calls:
                for old, new in zip(given, tree_flatten(function(*args, **kwargs))[0], strict=True):
                    if isinstance(old, Tensor) and old.untyped_storage().data_ptr() != new.untyped_storage().data_ptr():
                        old.copy_(new)
        self._forget_own()

    def _forget_own(self) -> None:
        for storage in self._own.values():
            storage.fill_(_GARBAGE)
