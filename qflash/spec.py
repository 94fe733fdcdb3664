"""Spec: the frozen key that selects a kernel. Nothing in it depends on lengths or addresses."""

from __future__ import annotations

from dataclasses import dataclass

DTYPES = ("float32", "float16", "bfloat16")
PRECISIONS = ("native", "int8", "int8_fp8")


@dataclass(frozen=True, slots=True)
class Spec:
    """What a kernel must be able to do to serve a problem."""

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
