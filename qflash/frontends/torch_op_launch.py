"""Operations beside attention on real torch tensors: descriptions, the plan cache, allocation, the launch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from qflash.call.array import Array
from qflash.call.op import Op, Operand, Plan, Prepared, prepare
from qflash.frontends.torch_launch import arch_of_device, check_storage, describe, index

Tensor = torch.Tensor
_CACHE_LIMIT = 4096
_INT32 = torch.iinfo(torch.int32)


def described(op: Op, arrays: Sequence[Any]) -> list[Array | None]:
    """Every array of a call, or TypeError."""
    return [None if x is None else describe(name, x, op.arrays[0]) for name, x in zip(op.arrays, arrays, strict=True)]


def with_indices(op: Op, arrays: Sequence[Any]) -> list[Any]:
    """The arrays, with lengths and positions that are on the host as int32 tensors."""
    arrays = list(arrays)
    for name in op.indices:
        at = op.arrays.index(name)
        if arrays[at] is not None:
            arrays[at] = index(name, arrays[at], arrays[0].device)
    return arrays


_plans: dict[tuple, Prepared] = {}


def prepared(op: Op, arrays: Sequence[Any], words: Sequence[Any]) -> Prepared:
    """The prepared call, looked up by everything it depends on; a miss checks and prepares."""
    try:
        key = (
            op.name,
            *(None if x is None else (x.shape, x.stride(), x.dtype, x.device) for x in arrays),
            *words,
            *map(type, words),  # because to a dict True is 1 is 1.0, and to a plan they are not
        )
        return _plans[key]
    except KeyError:
        found = _prepare(op, arrays, words)
    except (AttributeError, TypeError, ValueError, RuntimeError):  # not a dense tensor, or words that do not hash
        return _prepare(op, arrays, words)
    if len(_plans) >= _CACHE_LIMIT:
        _plans.clear()
    _plans[key] = found
    return found


def _prepare(op: Op, arrays: Sequence[Any], words: Sequence[Any]) -> Prepared:
    plan = op.plan(*described(op, arrays), *words)
    return prepare(plan, arch_of_device(arrays[0].device))


def empty_results(plan: Plan, like: Tensor) -> list[Tensor]:
    """The results of a plan, not yet written."""
    return [like.new_empty(result.shape, dtype=getattr(torch, result.dtype)) for result in plan.results]


def launch(op: Op, call: Prepared, arrays: Sequence[Tensor | None]) -> list[Tensor]:
    """Allocate the results, launch on the current stream."""
    first = arrays[0]
    if first.is_cuda and first.device.index != torch._C._cuda_getDevice():
        with torch.cuda.device(first.device):
            return launch(op, call, arrays)
    results = empty_results(call.plan, first)
    if call.call is None:
        return [x.zero_() for x in results]
    # A name, so that converted copies outlive the launch.
    operands = [_ready(operand, arrays[op.arrays.index(operand.argument)]) for operand in call.plan.operands]
    addresses = [x.data_ptr() for x in (*operands, *results)]
    if not all(addresses):
        check_storage(**{operand.argument: x for operand, x in zip(call.plan.operands, operands, strict=True)})
    if not first.is_cuda:
        call.call(*addresses, 0, 0, torch.get_num_threads())
        return results
    # The allocator hands freed memory to later work of the same stream only, so operands and workspace may go at once.
    size = call.workspace_bytes
    workspace = torch.empty(size, dtype=torch.uint8, device=first.device) if size else None
    stream = torch._C._cuda_getCurrentRawStream(first.device.index)
    call.call(*addresses, 0 if workspace is None else workspace.data_ptr(), stream, 0)
    return results


def _ready(operand: Operand, x: Tensor) -> Tensor:
    """The operand as the kernel reads it. A lazily negated view holds its memory with the wrong sign."""
    if x.is_neg():
        x = x.resolve_neg()
    if operand.dtype is not None and x.dtype is not getattr(torch, operand.dtype):
        if operand.dtype == "int32":
            x = x.clamp(_INT32.min, _INT32.max)
        x = x.to(getattr(torch, operand.dtype))
    return x.contiguous() if operand.contiguous else x
