"""qflash in Hugging Face transformers: attention functions, a paged cache, and a decode loop. Importing it needs both.

names      register, which makes attn_implementation "qf" and "qf_int8" known
patterns   what a mask function of transformers means
mask       masks in qflash's words, and the mask function that makes them
attention  the attention functions
tokens     which tokens of a batch are padding
pages      PagedCache, a cache of transformers over qflash.KVCache
prompts    what generate is given, and what is refused of it
sampling   the next token from logits
causal_model  a decoder-only model as the decode loops call it
capture    a step as a CUDA graph
decoding   generate and Decoder, the decode loop
batching   Batcher: requests that come and go
requests   what a Batcher is asked for, and what came of it
prefixes   pages that requests have in common
passes     the forward passes of a Batcher
step_cache  the cache that such a pass writes
rows       what such a pass knows of each request, and its next token
stand_ins  what a module computes, found out by trying it
joined     fuse_projections: layers that read the same input as one product
int8_linears  quantize_linears: linear layers in INT8
fused_layers  fuse_layers: small steps between products as one each, for training
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
