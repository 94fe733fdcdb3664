"""Which kernels can run on this machine, and why the others cannot. Compiles nothing and imports no framework."""

from __future__ import annotations

from dataclasses import dataclass

from qflash import machine
from qflash.dispatch import KERNELS, Kernel


@dataclass(frozen=True)
class Usable:
    """A kernel and what stands in its way here; `why_not` is empty when nothing does."""

    kernel: Kernel
    why_not: str = ""


def usable_kernels() -> dict[str, Usable]:
    """Every row of KERNELS, judged for this machine."""
    return {kernel.name: Usable(kernel, _why_not(kernel)) for kernel in KERNELS}


def _why_not(kernel: Kernel) -> str:
    if kernel.device == "cpu":
        return ""
    gpus, none_because = machine.gpus()
    if not gpus:
        return f"no NVIDIA GPU: {none_because}"
    best = max(gpu.arch for gpu in gpus)
    if best < kernel.min_arch:
        return f"needs compute capability {kernel.min_arch / 10}, the best GPU here has {best / 10}"
    return ""
