"""What makes the primitives good JAX citizens: vmap (fold the axis into the batch), grad, varying mesh axes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap
from jax.custom_derivatives import SymbolicZero

from qflash.call.spec import PRECISIONS
from qflash.frontends.jax.call import Call
from qflash.frontends.jax.derivatives import once, reverse_only
from qflash.frontends.jax.partitioning import partitioned
from qflash.frontends.jax.primitives import attention_bwd_p, attention_p


@lru_cache(maxsize=4096)
def attend(call: Call):
    """(q, k, v, *optional) -> (out, lse): differentiable, batchable."""
    forward, backward = once(_forward(call)), once(_backward(call))
    backward_with_dlse = once(_backward(call.with_operand("dlse")))

    @jax.custom_vjp
    def attention(*operands):
        return forward(*operands)

    def save(*operands):
        _check_differentiable(call, operands)
        operands = tuple(operand.value for operand in operands)
        out, lse = forward(*operands)
        return (out, lse), (operands, out, lse)

    def pull_back(saved, cotangents):
        operands, out, lse = saved
        dout, dlse = cotangents
        if isinstance(dout, SymbolicZero):
            dout = jnp.zeros_like(out)
        inputs = (*operands[:3], out, lse, dout, *operands[3:])
        gradients = backward(*inputs) if isinstance(dlse, SymbolicZero) else backward_with_dlse(*inputs, dlse)
        return (*gradients, *[None] * len(call.operands))

    attention.defvjp(save, pull_back, symbolic_zeros=True)
    return lambda q, k, v, *optional: attention(*map(reverse_only, (q, k, v)), *optional)


def _check_differentiable(call: Call, operands: Sequence[Any]) -> None:
    if call.precision != PRECISIONS[0]:
        raise NotImplementedError(
            f"precision {call.precision!r} has no backward pass; use precision=None, "
            "or put jax.lax.stop_gradient around q, k and v"
        )
    for name in ("cos", "sin"):
        if name in call.operands and operands[call.index(name)].perturbed:
            raise NotImplementedError(
                f"rope.{name} has no gradient in qflash; put jax.lax.stop_gradient around the tables"
            )


@lru_cache(maxsize=4096)
def _forward(call: Call):
    forward = custom_vmap(partitioned(attention_p, call, ("q", "kv", "kv"), ("q", "lse")))

    @forward.def_vmap
    def rule(axis_size, in_batched, *operands):
        if _one_at_a_time(call, axis_size, in_batched, first_optional=3):
            return map_samples(forward, in_batched, operands), (True, True)
        if in_batched[0] and not any(in_batched[1:]):
            return _share_keys(forward, axis_size, *operands), (True, True)
        folded = _fold(call, axis_size, in_batched, operands, first_optional=3)
        return tuple(_unfold(x, axis_size) for x in forward(*folded)), (True, True)

    return forward


@lru_cache(maxsize=4096)
def _backward(call: Call):
    fixed = ("q", "kv", "kv", "q", "lse", "q")
    backward = custom_vmap(partitioned(attention_bwd_p, call, fixed, ("q", "kv", "kv")))

    @backward.def_vmap
    def rule(axis_size, in_batched, *operands):
        if _one_at_a_time(call, axis_size, in_batched, first_optional=6):
            return map_samples(backward, in_batched, operands), (True,) * 3
        folded = _fold(call, axis_size, in_batched, operands, first_optional=6)
        return tuple(_unfold(x, axis_size) for x in backward(*folded)), (True,) * 3

    return backward


def _one_at_a_time(call: Call, axis_size: int, in_batched: Sequence[bool], first_optional: int) -> bool:
    """A kernel takes one set of tables and one packed array, so these are not folded but looped over.

    An axis of 0 cannot be unfolded again, nor be heads; a loop of no turns gives the empty results.
    """
    tables = [
        batched
        for name, batched in zip(call.operands, in_batched[first_optional:], strict=True)
        if name in ("cos", "sin")
    ]
    return axis_size == 0 or call.packed or any(tables)


def map_samples(function, in_batched: Sequence[bool], operands: Sequence[Any]):
    """vmap by a loop: `function` for one sample after another."""

    def one(batched):
        batched = iter(batched)
        return function(*(next(batched) if b else x for x, b in zip(operands, in_batched, strict=True)))

    return jax.lax.map(one, [x for x, b in zip(operands, in_batched, strict=True) if b])


def _share_keys(forward, axis_size: int, q, k, v, *optional):
    """Only q is batched: its axis joins the query heads of each group, and no key is copied."""
    _, batch, length, q_heads, head_dim = q.shape
    kv_heads = k.shape[2]
    group = q_heads // kv_heads
    q = q.reshape(axis_size, batch, length, kv_heads, group, head_dim)
    q = jnp.moveaxis(q, 0, 3).reshape(batch, length, axis_size * q_heads, head_dim)
    out, lse = forward(q, k, v, *optional)
    out = jnp.moveaxis(out.reshape(batch, length, kv_heads, axis_size, group, head_dim), 3, 0)
    lse = jnp.moveaxis(lse.reshape(batch, kv_heads, axis_size, group, length), 2, 0)
    return (
        out.reshape(axis_size, batch, length, q_heads, head_dim),
        lse.reshape(axis_size, batch, q_heads, length),
    )


def _fold(call: Call, axis_size: int, in_batched: Sequence[bool], operands: Sequence[Any], first_optional: int):
    """Merge the new leading axis into the batch of every operand that has one."""
    names = [None] * first_optional + list(call.operands)
    batch = operands[0].shape[1 if in_batched[0] else 0]
    folded = []
    for name, batched, x in zip(names, in_batched, operands, strict=True):
        if name in ("cos", "sin") or (name in ("positions_q", "positions_k") and not batched and x.ndim == 1):
            folded.append(x)  # the same for every sequence
            continue
        if not batched:
            x = jnp.broadcast_to(x, (axis_size, *x.shape))
        elif name in ("positions_q", "positions_k") and x.ndim == 2:
            x = jnp.broadcast_to(x[:, None], (axis_size, batch, x.shape[1]))
        folded.append(x.reshape(axis_size * batch, *x.shape[2:]))
    return folded


def _unfold(x, axis_size: int):
    return x.reshape(axis_size, x.shape[0] // axis_size, *x.shape[1:])


def vary_alike(operands: Sequence[Any]) -> list[Any]:
    """Under shard_map: mark every operand as varying over each mesh axis that any of them varies over.

    Done outside the differentiable function, so that JAX sums the gradient of an operand all devices share.
    """
    varying = [_varying_axes(x) for x in operands]
    everywhere = frozenset().union(*varying)
    return [
        _vary(x, tuple(everywhere - axes)) if axes != everywhere else x
        for x, axes in zip(operands, varying, strict=True)
    ]


def _varying_axes(x: Any) -> frozenset:
    aval = jax.typeof(x)
    return aval.vma if hasattr(aval, "vma") else aval.manual_axis_type.varying  # JAX before 0.10; since


def _vary(x: Any, axes: tuple) -> Any:
    if hasattr(jax.lax, "pcast"):  # JAX 0.8
        return jax.lax.pcast(x, axes, to="varying")
    return jax.lax.pvary(x, axes)
