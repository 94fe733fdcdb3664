"""The one JAX primitive, and its lowering to the one XLA custom call.

It is a primitive rather than a `jax.ffi.ffi_call` because the platform is known only at lowering: there the kernel is
chosen, loaded and registered, and a call that no kernel of that platform serves is rejected.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.sharding import NamedSharding, PartitionSpec

from qflash import backends, dispatch
from qflash.backends import Entry
from qflash.call.op import Plan
from qflash.call.prepare import prepare
from qflash.errors import NoKernelError
from qflash.frontends.jax.attributes import attributes, symbolic
from qflash.frontends.jax.call import Call, dims_of
from qflash.frontends.jax.kernels import TARGET, cuda_arch, register

# The arrays named `call.names` -> the results of the plan
call_p = Primitive(TARGET)
call_p.multiple_results = True


@call_p.def_abstract_eval
def _abstract(*avals: Any, call: Call) -> list[Any]:
    """The results vary over the mesh axes that the operands vary over, and are sharded like dimensions of the same
    letter; those without a letter are not sharded."""
    first = avals[0].update(weak_type=False)
    known = call.dims([aval.ndim for aval in avals])
    axes: dict[str, Any] = {}
    if known is not None:
        for name, aval in zip(call.names, avals, strict=True):
            spec = (*aval.sharding.spec, *[None] * aval.ndim)
            axes = dict(zip(dims_of(known, name, aval.ndim), spec, strict=False)) | axes

    def like(at: int, shape: Sequence[int], dtype: str) -> Any:
        letters = "?" * len(shape) if known is None else known[call.op.results[at]]
        sharding = NamedSharding(first.sharding.mesh, PartitionSpec(*_once_each(map(axes.get, letters))))
        return first.update(shape=tuple(shape), dtype=jnp.dtype(dtype), sharding=sharding)

    plan = call.plan(avals, "cpu")
    written = (avals[call.names.index(operand.argument)] for operand in plan.written)
    return [
        *(like(at, result.shape, result.dtype) for at, result in enumerate(plan.results)),
        *(like(0, aval.shape, aval.dtype.name) for aval in written),
    ]


def _once_each(axes: Iterable[Any]) -> Iterator[Any]:
    """The entries of a PartitionSpec, without any that has a mesh axis of an earlier one."""
    seen: set[str] = set()
    for entry in axes:
        names = {entry} if isinstance(entry, str) else set(entry or ())
        yield entry if seen.isdisjoint(names) else None
        seen |= names


def _lower(ctx: Any, *operands: Any, call: Call, platform: str) -> Any:
    plan = call.plan(ctx.avals_in, platform)
    arch = cuda_arch() if platform == "cuda" else 0
    spec = plan.spec(arch)
    kernel = _kernel(call, plan, arch)
    if plan.nothing_to_do:
        empty = [(result.shape, result.dtype) for result in plan.results]
        kept = [call.names.index(operand.argument) for operand in plan.written]
        make = mlir.lower_fun(
            lambda *xs: [*(jnp.zeros(*result) for result in empty), *(xs[at] for at in kept)], multiple_results=True
        )
        return make(ctx, *operands)
    entry = backends.load(kernel, spec)
    if not isinstance(entry, Entry):
        raise NotImplementedError(f"kernel {kernel.name!r} takes arrays of another framework; allowed in JAX: others")
    order = [call.names.index(operand.argument) for operand in plan.operands]
    avals = [ctx.avals_in[at] for at in order]
    # The kernel's workspace is an additional result, so that XLA allocates it. It is never empty: every platform has an
    # address for a buffer of one byte.
    workspace = jax.core.ShapedArray((max(_workspace_bytes(call, plan, arch, entry, ctx.avals_in), 1),), jnp.uint8)
    words = attributes(call, plan, avals, ctx.avals_out)
    ctx = ctx.replace(avals_in=avals, avals_out=[*ctx.avals_out, workspace])
    key = register(kernel.name, spec, entry, plan.struct)
    # What is written is both operand and result, in one buffer: XLA copies an operand only if it is used again.
    places = [at for at, operand in enumerate(plan.operands) if operand.written]
    aliases = {at: len(plan.results) + i for i, at in enumerate(places)}
    lower = jax.ffi.ffi_lowering(TARGET, operand_output_aliases=aliases)
    return lower(ctx, *(operands[at] for at in order), kernel=key, **words)[:-1]


def _kernel(call: Call, plan: Plan, arch: int) -> dispatch.Kernel:
    try:
        return dispatch.choose(plan.spec(arch), plan.kernel)
    except NoKernelError as error:
        if not call.op.no_gradient:
            raise
        place = plan.device.upper()  # the user did not call this operation, but requested a derivative
        raise NotImplementedError(
            f"qflash has no backward pass on {place} for this call; differentiate on the CPU (jax.device_put to "
            f"jax.devices('cpu')), or put jax.lax.stop_gradient around what is differentiated. {error}"
        ) from None


def _workspace_bytes(call: Call, plan: Plan, arch: int, entry: Entry, avals: Sequence[Any]) -> int:
    if entry.workspace == 0:
        return 0
    for name, aval in zip(call.names, avals, strict=True):
        if symbolic(aval):
            raise NotImplementedError(
                f"{name} has symbolic shape {aval.shape}; allowed in {call.op.spoken} on {plan.device.upper()}: "
                "numbers, because the kernel's workspace is part of the program"
            )
    return prepare(plan, arch).workspace_bytes


def _evaluate(*operands: Any, call: Call) -> Any:
    """Called outside any transformation, which only happens with jax.disable_jit(): compiles this one operation."""
    with jax.disable_jit(False):
        return jax.jit(partial(call_p.bind, call=call))(*operands)


call_p.def_impl(_evaluate)
for _platform in ("cpu", "cuda"):
    mlir.register_lowering(call_p, partial(_lower, platform=_platform), platform=_platform)
