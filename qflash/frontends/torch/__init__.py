"""PyTorch tensors, CPU and CUDA: the eager path, and the path to torch.ops.qflash for everything else.

arrays    tensor descriptions, lengths from the host   library  the dispatcher's ops
launch    the lookup of a plan, and its launch         vmap     torch.func.vmap of the ops
autograd  gradients, eager and of the ops              flops    formulas for PyTorch's FLOP counter
traced    words in code that torch.compile traces      watch    what PyTorch has no public name for

Under torch.autocast the arrays that an operation specifies are cast like those of
torch.nn.functional.scaled_dot_product_attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from qflash._native import plan_key
from qflash.call import cache
from qflash.call.op import Op, Plan
from qflash.call.words import plain
from qflash.frontends.torch import autograd, launch
from qflash.frontends.torch.arrays import arch_of_device, as_index, check_writeable, described, with_indices
from qflash.frontends.torch.launch import PLAIN
from qflash.frontends.torch.library import TYPES, dispatched, plan_traced
from qflash.frontends.torch.traced import traced_word
from qflash.frontends.torch.watch import (
    autocast,
    is_autocast_anywhere,
    is_compiling,
    is_grad_enabled,
    is_jit_tracing,
    is_watched,
)

__all__ = ["arch_of", "as_index", "plan_of", "run", "run_in_place", "scalar"]

Tensor = torch.Tensor


def run(op: Op, arrays: Sequence[Any], words: Sequence[Any]) -> Sequence[Tensor]:
    """Launch directly, or through the dispatcher if something intercepts it. Results are in the order of the plan."""
    if is_watched() or is_autocast_anywhere():
        return _run_watched(op, arrays, words)
    ready = cache.find(plan_key(op, arrays, words, PLAIN, True))
    if ready is None:
        return _run_unknown(op, arrays, words)
    if ready.wants_gradient and is_grad_enabled():
        return _with_gradient(op, ready, arrays, words)
    return launch.launch(op, ready, arrays)


def run_in_place(op: Op, arrays: Sequence[Any], words: Sequence[Any]) -> Sequence[Tensor]:
    """`run` of an operation that writes to its tensors; returns those."""
    if not is_compiling():
        check_writeable(op, arrays)
    run(op, arrays, words)
    return op.written(arrays)


def _run_unknown(op: Op, arrays: Sequence[Any], words: Sequence[Any]) -> Sequence[Tensor]:
    """A call whose key is not cached: the first of its kind, or one with an argument that kernels cannot read as is."""
    arrays = with_indices(op, arrays)
    hashable = [tuple(word) if type(word) is list else word for word in words]
    key = plan_key(op, arrays, hashable, PLAIN, True)
    if key is None or arrays[0].is_meta:
        return _through_op(op, arrays, words)
    if is_grad_enabled():
        autograd.check(op, arrays)
    ready = cache.find(key) or launch.make_ready(op, arrays, words, key)
    if ready.wants_gradient and is_grad_enabled():
        return _with_gradient(op, ready, arrays, words)
    return launch.launch(op, ready, arrays)


def _run_watched(op: Op, arrays: Sequence[Any], words: Sequence[Any]) -> Sequence[Tensor]:
    arrays = _autocast(op, with_indices(op, arrays))
    if is_watched():
        return _through_op(op, arrays, words)
    return _run_unknown(op, arrays, words)


def _with_gradient(op: Op, ready: launch.Ready, arrays: Sequence[Any], words: Sequence[Any]) -> Sequence[Tensor]:
    autograd.check(op, arrays)
    if op.gradient is None:
        return launch.launch(op, ready, arrays)
    if ready.with_gradient is None:  # the same call with all results that its gradient takes
        words = op.with_words(words, op.gradient.words)
        launch.check_differentiable(op, ready.prepared.plan, arch_of_device(ready.device))
        ready.with_gradient = launch.find_ready(op, arrays, words), tuple(words)
    return autograd.apply_eager(op, *ready.with_gradient, *arrays)


def _through_op(op: Op, arrays: Sequence[Any], words: Sequence[Any]) -> Sequence[Tensor]:
    """The same call as a dispatcher op."""
    if is_compiling():
        words = [traced_word(name, TYPES[name], word) for name, word in zip(op.words, words, strict=True)]
    else:
        words = _checked_words(op, arrays, words)
    # A program recorded by torch.jit.trace serves either grad mode, so it always has what gradients take.
    if op.gradient is not None and (is_grad_enabled() or (not is_compiling() and is_jit_tracing())):
        words = op.with_words(words, op.gradient.words)
    return dispatched(op, arrays, words)


@torch.compiler.disable  # for the same reason as make_ready
def _checked_words(op: Op, arrays: Sequence[Any], words: Sequence[Any]) -> Sequence[Any]:
    """The words as the dispatcher takes them, checked here because the dispatcher's errors are worded differently."""
    op.plan(*described(op, arrays), *words)
    plan_traced(op, arrays, words)
    return [[*map(plain, word)] if isinstance(word, (tuple, list)) else plain(word) for word in words]


def _autocast(op: Op, arrays: Sequence[Any]) -> Sequence[Any]:
    places = [op.arrays.index(name) for name in op.autocast]
    if not places or not is_autocast_anywhere():
        return arrays
    changed = list(arrays)
    for at, x in zip(places, autocast(*(arrays[at] for at in places)), strict=True):
        changed[at] = x
    return changed


def plan_of(op: Op, arrays: Sequence[Any], words: Sequence[Any]) -> Plan:
    """The plan of a checked call, for `explain`."""
    return op.plan(*described(op, _autocast(op, with_indices(op, arrays))), *words)


def arch_of(x: Tensor) -> int:
    """Compute capability times ten of the tensor's device; 0 is the CPU."""
    return arch_of_device(x.device)


def scalar(value: float, like: Tensor) -> Tensor:
    """A number as a tensor, on the device of `like`."""
    return torch.full((), value, dtype=torch.float32, device=like.device)
