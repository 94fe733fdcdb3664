"""The CUDA runtime that compiled kernels call: one library shared by all of them, if the toolkit has a shared one.

Linked into every kernel, it would take most of the cache. So the toolkit's libcudart.so is copied into the cache once,
as an entry of its own, and kernels refer to it by its SONAME. If a framework has loaded a library of that name, kernels
use that one; otherwise the copy is checked and opened before them. If a toolkit has no shared runtime, its static
runtime is linked into every kernel.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from qflash.jit.cache import Build, Cache
from qflash.jit.toolchain import Toolchain


@dataclass(frozen=True, slots=True)
class Runtime:
    """A shared runtime: the toolkit's file, and the cache key of the copy."""

    source: Path
    key: str

    @property
    def name(self) -> str:
        """Its SONAME: "libcudart.so.13"."""
        return self.source.name

    def build(self, directory: Path) -> None:
        """Fill the cache's entry."""
        shutil.copyfile(self.source, directory / self.name)


@lru_cache(maxsize=4)
def find(tools: Toolchain) -> Runtime | None:
    """The runtime that comes with a compiler; None if there is only a static one."""
    name = name_of(tools)
    for directory in (*map(Path, tools.library_dirs), *_library_dirs(tools.nvcc)):
        with suppress(OSError):
            digest = hashlib.sha256((directory / name).read_bytes()).hexdigest()
            major = tools.version.partition(".")[0]
            return Runtime(directory / name, f"cudart{major}-runtime-{digest[:24]}")
    return None


def name_of(tools: Toolchain) -> str:
    """The SONAME of the runtime required by a compiler's code."""
    return f"libcudart.so.{tools.version.partition('.')[0]}"


def _library_dirs(nvcc: str) -> Iterator[Path]:
    """The directories where nvcc searches for libraries, from nvcc itself: it may be a link or a script far from its
    toolkit."""
    command = [nvcc, "--dryrun", "none.cu"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.SubprocessError):
        return
    for line in re.findall(r"^#\$ LIBRARIES=(.*)$", said.stdout + said.stderr, re.MULTILINE):
        yield from (Path(word[2:]) for word in shlex.split(line) if word.startswith("-L"))


def is_loaded(name: str) -> bool:
    """Whether this process has a library with that SONAME."""
    with suppress(OSError):
        ctypes.CDLL(name, mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
        return True
    return False


def ensure_loaded(name: str, key: str, build: Build, cache: Cache) -> None:
    """Open the cache's copy, unless the process has a runtime of that name. It stays open."""
    if is_loaded(name):
        return
    with cache.opened(key, build) as entry:
        ctypes.CDLL(f"{entry.held}/{name}")
