"""dlopen a compiled unit and hand out addresses."""

from __future__ import annotations

import ctypes

from qflash.errors import KernelError
from qflash.jit import toolchain
from qflash.jit.cache import Cache
from qflash.jit.compiler import LIBRARY, Unit, compile_unit, key_of


def load(unit: Unit, cache: Cache | None = None) -> ctypes.CDLL:
    """The unit's library, compiled if need be. An entry that does not open was damaged: it is compiled once more."""
    cache = cache or Cache()
    try:
        return ctypes.CDLL(str(compile_unit(unit, cache) / LIBRARY))
    except OSError:
        cache.remove(key_of(unit, toolchain.find()))
    return ctypes.CDLL(str(compile_unit(unit, cache) / LIBRARY))


def address(library: ctypes.CDLL, symbol: str) -> int:
    """Where a C function lives."""
    try:
        function = getattr(library, symbol)
    except AttributeError:
        raise KernelError(f"the compiled library {library._name} has no function {symbol}") from None
    return ctypes.cast(function, ctypes.c_void_p).value or 0
