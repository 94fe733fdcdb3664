"""The calls of PyTorch's scaled_dot_product_attention that qflash does not support, each with its error message."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

Tensor = torch.Tensor

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
MAX_HEAD_DIM = 256


class Obstacle(NamedTuple):
    """Why a call is not supported. NotImplementedError: PyTorch supports it. Any other type: PyTorch rejects it too."""

    came: str  # the key of a Report's counts
    allowed: str
    kind: type[Exception] = NotImplementedError

    def error(self) -> Exception:
        other_way = ", or fallback=True" if self.kind is NotImplementedError else ""
        return self.kind(f"{self.came}; allowed: {self.allowed}{other_way}")


def short(kind: Any) -> str:
    """A dtype or layout without the "torch." prefix."""
    return str(kind).removeprefix("torch.")


def in_tensors(query: Any, key: Any, value: Any) -> Obstacle | None:
    """Check class, layout, dtype and device of the arguments."""
    for name, x in (("query", query), ("key", key), ("value", value)):
        if not isinstance(x, Tensor):
            return Obstacle(f"{name} is {type(x).__module__}.{type(x).__qualname__}", "torch.Tensor", TypeError)
        if x.is_nested:
            return Obstacle(f"{name} is a nested tensor", "a dense tensor; qflash.attention_varlen takes packed ones")
        if x.layout is not torch.strided:
            return Obstacle(f"{name} is a {short(x.layout)} tensor", "a dense (strided) tensor")
        if x.dtype not in DTYPES:
            return Obstacle(f"{name} has dtype {short(x.dtype)}", ", ".join(map(short, DTYPES)))
    for name, x in (("key", key), ("value", value)):
        if x.device != query.device:
            return Obstacle(f"{name} is on {x.device}", f"query's device, {query.device}", ValueError)
        if x.dtype != query.dtype and not torch.is_autocast_enabled(query.device.type):  # which would convert both
            return Obstacle(f"{name} has dtype {short(x.dtype)}", f"query's, {short(query.dtype)}", TypeError)
    return None


def in_shapes(q: Sequence[int], k: Sequence[int], v: Sequence[int], enable_gqa: bool) -> Obstacle | None:
    """Check ranks and sizes, batch and head dimensions last."""
    # The common case. Query and key lengths are not compared: a traced program would be specialized on the outcome.
    if len(q) == len(k) == 4 and k == v and q[:2] == k[:2] and q[3] == k[3] and q[1] > 0 and 0 < q[3] <= MAX_HEAD_DIM:
        return None
    for name, extents in (("query", q), ("key", k), ("value", v)):
        if len(extents) < (3 if enable_gqa else 2):
            allowed = "[..., heads, length, head_dim]" + ("" if enable_gqa else " or [length, head_dim]")
            return Obstacle(f"{name} has shape {tuple(extents)}", allowed, ValueError)
    head_dim = q[-1]
    if k[-1] != head_dim:
        return Obstacle(f"key has head_dim {int(k[-1])}", f"query's, {int(head_dim)}", ValueError)
    if v[-1] != head_dim:
        return Obstacle(f"value has head_dim {int(v[-1])}", f"query's, {int(head_dim)}")
    if not 1 <= head_dim <= MAX_HEAD_DIM:
        return Obstacle(f"query has head_dim {int(head_dim)}", f"1 to {MAX_HEAD_DIM}")
    if v[-2] != k[-2]:
        return Obstacle(f"value has length {int(v[-2])}", f"key's, {int(k[-2])}", ValueError)
    in_front = _in_heads(q[-3], k[-3], v[-3]) if enable_gqa else _in_no_heads(q, k, v)
    return in_front or _in_broadcast(q, k, v, 3 if enable_gqa else 2)


def _in_heads(q: int, k: int, v: int) -> Obstacle | None:
    """Check the numbers of heads, with enable_gqa."""
    for name, heads in (("query", q), ("key", k), ("value", v)):
        if heads == 0:
            return Obstacle(f"{name} has 0 heads", "1 or more")
    for name, heads in (("key", k), ("value", v)):
        if q % heads:
            return Obstacle(f"{name} has {int(heads)} heads", f"a divisor of query's {int(q)} heads", ValueError)
    return None if v == k else Obstacle(f"value has {int(v)} heads", f"key's {int(k)} heads")


def _in_no_heads(*shapes: Sequence[int]) -> Obstacle | None:
    """Check the heads where every leading dimension broadcasts. Three dimensions are `[batch, length, head_dim]`."""
    if max(map(len, shapes)) > 3 and any(extents[-3:-2] == (0,) for extents in shapes):
        return Obstacle("query, key or value has 0 heads", "1 or more")
    return None


def _in_broadcast(q: Sequence[int], k: Sequence[int], v: Sequence[int], behind: int) -> Obstacle | None:
    """Check that all dimensions but the last `behind` broadcast."""
    if q[:-behind] == k[:-behind] == v[:-behind]:
        return None
    try:
        torch.broadcast_shapes(q[:-behind], k[:-behind], v[:-behind])
    except RuntimeError:
        shapes = f"key has shape {tuple(k)} and value {tuple(v)}"
        allowed = f"dimensions before the {behind} last that broadcast with those of query's {tuple(q)}"
        fewer_heads = "" if behind == 3 else ", or enable_gqa=True where key and value have fewer heads"
        return Obstacle(shapes, allowed + fewer_heads, ValueError)
    return None
