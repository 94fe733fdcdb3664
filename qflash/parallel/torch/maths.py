"""The PyTorch functions that parts are computed with (qflash.parallel.parts.Maths)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

Tensor = torch.Tensor


def arange(count: int, like: Tensor) -> Tensor:
    return torch.arange(count, dtype=torch.int32, device=like.device)


def concatenate(arrays: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(arrays), -1)


def clip(x: Tensor, low: int, high: int) -> Tensor:
    return x.clamp(low, high)


def where(condition: Tensor, x: Any, y: Any) -> Tensor:
    return torch.where(condition, x, y)


def as_float32(x: Tensor) -> Tensor:
    return x.float()


def starts(offsets: Tensor, tokens: Tensor) -> Tensor:
    sequence = torch.searchsorted(offsets, tokens, right=True, out_int32=True)
    return offsets[(sequence - 1).clamp(0, offsets.shape[0] - 2).long()]
