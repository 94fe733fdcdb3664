"""Where kernels live: each backend turns a dispatch row into the addresses of its C functions."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Entry:
    """Addresses of a kernel's C functions (see csrc/include/qflash.h); `workspace` may be 0."""

    address: int
    status_text: int
    workspace: int = 0
