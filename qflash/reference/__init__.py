"""The oracle: every operation of qflash defined in NumPy, and the replay of each quantized pipeline.

`exact`, `operations`, `rotary` and `linear` are the definitions, in float64. The other modules repeat the arithmetic of
a quantized kernel, rounding by rounding: `int8` (the CPU engine), `quantize`, `kv_write`, `pages_int8`, `fa_int8`,
`sm90_quantize` and `sm90_int8`, and in `linear` the function `linear_int8`.
"""

from qflash.reference.blocks import visible
from qflash.reference.exact import (
    attention,
    attention_backward,
    attention_varlen,
    attention_varlen_backward,
    sink_gradient,
)
from qflash.reference.fa_int8 import attention_fa_int8
from qflash.reference.int8 import attention_int8
from qflash.reference.linear import linear, linear_backward, linear_int8, swiglu, swiglu_backward
from qflash.reference.operations import (
    cross_entropy,
    cross_entropy_backward,
    layer_norm,
    layer_norm_backward,
    merge,
    softmax,
    softmax_backward,
)
from qflash.reference.rotary import apply_rope, rope
from qflash.reference.sm90_int8 import attention_sm90_int8

__all__ = [
    "apply_rope",
    "attention",
    "attention_backward",
    "attention_fa_int8",
    "attention_int8",
    "attention_sm90_int8",
    "attention_varlen",
    "attention_varlen_backward",
    "cross_entropy",
    "cross_entropy_backward",
    "layer_norm",
    "layer_norm_backward",
    "linear",
    "linear_backward",
    "linear_int8",
    "merge",
    "rope",
    "sink_gradient",
    "softmax",
    "softmax_backward",
    "swiglu",
    "swiglu_backward",
    "visible",
]
