"""Spec and OpSpec: the frozen keys that select a kernel. Nothing in them depends on lengths or addresses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

DTYPES = ("float32", "float16", "bfloat16")
PRECISIONS = ("native", "int8", "int8_fp8")
# In the order of QfDtype and QfOpDtype: an array's code in the structs of operations.
OP_DTYPES = (*DTYPES, "int8", "int32", "e4m3")
# What may stand in the places of k and v, in the order of QfKvKind.
KV_KINDS = ("arrays", "quantized", "kept")


@dataclass(frozen=True, slots=True)
class Spec:
    """What a kernel must be able to do to serve an attention problem."""

    op: ClassVar[str] = "attention"

    device: str  # "cpu" or "cuda"
    arch: int  # compute capability times ten (90 is Hopper); 0 on the CPU
    dtype: str  # one of DTYPES
    head_dim: int
    precision: str = "native"  # one of PRECISIONS
    window: bool = False  # a finite edge on either side of the diagonal; causal is one
    softcap: bool = False
    rope: str | None = None  # None, "half" or "interleaved"
    packed: bool = False  # attention_varlen
    kv_lens: bool = False
    backward: bool = False


@dataclass(frozen=True, slots=True)
class OpSpec:
    """What a kernel must be able to do to serve an operation beside attention."""

    op: str  # "softmax", "int8_matmul", ...
    device: str
    arch: int
    # Of the floating-point side: the input of softmax or quantize, the result of int8_matmul, dequantize and so on
    dtype: str
    layout: str = ""  # int8_matmul: which dimension of b is contiguous, "n" or "k"
    head_dim: int = 0  # attention_int8, attention_kv, quantize_kv
    precision: str = ""  # attention_kv: one of PRECISIONS; "": kernels are not told apart by it
