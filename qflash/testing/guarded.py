"""Matrices at the edge of readable memory: a kernel that reads past one causes a fault."""

from __future__ import annotations

import ctypes
import mmap

import numpy as np

_PAGE, _PROT_NONE = mmap.PAGESIZE, 0
_FILL = 77  # value of bytes between rows: it shows up in a sum
_libc = ctypes.CDLL(None, use_errno=True)


def guarded(x: np.ndarray, row_bytes: int, at_end: bool) -> np.ndarray:
    """A copy of x whose rows are `row_bytes` apart. An unreadable page follows its last byte (`at_end`), or precedes
    its first one."""
    if row_bytes % x.itemsize:
        raise ValueError(f"row_bytes is {row_bytes}; allowed: multiples of {x.itemsize}")
    span = row_bytes * (x.shape[0] - 1) + x.shape[1] * x.itemsize if x.size else 0
    pages = -(-max(span, 1) // _PAGE)
    whole = np.frombuffer(mmap.mmap(-1, (pages + 2) * _PAGE), np.uint8)
    whole[...] = _FILL
    start = (pages + 1) * _PAGE - span if at_end else _PAGE
    items = whole[start : start + span].view(x.dtype)
    view = np.lib.stride_tricks.as_strided(items, x.shape, (row_bytes, x.itemsize))
    view[...] = x
    for page in (0, pages + 1):
        assert _libc.mprotect(ctypes.c_void_p(whole.ctypes.data + page * _PAGE), _PAGE, _PROT_NONE) == 0
    return view
