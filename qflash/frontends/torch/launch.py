"""From torch tensors to a running kernel: the lookup of the plan, allocation, the launch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any

import torch

from qflash import dispatch
from qflash._native import plan_key
from qflash.call import cache
from qflash.call.array import Array
from qflash.call.op import Op, Operand, Plan
from qflash.call.prepare import Prepared, prepare
from qflash.call.spec import SERVE_QUANTIZED
from qflash.errors import NoKernelError
from qflash.frontends.torch.arrays import arch_of_device, check_storage, described
from qflash.frontends.torch.watch import current_device, current_stream

Tensor = torch.Tensor
_INT32 = torch.iinfo(torch.int32)
PLAIN = (Tensor, torch.nn.Parameter)  # classes whose instances own their data


@dataclass(slots=True)
class Ready:
    """A prepared call with the facts that every launch of it needs, computed once."""

    prepared: Prepared
    call: Callable[..., None]
    device: torch.device
    on_cpu: bool
    operands: tuple[int, ...]  # their indices among the arrays
    pick: Callable[[Sequence[Any]], Sequence[Tensor]]  # selects these from all arrays
    converted: tuple[tuple[int, Operand], ...]  # operands that the kernel cannot read as they are
    shapes: tuple[tuple[tuple[int, ...], tuple[int, ...], torch.dtype], ...]  # shape, strides and dtype of each result
    like_first: bool  # the first result is shaped like the first array, which is contiguous
    is_plain: bool  # only that result, no array to convert or to write to, and a native kernel
    workspace: tuple[int]  # its shape, in bytes
    words: tuple[Any, ...]
    wants_gradient: bool  # an array requires a gradient
    with_gradient: tuple[Ready, tuple[Any, ...]] | None = None  # the call that autograd differentiates, and its words


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    return torch.empty(tuple(shape), device="meta").stride()


def _is_read_as_is(operand: Operand, x: Tensor, array: Array) -> bool:
    if operand.dtype is not None and array.dtype != operand.dtype:
        return False
    if operand.contiguous and not x.is_contiguous():
        return False
    if operand.written:
        return True
    # A lazily negated view (the imaginary part of a conjugate) has the wrong sign in memory. All its strides are even,
    # so is_neg() need only be called for few arrays.
    return not x.is_floating_point() or any(
        stride % 2 for stride, extent in zip(x.stride(), x.shape, strict=True) if extent > 1
    )


def _is_like(x: Tensor, shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> bool:
    return dtype is x.dtype and tuple(x.shape) == tuple(shape) and x.is_contiguous()


def _picker(places: tuple[int, ...]) -> Callable[[Sequence[Any]], Sequence[Tensor]]:
    if len(places) == 1:
        return lambda arrays: (arrays[places[0]],)
    return itemgetter(*places)


@torch.compiler.disable  # after a graph break Dynamo would trace the checks, with NumPy's scalars as arrays
def make_ready(op: Op, arrays: Sequence[Any], words: Sequence[Any], key: Any) -> Ready:
    """Check a call and prepare it, for this and later calls. `key`: of plan_key."""
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
    like_first = bool(shapes) and _is_like(first, *shapes[0])
    native = prepared.launch is None and not plan.nothing_to_do
    is_plain = like_first and len(shapes) == 1 and not converted and not op.writes and native
    found = Ready(
        prepared=prepared,
        call=prepared.call,
        device=first.device,
        on_cpu=first.is_cpu,
        operands=places,
        pick=_picker(places),
        converted=converted,
        shapes=shapes,
        like_first=like_first,
        is_plain=is_plain,
        workspace=(0 if first.is_cpu else prepared.workspace_bytes,),
        words=tuple(words),
        wants_gradient=any(x is not None and x.requires_grad for x in arrays),
    )
    cache.keep(key, found)
    return found


def find_ready(op: Op, arrays: Sequence[Any], words: Sequence[Any]) -> Ready:
    """The prepared call, looked up by everything it depends on; a miss checks and prepares."""
    key = plan_key(op, arrays, words, PLAIN, True)
    return cache.find(key) or make_ready(op, arrays, words, key)


def empty_results(plan: Plan, like: Tensor) -> list[Tensor]:
    """The results of a plan, uninitialized."""
    return [like.new_empty(result.shape, dtype=getattr(torch, result.dtype)) for result in plan.results]


def launch(op: Op, ready: Ready, arrays: Sequence[Any]) -> Sequence[Tensor]:
    """Allocate the results and launch on the current stream."""
    device = ready.device
    if not ready.is_plain or not (ready.on_cpu or device.index == current_device()):
        return _launch(op, ready, arrays)
    # The most common case: one result like the first array, and nothing to convert.
    out = torch.empty_like(arrays[0])
    try:
        if ready.on_cpu:
            ready.call(*ready.pick(arrays), out, 0, 0, torch.get_num_threads())
            return (out,)
        workspace = torch.empty_strided(ready.workspace, (1,), dtype=torch.uint8, device=device)
        ready.call(*ready.pick(arrays), out, workspace.data_ptr(), current_stream(device.index), 0)
    except ValueError:
        check_storage(op, arrays)
        raise
    return (out,)


def _launch(op: Op, ready: Ready, arrays: Sequence[Any]) -> Sequence[Tensor]:
    if op.writes and not ready.prepared.plan.nothing_to_do:
        _note_writes(op.written(arrays))
    device = ready.device
    if not ready.on_cpu and device.index != current_device():
        with torch.cuda.device(device):
            return _launch(op, ready, arrays)
    results = [torch.empty_like(arrays[0])] if ready.like_first else []
    for shape, strides, dtype in ready.shapes[len(results) :]:
        # empty_strided parses its arguments in half the time of torch.empty.
        results.append(torch.empty_strided(shape, strides, dtype=dtype, device=device))
    prepared = ready.prepared
    if prepared.plan.nothing_to_do:
        return [x.zero_() for x in results]
    if any(not operand.contiguous and arrays[ready.operands[i]].is_neg() for i, operand in ready.converted):
        arrays = [x if x is None else x.resolve_neg() for x in arrays]  # which have other strides
        return launch(op, find_ready(op, arrays, ready.words), arrays)
    operands = ready.pick(arrays)  # a variable, so that converted copies outlive the launch
    if ready.converted:
        operands = list(operands)
        for i, operand in ready.converted:
            operands[i] = _converted(operand, operands[i])
    if prepared.launch is not None:
        prepared.launch(operands, results, 0 if ready.on_cpu else current_stream(device.index))
        return results
    try:
        if ready.on_cpu:
            ready.call(*operands, *results, 0, 0, torch.get_num_threads())
            return results
        # The allocator reuses freed memory only for later work on the same stream, so operands and workspace may be
        # freed once the launch is on that stream, but not before.
        workspace = torch.empty_strided(ready.workspace, (1,), dtype=torch.uint8, device=device)
        ready.call(*operands, *results, workspace.data_ptr(), current_stream(device.index), 0)
    except ValueError:
        check_storage(op, arrays)
        raise
    return results


def _note_writes(tensors: Sequence[Tensor]) -> None:
    """Notify autograd, which raises if a saved tensor was modified since."""
    torch.autograd.graph.increment_version([x for x in tensors if not x.is_inference()])


def _converted(operand: Operand, x: Tensor) -> Tensor:
    """The operand as the kernel reads it.

    Nothing is cached for the next call. A cached copy would become stale unnoticed: writes through `.data`, or to a
    tensor that shares its memory, leave no trace on it.
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
    """Raise NotImplementedError if no kernel computes the gradient of a call."""
    gradient = op.gradient
    assert gradient is not None
    spec = plan.spec(arch)
    try:
        dispatch.choose(replace(spec, op=op.backward.computed_as))
    except NoKernelError:
        kernel = dispatch.choose(spec, plan.kernel)
        given = {operand.argument for operand in plan.operands}
        *most, last = (name for name in gradient.of if name in given)
        names = " or ".join(filter(None, (", ".join(most), last)))
        detached = " and ".join(filter(None, (", ".join(most), last)))
        raise NotImplementedError(
            f"{names} requires a gradient and kernel {kernel.name!r} ({kernel.device}, precision "
            f"{spec.precision}) has no backward pass; allowed: call it under torch.no_grad(), detach() "
            f"{detached}, or precision=None{'' if spec.precision == 'native' else SERVE_QUANTIZED}"
        ) from None
