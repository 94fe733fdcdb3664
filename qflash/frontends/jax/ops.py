"""Operations beside attention on JAX arrays: one primitive for all, lowered to one XLA custom call.

As with attention, the kernel is chosen where the platform is known, at lowering. The struct is packed there too, so a
program is for the sizes it was lowered with.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import custom_vmap
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.sharding import NamedSharding, PartitionSpec

from qflash import _native, dispatch
from qflash.call.array import Array
from qflash.call.op import Op, Operand, Plan, prepare
from qflash.call.spec import OpSpec
from qflash.frontends.jax import arch_of, await_verdict, describe, traced
from qflash.frontends.jax.derivatives import constant
from qflash.frontends.jax.kernels import OP, cuda_arch, register
from qflash.frontends.jax.lengths import as_lengths
from qflash.frontends.jax.transforms import map_samples, vary_alike
from qflash.frontends.jax.words import require_known
from qflash.ops.kv import QuantizedKV
from qflash.ops.quantization import Quantized
from qflash.planning import entry_of

_PLANS_LIMIT = 4096
_INT32 = jnp.iinfo(jnp.int32)

jax.tree_util.register_dataclass(
    Quantized,
    data_fields=["values", "scale", "zero_point", "mean", "sums"],
    meta_fields=["granularity", "group", "symmetric", "dtype"],
)
jax.tree_util.register_dataclass(
    QuantizedKV,
    data_fields=["k", "k_scale", "k_mean", "k_wild", "v", "v_scale", "v_lift", "v_wild", "v_mean", "lens"],
    meta_fields=["dtype", "precision"],
)

# The arrays called `names` -> the results of the plan
op_p = Primitive(OP)
op_p.multiple_results = True


def run_op(op: Op, arrays: Sequence[Any], words: Sequence[Any]) -> Sequence[jax.Array]:
    """Check, then run as a cached jit."""
    named = _named(op, arrays)
    if traced(named.values()):
        _check(op, named, words)
        return _run(op, tuple(words), tuple(named), tuple(named.values()))
    plan = _check_cached(op, named, words)
    args = (op, tuple(words), tuple(named), tuple(named.values()))
    waits = plan.device == "cpu" and any(name in named for name in op.checked)
    return await_verdict(_run, *args) if waits else _run(*args)


def spec_of(op: Op, arrays: Sequence[Any], words: Sequence[Any]) -> OpSpec:
    """What selects the kernel of a checked call, for `explain`."""
    return _check(op, _named(op, arrays), words).spec(arch_of(arrays[0]))


def _named(op: Op, arrays: Sequence[Any]) -> dict[str, Any]:
    """The arrays that are there, by name."""
    return {
        name: as_lengths(name, x) if name in op.indices else x
        for name, x in zip(op.arrays, arrays, strict=True)
        if x is not None
    }


def as_index(name: str, x: Any, like: jax.Array) -> jax.Array:
    """Lengths as int32; not committed to a device, so they go where `like` is."""
    return as_lengths(name, x)


def scalar(value: float, like: jax.Array) -> jax.Array:
    """A number as an array; not committed to a device, so it goes where `like` is."""
    return jnp.asarray(value, jnp.float32)


def _check(op: Op, named: dict[str, Any], words: Sequence[Any]) -> Plan:
    require_known(dict(zip(op.words, words, strict=True)))
    return _plan(op, words, describe(named, op.arrays[0]))


_checked: dict[tuple, Plan] = {}


def _check_cached(op: Op, named: dict[str, Any], words: Sequence[Any]) -> Plan:
    """`_check` for arrays that exist: eager calls repeat."""
    try:
        # With types, because to a dict True is 1 is 1.0, and to a plan they are not.
        places = [(x.aval, x.sharding, x.committed) for x in named.values()]
        key = (op.name, *named, *places, *words, *map(type, words))
        found = _checked.get(key)
    except (AttributeError, TypeError):  # something is not what it should be; `_check` says what
        return _check(op, named, words)
    if found is None:
        if len(_checked) >= _PLANS_LIMIT:
            _checked.clear()
        found = _checked[key] = _check(op, named, words)
    return found


def _plan(op: Op, words: Sequence[Any], described: dict[str, Array]) -> Plan:
    return op.plan(*(described.get(name) for name in op.arrays), *words)


def _plan_of_avals(op: Op, words: Sequence[Any], names: Sequence[str], avals: Sequence[Any], platform: str) -> Plan:
    arrays = (Array(aval.shape, None, aval.dtype.name, platform) for aval in avals)
    return _plan(op, words, dict(zip(names, arrays, strict=True)))


@partial(jax.jit, static_argnums=(0, 1, 2))
def _run(op: Op, words: tuple, names: tuple[str, ...], arrays: Sequence[jax.Array]) -> list[jax.Array]:
    operands = _plan_of_avals(op, words, names, arrays, "cpu").operands
    wanted = {operand.argument: operand for operand in operands}
    arrays = [_forward_only(op, name, x) for name, x in zip(names, arrays, strict=True)]
    # What no kernel reads, only a check, goes as it is.
    ready = [_ready(wanted[name], x) if name in wanted else x for name, x in zip(names, arrays, strict=True)]
    return _operation(op, words, names)(*vary_alike(ready))


@lru_cache(maxsize=4096)
def _operation(op: Op, words: tuple, names: tuple[str, ...]):
    """The primitive with what vmap makes of it."""
    bind = partial(op_p.bind, op=op, words=words, names=names)

    @custom_vmap
    def forward(*operands):
        return tuple(bind(*operands))

    @forward.def_vmap
    def rule(axis_size, in_batched, *operands):
        ranks = {name: x.ndim - mapped for name, x, mapped in zip(names, operands, in_batched, strict=True)}
        mapped = [name for name, is_mapped in zip(names, in_batched, strict=True) if is_mapped]
        if op.folds(mapped, ranks, dict(zip(op.words, words, strict=True))):
            outs = forward(*operands)
        else:
            outs = map_samples(forward, in_batched, operands)
        return outs, tuple(True for _ in outs)

    return forward


def _forward_only(op: Op, name: str, x: jax.Array) -> jax.Array:
    """Argument `name` of an operation, which refuses to be differentiated."""
    return constant(
        x, f"qflash.{op.name} is forward only and {name} is being differentiated; put jax.lax.stop_gradient around it"
    )


def _ready(operand: Operand, x: jax.Array) -> jax.Array:
    if operand.dtype == "int32" and x.dtype.itemsize > _INT32.dtype.itemsize:
        x = jnp.clip(x, _INT32.min, _INT32.max)
    return x if operand.dtype is None else x.astype(operand.dtype)


@op_p.def_abstract_eval
def _abstract(*avals, op: Op, words: tuple, names: tuple[str, ...]):
    """The results vary over the mesh axes that the operands vary over, and are whole along the others."""
    first = avals[0].update(weak_type=False)

    def like(result: Any) -> Any:
        spec = PartitionSpec(*[None] * len(result.shape))
        sharding = NamedSharding(first.sharding.mesh, spec)
        return first.update(shape=result.shape, dtype=jnp.dtype(result.dtype), sharding=sharding)

    return [like(result) for result in _plan_of_avals(op, words, names, avals, "cpu").results]


def _lower(ctx, *operands, op: Op, words: tuple, names: tuple[str, ...], platform: str):
    for name, aval in zip(names, ctx.avals_in, strict=True):
        if not all(isinstance(extent, int) for extent in aval.shape):
            raise NotImplementedError(
                f"{name} has symbolic shape {aval.shape}; allowed in qflash.{op.name}: numbers, because the sizes are "
                "part of the program"
            )
    plan = _plan_of_avals(op, words, names, ctx.avals_in, platform)
    arch = cuda_arch() if platform == "cuda" else 0
    spec = plan.spec(arch)
    kernel = dispatch.plan(spec, plan.kernel)
    if plan.nothing_to_do:
        empty = [(result.shape, result.dtype) for result in plan.results]
        return mlir.lower_fun(lambda *_: [jnp.zeros(*result) for result in empty], multiple_results=True)(
            ctx, *operands
        )
    entry = entry_of(kernel, spec)
    avals = _in_order(plan, names, ctx.avals_in)
    workspace = jax.core.ShapedArray((max(prepare(plan, arch).workspace_bytes, 1),), jnp.uint8)  # as for attention
    fields = _native.op_layouts[plan.struct][1]
    attributes = {
        "kernel": register(kernel.name, spec, entry, plan.struct),
        "takes": plan.struct,
        "params": np.frombuffer(plan.params(), np.int64),
        "pointers": np.array([fields[name][0] for name in plan.pointers], np.int64),
        "num_bytes": np.array([_num_bytes(aval) for aval in (*avals, *ctx.avals_out)], np.int64),
    }
    ctx = ctx.replace(avals_in=avals, avals_out=[*ctx.avals_out, workspace])
    return jax.ffi.ffi_lowering(OP)(ctx, *_in_order(plan, names, operands), **attributes)[:-1]


def _in_order(plan: Plan, names: Sequence[str], values: Sequence[Any]) -> list[Any]:
    """Values that stand in the order of `names`, in that of the plan's operands."""
    by_name = dict(zip(names, values, strict=True))
    return [by_name[operand.argument] for operand in plan.operands]


def _num_bytes(aval: Any) -> int:
    return math.prod(aval.shape) * aval.dtype.itemsize


def _evaluate(*arrays, **params):
    """Outside any transformation, which only jax.disable_jit() brings about: compile this one operation."""
    with jax.disable_jit(False):
        return jax.jit(partial(op_p.bind, **params))(*arrays)


op_p.def_impl(_evaluate)
for _platform in ("cpu", "cuda"):
    mlir.register_lowering(op_p, partial(_lower, platform=_platform), platform=_platform)
