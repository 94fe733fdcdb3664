"""PyTorch tensors, CPU and CUDA: the eager path, and the way to torch.ops.qflash for everything else.

Under autocast the tensors' own dtypes decide, as for any operator autocast does not list.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import forward_ad
from torch.autograd.function import once_differentiable

from qflash.frontends import torch_launch as launch
from qflash.frontends.torch_launch import Extras
from qflash.frontends.torch_ops import attention_op
from qflash.planning import Prepared
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
    extras = _NO_EXTRAS if kv_lens is None and rope is None else launch.extras_of(kv_lens, rope)
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
    for name, x in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} is {type(x).__name__}; allowed: torch.Tensor of int32")
    extras = launch.extras_of(kv_lens, rope, (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k))
    return _attention(q, k, v, options, extras, return_lse)


def _attention(q: Any, k: Any, v: Any, options: Options, extras: Extras, return_lse: bool) -> Any:
    if _is_compiling() or not _is_plain(q, k, v):
        return _through_op(q, k, v, options, extras, return_lse)
    prepared = launch.plan(q, k, v, options, extras)
    side = None if extras is _NO_EXTRAS else extras
    if _is_grad_enabled():
        if q.requires_grad or k.requires_grad or v.requires_grad:
            launch.check_differentiable(prepared.kernel)
            launch.check_tables_constant(extras)
            out, lse = _Attention.apply(q, k, v, prepared, side)
            return (out, lse) if return_lse else out
        if side is not None:
            launch.check_tables_constant(extras)
    out, lse = launch.forward(prepared, q, k, v, side, return_lse)
    return (out, lse) if return_lse else out


def _is_plain(q: Any, k: Any, v: Any) -> bool:
    """Whether this is an eager call on tensors that own their data, with nobody watching the dispatcher.

    Fake and meta tensors have a null data pointer, functorch's wrappers have none, a lazily negated view has one
    that holds the wrong sign, and a mode or a tracer would not see a launch that goes around the dispatcher.
    """
    return (
        q.__class__ is Tensor
        and k.__class__ is Tensor
        and v.__class__ is Tensor
        and not _dispatch_modes()
        and _functorch_level() is None
        and _jit_tracing() is None
        and forward_ad._current_level < 0
        and not q.is_meta
        and not q.is_neg()
        and not k.is_neg()
        and not v.is_neg()
    )


def _through_op(q: Any, k: Any, v: Any, options: Options, extras: Extras, return_lse: bool) -> Any:
    """The same call as a dispatcher op."""
    out, lse = attention_op(q, k, v, *extras, *options)
    return (out, lse) if return_lse else out


class _Attention(torch.autograd.Function):
    """The eager call with a backward pass. Transforms of torch.func never come here, so one forward does it all."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, prepared: Prepared, extras: Extras | None) -> Any:
        out, lse = launch.forward(prepared, q, k, v, extras, True)
        ctx.prepared = prepared
        ctx.set_materialize_grads(False)
        if extras is None:
            ctx.save_for_backward(q, k, v, out, lse)
        else:
            ctx.save_for_backward(q, k, v, out, lse, *(x for x in extras if isinstance(x, Tensor)))
        ctx.extras = extras
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> Any:
        q, k, v, out, lse, *_ = ctx.saved_tensors  # raises if one of them, or of the extras, was written to since
        return (*launch.backward(ctx.prepared, dout, dlse, q, k, v, out, lse, ctx.extras), None, None)
