"""Real torch tensors to a running kernel: the look-up of the plan, allocation, the launch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from qflash import dispatch
from qflash.call import cache
from qflash.call.array import Array
from qflash.call.op import Op, Operand, Plan
from qflash.call.prepare import Prepared, prepare
from qflash.errors import NoKernelError
from qflash.frontends.torch.arrays import arch_of_device, check_storage, described
from qflash.frontends.torch.watch import current_device, current_stream

Tensor = torch.Tensor
_INT32 = torch.iinfo(torch.int32)


@dataclass(slots=True)
class Ready:
    """A prepared call with what each launch of it asks for, worked out once."""

    prepared: Prepared
    call: Callable[..., None]
    device: torch.device
    on_cpu: bool
    operands: tuple[int, ...]  # which arrays they are
    converted: tuple[tuple[int, Operand], ...]  # operands that the kernel does not read as they are
    shapes: tuple[tuple[tuple[int, ...], tuple[int, ...], torch.dtype], ...]  # and strides, of results
    like_first: bool  # the first result is shaped as the first array, which is contiguous
    differentiable: bool | None = None  # whether its gradient has a kernel; None: nobody has asked


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    return torch.empty(tuple(shape), device="meta").stride()


def _is_read_as_is(operand: Operand, x: Tensor, array: Array) -> bool:
    if operand.dtype is not None and array.dtype != operand.dtype:
        return False
    if operand.contiguous and not x.is_contiguous():
        return False
    # A lazily negated view (the imaginary part of a conjugate) holds its memory with the wrong sign. Its strides are
    # even, all of them, so few arrays have to be asked.
    return not x.is_floating_point() or any(
        stride % 2 for stride, extent in zip(x.stride(), x.shape, strict=True) if extent > 1
    )


def _make_ready(op: Op, arrays: Sequence[Any], words: Sequence[Any]) -> Ready:
    arrays_described = described(op, arrays)
    plan = op.plan(*arrays_described, *words)
    first = arrays[0]
    prepared = prepare(plan, arch_of_device(first.device))
    places = tuple(op.arrays.index(operand.argument) for operand in plan.operands)
    converted = tuple(
        (i, operand)
        for i, (operand, at) in enumerate(zip(plan.operands, places, strict=True))
        if not _is_read_as_is(operand, arrays[at], arrays_described[at])
    )
    shapes = tuple((result.shape, _strides(result.shape), getattr(torch, result.dtype)) for result in plan.results)
    shape, _, dtype = shapes[0]
    like_first = dtype is first.dtype and tuple(first.shape) == tuple(shape) and first.is_contiguous()
    return Ready(prepared, prepared.call, first.device, first.is_cpu, places, converted, shapes, like_first)


def ready(op: Op, arrays: Sequence[Any], words: Sequence[Any]) -> Ready:
    """The prepared call, looked up by everything it depends on; a miss checks and prepares."""
    try:
        key = (
            op,
            *[None if x is None else (x.shape, x.stride(), x.dtype, x.device) for x in arrays],
            *cache.words_key(words),
        )
        found: Ready = cache.find(key)
        return found
    except KeyError:
        found = _make_ready(op, arrays, words)
    except (AttributeError, TypeError, ValueError, RuntimeError):  # not a dense tensor, or words that do not hash
        return _make_ready(op, arrays, words)
    cache.keep(key, found)
    return found


def empty_results(plan: Plan, like: Tensor) -> list[Tensor]:
    """The results of a plan, not yet written."""
    return [like.new_empty(result.shape, dtype=getattr(torch, result.dtype)) for result in plan.results]


def launch(op: Op, ready: Ready, arrays: Sequence[Any]) -> list[Tensor]:
    """Allocate the results, launch on the current stream."""
    device = ready.device
    if not ready.on_cpu and device.index != current_device():
        with torch.cuda.device(device):
            return launch(op, ready, arrays)
    shapes = ready.shapes
    results = [torch.empty_like(arrays[0])] if ready.like_first else []
    for shape, strides, dtype in shapes[len(results) :]:
        # empty_strided takes its arguments in half the time torch.empty needs.
        results.append(torch.empty_strided(shape, strides, dtype=dtype, device=device))
    prepared = ready.prepared
    if prepared.plan.nothing_to_do:
        return [x.zero_() for x in results]
    operands = [arrays[at] for at in ready.operands]  # a name, so that converted copies outlive the launch
    for i, operand in ready.converted:
        operands[i] = _converted(operand, operands[i])
    if prepared.launch is not None:
        prepared.launch(operands, results, 0 if ready.on_cpu else current_stream(device.index))
        return results
    addresses = [x.data_ptr() for x in operands]
    if 0 in addresses:
        for at, x in zip(ready.operands, operands, strict=True):
            check_storage(op.arrays[at], x)
    addresses += [x.data_ptr() for x in results]
    if ready.on_cpu:
        ready.call(*addresses, 0, 0, torch.get_num_threads())
        return results
    # The allocator hands freed memory to later work of the same stream only, so operands and workspace may go at once.
    size = prepared.workspace_bytes
    workspace = torch.empty(size, dtype=torch.uint8, device=device) if size else None
    ready.call(*addresses, 0 if workspace is None else workspace.data_ptr(), current_stream(device.index), 0)
    return results


def _converted(operand: Operand, x: Tensor) -> Tensor:
    """The operand as the kernel reads it.

    Nothing is kept for the next call. A kept copy would go stale unnoticed: writes through `.data`, or to a tensor that
    shares this one's memory, leave no trace on it.
    """
    x = x.detach()
    if x.is_neg():
        x = x.resolve_neg()
    if operand.dtype is not None and x.dtype is not getattr(torch, operand.dtype):
        if operand.dtype == "int32":
            x = x.clamp(_INT32.min, _INT32.max)
        x = x.to(getattr(torch, operand.dtype))
    return x.contiguous() if operand.contiguous else x


def check_differentiable(op: Op, plan: Plan, arch: int) -> None:
    """NotImplementedError where the gradient of a call has no kernel."""
    gradient = op.gradient
    assert gradient is not None
    spec = plan.spec(arch)
    try:
        dispatch.plan(replace(spec, op=gradient.op.name))
    except NoKernelError:
        kernel = dispatch.plan(spec, plan.kernel)
        *most, last = gradient.of
        names = f"{', '.join(most)} or {last}"
        raise NotImplementedError(
            f"{names} requires a gradient and kernel {kernel.name!r} ({kernel.device}, precision "
            f"{spec.precision}) has no backward pass; allowed: call it under torch.no_grad(), detach() "
            f"{', '.join(most)} and {last}, or use tensors on the CPU with precision=None"
        ) from None
