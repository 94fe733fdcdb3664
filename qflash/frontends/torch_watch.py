"""Who watches a call of PyTorch's: tracers, transforms, modes, profilers, autocast. Each is asked on every eager call.

A launch that goes around the dispatcher is seen by none of them, so a watched call goes through torch.ops instead.
PyTorch has no public name for some of these questions; the private ones are asked here and nowhere else, and a release
that lacks one fails as this module is imported.
"""

from __future__ import annotations

import torch
from torch.autograd import forward_ad, profiler

Tensor = torch.Tensor

# Bound once, because attribute look-ups would cost as much as the answers.
is_compiling = torch.compiler.is_dynamo_compiling
is_grad_enabled = torch.is_grad_enabled
is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor  # whether a transform of torch.func holds the tensor
_dispatch_modes = torch._C._len_torch_dispatch_stack
_functorch_level = torch._C._functorch.peek_interpreter_stack
_jit_tracing = torch._C._get_tracing_state
is_autocast_anywhere = torch._C._is_any_autocast_enabled


def is_watched() -> bool:
    """Whether torch.compile, a dispatch mode, torch.func, torch.jit.trace, a dual level or a profiler is active."""
    return (
        is_compiling()
        or _dispatch_modes() != 0
        or _functorch_level() is not None
        or _jit_tracing() is not None
        or forward_ad._current_level >= 0
        or profiler._is_profiler_enabled
    )


def autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors as `torch.nn.functional.scaled_dot_product_attention` would see them under autocast.

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
