"""qflash: attention for NumPy, PyTorch and JAX on kernels written from scratch."""

from qflash._native import get_num_threads, set_num_threads
from qflash.api import Explanation, attention, attention_varlen, explain
from qflash.errors import CompileError, KernelError, NoKernelError, ToolchainError
from qflash.rope import Rope, rope_tables

__version__ = "0.1.0"

__all__ = [
    "CompileError",
    "Explanation",
    "KernelError",
    "NoKernelError",
    "Rope",
    "ToolchainError",
    "attention",
    "attention_varlen",
    "explain",
    "get_num_threads",
    "rope_tables",
    "set_num_threads",
]
