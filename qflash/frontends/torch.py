"""PyTorch tensors, CPU and CUDA: the eager path, and the way to torch.ops.qflash for everything else.

Under torch.autocast q, k and v are cast as those of torch.nn.functional.scaled_dot_product_attention are.
"""

from __future__ import annotations

from typing import Any

import torch

from qflash.call.words import plain
from qflash.frontends import torch_flops  # noqa: F401  (registers with PyTorch's FLOP counter)
from qflash.frontends import torch_launch as launch
from qflash.frontends.torch_launch import Extras, Plan
from qflash.frontends.torch_ops import attention_op, backward_op
from qflash.frontends.torch_traced import traced_options
from qflash.frontends.torch_watch import autocast, is_autocast_anywhere, is_compiling, is_grad_enabled, is_watched
from qflash.ops.problem import Options, Problem
from qflash.rope import Rope

Tensor = torch.Tensor
_NO_EXTRAS = Extras()


def problem_of(
    q: Any, k: Any, v: Any, options: Options, kv_lens: Any = None, rope: Rope | None = None, packed: tuple = ()
) -> Problem:
    """The checked problem behind `attention`, or with `packed` behind `attention_varlen`, for `explain`."""
    return launch.check_call(*autocast(q, k, v), options, launch.extras_of(q, kv_lens, rope, packed))


def arch_of(q: Tensor) -> int:
    """Compute capability times ten of the tensor's device; 0 is the CPU."""
    return launch.arch_of_device(q.device)


def attention(
    q: Any, k: Any, v: Any, options: Options, kv_lens: Any = None, rope: Rope | None = None, return_lse: bool = False
) -> Any:
    """See qflash.attention."""
    extras = None if kv_lens is None and rope is None else launch.extras_of(q, kv_lens, rope)
    return _attention(q, k, v, options, extras, return_lse)


def attention_varlen(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: int,
    max_seqlen_k: int,
    options: Options,
    kv_lens: Any = None,
    rope: Rope | None = None,
    return_lse: bool = False,
) -> Any:
    """See qflash.attention_varlen."""
    extras = launch.extras_of(q, kv_lens, rope, (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k))
    return _attention(q, k, v, options, extras, return_lse)


def _attention(q: Any, k: Any, v: Any, options: Options, extras: Extras | None, return_lse: bool) -> Any:
    if is_autocast_anywhere():
        q, k, v = autocast(q, k, v)
    # Plain tensors that own their data, and nobody watching the dispatcher? Fake tensors have a null data pointer and
    # functorch's wrappers have none.
    if (
        is_watched()
        or q.__class__ is not Tensor
        or k.__class__ is not Tensor
        or v.__class__ is not Tensor
        or (extras is not None and not launch.are_plain(extras))
    ):
        return _through_op(q, k, v, options, extras, return_lse)
    plan = launch.plan(q, k, v, options, extras)
    if plan is None or plan.may_be_negated:
        return _through_op(q, k, v, options, extras, return_lse)
    if is_grad_enabled():
        if extras is not None:
            launch.check_tables_constant(extras)
        if q.requires_grad or k.requires_grad or v.requires_grad:
            launch.check_differentiable(plan.prepared.kernel)
            out, lse = _apply(q, k, v, plan, extras, options)
            return (out, lse) if return_lse else out
    out, lse = launch.forward(plan, q, k, v, extras, return_lse)
    return (out, lse) if return_lse else out


def _through_op(q: Any, k: Any, v: Any, options: Options, extras: Extras | None, return_lse: bool) -> Any:
    """The same call as a dispatcher op."""
    if is_compiling():
        options = traced_options(options)
    else:
        launch.check_call(q, k, v, options, extras)  # the dispatcher would word its refusals differently
        window = options.window
        options = Options(*map(plain, options))._replace(window=None if window is None else [*map(plain, window)])
    out, lse = attention_op(q, k, v, *(extras or _NO_EXTRAS), *options)
    return (out, lse) if return_lse else out


class _Attention(torch.autograd.Function):
    """The eager call with a backward pass. Transforms of torch.func never come here, so one forward does it all."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, plan: Plan, extras: Extras | None, options: Options
    ) -> tuple[Tensor, Tensor]:
        out, lse = launch.forward(plan, q, k, v, extras, True)
        if extras is None:
            ctx.save_for_backward(q, k, v, out, lse)
        else:
            ctx.save_for_backward(q, k, v, out, lse, *(x for x in extras if isinstance(x, Tensor)))
        ctx.set_materialize_grads(False)
        ctx.call = plan, extras, options
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, *_ = ctx.saved_tensors  # raises if one of them, or of the extras, was written to since
        plan, extras, options = ctx.call
        dout = torch.zeros_like(out) if dout is None else dout
        if is_grad_enabled():  # create_graph: the op refuses when the graph is used, not before
            dlse = torch.zeros_like(lse) if dlse is None else dlse
            grads = backward_op(dout, dlse, q, k, v, out, lse, *(extras or _NO_EXTRAS), *map(plain, options))
        else:
            grads = launch.backward(plan, dout, dlse, q, k, v, out, lse, extras)
        return *grads, None, None, None


# Function.apply first asks whether a transform of torch.func is active, at a third of the whole cost. None is, here.
_apply = super(torch.autograd.Function, _Attention).apply
