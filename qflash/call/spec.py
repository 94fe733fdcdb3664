"""Spec: the frozen key that selects a kernel. It does not depend on addresses, and on lengths only by `few_rows`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

DTYPES = ("float32", "float16", "bfloat16")
PRECISIONS = ("native", "int8", "int8_fp8")
# The end of the error raised when a quantized call is differentiated (docs/decisions/0016-quantized-training.md)
SERVE_QUANTIZED = ": train in the arrays' own type, and serve what was trained in INT8"
# The kinds of k and v, in the order of QfKvKind: arrays; Quantized; QuantizedKV; PagedKV.
KV_KINDS = ("arrays", "quantized", "kept", "pages", "pages_int8")
# In the order of QfDtype and QfOpDtype: an array's code in the structs of operations.
OP_DTYPES = (*DTYPES, "int8", "int32", "e4m3")
# The activation of a linear layer, in the order of QfActivation; "": none.
ACTIVATIONS = ("", "gelu", "gelu_tanh", "silu", "swiglu")

MOST_DECODE_ROWS = 64  # csrc/attn/decode/config.cuh


@dataclass(frozen=True, slots=True)
class Spec:
    """The properties of a call that its kernel must support."""

    device: str  # "cpu" or "cuda"
    arch: int  # compute capability times ten (90 is Hopper); 0 on the CPU
    # The floating-point dtype: of q, k and v, of the input of softmax or quantize, of the result of int8 products, ...
    dtype: str
    head_dim: int = 0
    precision: str = "native"  # one of PRECISIONS
    window: bool = False  # a finite edge on either side of the diagonal; causal is one
    softcap: bool = False
    rope: str | None = None  # None, "half" or "interleaved"
    packed: bool = False  # attention_varlen
    kv_lens: bool = False
    op: str = "attention"
    kv: str = "arrays"  # one of KV_KINDS
    layout: str = ""  # linear: which dimension of w [k, n] is contiguous, "n" or "k"
    activation: str = ""  # linear: one of ACTIVATIONS
    # Scores are a positive factor times q . k, which is folded into the exponential: no softcap, a scale above 0
    plain_scores: bool = True
    sinks: bool = False
    few_rows: bool = False  # at most MOST_DECODE_ROWS rows of queries per KV head: Tq times the heads that share it
    batch_invariant: bool = False  # a sequence's bits must not depend on the rest of the batch
    # Strides of pages, and of the scales of int8 pages, are not multiples of 16 bytes: bulk loads cannot address them
    odd_pages: bool = False
    odd_scales: bool = False


def spec_of(op: str, device: str, dtype: str, **more: Any) -> Spec:
    """The Spec of an operation other than attention, without arch. `device` may have an index."""
    return Spec(device.partition(":")[0], 0, dtype, op=op, **more)
