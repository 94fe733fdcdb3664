"""How XLA may split a call over devices: by batch and by heads, with no communication.

Under shard_map the split is the user's and nothing here runs. Under a bare jit on sharded arrays XLA would gather every
operand of a custom call it knows nothing about; `partitioned` tells it that sequences are independent, and so are
groups of heads. Lengths and head_dim are never split: a shard of those is gathered first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec

from qflash.frontends.jax.call import Call, dims_of
from qflash.frontends.jax.primitive import call_p


def partitioned(call: Call) -> Callable[..., tuple[Any, ...]]:
    """The primitive for `call` as a function XLA can split, where the operation tells its dimensions."""

    def bind(*arrays: Any) -> tuple[Any, ...]:
        return tuple(call_p.bind(*arrays, call=call))

    if call.op.dims is None:
        return bind

    def dims(arrays: Sequence[Any], results: Sequence[Any]) -> tuple[list[str], list[str]]:
        known = call.dims([len(x.shape) for x in arrays])
        assert known is not None
        of_arrays = [dims_of(known, name, len(x.shape)) for name, x in zip(call.names, arrays, strict=True)]
        return of_arrays, [known[name] for name in call.op.results[: len(results)]]

    def shardings(mesh: Any, arrays: Sequence[Any], results: Sequence[Any]) -> tuple[tuple, tuple]:
        of_arrays, of_results = dims(arrays, results)
        place = partial(_sharding, mesh, _kept_axes(mesh, arrays, of_arrays, of_results))
        return tuple(map(place, of_arrays)), tuple(map(place, of_results))

    def partition(mesh: Any, arrays: Sequence[Any], results: Sequence[Any]):
        places, result_places = shardings(mesh, arrays, results)
        return mesh, bind, result_places, places

    def rule(mesh: Any, arrays: Sequence[Any], results: Sequence[Any]):
        return _rule(arrays, *dims(arrays, results))

    function = custom_partitioning(bind)
    function.def_partition(
        partition=partition,
        infer_sharding_from_operands=lambda *of: shardings(*of)[1],
        sharding_rule=rule,
    )
    return function


def _sizes(arrays: Sequence[Any], dims: Sequence[str]) -> dict[str, int]:
    """Extents by letter."""
    sizes: dict[str, int] = {}
    for x, letters in zip(arrays, dims, strict=True):
        sizes.update(zip(letters, x.shape, strict=True))
    return sizes


def _kv_heads(sizes: dict[str, int]) -> int:
    """Heads that are split one by one: of keys, or all where there are no keys."""
    return sizes.get("G", sizes["H"])


def _sums_keys(results: Sequence[str]) -> bool:
    """A gradient of keys sums over the query heads of a group, so groups stay together."""
    return any("G" in letters for letters in results)


def _sums_batch(results: Sequence[str]) -> bool:
    """A gradient of sinks sums over sequences, so these stay together."""
    return any("b" not in letters for letters in results)


def _kept_axes(mesh: Any, arrays: Sequence[Any], dims: Sequence[str], results: Sequence[str]) -> dict[str, Any]:
    """The mesh axes over which batch and heads stay split: those that divide them evenly, from where the queries (or
    what is shaped as they are) are split the most."""
    sizes = _sizes(arrays, dims)
    axes: dict[str, Any] = {}
    for x, letters in zip(arrays, dims, strict=True):
        if "H" in letters and isinstance(x.sharding, NamedSharding):
            spec = dict(zip(letters, (*x.sharding.spec, *[None] * len(letters)), strict=False))
            axes = max(axes, spec, key=lambda spec: _ways(mesh, spec.get("b")) * _ways(mesh, spec.get("H")))
    split = {}
    if not _sums_batch(results) and sizes.get("b", 1) % _ways(mesh, axes.get("b")) == 0:
        split["b"] = axes.get("b")
    heads, kv_heads = axes.get("H"), _kv_heads(sizes)
    if kv_heads % _ways(mesh, heads) == 0:
        split["H"] = split["G"] = heads
    elif kv_heads == 1 and not _sums_keys(results) and sizes["H"] % _ways(mesh, heads) == 0:
        split["H"] = heads  # every device has the one key head
    return split


def _ways(mesh: Any, axes: Any) -> int:
    """Into how many parts a dimension is split by a PartitionSpec entry."""
    names = () if axes is None else (axes,) if isinstance(axes, str) else axes
    return math.prod(mesh.shape[name] for name in names)


def _sharding(mesh: Any, split: dict[str, Any], dims: str) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec(*(split.get(dim) for dim in dims)))


def _rule(arrays: Sequence[Any], operands: Sequence[str], results: Sequence[str]) -> tuple[str, dict[str, Any]]:
    """The same for the Shardy partitioner: an einsum-like text, and the factors that must not be split.

    Query heads are key heads times a group; the group is the minor factor and stays whole unless it is all there is.
    """
    extents = _sizes(arrays, operands)
    q_heads, kv_heads = extents["H"], _kv_heads(extents)
    if q_heads == kv_heads:
        factors, free, sizes = "G", "bG", {}
    elif kv_heads == 1:
        factors, free, sizes = "r", "b" if _sums_keys(results) else "br", {}
    else:
        factors, free, sizes = "(G r)", "bG", {"r": q_heads // kv_heads}
    if _sums_batch(results):
        free = free.replace("b", "")
    sides = [", ".join(" ".join(dims) for dims in side).replace("H", factors) for side in (operands, results)]
    in_order = dict.fromkeys(name for name in sides[0] if name.isalpha())
    return " -> ".join(sides), {
        "need_replication_factors": tuple(name for name in in_order if name not in free),
        **sizes,
    }
