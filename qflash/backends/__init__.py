"""Where kernels live: each backend turns a dispatch row into something to launch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qflash.call.spec import Spec
    from qflash.dispatch import Kernel

# A kernel that takes arrays of a framework: (operands, results, stream), in the order of the plan.
Launch = Callable[[Sequence[Any], Sequence[Any], int], None]


@dataclass(frozen=True, slots=True)
class Entry:
    """Addresses of a kernel's C functions (see csrc/include/qflash.h); `workspace` may be 0."""

    address: int
    status_text: int
    workspace: int = 0


def load(kernel: Kernel, spec: Spec) -> Entry | Launch:
    """`kernel` built for `spec`: linked in, loaded, or compiled first. Its backend is a module of this package."""
    entry: Entry | Launch = import_module(f"qflash.backends.{kernel.backend}").entry(kernel, spec)
    return entry
