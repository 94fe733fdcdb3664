"""JAX arrays, on the CPU or CUDA: one XLA custom call that works with jit, vmap, grad, scan, remat and shard_map.

__init__      checked calls, each a cached jit
call          the static part of a call
describe      array descriptions         words    rejects words that are arrays
trees         objects as pytrees         lengths  lists, NumPy integers and int64 as int32 arrays
gradients     reverse mode               derivatives  errors for derivatives that do not exist
batching      vmap                       varying      shard_map's varying mesh axes
partitioning  how XLA may shard a call over devices
primitive     the JAX primitive and its lowering per platform
attributes    what a program passes to the XLA handler
kernels       keys by which compiled programs refer to kernels
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp

from qflash.call import cache
from qflash.call.op import Op, Plan
from qflash.frontends.jax import trees  # noqa: F401  (registers them)
from qflash.frontends.jax.call import Call
from qflash.frontends.jax.describe import default_platform, describe, is_traced
from qflash.frontends.jax.gradients import differentiable
from qflash.frontends.jax.kernels import arch_of_device, cuda_arch
from qflash.frontends.jax.lengths import as_lengths
from qflash.frontends.jax.varying import vary_alike
from qflash.frontends.jax.words import require_known

_FAILED = "INVALID_ARGUMENT: qflash: "  # the prefix of XLA's error when a handler rejects a value


@dataclass(frozen=True, slots=True)
class Checked:
    """A checked call on concrete arrays. `waits`: the CPU engine checks values at run time, so the call blocks."""

    program: Callable[..., tuple[jax.Array, ...]]
    waits: bool


def run(op: Op, arrays: Sequence[Any], words: Sequence[Any]) -> Sequence[jax.Array]:
    """Check, then run as a cached jit. Results are in the order of the plan."""
    given = _given(op, arrays)
    values = given.values()
    if is_traced(values):
        _plan(op, given, words)
        return _program(Call(op, tuple(words), tuple(given)))(*values)
    key = _key(op, given, words)
    checked = cache.find(key)
    if checked is None:
        checked = _check(op, given, words)
        cache.keep(key, checked)
    return await_verdict(checked.program, *values) if checked.waits else checked.program(*values)


def run_in_place(op: Op, arrays: Sequence[Any], words: Sequence[Any]) -> Sequence[jax.Array]:
    """`run` of an operation that writes to its arrays: returns new ones, in the memory of the old if it was donated."""
    return run(op, arrays, words)  # there are no other results


def plan_of(op: Op, arrays: Sequence[Any], words: Sequence[Any]) -> Plan:
    """The plan of a checked call, for `explain`."""
    return _plan(op, _given(op, arrays), words)


def arch_of(x: jax.Array) -> int:
    """Compute capability times ten of the array's device (0: CPU); of the default device while x is traced."""
    if is_traced([x]):
        return cuda_arch() if default_platform() == "cuda" else 0
    return arch_of_device(next(iter(x.devices())))


def as_index(name: str, x: Any, like: jax.Array) -> Any:
    """Lengths or positions as int32; not committed to a device, so they follow `like`."""
    return None if x is None else as_lengths(name, x)


def scalar(value: float, like: jax.Array) -> jax.Array:
    """A number as an array; not committed to a device, so it follows `like`."""
    return jnp.asarray(value, jnp.float32)


def await_verdict(function: Callable[..., Any], *args: Any) -> Any:
    """The result of function(*args), ready. If the CPU engine rejects a value, raises ValueError with its text."""
    try:
        return jax.block_until_ready(function(*args))
    except (jax.errors.JaxRuntimeError, ValueError) as error:  # which of the two depends on when XLA detects the error
        _, failed, text = str(error).partition(_FAILED)
        if failed:
            raise ValueError(text) from None
        raise


def _given(op: Op, arrays: Sequence[Any]) -> dict[str, Any]:
    """The given arrays, by name; lengths as int32."""
    indices = op.indices
    return {
        name: as_lengths(name, x) if name in indices else x
        for name, x in zip(op.arrays, arrays, strict=True)
        if x is not None
    }


def _plan(op: Op, given: dict[str, Any], words: Sequence[Any]) -> Plan:
    require_known(dict(zip(op.words, words, strict=True)))
    return Call(op, tuple(words), tuple(given)).plan_of(describe(given, op.arrays[0]))


def _key(op: Op, given: dict[str, Any], words: Sequence[Any]) -> tuple[Any, ...] | None:
    """What a checked call depends on; None if something is invalid, and the checks then raise."""
    try:
        facts = [(x.aval, x.sharding, x.committed) for x in given.values()]
        return ("jax", op, *given, *facts, *cache.words_key(words))
    except (AttributeError, TypeError):
        return None


def _check(op: Op, given: dict[str, Any], words: Sequence[Any]) -> Checked:
    plan = _plan(op, given, words)
    waits = plan.device == "cpu" and any(operand.argument in op.checked for operand in plan.operands)
    return Checked(_program(Call(op, tuple(words), tuple(given))), waits)


@lru_cache(maxsize=4096)
def _program(call: Call) -> Callable[..., tuple[jax.Array, ...]]:
    """The jit of a call. It has no static arguments, so a lookup of the compiled program hashes none."""

    def program(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        return differentiable(call)(*vary_alike(call.read_as(arrays)))

    program.__name__ = program.__qualname__ = f"qflash_{call.op.name}"  # shown in jaxprs and profiles
    compiled: Callable[..., tuple[jax.Array, ...]] = jax.jit(program)
    return compiled
