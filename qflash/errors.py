"""The exceptions qflash raises besides ValueError and TypeError."""

from __future__ import annotations


class NoKernelError(ValueError):
    """No kernel (or not the one that was asked for) can serve the problem; the text carries the reasons.

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
    """A CUDA kernel must be compiled and no usable compiler was found; the text says what to install.

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
    """The compiler ran and failed; the text carries the command and its output.

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
    """A kernel returned a failure status while running.

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
    """The compile cache is not safe or not possible to use; the text names the path and says what to do.

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
    """A cache has too few free pages for new tokens; nothing was changed. `needed`, `free`, `total`: how many pages.

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
        super().__init__(needed, free, total)  # so that pickle can make it again
        self.needed, self.free, self.total = needed, free, total

    def __str__(self) -> str:
        advice = "close or truncate sequences first" if self.needed <= self.total else "make the cache with more pages"
        return f"extend needs {self.needed} more pages, and {self.free} of the cache's {self.total} are free; {advice}"
