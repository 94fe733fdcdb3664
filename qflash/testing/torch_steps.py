"""Records the operations of a PyTorch step, for tests of steps that a CUDA graph is to hold."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Recorder(TorchDispatchMode):
    """The operations of a step with the shapes of their arguments; reading a value raises an error."""

    ASKS_FOR_VALUES = ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "equal", "is_nonzero")

    OPAQUE = (list, torch.Generator)

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, str]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert function.overloadpacket.__name__ not in self.ASKS_FOR_VALUES, f"{function} waits for the device"
        values = [*args, *(kwargs or {}).values()]
        shapes = [
            tuple(x.shape) if isinstance(x, torch.Tensor) else x for x in values if not isinstance(x, self.OPAQUE)
        ]
        self.calls.append((str(function), str(shapes)))
        return function(*args, **kwargs or {})
