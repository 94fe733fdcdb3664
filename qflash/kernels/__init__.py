"""KERNELS: the table, one row per kernel, in files by what they compute. The first row that serves a call wins."""

from __future__ import annotations

from qflash.kernels.attention import ATTENTION
from qflash.kernels.cache import CACHE
from qflash.kernels.kernel import HEAD_DIMS, Kernel
from qflash.kernels.linear import LINEAR
from qflash.kernels.rows import ROWS

__all__ = ["HEAD_DIMS", "KERNELS", "Kernel"]

KERNELS: tuple[Kernel, ...] = (*ATTENTION, *CACHE, *ROWS, *LINEAR)
