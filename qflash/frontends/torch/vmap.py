"""torch.func.vmap of any operation: one call if a dimension can absorb the mapped one, otherwise one per sample."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from qflash.call.op import Op

Tensor = torch.Tensor


def batched(op: Op, packet: Any, size: int, in_dims: Sequence[Any], args: Sequence[Any]) -> list[Tensor]:
    """The results, each with the mapped dimension first."""
    count = len(op.arrays)
    dims_of, words = in_dims[:count], args[count:]  # the in_dims of a word may be a list, for a window
    arrays = [x if dim is None else x.movedim(dim, 0) for x, dim in zip(args, dims_of, strict=False)]
    mapped = {name for name, dim in zip(op.arrays, dims_of, strict=True) if dim is not None}
    named = op.named(arrays)
    ranks = {name: x.dim() - (name in mapped) for name, x in named.items()}
    if op.folds(mapped, ranks, dict(zip(op.words, words, strict=True))):
        return packet(*arrays, *words)
    dims = op.dims(ranks) if op.dims is not None else None
    if dims and dims[op.arrays[0]][0] == "b" and not mapped & set(op.tables) and not op.sums_batch(dims):
        return _folded(op, packet, size, mapped, dims, arrays, words)
    return _each(op, packet, size, mapped, arrays, words)


def _folded(
    op: Op, packet: Any, size: int, mapped: set[str], dims: Any, arrays: Sequence[Any], words: Sequence[Any]
) -> list[Tensor]:
    """One call with the mapped dimension folded into the batch."""
    first = op.arrays[0]
    batch = arrays[0].shape[1 if first in mapped else 0]

    def fold(name: str, x: Tensor | None) -> Tensor | None:
        if x is None or "b" not in dims[name]:
            return x
        rank = x.dim() - (name in mapped)  # in one sample
        if rank < len(dims[name]):  # one for all sequences: [T] instead of [B, T]
            if name not in mapped:
                return x
            x = x[:, None].expand(size, batch, *x.shape[1:])
        elif name not in mapped:
            x = x.expand(size, *x.shape)
        return _readable(x.reshape(size * batch, *x.shape[2:]))

    folded = [fold(name, x) for name, x in zip(op.arrays, arrays, strict=True)]
    return [x.unflatten(0, (size, batch)) for x in packet(*folded, *words)]


def _each(
    op: Op, packet: Any, size: int, mapped: set[str], arrays: Sequence[Any], words: Sequence[Any]
) -> list[Tensor]:
    """One call per sample."""
    if not size:
        return _none(op, packet, mapped, arrays, words)
    ready = [_readable(x) if name in mapped else x for name, x in zip(op.arrays, arrays, strict=True)]
    samples = (
        packet(*(x[i] if name in mapped else x for name, x in zip(op.arrays, ready, strict=True)), *words)
        for i in range(size)
    )
    return [torch.stack(out) for out in zip(*samples, strict=True)]


def _none(op: Op, packet: Any, mapped: set[str], arrays: Sequence[Any], words: Sequence[Any]) -> list[Tensor]:
    """The results for zero samples: their shapes are those of a sample without data."""

    def sample(name: str, x: Tensor | None) -> Tensor | None:
        if x is None:
            return None
        return torch.empty(x.shape[1:] if name in mapped else x.shape, dtype=x.dtype, device="meta")

    outs = packet(*(sample(name, x) for name, x in zip(op.arrays, arrays, strict=True)), *words)
    # Empty sums connect the results to their inputs, so that each input has a gradient: zeros.
    tie = sum((x.reshape(-1)[:0].sum() for x in arrays if x is not None and x.is_floating_point()), torch.zeros(()))
    nothing = (torch.zeros((0, *x.shape), dtype=x.dtype, device=arrays[0].device) for x in outs)
    return [x + tie.to(device=x.device, dtype=x.dtype) for x in nothing]


def _readable(x: Tensor) -> Tensor:
    """Kernels require a contiguous last dimension, which moving the mapped one may have destroyed."""
    return x if x.dim() == 0 or x.stride(-1) == 1 else x.contiguous()
