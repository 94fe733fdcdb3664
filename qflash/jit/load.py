"""dlopen a compiled unit and hand out addresses."""

from __future__ import annotations

import ctypes

from qflash.errors import KernelError
from qflash.jit.cache import Cache
from qflash.jit.compiler import LIBRARY, Unit, recipe


def load(unit: Unit, cache: Cache | None = None) -> ctypes.CDLL:
    """The unit's library, compiled if need be.

    A sound library that does not open was made for another system (a home shared by machines with different C
    libraries), or was removed since it was checked. It is compiled once more.
    """
    cache = cache or Cache()
    try:
        return _open(unit, cache)
    except OSError:
        cache.remove(recipe(unit, cache)[0])
    return _open(unit, cache)


def _open(unit: Unit, cache: Cache) -> ctypes.CDLL:
    with cache.opened(*recipe(unit, cache)) as entry:
        try:
            library = ctypes.CDLL(f"{entry.held}/{LIBRARY}")
        except OSError as error:
            raise OSError(str(error).replace(entry.held, str(entry.path))) from None
        library._name = str(entry.path / LIBRARY)  # for people: the path it was opened by ends with the descriptor
        return library


def address(library: ctypes.CDLL, symbol: str) -> int:
    """Where a C function lives."""
    try:
        function = getattr(library, symbol)
    except AttributeError:
        raise KernelError(f"the compiled library {library._name} has no function {symbol}") from None
    return ctypes.cast(function, ctypes.c_void_p).value or 0
