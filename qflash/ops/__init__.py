"""One file per operation: from arguments and array descriptions to a checked Plan."""

from qflash.ops.attention import ATTENTION, ATTENTION_BACKWARD, ATTENTION_BACKWARD_SHARE
from qflash.ops.attention_kv import ATTENTION_KEPT, ATTENTION_QUANTIZED
from qflash.ops.kv import QUANTIZE_KV
from qflash.ops.kv_write import KV_WRITE
from qflash.ops.linear import LINEAR, LINEAR_INT8, SWIGLU, SWIGLU_INT8
from qflash.ops.linear_gradient import LINEAR_BACKWARD, SWIGLU_BACKWARD
from qflash.ops.linear_weights import QUANTIZE_ROWS
from qflash.ops.matmul import INT8_MATMUL
from qflash.ops.merge import MERGE
from qflash.ops.paged import ATTENTION_PAGED
from qflash.ops.quantization import DEQUANTIZE, QUANTIZE
from qflash.ops.rope import ROPE
from qflash.ops.row_gradients import CROSS_ENTROPY_BACKWARD, LAYER_NORM_BACKWARD, SOFTMAX_BACKWARD
from qflash.ops.rows import CROSS_ENTROPY, LAYER_NORM, SOFTMAX

# Every operation, for front ends that must register them before the first call.
OPS = (
    *(ATTENTION, ATTENTION_BACKWARD, ATTENTION_BACKWARD_SHARE),
    *(ATTENTION_QUANTIZED, ATTENTION_KEPT, ATTENTION_PAGED),
    *(QUANTIZE_KV, KV_WRITE, QUANTIZE, DEQUANTIZE, INT8_MATMUL, SOFTMAX, LAYER_NORM, CROSS_ENTROPY, MERGE, ROPE),
    *(SOFTMAX_BACKWARD, LAYER_NORM_BACKWARD, CROSS_ENTROPY_BACKWARD),
    *(LINEAR, SWIGLU, LINEAR_INT8, SWIGLU_INT8, LINEAR_BACKWARD, SWIGLU_BACKWARD, *QUANTIZE_ROWS),
)
