"""qflash: attention for NumPy, PyTorch and JAX on kernels written from scratch."""

from qflash._native import get_num_threads, set_num_threads
from qflash.api import Explanation, attention, attention_varlen, explain
from qflash.errors import CacheError, CompileError, KernelError, NoKernelError, ToolchainError
from qflash.ops.kv import QuantizedKV, quantize_kv
from qflash.ops.matmul import int8_matmul
from qflash.ops.quantization import Quantized, dequantize, quantize
from qflash.ops.rows import cross_entropy, layer_norm, softmax
from qflash.rope import Rope, rope_tables

__version__ = "0.1.0"

__all__ = [
    "CacheError",
    "CompileError",
    "Explanation",
    "KernelError",
    "NoKernelError",
    "Quantized",
    "QuantizedKV",
    "Rope",
    "ToolchainError",
    "attention",
    "attention_varlen",
    "cross_entropy",
    "dequantize",
    "explain",
    "get_num_threads",
    "int8_matmul",
    "layer_norm",
    "quantize",
    "quantize_kv",
    "rope_tables",
    "set_num_threads",
    "softmax",
]
