"""NVIDIA's programs that tests of compiled kernels need, and why one of them is missing."""

from __future__ import annotations

import shutil
import sysconfig
from functools import lru_cache
from pathlib import Path

from qflash.errors import ToolchainError
from qflash.jit import toolchain


@lru_cache(maxsize=1)
def why_no_nvcc() -> str | None:
    """None if kernels can be compiled, else the reason in one line."""
    try:
        toolchain.find()
    except ToolchainError as error:
        return str(error).splitlines()[0]
    return None


@lru_cache(maxsize=1)
def cuobjdump() -> str | None:
    """The disassembler, from PyPI or on the PATH."""
    wheel = Path(sysconfig.get_path("purelib")) / "nvidia" / "cu13" / "bin" / "cuobjdump"
    return str(wheel) if wheel.is_file() else shutil.which("cuobjdump")
