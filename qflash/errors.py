"""The exceptions qflash raises in addition to ValueError and TypeError."""

from __future__ import annotations


class NoKernelError(ValueError):
    """No kernel, or not the requested one, supports the call; the message lists the reasons.

    Example:
        >>> import numpy as np
        >>> import qflash
        >>> x = np.zeros((1, 16, 2, 64), np.float32)
        >>> try:
        ...     qflash.attention(x, x, x, precision="int8", kernel="cpu")
        ... except qflash.NoKernelError as error:
        ...     print(str(error).splitlines()[0])
        kernel 'cpu' cannot serve this problem: takes precision None, not "int8"
    """


class ToolchainError(RuntimeError):
    """A CUDA kernel must be compiled and no usable compiler was found; the message says what to install.

    Example:
        >>> import numpy as np
        >>> import qflash
        >>> x = np.zeros((1, 16, 2, 64), np.float32)
        >>> try:
        ...     out = qflash.attention(x, x, x)
        ... except qflash.ToolchainError as error:  # first use on a GPU, without nvcc
        ...     print(error)
    """


class CompileError(RuntimeError):
    """The compiler ran and failed; the message contains the command and its output.

    Example:
        >>> import numpy as np
        >>> import qflash
        >>> x = np.zeros((1, 16, 2, 64), np.float32)
        >>> try:
        ...     out = qflash.attention(x, x, x)
        ... except qflash.CompileError as error:  # nvcc failed on a kernel
        ...     print(error)
    """


class KernelError(RuntimeError):
    """A kernel returned an error status at run time.

    Example:
        >>> import numpy as np
        >>> import qflash
        >>> x = np.zeros((1, 16, 2, 64), np.float32)
        >>> try:
        ...     out = qflash.attention(x, x, x)
        ... except qflash.KernelError as error:  # a kernel failed while it ran
        ...     print(error)
    """


class CacheError(RuntimeError):
    """The compile cache is unsafe or cannot be used; the message names the path and says what to do.

    Example:
        >>> import numpy as np
        >>> import qflash
        >>> x = np.zeros((1, 16, 2, 64), np.float32)
        >>> try:
        ...     out = qflash.attention(x, x, x)
        ... except qflash.CacheError as error:  # others can write to the cache's folder
        ...     print(error)
    """


class OutOfPagesError(RuntimeError):
    """A cache has too few free pages for new tokens; nothing was changed.

    Attributes:
        needed: number of pages needed.
        free: number of free pages.
        total: number of pages of the cache.
    Example:
        >>> import numpy as np
        >>> import qflash
        >>> cache = qflash.KVCache(layers=1, kv_heads=2, head_dim=64, pages=4, page_size=16, dtype=np.float32)
        >>> a = cache.open()
        >>> try:
        ...     step = cache.extend([a], 100)
        ... except qflash.OutOfPagesError as error:
        ...     print(error)
        extend needs 7 more pages, and 4 of the cache's 4 are free; make the cache with more pages
    """

    def __init__(self, needed: int, free: int, total: int) -> None:
        super().__init__(needed, free, total)  # for pickle
        self.needed, self.free, self.total = needed, free, total

    def __str__(self) -> str:
        advice = "close or truncate sequences first" if self.needed <= self.total else "make the cache with more pages"
        return f"extend needs {self.needed} more pages, and {self.free} of the cache's {self.total} are free; {advice}"
