"""Describes this machine: processor, GPUs, installed frameworks. Queries the system and imports no framework."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

# The extensions that the CPU engine can use, as named in /proc/cpuinfo.
VECTOR_FLAGS = ("avx2", "fma", "f16c", "avx_vnni", "avx512f", "avx512bw", "avx512_vnni", "avx512_bf16", "amx_int8")


@dataclass(frozen=True, slots=True)
class Gpu:
    """One NVIDIA GPU as reported by the driver."""

    name: str
    arch: int  # compute capability times ten
    memory_mib: int
    driver: str


@lru_cache(maxsize=1)
def _cpuinfo() -> dict[str, str]:
    """The first processor's entry of /proc/cpuinfo; empty if there is no such file."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return {}
    lines = (line.partition(":") for line in text.split("\n\n")[0].splitlines())
    return {key.strip(): value.strip() for key, _, value in lines}


def cpu_name() -> str:
    return _cpuinfo().get("model name") or platform.processor() or platform.machine()


def cpu_flags() -> list[str]:
    """The vector extensions of this processor, out of those that qflash uses."""
    have = set(_cpuinfo().get("flags", "").split())
    return [flag for flag in VECTOR_FLAGS if flag in have]


def cores() -> int:
    """The number of processors this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def memory_gib() -> float:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30


@lru_cache(maxsize=1)
def gpus() -> tuple[tuple[Gpu, ...], str]:
    """(the NVIDIA GPUs, why there are none). Runs nvidia-smi, so no CUDA context is created."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return (), "nvidia-smi is not on the PATH: no NVIDIA driver is installed"
    fields = "name,compute_cap,memory.total,driver_version"
    try:
        done = subprocess.run(
            [tool, f"--query-gpu={fields}", "--format=csv,noheader,nounits"], capture_output=True, text=True, timeout=30
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return (), f"nvidia-smi failed: {error}"
    if done.returncode:
        return (), f"nvidia-smi failed: {(done.stdout or done.stderr).strip()}"
    return parse_gpus(done.stdout), "nvidia-smi lists no GPU"


def parse_gpus(text: str) -> tuple[Gpu, ...]:
    """Parses nvidia-smi's output lines: name, compute capability, memory in MiB, driver."""
    found = []
    for line in text.splitlines():
        if line.count(",") < 3:
            continue
        name, capability, memory, driver = (part.strip() for part in line.rsplit(",", 3))
        major, minor = capability.split(".")
        found.append(Gpu(name, int(major) * 10 + int(minor), int(float(memory)), driver))
    return tuple(found)


def version(package: str) -> str | None:
    """The installed version of a package, without importing it."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def slug(text: str) -> str:
    """A name for a folder: 'NVIDIA H200' becomes nvidia-h200."""
    text = re.sub(r"\((r|tm|c)\)", " ", text.lower())
    return re.sub(r"[^a-z0-9]+", "-", text.partition("@")[0]).strip("-")
