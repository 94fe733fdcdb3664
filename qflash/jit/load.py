"""Opens a compiled unit with dlopen and returns addresses."""

from __future__ import annotations

import ctypes
from contextlib import suppress

from qflash.errors import KernelError, ToolchainError
from qflash.jit import prebuilt, runtime, toolchain
from qflash.jit.cache import Build, Cache
from qflash.jit.compiler import LIBRARY, Unit, recipe


def load(unit: Unit, cache: Cache | None = None) -> ctypes.CDLL:
    """The unit's library, compiled if necessary; on a machine without a compiler, one that another machine compiled.

    If a sound library does not open, it was built for another system (a home shared by machines with different C
    libraries), refers to a function that the framework's CUDA runtime is too old to have, or was removed since it was
    checked. It is then compiled with a static runtime, a second time if necessary.
    """
    cache = cache or Cache()
    try:
        tools = toolchain.find()
    except ToolchainError as error:
        return _open_prebuilt(unit, cache, error)
    if (shared := runtime.find(tools)) is not None:
        with suppress(OSError):
            runtime.ensure_loaded(shared.name, shared.key, shared.build, cache)
            return _open(*recipe(unit, cache, tools, shared), cache)
    key, build = recipe(unit, cache, tools, None)
    try:
        return _open(key, build, cache)
    except OSError:
        cache.remove(key)
    return _open(key, build, cache)


def _open_prebuilt(unit: Unit, cache: Cache, missing: ToolchainError) -> ctypes.CDLL:
    def build(directory: object) -> None:
        raise missing

    found = prebuilt.find(unit, cache)
    if found is None:
        raise missing
    if found.runtime is not None:
        runtime.ensure_loaded(*found.runtime, build, cache)
    return _open(found.key, build, cache)


def _open(key: str, build: Build, cache: Cache) -> ctypes.CDLL:
    with cache.opened(key, build) as entry:
        try:
            library = ctypes.CDLL(f"{entry.held}/{LIBRARY}")
        except OSError as error:
            raise OSError(str(error).replace(entry.held, str(entry.path))) from None
        library._name = str(entry.path / LIBRARY)  # for display: the path it was opened by contains the descriptor
        return library


def address(library: ctypes.CDLL, symbol: str) -> int:
    """The address of a C function."""
    try:
        function = getattr(library, symbol)
    except AttributeError:
        raise KernelError(f"the compiled library {library._name} has no function {symbol}") from None
    return ctypes.cast(function, ctypes.c_void_p).value or 0
