"""Operations beside attention on torch tensors: the eager path, and torch.ops.qflash for everything else.

As for attention: a plain eager call launches directly; what traces, transforms or wraps tensors speaks to the
dispatcher and meets one op for each operation, with a fake implementation and a vmap rule. All are forward only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.autograd import forward_ad

from qflash import dispatch
from qflash.call.array import Array
from qflash.call.op import Op, Plan
from qflash.call.spec import OpSpec
from qflash.call.words import plain
from qflash.frontends import torch_op_launch as launch
from qflash.frontends.torch_flops import count
from qflash.frontends.torch_launch import arch_of_device, index
from qflash.frontends.torch_ops import below_autograd
from qflash.frontends.torch_traced import is_symbolic, traced_word
from qflash.frontends.torch_watch import is_compiling, is_grad_enabled, is_watched
from qflash.ops.attention import ATTENTION_INT8
from qflash.ops.kv import QUANTIZE_KV
from qflash.ops.kv_attention import ATTENTION_KV
from qflash.ops.matmul import INT8_MATMUL
from qflash.ops.quantization import DEQUANTIZE, QUANTIZE
from qflash.ops.rows import CROSS_ENTROPY, LAYER_NORM, SOFTMAX

Tensor = torch.Tensor

# How the dispatcher spells the type of each word. Scalar and SymInt may be symbolic, in a program that torch.compile
# traces; the others decide about shapes or kernels.
_TYPES = {
    "scale": "Scalar", "eps": "Scalar", "label_smoothing": "Scalar", "softcap": "Scalar",
    "ignore_index": "SymInt", "seed": "SymInt", "group": "int",
    "return_stats": "bool", "return_lse": "bool", "symmetric": "bool", "smooth": "bool", "interleaved": "bool",
    "reduction": "str", "granularity": "str", "rounding": "str", "dtype": "str", "precision": "str",
    "out_dtype": "str?", "kernel": "str?",
    "q_granularity": "str", "k_granularity": "str", "v_granularity": "str", "v_dtype": "str?",
    "q_group": "int", "k_group": "int", "v_group": "int",
    "window_left": "int", "window_right": "int",
}  # fmt: skip

_PLAIN = (Tensor, torch.nn.Parameter)  # classes whose instances own their data


def run_op(op: Op, arrays: Sequence[Any], words: Sequence[Any]) -> Sequence[Tensor]:
    """Launch directly where nobody watches the dispatcher, else through it."""
    if op.indices:
        arrays = launch.with_indices(op, arrays)
    if is_compiling():
        traced = (traced_word(name, _TYPES[name], word) for name, word in zip(op.words, words, strict=True))
        return _ops[op.name](*arrays, *traced)
    if is_watched() or arrays[0].is_meta or any(x.__class__ not in _PLAIN for x in arrays if x is not None):
        launch.described(op, arrays)  # the dispatcher would word its refusals differently
        _plan(op, arrays, words)
        return _ops[op.name](*arrays, *map(plain, words))
    if is_grad_enabled():
        _check_no_gradient(op, arrays)
    return launch.launch(op, launch.prepared(op, arrays, words), arrays)


def spec_of(op: Op, arrays: Sequence[Any], words: Sequence[Any]) -> OpSpec:
    """What selects the kernel of a checked call, for `explain`."""
    return op.plan(*launch.described(op, launch.with_indices(op, arrays)), *words).spec(
        arch_of_device(arrays[0].device)
    )


def as_index(name: str, x: Any, like: Tensor) -> Tensor:
    """Lengths as int32, where `like` is."""
    return index(name, x, like.device)


def scalar(value: float, like: Tensor) -> Tensor:
    """A number as a tensor where `like` is."""
    return torch.full((), value, dtype=torch.float32, device=like.device)


def _check_no_gradient(op: Op, arrays: Sequence[Tensor | None]) -> None:
    for name, x in zip(op.arrays, arrays, strict=True):
        if x is not None and x.requires_grad:
            raise NotImplementedError(
                f"{name} requires a gradient and qflash.{op.name} is forward only; allowed: {name}.detach(), or a call "
                "under torch.no_grad()"
            )


def _check_no_tangent(op: Op, arrays: Sequence[Tensor | None]) -> None:
    if forward_ad._current_level < 0:
        return
    for name, x in zip(op.arrays, arrays, strict=True):
        if x is not None and forward_ad.unpack_dual(x).tangent is not None:
            raise NotImplementedError(
                f"{name} has a tangent and qflash.{op.name} has no forward-mode derivative; allowed: tensors without"
            )


def _plan(op: Op, arrays: Sequence[Tensor | None], words: Sequence[Any]) -> Plan:
    """The plan of a call whose tensors may be fake: lengths may be symbolic, and strides do not matter to results."""
    described = [
        None if x is None else Array(tuple(x.shape), None, str(x.dtype).removeprefix("torch."), str(x.device))
        for x in arrays
    ]
    plan = op.plan(*described, *words)
    device = arrays[0].device
    if device.type == "cpu" or (device.type == "cuda" and torch.cuda.is_available()):
        dispatch.plan(plan.spec(arch_of_device(device)), plan.kernel)
    return plan


def _split(op: Op, args: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
    count = len(op.arrays)
    return args[:count], args[count:]


def _real(op: Op, *args: Any) -> list[Tensor]:
    arrays, words = _split(op, args)
    return launch.launch(op, launch.prepared(op, arrays, words), arrays)


def _fake(op: Op, *args: Any) -> list[Tensor]:
    arrays, words = _split(op, args)
    known = (1 if is_symbolic(word) else word for word in words)  # the op checks the others when it runs
    return launch.empty_results(_plan(op, arrays, known), arrays[0])


def _autograd(op: Op, *args: Any) -> list[Tensor]:
    arrays, _ = _split(op, args)
    _check_no_tangent(op, arrays)
    if is_grad_enabled():
        _check_no_gradient(op, arrays)
    return below_autograd(_ops[op.name], args)


def _vmap(op: Op, info: Any, in_dims: tuple, *args: Any) -> tuple[list[Tensor], list[int]]:
    """One call where the mapped dimension can be one of the arrays', else one call per sample."""
    moved = [x if dim is None else x.movedim(dim, 0) for x, dim in zip(args, in_dims, strict=True)]
    arrays, words = _split(op, moved)
    mapped = [name for name, dim in zip(op.arrays, in_dims, strict=False) if dim is not None]
    ranks = {name: x.dim() - (name in mapped) for name, x in zip(op.arrays, arrays, strict=True) if x is not None}
    if op.folds(mapped, ranks, dict(zip(op.words, words, strict=True))):
        outs = _ops[op.name](*moved)
    elif not info.batch_size:
        outs = _of_no_sample(op, moved, in_dims)
    else:
        samples = (
            _ops[op.name](*(x if dim is None else x[i] for x, dim in zip(moved, in_dims, strict=True)))
            for i in range(info.batch_size)
        )
        outs = [torch.stack(out) for out in zip(*samples, strict=True)]
    return outs, [0] * len(outs)


def _of_no_sample(op: Op, moved: Sequence[Any], in_dims: tuple) -> list[Tensor]:
    """The results of mapping over a dimension of 0: their shapes are those that a sample without data gives."""
    sample = [
        torch.empty(x.shape if dim is None else x.shape[1:], dtype=x.dtype, device="meta")
        if isinstance(x, Tensor)
        else x
        for x, dim in zip(moved, in_dims, strict=True)
    ]
    return [moved[0].new_zeros((0, *x.shape), dtype=x.dtype) for x in _ops[op.name](*sample)]


_library = torch.library.Library("qflash", "FRAGMENT")


def _define(op: Op) -> Callable[..., list[Tensor]]:
    """The dispatcher op of an operation: its arrays, then its words; results as a list."""
    first, *others = (name.replace(".", "_") for name in op.arrays)
    arrays = [f"Tensor {first}", *(f"Tensor? {name}" for name in others)]
    words = [f"{_TYPES[word]} {word}" for word in op.words]
    _library.define(f"{op.name}({', '.join((*arrays, *words))}) -> Tensor[]", tags=(torch.Tag.pt2_compliant_tag,))
    for key in ("CPU", "CUDA"):
        _library.impl(op.name, partial(_real, op), key)
    _library.impl(op.name, partial(_autograd, op), "Autograd")
    torch.library.register_fake(f"qflash::{op.name}", partial(_fake, op), lib=_library)
    torch.library.register_vmap(f"qflash::{op.name}", partial(_vmap, op), lib=_library)
    packet = getattr(torch.ops.qflash, op.name)
    if op.flops is not None:
        count(packet, partial(_flops, op))
    return packet.default


def _flops(op: Op, *args: Any, **_: Any) -> int:
    shapes = {name: x.shape for name, x in zip(op.arrays, args, strict=False) if x is not None}
    return op.flops(shapes)


_ALL = (
    *(SOFTMAX, LAYER_NORM, CROSS_ENTROPY, INT8_MATMUL, QUANTIZE, DEQUANTIZE),
    *(ATTENTION_INT8, QUANTIZE_KV, ATTENTION_KV),
)
_ops = {op.name: _define(op) for op in _ALL}
