"""Shapes of models of transformers whose generation is measured. Weights are random: none are downloaded, and speed
does not depend on them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

SEED = 0
_SPECIAL = {"pad_token_id": 0, "eos_token_id": None, "bos_token_id": None}  # no text ends early


@dataclass(frozen=True)
class Shape:
    """A configuration of transformers, and the maximum number of tokens that it has positions for."""

    name: str
    config: str
    positions: int
    sizes: Mapping[str, Any]

    def make_config(self) -> Any:
        import transformers

        return getattr(transformers, self.config)(**self.sizes, **_SPECIAL)


def _llama(name: str, positions: int = 131072, **sizes: Any) -> Shape:
    return Shape(name, "LlamaConfig", positions, {"max_position_embeddings": positions} | sizes)


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("gpt2", "GPT2Config", 1024, {"n_positions": 1024}),  # the defaults are those of 124 million parameters
        _llama(
            "llama-1b", vocab_size=128256, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16,
            num_attention_heads=32, num_key_value_heads=8, head_dim=64, tie_word_embeddings=True,
        ),
        _llama(
            "llama-8b", vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32,
            num_attention_heads=32, num_key_value_heads=8, head_dim=128,
        ),
        _llama(
            "tiny", 256, vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2,
        ),
    )
}  # fmt: skip


def build(shape: Shape, device: str, dtype: str) -> Any:
    """The model on a device, in eval mode, with the same weights in every call."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(SEED)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(
            shape.make_config(), dtype=getattr(torch, dtype), attn_implementation="sdpa"
        )
    return model.to(device).eval()


def cache_bytes(config: Any, tokens: int, item_bytes: int, int8: bool = False) -> int:
    """Bytes of the keys and values of that many tokens in all layers; INT8 adds a float32 scale per token and head."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * config.num_hidden_layers * tokens * heads * (head_dim + 4 if int8 else head_dim * item_bytes)
