"""vmap: one call if the operation can take the samples as more sequences, rows or query heads, otherwise a loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap

from qflash.frontends.jax.call import Call, dims_of
from qflash.frontends.jax.partitioning import partitioned

Results = tuple[Any, ...]


@lru_cache(maxsize=4096)
def batchable(call: Call) -> Callable[..., Results]:
    """(arrays named `call.names`) -> results; supports vmap, and XLA can shard it over devices."""
    function = custom_vmap(partitioned(call))

    @function.def_vmap
    def rule(axis_size: int, in_batched: Sequence[bool], *operands: Any) -> tuple[Results, tuple[bool, ...]]:
        results = _mapped(call, function, axis_size, in_batched, operands)
        return results, (True,) * len(results)

    return function


def _mapped(
    call: Call, function: Callable[..., Results], axis_size: int, in_batched: Sequence[bool], operands: Sequence[Any]
) -> Results:
    """The results with the mapped axis first, where the mapped operands also have it."""
    mapped = [name for name, is_mapped in zip(call.names, in_batched, strict=True) if is_mapped]
    ranks = {name: x.ndim - is_mapped for name, x, is_mapped in zip(call.names, operands, in_batched, strict=True)}
    if call.op.folds(mapped, ranks, call.words_by_name()):
        return function(*operands)
    known = call.dims([ranks[name] for name in call.names])
    # An axis of 0 cannot be unfolded again, nor be heads; a loop without iterations returns the empty results.
    if known is None or axis_size == 0 or not _takes_a_batch(call, known, mapped):
        return _loop(function, in_batched, operands)
    if _are_queries(call, known, mapped):
        return _join_heads(call, known, function, axis_size, in_batched, operands)
    folded = _fold(call, known, axis_size, in_batched, operands)
    return tuple(x.reshape(axis_size, x.shape[0] // axis_size, *x.shape[1:]) for x in function(*folded))


def _takes_a_batch(call: Call, known: Mapping[str, str], mapped: Sequence[str]) -> bool:
    """Whether every mapped array can have a batch dimension. Tables and packed arrays cannot, nor is it possible with
    results that sum over all sequences."""
    return not call.op.sums_batch(known) and all(
        known[name].startswith("b") and name not in call.op.tables for name in mapped
    )


def _loop(function: Callable[..., Results], in_batched: Sequence[bool], operands: Sequence[Any]) -> Results:
    """`function` for each sample in sequence."""

    def one(samples: Sequence[Any]) -> Results:
        sample = iter(samples)
        return function(*(next(sample) if b else x for x, b in zip(operands, in_batched, strict=True)))

    results: Results = jax.lax.map(one, [x for x, b in zip(operands, in_batched, strict=True) if b])
    return results


# Only queries are mapped: their axis joins the query heads of each key head, and no key is copied ---------------------


def _are_queries(call: Call, known: Mapping[str, str], mapped: Sequence[str]) -> bool:
    """Whether all mapped arrays and all results have query heads, and the keys are shared."""
    names = [*mapped, *(name for name in call.op.results if name in known)]
    return all("H" in known[name] for name in names) and any("G" in known[name] for name in call.names)


def _join_heads(
    call: Call,
    known: Mapping[str, str],
    function: Callable[..., Results],
    axis_size: int,
    in_batched: Sequence[bool],
    operands: Sequence[Any],
) -> Results:
    shared = next(at for at, name in enumerate(call.names) if "G" in known[name])
    kv_heads = operands[shared].shape[known[call.names[shared]].index("G")]

    def join(name: str, x: Any, is_mapped: bool) -> Any:
        """[axis, ..., G r, ...] as [..., G axis r, ...]"""
        if "H" not in known[name]:
            return x
        if not is_mapped:
            x = jnp.broadcast_to(x, (axis_size, *x.shape))
        at = known[name].index("H")
        _, *before, heads = x.shape[: at + 2]
        after = x.shape[at + 2 :]
        x = x.reshape(axis_size, *before, kv_heads, heads // kv_heads, *after)
        return jnp.moveaxis(x, 0, at + 1).reshape(*before, axis_size * heads, *after)

    def part(name: str, x: Any) -> Any:
        at = known[name].index("H")
        before, heads, after = x.shape[:at], x.shape[at] // axis_size, x.shape[at + 1 :]
        x = x.reshape(*before, kv_heads, axis_size, heads // kv_heads, *after)
        return jnp.moveaxis(x, at + 1, 0).reshape(axis_size, *before, heads, *after)

    joined = [join(*of) for of in zip(call.names, operands, in_batched, strict=True)]
    return tuple(part(name, x) for name, x in zip(call.op.results, function(*joined), strict=False))


# Otherwise the axis is folded into the batch --------------------------------------------------------------------------


def _fold(
    call: Call, known: Mapping[str, str], axis_size: int, in_batched: Sequence[bool], operands: Sequence[Any]
) -> list[Any]:
    """Every operand with the new leading axis merged into its batch; arrays that all sequences share are unchanged."""
    batch = operands[0].shape[1 if in_batched[0] else 0]
    folded = []
    for name, x, is_mapped in zip(call.names, operands, in_batched, strict=True):
        has_batch = dims_of(known, name, x.ndim - is_mapped).startswith("b")
        if is_mapped or has_batch:
            if not is_mapped:
                x = jnp.broadcast_to(x, (axis_size, *x.shape))
            elif not has_batch:  # of a sample, shared by its sequences
                x = jnp.broadcast_to(x[:, None], (axis_size, batch, *x.shape[1:]))
            x = x.reshape(axis_size * batch, *x.shape[2:])
        folded.append(x)
    return folded
