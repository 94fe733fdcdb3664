"""Everything that PyTorch has no public name for, and whether something intercepts a call.

Tracers, transforms, modes and profilers do not see a launch that bypasses the dispatcher, so an intercepted ("watched")
call goes through torch.ops instead. Each check is made on every eager call.

A name marked "needed" makes the import of this module fail, with its name in the error, in a release of PyTorch that
lacks it: without it a result could be silently wrong. Without one of the others something is slower or not reported.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch._functorch.utils import enable_single_level_autograd_function  # needed: gradients inside torch.func
from torch._subclasses import fake_tensor
from torch.autograd import forward_ad, profiler
from torch.autograd.function import _SingleLevelFunction  # needed: likewise

try:
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack as active_modes
except ImportError:  # a FLOP counter active in the very first call then misses it

    def active_modes() -> list[Any]:
        return []


Tensor = torch.Tensor

# Bound once, because attribute lookups would cost as much as the calls.
is_compiling = torch.compiler.is_dynamo_compiling
is_grad_enabled = torch.is_grad_enabled
is_fake = fake_tensor.is_fake  # needed, for the FLOPs of packed calls
is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor  # needed: whether torch.func holds the tensor
# Whether torch.autograd.grad(is_grads_batched=True) made the tensor, by another vmap than torch.func's.
is_batched_by_autograd = getattr(torch._C._functorch, "is_legacy_batchedtensor", lambda x: False)
_dispatch_modes = torch._C._len_torch_dispatch_stack  # needed
_functorch_level = torch._C._functorch.peek_interpreter_stack  # needed
_jit_tracing = torch._C._get_tracing_state  # needed
# Faster than torch.is_autocast_enabled, which needs a device.
is_autocast_anywhere = getattr(torch._C, "_is_any_autocast_enabled", lambda: True)
# A build without CUDA has neither, and no CUDA tensor. The public ones create objects, at several times the cost.
current_device = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
current_stream = getattr(
    torch._C, "_cuda_getCurrentRawStream", lambda index: torch.cuda.current_stream(index).cuda_stream
)


def has_dual_level() -> bool:
    """Whether forward-mode differentiation is active. Needed."""
    return forward_ad._current_level >= 0


def is_jit_tracing() -> bool:
    """Whether torch.jit.trace is recording."""
    return _jit_tracing() is not None


def is_watched() -> bool:
    """Whether torch.compile, a dispatch mode, torch.func, torch.jit.trace, a dual level or a profiler is active."""
    return (
        is_compiling()
        or _dispatch_modes() != 0
        or _functorch_level() is not None
        or _jit_tracing() is not None
        or forward_ad._current_level >= 0
        or getattr(profiler, "_is_profiler_enabled", False)  # profiles lack the calls without it
    )


def autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors as `torch.nn.functional.scaled_dot_product_attention` would get them under autocast.

    Floating-point tensors on the first one's device get the dtype of autocast, float64 excepted.
    """
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(
        x.to(dtype)
        if isinstance(x, Tensor) and x.is_floating_point() and x.dtype is not torch.float64 and x.device.type == device
        else x
        for x in tensors
    )


def without_batch(x: Tensor) -> Tensor:
    """A tensor that is_batched_by_autograd as a plain one with the batch as its first dimension."""
    return torch._remove_batch_dim(x, _autograd_batch_level(), 0, 0)


def with_batch(x: Tensor) -> Tensor:
    """The reverse of without_batch."""
    return torch._add_batch_dim(x, 0, _autograd_batch_level())


def _autograd_batch_level() -> int:
    level = torch._C._vmapmode_increment_nesting()
    torch._C._vmapmode_decrement_nesting()
    return level - 1


def apply_function(function: type[torch.autograd.Function], args: Sequence[Any]) -> Any:
    """`function.apply` for the level of torch.func transforms that is being dispatched, and for no other.

    An Autograd kernel runs once for each level on the stack, like a C++ one, and what it calls below autograd goes to
    the next level. Function.apply would start over at the top, so a function without that behavior does the work.
    """
    if not torch._C._are_functorch_transforms_active():
        return function.apply(*args)
    with enable_single_level_autograd_function():
        return _of_one_level(function).apply(*args)


@cache
def _of_one_level(function: type[torch.autograd.Function]) -> type[_SingleLevelFunction]:
    passes = {name: staticmethod(getattr(function, name)) for name in ("forward", "backward")}
    return type(function.__name__, (_SingleLevelFunction,), passes)


def below_autograd(op: Any, args: Sequence[Any]) -> Any:
    """`op(*args)` as the next dispatch key sees it."""
    with torch._C._AutoDispatchBelowAutograd():
        if not torch._C._are_functorch_transforms_active():
            return op(*args)
        # Inside Function.forward derivatives are disabled. The next level has its own state, and restores it.
        with torch.enable_grad(), forward_ad._set_fwd_grad_enabled(True):
            return op(*args)
