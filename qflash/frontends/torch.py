"""PyTorch tensors, CPU and CUDA: the eager path, and the way to torch.ops.qflash for everything else.

Under autocast the tensors' own dtypes decide, as for any operator autocast does not list.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import forward_ad

from qflash.frontends import torch_launch as launch
from qflash.frontends.torch_launch import Extras, Plan
from qflash.frontends.torch_ops import attention_op, backward_op
from qflash.problem import Options, Problem
from qflash.rope import Rope

Tensor = torch.Tensor
_NO_EXTRAS = Extras()

# Bound once: each is asked on every eager call.
_is_compiling = torch.compiler.is_dynamo_compiling
_is_grad_enabled = torch.is_grad_enabled
_dispatch_modes = torch._C._len_torch_dispatch_stack
_functorch_level = torch._C._functorch.peek_interpreter_stack
_jit_tracing = torch._C._get_tracing_state


def problem_of(q: Any, k: Any, v: Any, options: Options, kv_lens: Any = None, rope: Rope | None = None) -> Problem:
    """The checked problem behind `attention`, for `explain`."""
    return launch.check_call(q, k, v, options, launch.extras_of(kv_lens, rope))


def arch_of(q: Tensor) -> int:
    """Compute capability times ten of the tensor's device; 0 is the CPU."""
    return launch.arch_of_device(q.device)


def attention(
    q: Any, k: Any, v: Any, options: Options, kv_lens: Any = None, rope: Rope | None = None, return_lse: bool = False
) -> Any:
    """See qflash.attention."""
    extras = None if kv_lens is None and rope is None else launch.extras_of(kv_lens, rope)
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
    extras = launch.extras_of(kv_lens, rope, (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k))
    return _attention(q, k, v, options, extras, return_lse)


def _attention(q: Any, k: Any, v: Any, options: Options, extras: Extras | None, return_lse: bool) -> Any:
    # Plain tensors that own their data, and nobody watching the dispatcher? Fake tensors have a null data pointer,
    # functorch's wrappers have none, and a mode, a tracer or a dual level would not see a launch that goes around it.
    if (
        _is_compiling()
        or q.__class__ is not Tensor
        or k.__class__ is not Tensor
        or v.__class__ is not Tensor
        or _dispatch_modes()
        or _functorch_level() is not None
        or _jit_tracing() is not None
        or forward_ad._current_level >= 0
        or (extras is not None and not launch.are_plain(extras))
    ):
        return _through_op(q, k, v, options, extras, return_lse)
    plan = launch.plan(q, k, v, options, extras)
    if plan is None or plan.may_be_negated:
        return _through_op(q, k, v, options, extras, return_lse)
    if _is_grad_enabled():
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
    if not _is_compiling():  # the dispatcher would word its refusals differently
        launch.check_call(q, k, v, options, extras)
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
        if _is_grad_enabled():  # create_graph: the op refuses when the graph is used, not before
            dlse = torch.zeros_like(lse) if dlse is None else dlse
            grads = backward_op(dout, dlse, q, k, v, out, lse, *(extras or _NO_EXTRAS), *options)
        else:
            grads = launch.backward(plan, dout, dlse, q, k, v, out, lse, extras)
        return *grads, None, None, None


# Function.apply first asks whether a transform of torch.func is active, at a third of the whole cost. None is, here.
_apply = super(torch.autograd.Function, _Attention).apply
