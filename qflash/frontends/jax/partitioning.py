"""How XLA may split an attention call over devices: by batch and by heads, with no communication.

Under shard_map the split is the user's and nothing here runs. Under a bare jit on sharded arrays XLA would gather every
operand of a custom call it knows nothing about; `partitioned` tells it that sequences are independent, and so are
groups of heads. Lengths and head_dim are never split: a shard of those is gathered first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

from jax.experimental.custom_partitioning import custom_partitioning
from jax.extend.core import Primitive
from jax.sharding import NamedSharding, PartitionSpec

from qflash.frontends.jax.call import Call

# The dimensions of each array by name: b batch, m and n query and key lengths, H and G query and key heads, d head_dim.
_PADDED = {
    "q": "bmHd", "kv": "bnGd", "lse": "bHm", "kv_lens": "b", "cos": "pc", "sin": "pc",
    "positions_q": "bm", "positions_k": "bn", "dlse": "bHm",
}  # fmt: skip
_PACKED = {
    "q": "mHd", "kv": "nGd", "lse": "Hm", "cu_seqlens_q": "s", "cu_seqlens_k": "s", "kv_lens": "t",
    "cos": "pc", "sin": "pc", "positions_q": "m", "positions_k": "n", "dlse": "Hm",
}  # fmt: skip


def partitioned(primitive: Primitive, call: Call, fixed: Sequence[str], results: Sequence[str]):
    """`primitive` for `call` as a function XLA can split. `fixed` names the operands before the optional ones."""
    known = _PACKED if call.packed else _PADDED
    operands = (*fixed, *call.operands)
    sums_keys = "kv" in results  # a gradient of keys sums over the query heads of a group, so groups stay together

    def bind(*arrays):
        return tuple(primitive.bind(*arrays, call=call))

    def dims(arrays: Sequence[Any]) -> list[str]:
        """Dimension names of the operands; positions [length] serve every sequence alike and have no batch."""
        return [known[name][-_rank(x) :] for name, x in zip(operands, arrays, strict=True)]

    def shardings(mesh: Any, arrays: Sequence[Any]) -> tuple[tuple, tuple]:
        split = _kept_axes(mesh, arrays, dims(arrays), sums_keys)
        place = partial(_sharding, mesh, split)
        return tuple(map(place, dims(arrays))), tuple(place(known[name]) for name in results)

    def partition(mesh: Any, arrays: Sequence[Any], _):
        places, result_places = shardings(mesh, arrays)
        return mesh, bind, result_places, places

    def rule(mesh: Any, arrays: Sequence[Any], _):
        return _rule(arrays, dims(arrays), [known[name] for name in results], sums_keys)

    function = custom_partitioning(bind)
    function.def_partition(
        partition=partition,
        infer_sharding_from_operands=lambda mesh, arrays, _: shardings(mesh, arrays)[1],
        sharding_rule=rule,
    )
    return function


def _rank(array: Any) -> int:
    return len(array.shape)


def _kept_axes(mesh: Any, arrays: Sequence[Any], dims: Sequence[str], sums_keys: bool) -> dict[str, Any]:
    """The mesh axes over which batch and heads stay split, from where q is: those that divide them evenly."""
    q, k = arrays[:2]
    if not isinstance(q.sharding, NamedSharding):
        return {}
    spec = dict(zip(dims[0], (*q.sharding.spec, *[None] * _rank(q)), strict=False))
    sizes = dict(zip(dims[0], q.shape, strict=True)) | dict(zip(dims[1], k.shape, strict=True))
    split = {}
    if sizes.get("b", 1) % _ways(mesh, spec.get("b")) == 0:
        split["b"] = spec.get("b")
    if sizes["G"] % _ways(mesh, spec["H"]) == 0:
        split["H"] = split["G"] = spec["H"]
    elif sizes["G"] == 1 and not sums_keys and sizes["H"] % _ways(mesh, spec["H"]) == 0:
        split["H"] = spec["H"]  # every device has the one key head
    return split


def _ways(mesh: Any, axes: Any) -> int:
    """Into how many parts a dimension is split by a PartitionSpec entry."""
    names = () if axes is None else (axes,) if isinstance(axes, str) else axes
    return math.prod(mesh.shape[name] for name in names)


def _sharding(mesh: Any, split: dict[str, Any], dims: str) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec(*(split.get(dim) for dim in dims)))


def _rule(
    arrays: Sequence[Any], operands: Sequence[str], results: Sequence[str], sums_keys: bool
) -> tuple[str, dict[str, Any]]:
    """The same for the Shardy partitioner: an einsum-like text, and the factors that must not be split.

    Query heads are key heads times a group; the group is the minor factor and stays whole unless it is all there is.
    """
    q_heads, kv_heads = arrays[0].shape[-2], arrays[1].shape[-2]
    if q_heads == kv_heads:
        factors, free, sizes = "G", "bG", {}
    elif kv_heads == 1:
        factors, free, sizes = "r", "b" if sums_keys else "br", {}
    else:
        factors, free, sizes = "(G r)", "bG", {"r": q_heads // kv_heads}
    sides = [", ".join(" ".join(dims) for dims in side).replace("H", factors) for side in (operands, results)]
    in_order = dict.fromkeys(name for name in sides[0] if name.isalpha())
    return " -> ".join(sides), {
        "need_replication_factors": tuple(name for name in in_order if name not in free),
        **sizes,
    }
