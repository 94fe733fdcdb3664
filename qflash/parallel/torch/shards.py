"""Tensors sharded over ranks and reassembled, and the positions of a rank's tokens in the whole sequence."""

from __future__ import annotations

from typing import Any

import torch

from qflash.call.words import check_int, shown
from qflash.parallel.placement import Placement, check_placement
from qflash.parallel.torch.agree import agree, device_of, in_words
from qflash.parallel.torch.exchange import all_gather
from qflash.parallel.torch.groups import Ranks, ranks_of

Tensor = torch.Tensor


def shard(x: Tensor, *, group: Any = None, dim: int = 1, causal: bool = False, placement: str | None = None) -> Tensor:
    """Return this rank's part of a tensor that every rank has in full.

    Args:
        x: with all tokens in dimension `dim`: q, k, v, token ids, labels.
        group: a process group, or one dimension of a DeviceMesh. None: the default group.
        dim: the dimension of tokens.
        causal: selects the placement, as in `attention`.
        placement: "zigzag" (two chunks per rank, from both ends) or "contiguous" (one). None: zigzag if causal.

    Returns:
        A tensor with 1 / ranks of the tokens, in the order that `attention` expects. Its gradient is x's, with zeros
        for the tokens of other ranks.

    Raises:
        ValueError: the tokens do not divide evenly. Pad them at the end: a causal mask hides padded keys, and `kv_lens`
            does without a mask.
    """
    ranks = ranks_of(group)
    at, dim = _placed("x", x, ranks, dim, causal, placement, whole=True)
    return own_part(x, at, ranks.rank, dim) if ranks.size > 1 else x


def unshard(
    x: Tensor, *, group: Any = None, dim: int = 1, causal: bool = False, placement: str | None = None
) -> Tensor:
    """Return the full tensor on every rank: the inverse of `shard`, with the same arguments.

    Its gradient is this rank's part of the full tensor's gradient, which is correct if every rank computes the same
    loss from the full tensor. Losses that ranks compute from their own parts do not need `unshard`.

    Raises:
        TypeError, ValueError: an argument is invalid, or differs between ranks. All ranks raise.
    """
    ranks = ranks_of(group)
    refusal: Exception | None = None
    text = ""
    try:
        at, dim = _placed("x", x, ranks, dim, causal, placement, whole=False)
        text = f"{in_words(x)} on {x.device.type}; {dim=}; {at.kind} placement"
    except Exception as error:  # whatever the error is, the other ranks must not wait for this one
        if torch.compiler.is_compiling() or ranks.size == 1:
            raise
        refusal = error
    if ranks.size == 1:
        return x
    if not torch.compiler.is_compiling():
        agree(ranks, text, refusal, device_of(x), "calls of unshard")
    return _Unshard.apply(x, ranks, at, dim)


def positions(
    length: int,
    *,
    group: Any = None,
    causal: bool = False,
    placement: str | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """Return the tokens of a sequence of `length` that this rank has, int32 `[length / ranks]`, in the rank's order.

    Use them as positions for rotary embeddings that are applied outside of `attention`, and for labels.
    """
    length = check_int("length", length, 0, 2**31 - 1)
    kind, ranks = check_placement(placement, causal), ranks_of(group)
    at = Placement.of_whole(kind, ranks.size, length, "a sequence", 0)
    return own_tokens(at, ranks.rank, device)


def own_tokens(at: Placement, rank: int, device: torch.device | str | None = None) -> Tensor:
    """The tokens that a rank has, in its order, as int32."""
    steps = torch.arange(at.chunk, dtype=torch.int32, device=device)
    return torch.cat([steps + chunk * at.chunk for chunk in at.chunks(rank)])


def _placed(
    name: str, x: Any, ranks: Ranks, dim: Any, causal: Any, placement: Any, whole: bool
) -> tuple[Placement, int]:
    """The checked arguments of `shard` and `unshard`."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} is {type(x).__module__}.{type(x).__qualname__}; allowed: torch.Tensor")
    if hasattr(x, "to_local"):
        raise TypeError(f"{name} is a DTensor; allowed: a plain tensor, as {name}.to_local() is, or full_tensor()")
    if not x.dim():
        raise ValueError(f"{name} has no dimension; allowed: a tensor with tokens in dimension {shown(dim)}")
    kind = check_placement(placement, causal)
    dim = check_int("dim", dim, -x.dim(), x.dim() - 1) % x.dim()
    if whole:
        return Placement.of_whole(kind, ranks.size, x.shape[dim], name, dim), dim
    return Placement.of_part(kind, ranks.size, x.shape[dim], name), dim


def own_part(x: Tensor, at: Placement, rank: int, dim: int) -> Tensor:
    """A rank's tokens, from a tensor with all of them."""
    return torch.cat([x.narrow(dim, chunk * at.chunk, at.chunk) for chunk in at.chunks(rank)], dim)


def by_rank(x: Tensor, at: Placement, dim: int) -> Tensor:
    """A tensor with all tokens as `[ranks, ...]`, each row a rank's part."""
    return torch.stack([own_part(x, at, rank, dim) for rank in range(at.ranks)])


def in_token_order(parts: Tensor, at: Placement, dim: int) -> Tensor:
    """`[ranks, ...]`, each row a rank's part, as one tensor in token order. dim: of a part."""
    return torch.cat([parts[rank].narrow(dim, run * at.chunk, at.chunk) for rank, run in at.holders()], dim)


class _Unshard(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, ranks: Ranks, at: Placement, dim: int) -> Tensor:
        return in_token_order(all_gather(ranks, x, "unshard"), at, dim)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, ranks, at, dim = inputs
        ctx.where = at, ranks.rank, dim

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return own_part(grad, *ctx.where), None, None, None
