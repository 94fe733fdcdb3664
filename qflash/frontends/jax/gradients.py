"""Reverse mode: connects an operation to the operation that computes its gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero

from qflash import dispatch
from qflash.call.op import Gradient, Op
from qflash.call.spec import SERVE_QUANTIZED
from qflash.frontends.jax.batching import batchable
from qflash.frontends.jax.call import Call
from qflash.frontends.jax.derivatives import constant, forward_only, listed, no_forward_mode, reverse_only


@lru_cache(maxsize=4096)
def differentiable(call: Call) -> Callable[..., tuple[Any, ...]]:
    """(arrays named `call.names`) -> results, with the operation's derivatives, and errors for the others."""
    gradient = call.op.gradient
    if gradient is None:
        forward = batchable(call)
        return lambda *arrays: forward(*(forward_only(call.op, *of) for of in zip(call.names, arrays, strict=True)))
    whole = replace(call, words=call.op.with_words(call.words, gradient.words))  # with all results
    run = batchable(call) if call.op.backward is call.op else _once(call.op, call)

    @jax.custom_vjp
    def function(*arrays: Any) -> tuple[Any, ...]:
        return run(*arrays)

    def save(*arrays: Any) -> tuple[tuple[Any, ...], Any]:
        _check_differentiable(call, gradient, arrays)
        arrays = tuple(x.value for x in arrays)
        run_whole = _inner(call.op, whole)
        # With these names jax.checkpoint's policies can save what would otherwise be recomputed.
        results = [
            checkpoint_name(x, f"{call.op.spoken}.{name}")
            for name, x in zip(call.op.results, run_whole(*arrays), strict=False)  # the last, a total, may be missing
        ]
        return tuple(results[at] for at in _shown(call, whole, arrays)), (arrays, results)

    def pull_back(saved: Any, cotangents: Sequence[Any]) -> tuple[Any, ...]:
        arrays, results = saved
        of_results: list[Any] = [None] * len(results)
        for at, cotangent in zip(_shown(call, whole, arrays), cotangents, strict=True):
            if not isinstance(cotangent, SymbolicZero):
                of_results[at] = cotangent
        if of_results[0] is None:
            of_results[0] = jnp.zeros_like(results[0])
        by_name = dict(zip(call.names, arrays, strict=True))
        known = by_name | dict(zip(call.op.results, results, strict=False))
        known |= {name: x for name, x in zip(call.op.cotangents, of_results, strict=False) if x is not None}
        operands = {name: known[name] for name in call.op.backward.arrays if name in known}
        backward_call = Call(call.op.backward, call.op.backward_words(whole.words), tuple(operands))
        operands = dict(zip(operands, backward_call.read_as(tuple(operands.values())), strict=True))
        backward = _inner(call.op, backward_call)
        wanted = [name for name in gradient.of if name in by_name]
        gradients = dict(zip(wanted, backward(*operands.values()), strict=True))
        gradients |= dict.fromkeys(gradient.passed, of_results[0])
        return tuple(_placed_as(x, gradients.get(name)) for name, x in by_name.items())

    function.defvjp(save, pull_back, symbolic_zeros=True)
    of = [name for name in call.names if name in (*gradient.of, *gradient.passed)]
    refusal = no_forward_mode(call.op, of)

    def guarded(name: str, x: Any) -> Any:
        # Not in `save`: if that raises, JAX keeps a program that cannot be differentiated any more.
        if name in gradient.refused:
            return constant(x, f"{name} has no gradient in qflash; put jax.lax.stop_gradient around it")
        return reverse_only(x, refusal) if name in of else x

    return lambda *arrays: function(*(guarded(*pair) for pair in zip(call.names, arrays, strict=True)))


def _placed_as(x: Any, gradient: Any) -> Any:
    """The gradient of x, with x's sharding: with explicit sharding it is part of the type."""
    wanted = jax.typeof(x).sharding
    if gradient is None or wanted.mesh.empty or jax.typeof(gradient).sharding.spec == wanted.spec:
        return gradient
    return jax.sharding.reshard(gradient, wanted)


def _inner(op: Op, call: Call) -> Callable[..., tuple[Any, ...]]:
    """`call` as part of the derivative of `op`. An operation that is its own derivative also has all higher ones."""
    return differentiable(call) if op.backward is op else _once(op, call)


def _once(op: Op, call: Call) -> Callable[..., tuple[Any, ...]]:
    """`call` as part of the only derivative of `op`: a derivative of it would be a second one."""
    function = batchable(call)
    return lambda *arrays: function(*(constant(x, op.backward.no_gradient) for x in arrays))


def _shown(call: Call, whole: Call, arrays: Sequence[Any]) -> list[int]:
    """Which of all results the call returns."""
    fields = [[result.field for result in x.plan(arrays, "cpu").results] for x in (call, whole)]
    return [fields[1].index(field) for field in fields[0]]


def _check_differentiable(call: Call, gradient: Gradient, arrays: Sequence[Any]) -> None:
    precision = call.plan([x.value for x in arrays], "cpu").for_spec.precision
    if all(precision not in kernel.precisions for kernel in dispatch.kernels_of(call.op.backward.computed_as)):
        raise NotImplementedError(
            f"precision {precision!r} has no backward pass; allowed: precision=None{SERVE_QUANTIZED}; "
            f"or put jax.lax.stop_gradient around {listed([name for name in gradient.of if name in call.names])}"
        )
