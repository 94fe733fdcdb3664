"""The CPU engine: linked into qflash._native, nothing to compile or load."""

from __future__ import annotations

from qflash import _native
from qflash.backends import Entry
from qflash.call.spec import Spec
from qflash.dispatch import Kernel


def entry(kernel: Kernel, spec: Spec) -> Entry:
    """Addresses of `kernel`'s entry, which has its name."""
    return Entry(_native.cpu_entries[kernel.name], _native.cpu_entries["status_text"])
