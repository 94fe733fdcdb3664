"""The words of a call in code that torch.compile traces.

Dynamo represents a NumPy scalar as an array whose value is unknown while it traces. Numbers and window edges become
symbolic, are read by the compiled program when it runs, and are then checked by the op. A Python constant that an eager
call rejects is rejected here, before the dispatcher converts True to 1.0 or 2 to True.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from qflash.call.words import FLOAT32_MAX, check_flag, shown

_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


def is_symbolic(value: Any) -> bool:
    """Whether the value of a word is unknown while a program is traced."""
    return isinstance(value, _SYMBOLIC)


def traced_word(name: str, kind: str, value: Any) -> Any:
    """A word as its op takes it, converted to the type that the op declares."""
    if value is None:
        return None
    if kind.startswith("Scalar"):
        return _number(name, value)
    if kind == "SymInt[]?":
        return _edges(name, value)
    if kind == "bool" or name == "causal":
        return _flag(name, kind, value)
    if isinstance(value, bool):
        raise TypeError(f"{name} is {value}; allowed: an int")
    return int(value) if isinstance(value, np.ndarray) else value


def _number(name: str, value: Any) -> Any:
    if isinstance(value, bool):
        raise TypeError(f"{name} is {value}; allowed: a number")
    if isinstance(value, int) and abs(value) > FLOAT32_MAX:  # it may exceed what the dispatcher can take
        raise ValueError(f"{name} is {shown(value)}; allowed: a finite number, up to float32's {FLOAT32_MAX:.3g}")
    return float(value) if isinstance(value, np.ndarray) else value


def _edges(name: str, value: Any) -> Any:
    if not isinstance(value, (tuple, list)) or any(isinstance(edge, bool) for edge in value):
        raise TypeError(f"{name} is {shown(value)}; allowed: None or two ints")
    if len(value) != 2:
        raise ValueError(f"{name} is {shown(value)}; allowed: None or two ints")
    return [int(edge) if isinstance(edge, np.ndarray) else edge for edge in value]


def _flag(name: str, kind: str, value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        raise TypeError(f"{name} is a torch.Tensor; allowed: True or False")
    if isinstance(value, np.ndarray):
        if kind == "bool":
            raise TypeError(f"{name} is a NumPy value in code that torch.compile traces; allowed: True or False")
        return int(value.astype(np.int64))  # .item() of a bool would need its value
    return check_flag(name, value)
