"""The names "qf", "qf_int8" and "qf_int8_fp8" for attn_implementation."""

from __future__ import annotations

from transformers import AttentionInterface, AttentionMaskInterface

from qflash.integrations.transformers.attention import qf_attention, qf_int8_attention, qf_int8_fp8_attention
from qflash.integrations.transformers.mask import qf_mask

FUNCTIONS = {"qf": qf_attention, "qf_int8": qf_int8_attention, "qf_int8_fp8": qf_int8_fp8_attention}


def register() -> None:
    """Register attn_implementation "qf", "qf_int8" and "qf_int8_fp8" with transformers, with their mask function.

    "qf" computes attention in the model's own dtype, "qf_int8" with precision "int8" in calls with more than one query,
    "qf_int8_fp8" with precision "int8_fp8" there. All support models with causal or bidirectional masks, sliding
    windows, padding on either side, packed position_ids, softcap and sinks; anything else raises NotImplementedError in
    the layer that needs it.

    Example:
        >>> import torch
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from qflash.integrations.transformers import register
        >>> register()
        >>> config = LlamaConfig(vocab_size=99, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        ...                      num_attention_heads=4, attn_implementation="qf")
        >>> LlamaForCausalLM(config)(torch.arange(10)[None]).logits.shape
        torch.Size([1, 10, 99])
    """
    for name, function in FUNCTIONS.items():
        AttentionInterface.register(name, function)
        AttentionMaskInterface.register(name, qf_mask)
