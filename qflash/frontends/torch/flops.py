"""What torch.utils.flop_counter counts for qflash's ops: the products of matrices, as it counts PyTorch's own."""

from __future__ import annotations

from typing import Any

from torch.utils import flop_counter

from qflash.frontends.torch.watch import active_modes


def count(op: Any, formula: Any) -> None:
    """Have `formula` count `op`, with the arguments of the op, from now on.

    A counter copies the known formulas when it is made, and qflash is loaded by the first call: counters that watch
    that very call are told too.
    """
    flop_counter.register_flop_formula(op, get_raw=True)(formula)
    for mode in active_modes():
        registry = getattr(getattr(mode, "counter", None), "flop_registry", None)
        if registry is not None:
            registry.setdefault(op, flop_counter.flop_registry[op])
