"""Gradients: of eager calls that launch directly, and of the dispatcher's ops."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd import forward_ad

from qflash.call.op import Op
from qflash.frontends.torch import launch
from qflash.frontends.torch.arrays import arch_of_device
from qflash.frontends.torch.launch import Ready
from qflash.frontends.torch.watch import (
    apply_function,
    below_autograd,
    has_dual_level,
    is_batched_by_autograd,
    is_grad_enabled,
    is_watched,
)

Tensor = torch.Tensor


def wanted(arrays: Sequence[Any]) -> bool:
    """Whether a gradient may be requested."""
    return is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in arrays)


def check(op: Op, arrays: Sequence[Any]) -> None:
    """Raise if a gradient that does not exist is required: of a forward-only operation, or of some of its arrays."""
    refused = op.arrays if op.gradient is None else op.gradient.refused
    for name, x in zip(op.arrays, arrays, strict=True):
        if name in refused and isinstance(x, Tensor) and x.requires_grad:
            if op.gradient is not None:
                raise NotImplementedError(f"{name} requires a gradient; allowed: a tensor without one, {name}.detach()")
            raise NotImplementedError(
                f"{name} requires a gradient and {op.spoken} is forward only; allowed: {name}.detach(), or a call "
                "under torch.no_grad()"
            )


def check_no_tangents(op: Op, arrays: Sequence[Any]) -> None:
    """Raise in forward-mode differentiation: a kernel would drop the tangents."""
    if not has_dual_level():
        return
    for name, x in zip(op.arrays, arrays, strict=True):
        if isinstance(x, Tensor) and forward_ad.unpack_dual(x).tangent is not None:
            raise NotImplementedError(
                f"{name} has a tangent and {op.spoken} has no forward-mode derivative (jvp, dual tensors); allowed: "
                "reverse mode where it has one, or tensors without tangents"
            )


def _save(ctx: Any, op: Op, arrays: Sequence[Any], words: Sequence[Any], results: Sequence[Tensor]) -> None:
    """Save what the backward operation takes, and nothing else."""
    given = op.named(arrays)
    named = {**given, **dict(zip(op.results, results, strict=False))}  # the last, a total of losses, may be missing
    kept = {name: x for name, x in named.items() if name in op.backward.arrays and name not in op.cotangents}
    ctx.save_for_backward(*kept.values())
    ctx.set_materialize_grads(False)
    ctx.call = op, tuple(words), tuple(given), tuple(kept)
    ctx.first = results[0].shape, {"dtype": results[0].dtype, "device": results[0].device}


def _inputs(ctx: Any, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
    """The arrays of the backward operation. Raises if a saved one was modified since."""
    op, _, _, kept = ctx.call
    # The first cotangent is always given; any other that is None is zero, and costs nothing.
    shape, like = ctx.first
    first = torch.zeros(shape, **like) if grads[0] is None else grads[0]
    # A lazily negated tensor has the wrong sign in memory.
    cotangents = (None if grad is None else grad.resolve_neg() for grad in (first, *grads[1:]))
    named = dict(zip(kept, ctx.saved_tensors, strict=True))
    named |= dict(zip(op.cotangents, cotangents, strict=False))
    return [named.get(name) for name in op.backward.arrays]


def _in_order(ctx: Any, inputs: Sequence[Tensor | None], gradients: Sequence[Tensor]) -> list[Tensor | None]:
    """The gradient of each array of the operation, None if there is none. `inputs`: of the backward operation."""
    op, _, given, _ = ctx.call
    by_name: dict[str, Tensor | None]
    by_name = dict(zip((name for name in op.gradient.of if name in given), gradients, strict=True))
    by_name |= {name: inputs[0] for name in op.gradient.passed if name in given}
    return [by_name.get(name) for name in op.arrays]


class Eager(torch.autograd.Function):
    """An eager call with a backward pass. Never used under transforms of torch.func, so one forward is sufficient."""

    @staticmethod
    def forward(ctx: Any, op: Op, ready: Ready, words: tuple[Any, ...], *arrays: Any) -> tuple[Tensor, ...]:
        results = launch.launch(op, ready, arrays)
        _save(ctx, op, arrays, words, results)
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        op, words, *_ = ctx.call
        backward_op, inputs, words = op.backward, _inputs(ctx, grads), op.backward_words(words)
        watched = is_watched()
        if not watched and any(x is not None and is_batched_by_autograd(x) for x in grads):
            from qflash.frontends.torch.library import batched_by_autograd

            gradients: Sequence[Tensor] = batched_by_autograd(backward_op, inputs, words)
        elif watched or is_grad_enabled():  # create_graph: the op raises when the graph is used, not before
            from qflash.frontends.torch.library import dispatched

            gradients = dispatched(backward_op, inputs, words)
        else:
            gradients = launch.launch(backward_op, launch.find_ready(backward_op, inputs, words), inputs)
        return None, None, None, *_in_order(ctx, inputs, gradients)


# Function.apply first checks for an active transform of torch.func, a third of the total cost. Here none is active.
apply_eager = super(torch.autograd.Function, Eager).apply


class _Traced(torch.autograd.Function):
    """The gradient of a dispatcher op that has one."""

    @staticmethod
    def forward(ctx: Any, op: Op, packet: Any, backward_packet: Any, *args: Any) -> tuple[Tensor, ...]:
        arrays, words = args[: len(op.arrays)], args[len(op.arrays) :]
        results = below_autograd(packet, args)
        _save(ctx, op, arrays, words, results)
        ctx.backward_packet = backward_packet
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        op, words, *_ = ctx.call
        inputs = _inputs(ctx, grads)
        gradients = ctx.backward_packet(*inputs, *op.backward_words(words))
        return None, None, None, *_in_order(ctx, inputs, gradients), *(None for _ in words)


class _Refused(torch.autograd.Function):
    """An op that may be differentiated without the user calling it by name: it raises when the graph is used."""

    @staticmethod
    def forward(ctx: Any, op: Op, packet: Any, *args: Any) -> tuple[Tensor, ...]:
        ctx.text = op.no_gradient
        return tuple(below_autograd(packet, args))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> None:
        raise NotImplementedError(ctx.text)


def differentiated(op: Op, packet: Any, backward_packet: Any, plan: Any, args: Sequence[Any]) -> list[Tensor]:
    """The Autograd kernel of a dispatcher op. `plan`: returns None if the device that will run it is unknown here."""
    arrays = args[: len(op.arrays)]
    check_no_tangents(op, arrays)
    if not wanted(arrays):
        return below_autograd(packet, args)
    if op.no_gradient:
        return list(apply_function(_Refused, (op, packet, *args)))
    check(op, arrays)
    if op.gradient is None:
        return below_autograd(packet, args)
    known = plan()
    if known is not None:
        launch.check_differentiable(op, known, arch_of_device(arrays[0].device))
    return list(apply_function(_Traced, (op, packet, backward_packet, *args)))
