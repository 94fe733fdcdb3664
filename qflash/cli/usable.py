"""Which kernels can run on this machine, and why the others cannot. Compiles nothing and imports no framework."""

from __future__ import annotations

from dataclasses import dataclass

from qflash import machine
from qflash.dispatch import KERNELS, Kernel
from qflash.errors import ToolchainError
from qflash.jit import toolchain


@dataclass(frozen=True)
class Usable:
    """A kernel and what stands in its way here; `why_not` is empty when nothing does."""

    kernel: Kernel
    why_not: str = ""


def usable_kernels() -> dict[str, Usable]:
    """Every row of KERNELS, judged for this machine."""
    return {kernel.name: Usable(kernel, "; ".join(_reasons(kernel))) for kernel in KERNELS}


def _reasons(kernel: Kernel) -> list[str]:
    if kernel.device == "cpu":
        return []
    reasons = []
    gpus, none_because = machine.gpus()
    if not gpus:
        reasons.append(f"no NVIDIA GPU: {none_because}")
    elif max(gpu.arch for gpu in gpus) < kernel.min_arch:
        best = max(gpu.arch for gpu in gpus)
        reasons.append(f"needs compute capability {kernel.min_arch / 10}, the best GPU here has {best / 10}")
    try:
        toolchain.find()
    except ToolchainError:
        reasons.append("no CUDA compiler: pip install 'qflash[cuda]', or put nvcc on the PATH")
    return reasons
