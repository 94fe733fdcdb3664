"""Operations beside attention on torch tensors: the eager path, and torch.ops.qflash for everything else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from qflash.frontends import torch_op_launch as launch
from qflash.ops.plan import Op

Tensor = torch.Tensor


def run_op(op: Op, arrays: Sequence[Any], words: Sequence[Any]) -> list[Tensor]:
    """Plan, allocate, launch."""
    call = launch.prepared(op, arrays, words)
    return launch.launch(op, call, arrays)


def scalar(value: float, like: Tensor) -> Tensor:
    """A number as a tensor where `like` is."""
    return torch.full((), value, dtype=torch.float32, device=like.device)
