"""torch.ops.qflash: attention as dispatcher ops, for everything that is not a plain eager call.

torch.compile, torch.export, FakeTensor and meta tensors, torch.func transforms, dispatch modes and tensor subclasses
all speak to the dispatcher, so they get an op with a fake implementation, an autograd formula and a vmap rule. The
eager front end goes around it, because a dispatcher op written in Python costs tens of microseconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import forward_ad

from qflash import dispatch
from qflash.frontends import torch_launch as launch
from qflash.frontends.torch_launch import Extras
from qflash.frontends.torch_traced import is_symbolic
from qflash.ops.problem import Options, Problem

Tensor = torch.Tensor

# The arguments after q, k, v, in the order of Extras and then of Options.
_EXTRAS = (
    "Tensor? kv_lens, Tensor? cos, Tensor? sin, Tensor? positions_q, Tensor? positions_k, bool interleaved, "
    "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, SymInt max_seqlen_q, SymInt max_seqlen_k"
)
# Numbers may be symbolic, in a program that torch.compile traces: hence Scalar, and SymInt for a flag.
_OPTIONS = "SymInt causal, SymInt[]? window, Scalar? softcap, Scalar? scale, str? precision, str? kernel"
_EXTRAS_COUNT = len(Extras._fields)
_LONGEST = ("max_seqlen_q", "max_seqlen_k")

_library = torch.library.Library("qflash", "FRAGMENT")
_library.define(
    f"attention(Tensor q, Tensor k, Tensor v, {_EXTRAS}, {_OPTIONS}) -> (Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_library.define(
    "attention_backward(Tensor dout, Tensor dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
    f"{_EXTRAS}, {_OPTIONS}) -> (Tensor, Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
attention_op = torch.ops.qflash.attention.default
backward_op = torch.ops.qflash.attention_backward.default


def _split(words: Sequence[Any]) -> tuple[Extras, Options]:
    """An op's trailing arguments as Extras and Options."""
    return Extras(*words[:_EXTRAS_COUNT]), Options(*words[_EXTRAS_COUNT:])


def _attention(q: Tensor, k: Tensor, v: Tensor, *words: Any) -> tuple[Tensor, Tensor]:
    extras, options = _split(words)
    plan = launch.plan(q, k, v, options, extras)
    return launch.forward(plan, q, k, v, extras, True)


def _attention_backward(dout, dlse, q, k, v, out, lse, *words: Any) -> tuple[Tensor, Tensor, Tensor]:
    extras, options = _split(words)
    plan = launch.plan(q, k, v, options, extras)
    launch.check_differentiable(plan.prepared.kernel)
    return launch.backward(plan, dout, dlse, q, k, v, out.contiguous(), lse.contiguous(), extras)


for _key in ("CPU", "CUDA"):
    _library.impl("attention", _attention, _key)
    _library.impl("attention_backward", _attention_backward, _key)


def _with_stand_ins(options: Options) -> Options:
    """Options with a good value for each that is symbolic: the op checks its own when it runs."""
    edges = options.window
    if edges is not None and any(map(is_symbolic, edges)):
        options = options._replace(window=(0, 0))
    return options._replace(
        causal=True if is_symbolic(options.causal) else options.causal,
        softcap=1.0 if is_symbolic(options.softcap) else options.softcap,
        scale=1.0 if is_symbolic(options.scale) else options.scale,
    )


def _check_traced(q: Tensor, k: Tensor, v: Tensor, words: Sequence[Any]) -> tuple[Problem, dispatch.Kernel | None]:
    """The problem and kernel of a traced call; no kernel where the device that will run it is not known here.

    What selects a kernel becomes a constant of the traced program; lengths stay symbolic.
    """
    extras, options = _split(words)
    options = _with_stand_ins(options)
    longest = (0 if isinstance(n, torch.SymInt) else n for n in (extras.max_seqlen_q, extras.max_seqlen_k))
    problem = launch.check_call(q, k, v, options, extras._replace(**dict(zip(_LONGEST, longest, strict=True))))
    if q.device.type == "meta" or (q.device.type == "cuda" and not torch.cuda.is_available()):
        return problem, None
    constant = replace(problem, head_dim=int(problem.head_dim))
    return problem, dispatch.plan(constant.spec(launch.arch_of_device(q.device)), problem.kernel)


@torch.library.register_fake("qflash::attention", lib=_library)
def _attention_fake(q: Tensor, k: Tensor, v: Tensor, *words: Any) -> tuple[Tensor, Tensor]:
    problem, _ = _check_traced(q, k, v, words)
    return q.new_empty(q.shape), q.new_empty(launch.lse_shape(problem), dtype=torch.float32)


@torch.library.register_fake("qflash::attention_backward", lib=_library)
def _attention_backward_fake(dout, dlse, q, k, v, *words: Any) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


class _Attention(torch.autograd.Function):
    """The op's gradient."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, *words: Any) -> tuple[Tensor, Tensor]:
        out, lse = below_autograd(attention_op, (q, k, v, *words))
        ctx.tensors = [i for i, word in enumerate(words) if isinstance(word, Tensor)]
        ctx.words = [None if isinstance(word, Tensor) else word for word in words]
        ctx.save_for_backward(q, k, v, out, lse, *(words[i] for i in ctx.tensors))
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor, dlse: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, *saved = ctx.saved_tensors
        words = list(ctx.words)
        for i, tensor in zip(ctx.tensors, saved, strict=True):
            words[i] = tensor
        return (*backward_op(dout, dlse, q, k, v, out, lse, *words), *(None for _ in words))


def _record(function: type[torch.autograd.Function], args: Sequence[Any]) -> Any:
    """`function.apply` for the level of torch.func transforms that is being dispatched, and for no other.

    An Autograd kernel runs once for each level on the stack, as a C++ one does, and what it calls below autograd goes
    on to the next level. Function.apply would start over at the top, so its base does the work.
    """
    if not torch._C._are_functorch_transforms_active():
        return function.apply(*args)
    with enable_single_level_autograd_function():
        return super(torch.autograd.Function, function).apply(*args)


def below_autograd(op: Any, args: Sequence[Any]) -> Any:
    with torch._C._AutoDispatchBelowAutograd():
        if not torch._C._are_functorch_transforms_active():
            return op(*args)
        # Inside Function.forward derivatives are off. The next level down has its own, and turns off what it had off.
        with torch.enable_grad(), forward_ad._set_fwd_grad_enabled(True):
            return op(*args)


def _wants_grad(*args: Any) -> bool:
    return torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in args)


def _attention_autograd(*args: Any) -> tuple[Tensor, Tensor]:
    q, k, v, *words = args
    launch.check_no_tangents(args)
    if not _wants_grad(*args):
        return below_autograd(attention_op, args)
    launch.check_tables_constant(Extras(*words[:_EXTRAS_COUNT]))
    _, kernel = _check_traced(q, k, v, words)
    if kernel is not None:
        launch.check_differentiable(kernel)
    return _record(_Attention, args)


def _backward_autograd(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _record(_Backward, args) if _wants_grad(*args) else below_autograd(backward_op, args)


class _Backward(torch.autograd.Function):
    """The gradient op's own gradient: there is none, and asking for it says so."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
        return below_autograd(backward_op, args)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> None:
        raise NotImplementedError(launch.NO_SECOND_DERIVATIVE)


_library.impl("attention", _attention_autograd, "Autograd")
_library.impl("attention_backward", _backward_autograd, "Autograd")


def _vmap(op: Any, leading: int):
    """The vmap rule of `op`, whose first `leading` tensors all start with the batch dimension."""

    def rule(info: Any, in_dims: tuple, *args: Any) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        moved = [x.movedim(dim, 0) if dim is not None else x for x, dim in zip(args, in_dims, strict=True)]
        batched = [dim is not None for dim in in_dims]
        extras = Extras(*moved[leading : leading + _EXTRAS_COUNT])
        mapped = Extras(*batched[leading : leading + _EXTRAS_COUNT])
        if extras.cu_seqlens_q is not None or mapped.cos or mapped.sin:
            outs = _each(op, leading, info.batch_size, moved, batched)
        else:
            outs = _folded(op, info.batch_size, leading, moved, batched)
        return outs, (0,) * len(outs)

    return rule


def _each(op: Any, leading: int, size: int, args: list, batched: list[bool]) -> tuple[Tensor, ...]:
    """One call per sample: packed sequences and per-sample rope tables have no batch dimension to fold into."""
    if not size:
        return _none(op, leading, args, batched)
    args = [_readable(x) if i < leading else x for i, x in enumerate(args)]
    calls = (op(*(x[i] if mapped else x for x, mapped in zip(args, batched, strict=True))) for i in range(size))
    return tuple(torch.stack(outs) for outs in zip(*calls, strict=True))


def _none(op: Any, leading: int, args: list, batched: list[bool]) -> tuple[Tensor, ...]:
    """The results of `_each` for no sample at all: their shapes are those that a sample without data gives."""

    def sample(x: Any, mapped: bool) -> Any:
        if not isinstance(x, Tensor):
            return x
        return torch.empty(x.shape[1:] if mapped else x.shape, dtype=x.dtype, device="meta")

    outs = op(*(sample(x, mapped) for x, mapped in zip(args, batched, strict=True)))
    # Sums of nothing tie the results to what they would depend on, so that each input has a gradient: zeros.
    tie = sum(x[:0].sum() for x in args[:leading])
    return tuple(torch.zeros((0, *x.shape), dtype=x.dtype, device=args[0].device) + tie.to(x.dtype) for x in outs)


def _readable(x: Tensor) -> Tensor:
    """Kernels want the last dimension without gaps; moving the mapped one may have left it with some."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _folded(op: Any, size: int, leading: int, args: list, batched: list[bool]) -> tuple[Tensor, ...]:
    """One call with the mapped dimension folded into the batch."""
    batch = args[2].shape[1] if batched[2] else args[2].shape[0]

    def fold(x: Tensor, mapped: bool) -> Tensor:
        x = x if mapped else x.expand(size, *x.shape)
        return x.reshape(size * batch, *x.shape[2:])

    def fold_positions(x: Tensor, mapped: bool) -> Tensor:  # [T] or [B, T] in the eyes of one sample
        if not mapped and x.dim() == 1:
            return x
        x = x if mapped else x.expand(size, *x.shape)
        x = x if x.dim() == 3 else x[:, None].expand(size, batch, x.shape[-1])
        return x.reshape(size * batch, x.shape[-1])

    args = list(args)
    for i in range(leading):
        args[i] = _readable(fold(args[i], batched[i]))
    extras = Extras(*args[leading : leading + _EXTRAS_COUNT])
    mapped = Extras(*batched[leading : leading + _EXTRAS_COUNT])
    if extras.kv_lens is not None:
        extras = extras._replace(kv_lens=fold(extras.kv_lens, mapped.kv_lens))
    for name in ("positions_q", "positions_k"):
        x = getattr(extras, name)
        if x is not None:
            extras = extras._replace(**{name: fold_positions(x, getattr(mapped, name))})
    outs = op(*args[:leading], *extras, *args[leading + _EXTRAS_COUNT :])
    return tuple(x.unflatten(0, (size, batch)) for x in outs)


torch.library.register_vmap("qflash::attention", _vmap(attention_op, 3), lib=_library)
torch.library.register_vmap("qflash::attention_backward", _vmap(backward_op, 7), lib=_library)
