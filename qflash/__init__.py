"""qflash: attention for NumPy, PyTorch and JAX on kernels written from scratch."""

try:
    from qflash._native import get_num_threads, set_num_threads
except ModuleNotFoundError as error:
    if error.name != "qflash._native":
        raise
    raise ModuleNotFoundError(
        f"qflash was imported from the folder {__path__[0]}, which has no compiled module for this Python. "
        "In a checkout install qflash with `pip install -e .` or `make build`, or start Python in another folder",
        name=error.name,
    ) from None
from qflash.api import attention, attention_varlen, explain
from qflash.errors import CacheError, CompileError, KernelError, NoKernelError, OutOfPagesError, ToolchainError
from qflash.explanation import Explanation
from qflash.integrations.sdpa import replace_sdpa, scaled_dot_product_attention
from qflash.kvcache import KVCache
from qflash.ops.backward_memory import get_backward_memory, set_backward_memory
from qflash.ops.kv import QuantizedKV, quantize_kv
from qflash.ops.kv_write import paged_write
from qflash.ops.linear import linear, swiglu
from qflash.ops.linear_weights import QuantizedLinear, quantize_linear
from qflash.ops.matmul import int8_matmul
from qflash.ops.merge import merge
from qflash.ops.paged import PagedKV
from qflash.ops.prefix import SharedPrefixKV, share_prefix
from qflash.ops.quantization import Quantized, dequantize, quantize
from qflash.ops.rope import rope
from qflash.ops.rows import cross_entropy, layer_norm, softmax
from qflash.rotary import Rope, rope_tables

__version__ = "0.1.0"

__all__ = [
    "CacheError",
    "CompileError",
    "Explanation",
    "KVCache",
    "KernelError",
    "NoKernelError",
    "OutOfPagesError",
    "PagedKV",
    "Quantized",
    "QuantizedKV",
    "QuantizedLinear",
    "Rope",
    "SharedPrefixKV",
    "ToolchainError",
    "attention",
    "attention_varlen",
    "cross_entropy",
    "dequantize",
    "explain",
    "get_backward_memory",
    "get_num_threads",
    "int8_matmul",
    "layer_norm",
    "linear",
    "merge",
    "paged_write",
    "quantize",
    "quantize_kv",
    "quantize_linear",
    "replace_sdpa",
    "rope",
    "rope_tables",
    "scaled_dot_product_attention",
    "set_backward_memory",
    "set_num_threads",
    "share_prefix",
    "softmax",
    "swiglu",
]
