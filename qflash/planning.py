"""From a checked Problem to something that launches: choose the kernel, load or compile it, bind the call. Cached."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from qflash import _native, dispatch
from qflash.backends import Entry
from qflash.call.spec import OpSpec, Spec
from qflash.ops.problem import Problem


@dataclass(frozen=True, slots=True)
class Prepared:
    """A call ready to run. `call` takes addresses only and may be shared by threads."""

    problem: Problem
    kernel: dispatch.Kernel
    entry: Entry
    call: Callable[..., None]  # an AttnCall, or an AttnBwdCall with its further addresses
    workspace_bytes: int = 0


def entry_of(kernel: dispatch.Kernel, spec: Spec | OpSpec) -> Entry:
    """The addresses of `kernel` built for `spec`: linked in, loaded, or compiled first."""
    if kernel.device == "cpu":
        from qflash.backends import cpu

        return cpu.entry(kernel, spec)
    from qflash.backends import cuda

    return cuda.entry(kernel, spec)


@lru_cache(maxsize=4096)
def prepare(problem: Problem, arch: int = 0) -> Prepared:
    """The forward call for `problem` on a device of compute capability `arch`/10 (0: CPU)."""
    kernel = dispatch.plan(problem.spec(arch), problem.kernel)
    entry = entry_of(kernel, problem.spec(arch))
    call = _native.AttnCall(problem, entry.address, entry.status_text, entry.workspace)
    return Prepared(problem, kernel, entry, call, call.workspace_bytes)


@lru_cache(maxsize=4096)
def prepare_backward(problem: Problem, arch: int = 0) -> Prepared:
    """The backward call for `problem`. Raises NotImplementedError where the forward kernel has none."""
    kernel = dispatch.plan(problem.spec(arch), problem.kernel)
    if not kernel.backward:
        raise NotImplementedError(
            f"kernel {kernel.name!r} ({kernel.device}, precision {kernel.precision}) has no backward pass; "
            "detach q, k and v, or use float arrays on the CPU with precision=None"
        )
    entry = entry_of(kernel, problem.spec(arch, backward=True))
    return Prepared(problem, kernel, entry, _native.AttnBwdCall(problem, entry.address, entry.status_text))
