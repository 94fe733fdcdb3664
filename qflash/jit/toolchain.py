"""Finds nvcc: QFLASH_NVCC, the PATH, CUDA_HOME or CUDA_PATH, /usr/local/cuda, then the wheels of `qflash[cuda]`."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from qflash.errors import ToolchainError

INSTALL_HINT = (
    "Install one with `pip install 'qflash[cuda]'` (nvcc from PyPI), or install the CUDA toolkit and put nvcc on the "
    "PATH or set CUDA_HOME or QFLASH_NVCC. A host C++ compiler (g++) is needed too."
)


@dataclass(frozen=True, slots=True)
class Toolchain:
    """A CUDA compiler that ran. `version` is the full one ("13.0.88"): it is part of every cache key."""

    nvcc: str
    origin: str  # how it was found, for display
    version: str
    library_dirs: tuple[str, ...] = ()

    @property
    def release(self) -> str:
        """Major and minor: "13.0"."""
        return ".".join(self.version.split(".")[:2])

    def at_least(self, major: int, minor: int) -> bool:
        """Whether it is of that release or a later one."""
        return tuple(map(int, self.release.split("."))) >= (major, minor)


def candidates() -> Iterator[tuple[str, Path, tuple[str, ...]]]:
    """(origin, nvcc, library directories to pass to it), best first; the files need not exist."""
    if asked := os.environ.get("QFLASH_NVCC"):
        yield "QFLASH_NVCC", Path(asked), ()
        return  # requested by name: no other is accepted
    if found := shutil.which("nvcc"):
        yield "PATH", Path(found), ()
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if home := os.environ.get(variable):
            yield variable, Path(home) / "bin" / "nvcc", ()
    yield "/usr/local/cuda", Path("/usr/local/cuda/bin/nvcc"), ()
    for unpacked in _wheel_homes():
        # nvcc 13.0's own profile refers to a directory layout that the wheels do not have.
        yield "PyPI", unpacked / "bin" / "nvcc", (str(unpacked / "lib"),)


def _wheel_homes() -> Iterator[Path]:
    """The directories where NVIDIA's wheels unpack: site-packages/nvidia/cu13 and, before CUDA 13, nvidia/cuda_nvcc."""
    roots = dict.fromkeys(sysconfig.get_path(name) for name in ("purelib", "platlib"))
    for root in roots:
        nvidia = Path(root) / "nvidia"
        yield from sorted(nvidia.glob("cu[0-9][0-9]"), reverse=True)
        yield nvidia / "cuda_nvcc"


def _version(nvcc: Path) -> str | None:
    """The version that nvcc reports, or None if it does not run."""
    try:
        text = subprocess.run([nvcc, "--version"], capture_output=True, text=True, timeout=60, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    found = re.search(r"\bV(\d+\.\d+(?:\.\d+)*)", text) or re.search(r"release (\d+\.\d+)", text)
    return found.group(1) if found else None


@lru_cache(maxsize=1)
def find() -> Toolchain:
    """The first nvcc that runs, or ToolchainError naming every place that was tried. Cached for the process."""
    tried = []
    for origin, nvcc, library_dirs in candidates():
        if not os.path.isfile(nvcc):  # Path.is_file raises if a directory may not be searched
            tried.append(f"{origin}: {nvcc} is not there")
        elif (version := _version(nvcc)) is None:
            tried.append(f"{origin}: {nvcc} does not run")
        elif host_compiler() is None:
            tried.append(f"{origin}: {nvcc} works, but there is no host C++ compiler (g++ or c++) on the PATH")
        else:
            return Toolchain(str(nvcc), origin, version, library_dirs)
    raise ToolchainError("no usable CUDA compiler (nvcc) was found. " + INSTALL_HINT + "\n  " + "\n  ".join(tried))


def host_compiler() -> str | None:
    """The C++ compiler that nvcc will call for host code."""
    return shutil.which("g++") or shutil.which("c++")
