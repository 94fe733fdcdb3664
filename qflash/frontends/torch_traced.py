"""The words of a call in code that torch.compile traces.

Dynamo shows a NumPy scalar as an array whose value is not known while it traces. Numbers and window edges become
symbolic ones, which the compiled program reads when it runs, and the op checks then. What is a Python constant is
refused here if an eager call refuses it, before the dispatcher turns True into 1.0 or 2 into True.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from qflash.call.words import FLOAT32_MAX, check_flag, shown
from qflash.ops.problem import WINDOW_FORM, Options

_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


def is_symbolic(value: Any) -> bool:
    """Whether the value of a word is not known while a program is traced."""
    return isinstance(value, _SYMBOLIC)


def traced_options(options: Options) -> Options:
    """The words of attention as the op takes them."""
    causal, window, softcap, scale, precision, kernel = options
    if isinstance(causal, np.ndarray):
        causal = int(causal.astype(np.int64))  # the item of a bool would be asked for its value
    elif not isinstance(causal, torch.Tensor):
        causal = check_flag("causal", causal)
    if window is not None:
        if not isinstance(window, (tuple, list)) or len(window) != 2:
            raise ValueError(f"window is {shown(window)}; allowed: {WINDOW_FORM}")
        window = [_edge(edge, window) for edge in window]
    return Options(causal, window, traced_number("softcap", softcap), traced_number("scale", scale), precision, kernel)


def _edge(edge: Any, window: Any) -> Any:
    if isinstance(edge, bool):
        raise ValueError(f"window is {shown(window)}; allowed: {WINDOW_FORM}")
    return int(edge) if isinstance(edge, np.ndarray) else edge


def traced_number(name: str, value: Any) -> Any:
    """A number as an op takes it."""
    if isinstance(value, bool):
        raise TypeError(f"{name} is {value}; allowed: a number")
    if isinstance(value, int) and abs(value) > FLOAT32_MAX:  # which may be more than the dispatcher can take
        raise ValueError(f"{name} is {shown(value)}; allowed: a finite number, up to float32's {FLOAT32_MAX:.3g}")
    return float(value) if isinstance(value, np.ndarray) else value


def traced_word(name: str, kind: str, value: Any) -> Any:
    """A word of another operation, by the type that its op declares."""
    if kind == "Scalar":
        return traced_number(name, value)
    if kind == "bool":
        if isinstance(value, np.ndarray):
            raise TypeError(f"{name} is a NumPy value in code that torch.compile traces; allowed: True or False")
        return check_flag(name, value)
    if isinstance(value, bool):
        raise TypeError(f"{name} is {value}; allowed: no bool")
    return int(value) if isinstance(value, np.ndarray) else value
