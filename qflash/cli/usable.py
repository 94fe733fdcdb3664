"""Which kernels can run on this machine, and why the others cannot. Compiles nothing and imports no framework."""

from __future__ import annotations

from dataclasses import dataclass

from qflash import dispatch, machine
from qflash.backends.arch import arch_for
from qflash.cli import environment
from qflash.dispatch import Kernel, arch_reasons
from qflash.errors import ToolchainError
from qflash.jit import toolchain


@dataclass(frozen=True)
class Usable:
    """A kernel and what stands in its way here; `why_not` is empty when nothing does."""

    kernel: Kernel
    why_not: str = ""


def usable_kernels() -> dict[str, Usable]:
    """Every row of KERNELS, judged for this machine."""
    return {kernel.name: Usable(kernel, "; ".join(_reasons(kernel))) for kernel in dispatch.KERNELS}


def _reasons(kernel: Kernel) -> list[str]:
    if kernel.device == "cpu":
        return list(filter(None, [environment.cpu_problem()] if kernel.backend == "cpu" else []))
    reasons = []
    gpus, none_because = machine.gpus()
    if not gpus:
        reasons.append(f"no NVIDIA GPU: {none_because}")
    else:
        reasons += _no_code(kernel, max(gpu.arch for gpu in gpus))
    if kernel.backend != "cuda":
        return reasons
    try:
        toolchain.find()
    except ToolchainError:
        reasons.append(
            "no CUDA compiler: pip install 'qflash[cuda]', or put nvcc on the PATH (what the compile cache holds runs "
            "without one)"
        )
    return reasons


def _no_code(kernel: Kernel, best: int) -> list[str]:
    """Why `kernel` does not run on the best GPU, of compute capability `best`/10."""
    try:
        arch = arch_for(best)
    except ValueError as error:
        return [str(error)]
    return arch_reasons(kernel, arch, "the best GPU here has" if arch == best else "QFLASH_CUDA_ARCH asks for")
