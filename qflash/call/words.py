"""Checks of the words of a call, its arguments that are not arrays: flags, numbers, counts and names.

All operations use the same checks. NumPy's scalars are accepted like Python's. An error names the argument, the value
given and what is allowed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Integral, Real
from typing import Any

import numpy as np

INT32_MAX = 2**31 - 1
FLOAT32_MAX = 2.0**128 - 2.0**104
_LONGEST_SHOWN = 80


def shown(value: Any) -> str:
    """A value in a message: for an array only its class, and nothing at great length."""
    if hasattr(value, "shape") and not isinstance(value, np.generic):
        return f"a {type(value).__module__.partition('.')[0]}.{type(value).__qualname__}"
    if isinstance(value, int) and abs(value) >= 10**_LONGEST_SHOWN:  # repr() raises for the longest ones
        return f"an int of {value.bit_length()} bits"
    text = " ".join(repr(value).split())
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}..."


def plain(value: Any) -> Any:
    """A NumPy scalar as a Python one; anything else unchanged."""
    return value.item() if isinstance(value, np.generic) else value


def check_flag(name: str, value: Any) -> bool:
    """True or False; a NumPy bool, 0 and 1 are accepted too."""
    if not (isinstance(value, bool) or (isinstance(value, (Integral, np.bool_)) and value in (0, 1))):
        raise TypeError(f"{name} is {shown(value)}; allowed: True or False")
    return bool(value)


def check_number(name: str, value: Any, allowed: str = "a number", most: float = FLOAT32_MAX) -> float:
    """A finite number that float32 can represent, of magnitude `most` or less."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} is {shown(value)}; allowed: {allowed}")
    try:
        number = float(value)
    except OverflowError:  # an int outside float64's range
        number = math.inf
    if not abs(number) <= most:
        limit = f"float32's {most:.3g}" if most == FLOAT32_MAX else f"2^{math.log2(most):g}, for float32's sake"
        raise ValueError(f"{name} is {shown(value)}; allowed: a finite number, up to {limit}")
    return number


def check_int(name: str, value: Any, low: int, high: int) -> int:
    """An int from `low` to `high`."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name} is {shown(value)}; allowed: an int")
    if not low <= int(value) <= high:
        raise ValueError(f"{name} is {shown(value)}; allowed: {low} to {high}")
    return int(value)


def check_word(name: str, value: Any, allowed: Sequence[str | None]) -> str:
    """One of a few names."""
    if not isinstance(value, str) or value not in allowed:
        wrong = ValueError if isinstance(value, str) else TypeError
        raise wrong(f"{name} is {shown(value)}; allowed: {', '.join(map(repr, allowed))}")
    return value


def check_kernel(kernel: Any) -> str | None:
    """None, or a string that may be a kernel's name."""
    if kernel is not None and not isinstance(kernel, str):
        raise TypeError(f"kernel is {shown(kernel)}; allowed: None or the name of a kernel")
    return kernel
