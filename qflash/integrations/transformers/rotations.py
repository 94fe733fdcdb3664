"""Rotary embedding fused into paged attention: a model's own rotation is skipped, and the write of keys and the
attention kernel rotate instead, by the same tables.

An attention module of transformers calls `apply_rotary_pos_emb(q, k, cos, sin)` and passes k to the cache and q to the
attention function. In a forward run by `Rotations`, that call returns q and k unchanged and stores a record of them.
The cache requests the record with the tensors that it received. If they are different tensors, or if the first pass
showed that something else is computed from them, the model does more than rotate them: nothing has been written yet, so
the module is run again unmodified, then and in all later passes.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

import qflash
from qflash.integrations.transformers.stand_ins import rotation_tables

Tensor = torch.Tensor

logger = logging.getLogger(__name__)

NAME = "apply_rotary_pos_emb"  # the function's name in modules of transformers


class _Record(NamedTuple):
    q: Tensor
    k: Tensor
    rope: qflash.Rope


class _NotUnderstood(Exception):
    """A module does more with q and k than rotate them."""


_of_thread = threading.local()


@contextmanager
def paged_pass() -> Iterator[None]:
    """A forward pass of this thread whose cache is a PagedCache, the only cache that requests the record."""
    before = getattr(_of_thread, "is_paged", False)
    _of_thread.is_paged = True
    try:
        yield
    finally:
        _of_thread.is_paged = before


def take_rope(q: Tensor, k: Tensor) -> qflash.Rope | None:
    """The rotation still to be applied to q and k, `[B, H, T, D]`. None: they need none.

    Its positions are int32 `[B, T]`, the same for q and k.
    """
    record = getattr(_of_thread, "record", None)
    if record is None:
        return None
    if record.q is not q or record.k is not k:
        raise _NotUnderstood
    _of_thread.record = None
    return record.rope


class Rotations:
    """The attention modules of one model whose rotation can be skipped."""

    def __init__(self) -> None:
        self.names: list[str] = []
        """Of the modules that run this way."""
        self._tables: list[tuple[Tensor, Tensor, qflash.Rope]] = []  # of the current pass: layers share them

    def forward_of(self, name: str, module: nn.Module) -> Callable[..., Any] | None:
        """A forward without the rotation, called with `module` and its arguments. None: not recognized."""
        found = rotation_of(module)
        if found is None:
            return None
        self.names.append(name)
        return _Layer(self, name, class_as_made(module).forward, *found).forward

    def end_pass(self) -> None:
        """Forget the tables of a forward pass."""
        self._tables = []

    def give_up(self, name: str) -> None:
        """Run a module unmodified from now on."""
        if name in self.names:
            self.names.remove(name)
            logger.info("%s does more with q and k than to rotate them by halves; it rotates them itself", name)

    def rope(self, cos: Tensor, sin: Tensor, batch: int, half: int) -> qflash.Rope:
        """Tables of a pass, `[1 or B, T, ...]`, in qflash's layout: a row per token."""
        for known_cos, known_sin, rope in self._tables:
            if known_cos is cos and known_sin is sin:
                return rope
        rows = [x[..., :half].reshape(-1, half).float().contiguous() for x in (cos, sin)]
        length = cos.shape[1]
        positions = torch.arange(cos.shape[0] * length, dtype=torch.int32, device=cos.device).view(-1, length)
        if cos.shape[0] != batch:
            positions = positions.expand(batch, length).contiguous()
        rope = qflash.Rope(*rows, positions_q=positions, positions_k=positions)
        self._tables = [*self._tables, (cos, sin, rope)]
        return rope


class _Layer:
    """One attention module, whose class has the forward `original`: `record` replaces the function that rotates."""

    def __init__(
        self, rotations: Rotations, name: str, original: FunctionType, rotate: Callable[..., Any], form: str
    ) -> None:
        self._rotations, self._name, self._rotate, self._form = rotations, name, rotate, form
        self._original, self._inner = original, with_global(original, NAME, self.record)
        self._has_halves: bool | None = None  # not checked yet
        self._is_watched = self._is_given_up = False

    def forward(self, module: nn.Module, /, *arguments: Any, **words: Any) -> Any:
        """The module's result, without its rotation if possible."""
        if getattr(_of_thread, "is_paged", False) and not self._is_given_up:
            try:
                with nullcontext() if self._is_watched else _Watch():
                    out = self._inner(module, *arguments, **words)
                if getattr(_of_thread, "record", None) is None:
                    self._is_watched = True
                    return out
            except _NotUnderstood:
                pass
            finally:
                _of_thread.record = None
            self._give_up()
        return self._original(module, *arguments, **words)

    def record(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *more: Any, **words: Any) -> Any:
        """Return q and k unchanged if qflash can rotate them."""
        if more or words or not self._is_served(q, k, cos, sin):
            self._give_up()
            return self._rotate(q, k, cos, sin, *more, **words)
        if getattr(_of_thread, "record", None) is not None:  # two rotations before one attention
            raise _NotUnderstood
        rope = self._rotations.rope(cos, sin, q.shape[0], q.shape[-1] // 2)
        _of_thread.record = _Record(q, k, rope)
        return q, k

    def _give_up(self) -> None:
        self._is_given_up = True
        self._rotations.give_up(self._name)

    def _is_served(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> bool:
        return fits(q, k, cos, sin, self._form) and self._is_halved(cos, sin)

    def _is_halved(self, cos: Tensor, sin: Tensor) -> bool:
        """Whether each angle occurs twice, which only models that mix several positions violate. Checked once, with the
        prompt, because values cannot be read in steps captured by a CUDA graph."""
        if self._has_halves is None:
            self._has_halves = has_halves(cos, sin, self._form)
        return self._has_halves


class _Watch(TorchFunctionMode):
    """Raises if anything is computed from q and k between their rotation and attention. A layer is watched once:
    watching is slow, and a layer does the same in every pass."""

    _LOOKS = frozenset(
        getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "is_cuda", "requires_grad")
    )

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        record = getattr(_of_thread, "record", None)
        if record is not None and func not in self._LOOKS and func not in (Tensor.size, Tensor.dim):
            values = [*args, *(kwargs or {}).values()]
            values += [x for value in values if isinstance(value, list | tuple) for x in value]
            if any(value is record.q or value is record.k for value in values):
                raise _NotUnderstood
        return func(*args, **(kwargs or {}))


def class_as_made(module: nn.Module) -> Any:
    """The class of a module, or its class before `fuse_layers` or a `Fusion` changed it."""
    return getattr(type(module), "_qflash_as_made", type(module))


def rotation_of(module: nn.Module) -> tuple[Callable[..., Any], str] | None:
    """The function with which an attention module rotates q and k, and the form of its tables (`rotation_tables`).
    None: it is not recognized."""
    original = class_as_made(module).forward
    is_function = isinstance(original, FunctionType) and "forward" not in vars(module)
    if not is_function or NAME not in original.__code__.co_names:
        return None
    rotate = original.__globals__.get(NAME)
    form = rotation_tables(rotate) if callable(rotate) else None
    return None if form is None else (rotate, form)


def fits(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, form: str) -> bool:
    """Whether q and k `[B, H, T, D]` and tables of a form have the shapes of a rotation of all channels."""
    if q.ndim != 4 or k.ndim != 4 or cos.ndim != 3 or cos.shape != sin.shape or q.shape[-1] % 2:
        return False
    batch, _, length, head_dim = q.shape
    if (k.shape[0], *k.shape[2:]) != (batch, length, head_dim) or cos.shape[0] not in (1, batch):
        return False
    return cos.shape[1:] == (length, head_dim if form == "twice" else head_dim // 2)


def has_halves(cos: Tensor, sin: Tensor, form: str) -> bool:
    """Whether each angle of the tables occurs twice, or once by definition of the form."""
    half = cos.shape[-1] // 2
    return form == "once" or all(torch.equal(x[..., :half], x[..., half:]) for x in (cos, sin))


def with_global(function: FunctionType, name: str, value: Any) -> FunctionType:
    """A copy of the function with another value for one global name; the module's own globals are unchanged."""
    names = function.__globals__ | {name: value}
    copy = FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy
