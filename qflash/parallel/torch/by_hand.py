"""Functions with a custom backward pass, which is not differentiable itself."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

from qflash.ops.attention import ATTENTION_BACKWARD

Tensor = torch.Tensor
Backward = Callable[..., tuple[Any, ...]]


class ByHand(torch.autograd.Function):
    """Saves for the backward pass: q, k, v, sinks, out and lse, and the description of the call."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        *arrays, of, ranks = inputs
        ctx.save_for_backward(*arrays, *output)
        ctx.set_materialize_grads(False)
        ctx.call = of, ranks


def once_differentiable(backward: Backward) -> Backward:
    """`backward`, whose gradients raise the same error as those of `qflash.attention` when they are differentiated.

    PyTorch's decorator of this name makes them constants, so `torch.autograd.grad` of a sum that contains them silently
    omits them.
    """

    @wraps(backward)
    def checked(ctx: Any, *cotangents: Tensor | None) -> tuple[Any, ...]:
        with torch.no_grad():
            gradients = backward(ctx, *cotangents)
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return gradients
        found = [x for x in gradients if x is not None]
        sources = [x for x in (*ctx.saved_tensors, *cotangents) if x is not None and x.requires_grad]
        linked = iter(_Refused.apply(len(found), *found, *sources))
        return tuple(None if x is None else next(linked) for x in gradients)

    return checked


class _Refused(torch.autograd.Function):
    """The first `count` tensors, as functions of the others that have no gradient."""

    @staticmethod
    def forward(count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(x.view_as(x) for x in tensors[:count])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> None:
        raise NotImplementedError(ATTENTION_BACKWARD.no_gradient)
