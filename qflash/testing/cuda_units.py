"""The units that compile tests compile of a CUDA kernel if one of its libraries is enough: a unit for Hopper."""

from __future__ import annotations

from dataclasses import replace

from qflash import dispatch
from qflash.backends import cuda
from qflash.jit.compiler import Unit

CUDA_ROWS = [row for row in dispatch.VARIANTS.values() if row.kernel.backend == "cuda"]
HOPPERS_OWN = [row for row in CUDA_ROWS if not row.kernel.later_arches]  # kernels that use Hopper's own instructions
ATTENTION = [row.name for row in dispatch.variants_of("attention", "cuda") if row in CUDA_ROWS]
# Portable decoding compiles slowly, and Hopper has its own: by default only the variant on arrays is compiled for it.
SELDOM = ("decode_kv", "decode_pages", "decode_pages_int8")
BACKWARD = [row.name for row in dispatch.variants_of("attention_backward", "cuda")]
GEMM = [row.name for row in CUDA_ROWS if row.kernel.op == "linear" and row not in HOPPERS_OWN]
ROWS = [f"{name}{gradient}" for gradient in ("", "_bwd") for name in ("softmax", "layer_norm", "cross_entropy")]

# dtype and bucket of units for Hopper other than the kernel's first dtype and 128: large ones, as registers are scarce.
HOPPER = {
    "fa_int8": ("float16", 192),
    "fa_int8_quantized": ("float16", 256),
    "fa_mma": ("bfloat16", 256),
    "fa_tc": ("bfloat16", 128),
    "fa_warps": ("float32", 96),
    "gelu_linear_wmma": ("bfloat16", 128),
    "gemm_mma": ("bfloat16", 128),
    "linear_bwd": ("bfloat16", 128),
    **{row.name: ("bfloat16", 128) for row in HOPPERS_OWN},
    **{name: ("bfloat16", 0) for name in ROWS},
}


def on_hopper(kernel: str) -> tuple[str, int]:
    return HOPPER.get(kernel, (dispatch.VARIANTS[kernel].dtypes[0], 128))


def hopper_unit(kernel: str) -> Unit:
    return cuda.unit_of(dispatch.VARIANTS[kernel], *on_hopper(kernel), 90)


def other_scores(kernel: str) -> Unit:
    """Like hopper_unit, for scores with a softcap."""
    variant = dispatch.VARIANTS[kernel]
    return cuda.unit(variant.kernel, replace(variant.spec(90, *on_hopper(kernel)), plain_scores=False))


def activated(kernel: str, dtype: str, activation: str, arch: int = 90) -> Unit:
    """The unit of a linear layer's activation."""
    variant = dispatch.VARIANTS[kernel]
    return cuda.unit(variant.kernel, replace(variant.spec(arch, dtype), activation=activation))
