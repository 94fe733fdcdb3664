"""The exceptions qflash raises besides ValueError and TypeError."""

from __future__ import annotations


class NoKernelError(ValueError):
    """No kernel (or not the one that was asked for) can serve the problem; the text carries the reasons."""


class ToolchainError(RuntimeError):
    """A CUDA kernel must be compiled and no usable compiler was found; the text says what to install."""


class CompileError(RuntimeError):
    """The compiler ran and failed; the text carries the command and its output."""


class KernelError(RuntimeError):
    """A kernel returned a failure status while running."""


class CacheError(RuntimeError):
    """The compile cache is not safe or not possible to use; the text names the path and says what to do."""
