"""torch.ops.qflash: one dispatcher op for each operation, for everything that is not a plain eager call.

torch.compile, torch.export, FakeTensor and meta tensors, torch.func transforms, dispatch modes, profilers and tensor
subclasses all use the dispatcher, so they get an op with a fake implementation, an autograd formula and a vmap rule.
The eager front end bypasses it, because a dispatcher op written in Python costs tens of microseconds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from qflash import dispatch
from qflash.call.array import Array
from qflash.call.op import Op, Plan
from qflash.frontends.torch import autograd, launch, vmap
from qflash.frontends.torch.arrays import arch_of_device
from qflash.frontends.torch.flops import count
from qflash.frontends.torch.traced import is_symbolic
from qflash.frontends.torch.watch import is_batched_by_autograd, is_fake, with_batch, without_batch
from qflash.ops import OPS

Tensor = torch.Tensor

# The type of each word in dispatcher schemas. Scalar and SymInt may be symbolic in a program that torch.compile traces;
# the others determine shapes or kernels.
TYPES = {
    "scale": "Scalar?", "eps": "Scalar", "label_smoothing": "Scalar", "softcap": "Scalar?",
    "ignore_index": "SymInt", "seed": "SymInt", "group": "int",
    "causal": "SymInt", "window": "SymInt[]?", "max_seqlen_q": "SymInt", "max_seqlen_k": "SymInt",
    "return_stats": "bool", "return_lse": "bool", "symmetric": "bool", "smooth": "bool", "interleaved": "bool",
    "inverse": "bool",
    "batch_invariant": "bool", "backward_memory": "int",
    "keep_pre": "bool", "activation": "str?",
    "reduction": "str", "granularity": "str", "layout": "str", "rounding": "str", "dtype": "str", "precision": "str?",
    "kv_precision": "str", "out_dtype": "str?", "kernel": "str?",
    "q_granularity": "str", "k_granularity": "str", "v_granularity": "str", "v_dtype": "str?",
    "q_group": "int", "k_group": "int", "v_group": "int",
    "window_left": "int", "window_right": "int",
}  # fmt: skip
# Valid values to plan with for symbolic words: the op checks the actual ones when it runs.
_STAND_INS = {"max_seqlen_q": 0, "max_seqlen_k": 0}


def dispatched(op: Op, arrays: Sequence[Any], words: Sequence[Any]) -> list[Tensor]:
    """The results of a call through the dispatcher."""
    return _ops[op.name](*arrays, *words) or []


def batched_by_autograd(op: Op, arrays: Sequence[Any], words: Sequence[Any]) -> list[Tensor]:
    """The results of a call with some arrays that come from torch.autograd.grad(is_grads_batched=True)."""
    is_batched = [x is not None and is_batched_by_autograd(x) for x in arrays]
    plain = [without_batch(x) if batched else x for x, batched in zip(arrays, is_batched, strict=True)]
    size = next(x.shape[0] for x, batched in zip(plain, is_batched, strict=True) if batched)
    dims = (*(0 if batched else None for batched in is_batched), *(None for _ in words))
    return [with_batch(x) for x in vmap.batched(op, _ops[op.name], size, dims, (*plain, *words))]


def plan_traced(op: Op, arrays: Sequence[Any], words: Sequence[Any]) -> Plan:
    """The plan of a call whose tensors may be fake: lengths may be symbolic, and strides do not affect results.

    What selects a kernel becomes a constant of a traced program.
    """
    described = [
        None if x is None else Array(tuple(x.shape), None, str(x.dtype).removeprefix("torch."), str(x.device))
        for x in arrays
    ]
    plan = op.plan(*described, *(_known(name, word) for name, word in zip(op.words, words, strict=True)))
    device = arrays[0].device
    if device.type == "cpu" or (device.type == "cuda" and torch.cuda.is_available()):
        dispatch.choose(plan.spec(arch_of_device(device)), plan.kernel)
    return plan


def _known(name: str, word: Any) -> Any:
    if isinstance(word, list) and any(map(is_symbolic, word)):
        return tuple(0 for _ in word)
    return _STAND_INS.get(name, 1) if is_symbolic(word) else word


def _split(op: Op, args: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
    number = len(op.arrays)
    return args[:number], [tuple(word) if isinstance(word, list) else word for word in args[number:]]


def _real(op: Op, *args: Any) -> list[Tensor] | None:
    arrays, words = _split(op, args)
    return _returned(op, launch.launch(op, launch.find_ready(op, arrays, words), arrays))


def _fake(op: Op, *args: Any) -> list[Tensor] | None:
    arrays, words = args[: len(op.arrays)], args[len(op.arrays) :]
    return _returned(op, launch.empty_results(plan_traced(op, arrays, words), arrays[0]))


def _returned(op: Op, results: Sequence[Tensor]) -> list[Tensor] | None:
    """An op that writes to its arguments returns nothing: functionalization does not support lists in addition."""
    return None if op.writes else list(results)


def _autograd(op: Op, *args: Any) -> list[Tensor]:
    arrays, words = args[: len(op.arrays)], args[len(op.arrays) :]

    def plan() -> Plan | None:
        device = arrays[0].device.type
        known = device == "cpu" or (device == "cuda" and torch.cuda.is_available())
        return plan_traced(op, arrays, words) if known else None

    backward = None if op.gradient is None else _ops[op.backward.name]
    return autograd.differentiated(op, _ops[op.name], backward, plan, args)


def _vmap(op: Op, info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[list[Tensor], list[int]]:
    if op.writes:
        raise NotImplementedError(
            f"{op.spoken} writes to {', '.join(op.writes)} and has no rule for torch.func.vmap; allowed: a loop"
        )
    outs = vmap.batched(op, _ops[op.name], info.batch_size, in_dims, args)
    return outs, [0] * len(outs)


def _flops(op: Op, *args: Any, **_: Any) -> int:
    assert op.flops is not None
    arrays, words = args[: len(op.arrays)], args[len(op.arrays) :]
    return op.flops(op.named(arrays), dict(zip(op.words, words, strict=True)), _read)


def _read(x: Tensor) -> list[int] | None:
    return None if is_fake(x) or x.is_meta else x.tolist()


_library = torch.library.Library("qflash", "FRAGMENT")


def _define(op: Op) -> Callable[..., list[Tensor]]:
    """The dispatcher op of an operation: its arrays, then its words; returns a list, or nothing if it writes."""
    arrays = []
    for at, name in enumerate(op.arrays):
        written = f"(a{at}!)" if name in op.writes else ""
        arrays.append(f"Tensor{written}{'?' if at else ''} {name.replace('.', '_')}")  # the first is always given
    words = [f"{TYPES[word]} {word}" for word in op.words]
    returned = "()" if op.writes else "Tensor[]"
    _library.define(f"{op.name}({', '.join((*arrays, *words))}) -> {returned}", tags=(torch.Tag.pt2_compliant_tag,))
    for key in ("CPU", "CUDA"):
        _library.impl(op.name, partial(_real, op), key)
    _library.impl(op.name, partial(_autograd, op), "Autograd")
    torch.library.register_fake(f"qflash::{op.name}", partial(_fake, op), lib=_library)
    torch.library.register_vmap(f"qflash::{op.name}", partial(_vmap, op), lib=_library)
    packet = getattr(torch.ops.qflash, op.name)
    if op.flops is not None:
        count(packet, partial(_flops, op))
    return packet.default


_ops = {op.name: _define(op) for op in OPS}
