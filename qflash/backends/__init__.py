"""Loading kernels: each backend turns a dispatch row into something to launch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qflash.call.op import Plan
    from qflash.call.spec import Spec
    from qflash.dispatch import Kernel

# A kernel that takes arrays of a framework: (operands, results, stream), in the order of the plan it was bound to.
Launch = Callable[[Sequence[Any], Sequence[Any], int], None]
# Such a kernel before it is bound. The plan's fields contain everything that the words of the call determine.
Bind = Callable[["Plan"], Launch]


@dataclass(frozen=True, slots=True)
class Entry:
    """Addresses of a kernel's C functions (see csrc/include/qflash.h); `workspace` may be 0."""

    address: int
    status_text: int
    workspace: int = 0
    context: int = 0  # the first argument of functions that launch many kernels; 0: they launch one


def load(kernel: Kernel, spec: Spec) -> Entry | Bind:
    """`kernel` built for `spec`: linked in, loaded, or compiled first. Its backend is a module of this package."""
    entry: Entry | Bind = import_module(f"qflash.backends.{kernel.backend}").entry(kernel, spec)
    return entry
