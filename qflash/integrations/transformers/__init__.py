"""qflash in Hugging Face transformers: attention functions, a paged cache, and a decode loop. Importing it needs both.

names      register, which makes attn_implementation "qf" and "qf_int8" known
patterns   what a mask function of transformers means
mask       masks in qflash's words, and the mask function that makes them
attention  the attention functions
tokens     which tokens of a batch are padding
pages      PagedCache, a cache of transformers over qflash.KVCache
prompts    what generate is given, and what is refused of it
sampling   the next token from logits
decoding   generate and Decoder, the decode loop
"""

from qflash.integrations.transformers.decoding import Decoder, Generated, generate
from qflash.integrations.transformers.names import register
from qflash.integrations.transformers.pages import PagedCache

__all__ = ["Decoder", "Generated", "PagedCache", "generate", "register"]
