"""torch.ops.qflash: attention as dispatcher ops, for everything that is not a plain eager call.

torch.compile, torch.export, FakeTensor and meta tensors, torch.func transforms, dispatch modes and tensor subclasses
all speak to the dispatcher, so they get an op with a fake implementation, an autograd formula and a vmap rule. The
eager front end goes around it, because a dispatcher op written in Python costs tens of microseconds.
"""

from __future__ import annotations

from typing import Any

import torch

from qflash import dispatch
from qflash.frontends import torch_launch as launch
from qflash.frontends.torch_launch import Extras
from qflash.problem import Options, Problem

Tensor = torch.Tensor

# The arguments after q, k, v, in the order of Extras and then of Options.
_EXTRAS = (
    "Tensor? kv_lens, Tensor? cos, Tensor? sin, Tensor? positions_q, Tensor? positions_k, bool interleaved, "
    "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, SymInt max_seqlen_q, SymInt max_seqlen_k"
)
_OPTIONS = "bool causal, SymInt[]? window, float? softcap, float? scale, str? precision, str? kernel"
_EXTRAS_COUNT = len(Extras._fields)

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


def _split(words: tuple) -> tuple[Extras, Options]:
    """An op's trailing arguments as Extras and Options."""
    extras, options = Extras(*words[:_EXTRAS_COUNT]), Options(*words[_EXTRAS_COUNT:])
    if options.window is not None:
        # A traced window may be symbolic. int() makes it this program's constant, as the kernel choice needs.
        options = options._replace(window=tuple(int(edge) for edge in options.window))
    return extras, options


def _attention(q: Tensor, k: Tensor, v: Tensor, *words: Any) -> tuple[Tensor, Tensor]:
    extras, options = _split(words)
    return launch.forward(launch.plan(q, k, v, options, extras), q, k, v, extras, True)


def _attention_backward(dout, dlse, q, k, v, out, lse, *words: Any) -> tuple[Tensor, Tensor, Tensor]:
    extras, options = _split(words)
    prepared = launch.plan(q, k, v, options, extras)
    launch.check_differentiable(prepared.kernel)
    return launch.backward(prepared, dout, dlse, q, k, v, out.contiguous(), lse.contiguous(), extras)


for _key in ("CPU", "CUDA"):
    _library.impl("attention", _attention, _key)
    _library.impl("attention_backward", _attention_backward, _key)


def _traced_kernel(problem: Problem, device: torch.device) -> dispatch.Kernel | None:
    """The kernel a traced program will run; None where the device that will run it is not known here."""
    if device.type == "meta" or (device.type == "cuda" and not torch.cuda.is_available()):
        return None
    return dispatch.plan(problem.spec(launch.arch_of_device(device)), problem.kernel)


@torch.library.register_fake("qflash::attention", lib=_library)
def _attention_fake(q: Tensor, k: Tensor, v: Tensor, *words: Any) -> tuple[Tensor, Tensor]:
    extras, options = _split(words)
    problem = launch.check_call(q, k, v, options, extras)
    _traced_kernel(problem, q.device)
    return q.new_empty(q.shape), q.new_empty(launch.lse_shape(problem), dtype=torch.float32)


@torch.library.register_fake("qflash::attention_backward", lib=_library)
def _attention_backward_fake(dout, dlse, q, k, v, *words: Any) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _setup_context(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    q, k, v, *words = inputs
    extras, options = _split(words)
    kernel = _traced_kernel(launch.check_call(q, k, v, options, extras), q.device)
    if kernel is not None:
        launch.check_differentiable(kernel)
    launch.check_tables_constant(extras)
    tensors = [i for i, word in enumerate(words) if isinstance(word, Tensor)]
    ctx.save_for_backward(q, k, v, *output, *(words[i] for i in tensors))
    ctx.tensors = tensors
    ctx.words = [None if isinstance(word, Tensor) else word for word in words]


def _backward(ctx: Any, dout: Tensor, dlse: Tensor) -> tuple[Tensor | None, ...]:
    q, k, v, out, lse, *saved = ctx.saved_tensors
    words = list(ctx.words)
    for i, tensor in zip(ctx.tensors, saved, strict=True):
        words[i] = tensor
    grads = backward_op(dout, dlse, q, k, v, out, lse, *words)
    return (*grads, *(None for _ in words))


torch.library.register_autograd("qflash::attention", _backward, setup_context=_setup_context, lib=_library)


def _no_double_backward(ctx: Any, *grads: Tensor) -> None:
    raise NotImplementedError("qflash.attention has no second derivative; allowed: one backward pass over it")


torch.library.register_autograd("qflash::attention_backward", _no_double_backward, lib=_library)


def _vmap(op: Any, leading: int):
    """The vmap rule of `op`, whose first `leading` tensors all start with the batch dimension."""

    def rule(info: Any, in_dims: tuple, *args: Any) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        moved = [x.movedim(dim, 0) if dim is not None else x for x, dim in zip(args, in_dims, strict=True)]
        batched = [dim is not None for dim in in_dims]
        extras = Extras(*moved[leading : leading + _EXTRAS_COUNT])
        mapped = Extras(*batched[leading : leading + _EXTRAS_COUNT])
        if extras.cu_seqlens_q is not None or mapped.cos or mapped.sin:
            outs = _each(op, info.batch_size, moved, batched)
        else:
            outs = _folded(op, info.batch_size, leading, moved, batched)
        return outs, (0,) * len(outs)

    return rule


def _each(op: Any, size: int, args: list, batched: list[bool]) -> tuple[Tensor, ...]:
    """One call per sample: packed sequences and per-sample rope tables have no batch dimension to fold into."""
    calls = (op(*(x[i] if mapped else x for x, mapped in zip(args, batched, strict=True))) for i in range(size))
    return tuple(torch.stack(outs) for outs in zip(*calls, strict=True))


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
        folded = fold(args[i], batched[i])
        args[i] = folded if folded.stride(-1) == 1 else folded.contiguous()
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
