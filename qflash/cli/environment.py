"""Finds QFLASH_* variables with invalid values. Compiles nothing and imports no framework."""

from __future__ import annotations

import os
import re

from qflash.backends import arch
from qflash.errors import CacheError, NoKernelError, ToolchainError
from qflash.jit import toolchain
from qflash.jit.cache import Cache


def problems() -> list[str]:
    """One message for each invalid variable, with the allowed values."""
    checks = {
        "QFLASH_NUM_THREADS": threads_problem,
        "QFLASH_CPU_ISA": cpu_problem,
        arch.VARIABLE: arch_problem,
        "QFLASH_NVCC": nvcc_problem,
        "QFLASH_CACHE_DIR": cache_problem,
    }
    found = (check() for variable, check in checks.items() if os.environ.get(variable))
    return [text for text in found if text]


def threads_problem() -> str:
    """The engine warns about it when it is loaded, and uses every core."""
    text = os.environ.get("QFLASH_NUM_THREADS", "")
    if not text or (re.fullmatch(r"\s*\+?[0-9]+", text) and int(text) >= 1):
        return ""
    return f"QFLASH_NUM_THREADS is {text!r}; allowed: 1 or more"


def cpu_problem() -> str:
    """Why calls on the CPU fail. The engine checks QFLASH_CPU_ISA at every call, so the smallest call shows it."""
    import numpy as np

    import qflash

    try:
        qflash.softmax(np.zeros((1, 1), np.float32))
    except (ValueError, NoKernelError) as error:
        return str(error)
    return ""


def arch_problem() -> str:
    try:
        arch.asked()
    except ValueError as error:
        return str(error)
    return ""


def nvcc_problem() -> str:
    try:
        toolchain.find()
    except ToolchainError as error:
        return f"QFLASH_NVCC is {os.environ.get('QFLASH_NVCC', '')!r}: {error}"
    return ""


def cache_problem() -> str:
    """Why the compile cache cannot be used; a cache that is missing or read-only is usable."""
    try:
        Cache().info()
    except CacheError as error:
        return str(error)
    return ""
