"""Formulas for torch.utils.flop_counter for qflash's ops: matrix products, counted as PyTorch's own."""

from __future__ import annotations

from typing import Any

from torch.utils import flop_counter

from qflash.frontends.torch.watch import active_modes


def count(op: Any, formula: Any) -> None:
    """Register `formula`, which takes the arguments of `op`, for `op`.

    A counter copies the known formulas when it is created, and qflash is loaded by the first call, so active counters
    are updated too.
    """
    flop_counter.register_flop_formula(op, get_raw=True)(formula)
    for mode in active_modes():
        registry = getattr(getattr(mode, "counter", None), "flop_registry", None)
        if registry is not None:
            registry.setdefault(op, flop_counter.flop_registry[op])
