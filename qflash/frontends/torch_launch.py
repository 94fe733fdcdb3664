"""Real torch tensors to a running kernel: descriptions, the plan cache, rope tables, allocation, the launch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.autograd import forward_ad

from qflash.backends.arch import arch_for
from qflash.call.array import Array
from qflash.call.lengths import lengths
from qflash.dispatch import Kernel
from qflash.frontends.torch_watch import is_compiling, is_wrapped
from qflash.ops.problem import PLAIN, Options, Problem, RopeArrays, check, check_packed
from qflash.planning import Prepared, prepare, prepare_backward
from qflash.rope import Rope

Tensor = torch.Tensor
_CACHE_LIMIT = 4096
_INT32 = torch.iinfo(torch.int32)
_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int64)


class Extras(NamedTuple):
    """The optional tensors of a call, and what a packed call adds. `cu_seqlens_q` is None unless packed."""

    kv_lens: Tensor | None = None
    cos: Tensor | None = None
    sin: Tensor | None = None
    positions_q: Tensor | None = None
    positions_k: Tensor | None = None
    interleaved: bool = False
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    max_seqlen_q: int = 0
    max_seqlen_k: int = 0


def _require_tensor(name: str, x: Any, first: str = "q") -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} is {type(x).__module__}.{type(x).__qualname__}; allowed: torch.Tensor, as {first} is")


def describe(name: str, x: Any, first: str = "q") -> Array:
    """Shape, strides, dtype and device of a strided tensor, or TypeError. `first` decided the framework.

    A tensor that a transform of torch.func wraps has no strides: those of one sample are not those of the tensor that
    the vmap rule makes of it for the kernel, and that one is described by itself.
    """
    _require_tensor(name, x, first)
    if x.is_nested or x.layout is not torch.strided:
        layout = "nested" if x.is_nested else str(x.layout).removeprefix("torch.")
        raise TypeError(f"{name} is a {layout} tensor; allowed: a dense (strided) torch.Tensor")
    strides = None if is_wrapped(x) else x.stride()
    return Array(tuple(x.shape), strides, str(x.dtype).removeprefix("torch."), str(x.device))


def _describe_optional(name: str, x: Any) -> Array | None:
    return None if x is None else describe(name, x)


def are_plain(extras: Extras) -> bool:
    """Whether every tensor among them is a torch.Tensor proper; a fake one has no data to point at."""
    return all(x.__class__ is Tensor or not isinstance(x, Tensor) for x in extras)


def index(name: str, x: Any, device: torch.device) -> Tensor:
    """Lengths or positions as an int32 tensor, where their values are on the host: ints that are not tensors, and
    tensors of other integers on the CPU. A tensor on a GPU stays what it is, and `check` has its say."""
    if isinstance(x, Tensor):
        if x.dtype is torch.int32 or x.dtype not in _INTEGERS or x.is_cuda:
            return x
        if x.dtype is torch.int64:  # saturated, so that no bad value becomes a good one
            x = x.clamp(_INT32.min, _INT32.max)
        return x.to(torch.int32)
    if not isinstance(x, (list, tuple, np.ndarray)):
        kind = f"{type(x).__module__}.{type(x).__qualname__}"
        raise TypeError(f"{name} is {kind}; allowed: torch.Tensor, or ints as a list, tuple or numpy.ndarray")
    if is_compiling():
        return torch.as_tensor(x, dtype=torch.int32, device=device)
    return torch.tensor(lengths(name, x), device=device)  # a copy, because users write to their arrays


def extras_of(q: Tensor, kv_lens: Any, rope: Any, packed: tuple = ()) -> Extras:
    """The user's optional arguments side by side; what tells by being None that it is absent may not be None."""
    device = q.device
    if packed:
        packed = (index("cu_seqlens_q", packed[0], device), index("cu_seqlens_k", packed[1], device), *packed[2:])
    if kv_lens is not None:
        kv_lens = index("kv_lens", kv_lens, device)
    if rope is None:
        return Extras(kv_lens, None, None, None, None, False, *packed)
    if not isinstance(rope, Rope):
        raise TypeError(f"rope is {type(rope).__name__}; allowed: None or qflash.Rope")
    _require_tensor("rope.cos", rope.cos)
    _require_tensor("rope.sin", rope.sin)
    positions_q = None if rope.positions_q is None else index("rope.positions_q", rope.positions_q, device)
    positions_k = None if rope.positions_k is None else index("rope.positions_k", rope.positions_k, device)
    return Extras(kv_lens, rope.cos, rope.sin, positions_q, positions_k, rope.interleaved, *packed)


def check_call(q: Any, k: Any, v: Any, options: Options, extras: Extras | None) -> Problem:
    """The checked problem of a call."""
    if isinstance(options.causal, Tensor):  # its truth lives on a device, and may change under a cached plan
        raise TypeError("causal is a torch.Tensor; allowed: True or False")
    arrays = describe("q", q), describe("k", k), describe("v", v)
    if extras is None:
        return check(*arrays, options)
    lens = _describe_optional("kv_lens", extras.kv_lens)
    rope = None
    if extras.cos is not None:
        rope = RopeArrays(
            describe("rope.cos", extras.cos),
            describe("rope.sin", extras.sin),
            extras.interleaved,
            _describe_optional("rope.positions_q", extras.positions_q),
            _describe_optional("rope.positions_k", extras.positions_k),
        )
    if extras.cu_seqlens_q is None:
        return check(*arrays, options, lens, rope)
    return check_packed(
        *arrays,
        describe("cu_seqlens_q", extras.cu_seqlens_q),
        describe("cu_seqlens_k", extras.cu_seqlens_k),
        extras.max_seqlen_q,
        extras.max_seqlen_k,
        options,
        lens,
        rope,
    )


_arch_of_index: dict[int, int] = {}


def arch_of_device(device: torch.device) -> int:
    """Compute capability times ten (or what QFLASH_CUDA_ARCH asks for); 0 for anything but a CUDA device."""
    if device.type != "cuda":
        return 0
    index = device.index if device.index is not None else torch.cuda.current_device()
    arch = _arch_of_index.get(index)
    if arch is None:
        major, minor = torch.cuda.get_device_capability(index)
        arch = _arch_of_index[index] = arch_for(10 * major + minor)
    return arch


def _extras_key(extras: Extras) -> tuple:
    """What a plan depends on in the optional tensors (made contiguous before use, so strides do not count)."""
    return tuple((x.shape, x.dtype, x.device, x.layout) if isinstance(x, Tensor) else (x, type(x)) for x in extras)


@dataclass(slots=True)
class Plan:
    """A prepared call with what each launch of it asks for, worked out once."""

    prepared: Prepared
    call: Callable[..., None]
    device: torch.device
    on_cpu: bool
    lse_shape: tuple[int, ...]
    lse_strides: tuple[int, ...]
    # A lazily negated view (the imaginary part of a conjugate) holds its memory with the wrong sign. It is strided in
    # twos, so it passes `check` with one-wide heads alone: those go through the dispatcher, which resolves it.
    may_be_negated: bool
    like_q: bool  # q is contiguous, and so is what torch.empty_like makes of it without being told
    backward_call: Callable[..., None] | None = None  # prepared when first wanted


_plans: dict[tuple, Plan | None] = {}


def _plan(q: Any, k: Any, v: Any, options: Options, extras: Extras | None) -> Plan | None:
    problem = check_call(q, k, v, options, extras)
    if q.is_meta:
        return None
    prepared = prepare(problem, arch_of_device(q.device))
    shape = lse_shape(problem)
    strides = torch.empty(shape, device="meta").stride()
    return Plan(prepared, prepared.call, q.device, q.is_cpu, shape, strides, problem.head_dim == 1, q.is_contiguous())


def plan(q: Any, k: Any, v: Any, options: Options, extras: Extras | None) -> Plan | None:
    """The prepared call, looked up by everything it depends on; a miss checks and prepares. None for meta tensors."""
    try:
        key = (
            q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(), q.dtype, k.dtype, v.dtype,
            q.device, k.device, v.device, options if options is PLAIN else options.key(),
            None if extras is None else _extras_key(extras),
        )  # fmt: skip
        return _plans[key]
    except KeyError:
        found = _plan(q, k, v, options, extras)
    except (AttributeError, TypeError, ValueError, RuntimeError):  # not a dense tensor, or words that do not hash
        return _plan(q, k, v, options, extras)
    if len(_plans) >= _CACHE_LIMIT:
        _plans.clear()
    _plans[key] = found
    return found


def _table(x: Tensor) -> Tensor:
    """A rope table as kernels read it: float32, contiguous.

    Another one is converted in every call. A copy that is kept would go stale unnoticed: writes through `.data`, or to
    a tensor that shares the table's memory, leave no trace on the table.
    """
    if x.dtype is torch.float32 and x.is_contiguous() and not x.is_neg():
        return x
    return x.detach().resolve_neg().to(torch.float32).contiguous()


def _address(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


def _contiguous(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()


class _Side(NamedTuple):
    """The optional tensors as the kernel reads them. Holding it keeps them alive through the launch."""

    kv_lens: Tensor | None
    cu_seqlens_q: Tensor | None
    cu_seqlens_k: Tensor | None
    cos: Tensor | None
    sin: Tensor | None
    positions_q: Tensor | None
    positions_k: Tensor | None


def _side(extras: Extras) -> _Side:
    return _Side(
        _contiguous(extras.kv_lens),
        _contiguous(extras.cu_seqlens_q),
        _contiguous(extras.cu_seqlens_k),
        None if extras.cos is None else _table(extras.cos),
        None if extras.sin is None else _table(extras.sin),
        _contiguous(extras.positions_q),
        _contiguous(extras.positions_k),
    )


def check_storage(**tensors: Tensor) -> None:
    """Refuse a tensor with elements and no memory: a storage resized to nothing, or a tensor of no data at all."""
    for name, x in tensors.items():
        if x.numel() and not x.data_ptr():
            raise ValueError(f"{name} has no storage; allowed: a tensor that holds data")


def _addresses(side: _Side) -> list[int]:
    addresses = []
    for x in side:
        at = 0 if x is None else x.data_ptr()
        if not at and x is not None:
            check_storage(**{name: y for name, y in side._asdict().items() if y is x})
        addresses.append(at)
    return addresses


_NO_ADDRESSES = (0,) * len(_Side._fields)


def lse_shape(problem: Problem) -> tuple[int, ...]:
    if problem.packed:
        return problem.q_heads, problem.total_q
    return problem.batch, problem.q_heads, problem.q_len


def forward(
    plan: Plan, q: Tensor, k: Tensor, v: Tensor, extras: Extras | None, want_lse: bool
) -> tuple[Tensor, Tensor | None]:
    """Allocate out and lse, launch on the current stream."""
    device = plan.device
    if not plan.on_cpu and device.index != torch._C._cuda_getDevice():
        with torch.cuda.device(device):
            return forward(plan, q, k, v, extras, want_lse)
    out = torch.empty_like(q) if plan.like_q else torch.empty_like(q, memory_format=torch.contiguous_format)
    lse, lse_at = None, 0
    if want_lse:
        # empty_strided takes its arguments in half the time torch.empty needs.
        lse = torch.empty_strided(plan.lse_shape, plan.lse_strides, dtype=torch.float32, device=device)
        lse_at = lse.data_ptr()
    q_at, k_at, v_at = q.data_ptr(), k.data_ptr(), v.data_ptr()
    if not (q_at and k_at and v_at):
        check_storage(q=q, k=k, v=v)
    addresses = _NO_ADDRESSES
    if extras is not None:
        side = _side(extras)  # a name, so that converted copies outlive the launch
        addresses = _addresses(side)
    if plan.on_cpu:
        plan.call(q_at, k_at, v_at, out.data_ptr(), lse_at, *addresses, 0, 0, torch.get_num_threads())
    else:
        # The allocator hands freed memory to later work of the same stream only, so the workspace may go at once.
        size = plan.prepared.workspace_bytes
        workspace = torch.empty(size, dtype=torch.uint8, device=device) if size else None
        stream = torch._C._cuda_getCurrentRawStream(device.index)
        plan.call(q_at, k_at, v_at, out.data_ptr(), lse_at, *addresses, _address(workspace), stream, 0)
    return out, lse


def backward(
    plan: Plan,
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    extras: Extras | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv, contiguous. `plan` is the forward call's; a dlse of None is zero."""
    if not lse.numel():  # no query at all, and so nothing an engine could read
        return tuple(torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    if plan.backward_call is None:
        plan.backward_call = prepare_backward(plan.prepared.problem, arch_of_device(q.device)).call
    dout, dlse = (None if x is None else x.resolve_neg().contiguous() for x in (dout, dlse))
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    side = _side(extras or Extras())
    plan.backward_call(
        q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(), lse.data_ptr(), *_addresses(side),
        dout.data_ptr(), _address(dlse), dq.data_ptr(), dk.data_ptr(), dv.data_ptr(), 0, torch.get_num_threads(),
    )  # fmt: skip
    return dq, dk, dv


def check_differentiable(kernel: Kernel) -> None:
    """NotImplementedError where the kernel that would run has no backward pass."""
    if not kernel.backward:
        raise NotImplementedError(
            f"q, k or v requires a gradient and kernel {kernel.name!r} ({kernel.device}, precision "
            f"{kernel.precision}) has no backward pass; allowed: call it under torch.no_grad(), detach() q, k and v, "
            "or use tensors on the CPU with precision=None"
        )


def check_tables_constant(extras: Extras) -> None:
    """Gradients reach q, k and v only; a rope table that asks for one is refused, not ignored."""
    for name, x in (("rope.cos", extras.cos), ("rope.sin", extras.sin)):
        if x is not None and x.requires_grad:
            raise NotImplementedError(f"{name} requires a gradient; allowed: a table without one, {name}.detach()")


NO_SECOND_DERIVATIVE = "qflash.attention has no second derivative; allowed: one backward pass over it"


def check_no_tangents(args: Sequence[Any]) -> None:
    """Forward-mode differentiation would lose its tangents in a kernel: refuse it."""
    if forward_ad._current_level < 0:
        return
    for x in args:
        if isinstance(x, Tensor) and forward_ad.unpack_dual(x).tangent is not None:
            raise NotImplementedError(
                "qflash.attention has no forward-mode derivative (jvp, dual tensors); allowed: reverse mode, or "
                "tensors without tangents"
            )
