"""The CPU engine: linked into qflash._native, nothing to compile or load."""

from __future__ import annotations

from qflash import _native
from qflash.backends import Entry
from qflash.dispatch import Kernel
from qflash.spec import OpSpec, Spec


def entry(kernel: Kernel, spec: Spec | OpSpec) -> Entry:
    """Addresses of `kernel`'s forward or backward entry."""
    name = "cpu_int8" if kernel.name == "cpu_int8_quantized" else kernel.name  # one entry serves both rows
    name = f"{name}_bwd" if isinstance(spec, Spec) and spec.backward else name
    return Entry(_native.cpu_entries[name], _native.cpu_entries["status_text"])
