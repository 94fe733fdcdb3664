"""qflash in Hugging Face transformers: attention functions, a paged cache and a decode loop. Importing it needs both.

names      register, which adds attn_implementation "qf", "qf_int8" and "qf_int8_fp8"
patterns   what a mask function of transformers means
mask       masks as arguments of qflash, and the mask function that makes them
attention  the attention functions
tokens     which tokens of a batch are padding
pages      PagedCache, a cache of transformers over qflash.KVCache
prompts    checks of the arguments of generate
sampling   the next token from logits
causal_model  a decoder-only model as the decode loops call it
capture    a step as a CUDA graph
decoding   generate and Decoder, the decode loop
batching   Batcher: continuous batching of requests
requests   a request to a Batcher and its results
prefixes   pages shared by requests
passes     the forward passes of a Batcher
step_cache  the cache that such a pass writes
rows       the tensors of such a pass that describe its requests, and their next tokens
stand_ins  recognizes what a module computes by trying it
joined     fuse_projections: layers that read the same input as one matrix product
int8_linears  quantize_linears: linear layers in INT8
fused_layers  fuse_layers: fused rope, SwiGLU and RMS norms, for training
"""

from qflash.integrations.transformers.batching import Batcher
from qflash.integrations.transformers.decoding import Decoder, Generated, generate
from qflash.integrations.transformers.fused_layers import fuse_layers
from qflash.integrations.transformers.int8_linears import Int8Layers, Int8Linear, quantize_linears
from qflash.integrations.transformers.joined import fuse_projections
from qflash.integrations.transformers.names import register
from qflash.integrations.transformers.pages import PagedCache
from qflash.integrations.transformers.requests import Request

__all__ = [
    "Batcher",
    "Decoder",
    "Generated",
    "Int8Layers",
    "Int8Linear",
    "PagedCache",
    "Request",
    "fuse_layers",
    "fuse_projections",
    "generate",
    "quantize_linears",
    "register",
]
