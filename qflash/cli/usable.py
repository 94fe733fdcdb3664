"""Which kernels can run on this machine, and why the others cannot. Compiles nothing and imports no framework."""

from __future__ import annotations

from dataclasses import dataclass

from qflash import dispatch, machine
from qflash.backends import cuda, triton
from qflash.backends.arch import arch_for
from qflash.cli import environment
from qflash.dispatch import Kernel, arch_reasons
from qflash.errors import ToolchainError
from qflash.jit import prebuilt, toolchain
from qflash.jit.cache import Cache


@dataclass(frozen=True)
class Usable:
    """A kernel and what prevents its use here; `why_not` is empty if nothing does."""

    kernel: Kernel
    reasons: tuple[str, ...] = ()
    note: str = ""  # what users of the kernel should know

    @property
    def why_not(self) -> str:
        return "; ".join(self.reasons)


def usable_kernels() -> dict[str, Usable]:
    """Every row of KERNELS, checked for this machine."""
    return {kernel.name: _judged(kernel) for kernel in dispatch.KERNELS}


def _judged(kernel: Kernel) -> Usable:
    if kernel.device == "cpu":
        problem = environment.cpu_problem() if kernel.backend == "cpu" else ""
        return Usable(kernel, (problem,) if problem else ())
    gpus, none_because = machine.gpus()
    if not gpus:
        return Usable(kernel, (f"no NVIDIA GPU: {none_because}",))
    best = max(gpu.arch for gpu in gpus)
    reasons = _no_code(kernel, best)
    if kernel.backend == "triton" and (problem := triton.why_not()):
        reasons.append(problem)
    if reasons or kernel.backend != "cuda":
        return Usable(kernel, tuple(reasons))
    try:
        toolchain.find()
    except ToolchainError:
        return _without_compiler(kernel, arch_for(best))
    return Usable(kernel)


def _without_compiler(kernel: Kernel, arch: int) -> Usable:
    """Without a compiler, only libraries in the compile cache are available."""
    units = cuda.specialisations([arch], [kernel.name])
    kept = Cache()
    ready = sum(prebuilt.find(unit, kept) is not None for unit in units)
    if not ready:
        return Usable(
            kernel,
            (
                "no CUDA compiler, and the compile cache has no library of it: pip install 'qflash[cuda]', or put nvcc "
                "on the PATH",
            ),
        )
    note = f"{ready} of {len(units)} libraries are compiled; there is no CUDA compiler for the others"
    return Usable(kernel, note="" if ready == len(units) else note)


def _no_code(kernel: Kernel, best: int) -> list[str]:
    """Why `kernel` does not run on the best GPU, of compute capability `best`/10."""
    try:
        arch = arch_for(best)
    except ValueError as error:
        return [str(error)]
    return arch_reasons(kernel, arch, "the best GPU here has" if arch == best else "QFLASH_CUDA_ARCH asks for")
