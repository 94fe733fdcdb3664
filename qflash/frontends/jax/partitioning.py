"""How XLA may shard a call over devices: attention by batch and by heads, products by rows of x and columns of w.

Under shard_map the user shards the arrays, and nothing here runs. Under a bare jit on sharded arrays XLA would gather
all operands of a custom call without sharding rules; `partitioned` declares that sequences are independent, and so are
groups of heads, rows and columns. Lengths, head_dim and reduction dimensions are never sharded: their shards are
gathered first. The only communication is for gradients of products, which are sums over the shards.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec, use_abstract_mesh

from qflash.frontends.jax.call import Call, dims_of
from qflash.frontends.jax.primitive import call_p

# A shard's computation has no mesh of its own. Under a mesh with explicit axes, JAX 0.11 and later would write
# shardings into the additions of `psum`, which XLA rejects.
_NO_MESH = AbstractMesh((), ())


def partitioned(call: Call) -> Callable[..., tuple[Any, ...]]:
    """The primitive for `call` as a function that XLA can shard, if the operation specifies its dimensions."""

    def bind(*arrays: Any) -> tuple[Any, ...]:
        return tuple(call_p.bind(*arrays, call=call))

    if call.op.dims is None:
        return bind

    def dims(arrays: Sequence[Any], results: Sequence[Any]) -> tuple[list[str], list[str]]:
        known = call.dims([len(x.shape) for x in arrays])
        assert known is not None
        of_arrays = [dims_of(known, name, len(x.shape)) for name, x in zip(call.names, arrays, strict=True)]
        return _apart(arrays, of_arrays), [known[name] for name in call.op.results[: len(results)]]

    def shardings(mesh: Any, arrays: Sequence[Any], results: Sequence[Any]) -> tuple[tuple, tuple, list]:
        of_arrays, of_results = dims(arrays, results)
        kept = _kept_axes(mesh, arrays, of_arrays, of_results)
        place = partial(_sharding, mesh, kept)
        return tuple(map(place, of_arrays)), tuple(map(place, of_results)), [_summed(kept, of) for of in of_results]

    def partition(mesh: Any, arrays: Sequence[Any], results: Sequence[Any]):
        places, result_places, summed = shardings(mesh, arrays, results)

        def compute_part(*shards: Any) -> tuple[Any, ...]:
            with use_abstract_mesh(_NO_MESH):
                parts = zip(bind(*shards), summed, strict=True)
                return tuple(jax.lax.psum(x, axes) if axes else x for x, axes in parts)

        return mesh, compute_part, result_places, places

    def rule(mesh: Any, arrays: Sequence[Any], results: Sequence[Any]):
        return _rule(arrays, *dims(arrays, results))

    function = custom_partitioning(bind)
    function.def_partition(
        partition=partition,
        infer_sharding_from_operands=lambda *of: shardings(*of)[1],
        sharding_rule=rule,
    )
    return lambda *arrays: (bind if call.dims([x.ndim for x in arrays]) is None else function)(*arrays)


def _sizes(arrays: Sequence[Any], dims: Sequence[str]) -> dict[str, int]:
    """Extents by letter, from the first array that has the letter, in the order of the arrays."""
    sizes: dict[str, int] = {}
    for x, letters in zip(arrays, dims, strict=True):
        for letter, size in zip(letters, x.shape, strict=True):
            sizes.setdefault(letter, size)
    return sizes


def _apart(arrays: Sequence[Any], dims: Sequence[str]) -> list[str]:
    """`dims`, but with a letter of its own, never sharded, for an array's one element for all rows or columns."""
    sizes = _sizes(arrays, dims)
    return [
        "".join("o" if size == 1 and sizes[letter] != 1 else letter for letter, size in zip(of, x.shape, strict=True))
        for x, of in zip(arrays, dims, strict=True)
    ]


def _kv_heads(sizes: dict[str, int]) -> int:
    """The number of heads that can be sharded individually: those of keys, or all if there are no keys."""
    return sizes.get("G", sizes["H"])


def _sums_keys(results: Sequence[str]) -> bool:
    """A gradient of keys sums over the query heads of a group, so groups are not sharded."""
    return any("G" in letters for letters in results)


def _sums_batch(results: Sequence[str]) -> bool:
    """A gradient of sinks sums over sequences, so these are not sharded."""
    return any("b" not in letters for letters in results)


def _kept_axes(mesh: Any, arrays: Sequence[Any], dims: Sequence[str], results: Sequence[str]) -> dict[str, Any]:
    """The mesh axes over which dimensions stay sharded, by letter."""
    if any("H" in letters for letters in dims):
        return _kept_heads(mesh, arrays, dims, results)
    return _kept_rows(mesh, arrays, dims)


def _kept_heads(mesh: Any, arrays: Sequence[Any], dims: Sequence[str], results: Sequence[str]) -> dict[str, Any]:
    """The mesh axes over which batch and heads stay sharded: those that divide them evenly, from the array shaped like
    queries that is sharded the most."""
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


def _kept_rows(mesh: Any, arrays: Sequence[Any], dims: Sequence[str]) -> dict[str, Any]:
    """The mesh axes over which rows and columns stay sharded: those that divide them evenly, from the array in which
    each is sharded the most. An axis shards what comes first, rows of x: a weight over the same devices is gathered."""
    kept: dict[str, Any] = {}
    for letter, size in _sizes(arrays, dims).items():
        specs = [
            (*x.sharding.spec, *[None] * len(letters))[letters.index(letter)]
            for x, letters in zip(arrays, dims, strict=True)
            if letter in letters and isinstance(x.sharding, NamedSharding)
        ]
        taken = {name for axes in kept.values() for name in _names(axes)}
        possible = [axes for axes in specs if size % _ways(mesh, axes) == 0 and taken.isdisjoint(_names(axes))]
        if letter.isupper() and possible:
            kept[letter] = max(possible, key=partial(_ways, mesh))
    return kept


def _summed(kept: Mapping[str, Any], letters: str) -> list[str]:
    """The mesh axes over which a result is a sum: those that shard rows or columns, but none of its dimensions."""
    rows = (letter for letter in kept if letter.isupper() and letter not in "GH")
    return [name for letter in rows if letter not in letters for name in _names(kept[letter])]


def _names(axes: Any) -> tuple[str, ...]:
    """Names of the mesh axes in a PartitionSpec entry."""
    return () if axes is None else (axes,) if isinstance(axes, str) else tuple(axes)


def _ways(mesh: Any, axes: Any) -> int:
    """The number of shards that a PartitionSpec entry makes of a dimension."""
    return math.prod(mesh.shape[name] for name in _names(axes))


def _sharding(mesh: Any, split: dict[str, Any], dims: str) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec(*(split.get(dim) for dim in dims)))


def _rule(arrays: Sequence[Any], operands: Sequence[str], results: Sequence[str]) -> tuple[str, dict[str, Any]]:
    """The same for the Shardy partitioner: an einsum-like text, and the factors that must not be sharded.

    Without heads, capitals are rows and columns, which may be sharded.

    Query heads are key heads times a group; the group is the minor factor and is not sharded unless it is the only one.
    """
    extents = _sizes(arrays, operands)
    if "H" not in extents:
        sides = [", ".join(" ".join(dims) for dims in side) for side in (operands, results)]
        return " -> ".join(sides), {"need_replication_factors": tuple(name for name in extents if name.islower())}
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
