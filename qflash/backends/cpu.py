"""The CPU engine: linked into qflash._native, nothing to compile or load."""

from __future__ import annotations

from qflash import _native
from qflash.backends import Entry
from qflash.dispatch import Kernel
from qflash.spec import OpSpec, Spec


def entry(kernel: Kernel, spec: Spec | OpSpec) -> Entry:
    """Addresses of `kernel`'s forward or backward entry."""
    name = f"{kernel.name}_bwd" if isinstance(spec, Spec) and spec.backward else kernel.name
    return Entry(_native.cpu_entries[name], _native.cpu_entries["status_text"])
