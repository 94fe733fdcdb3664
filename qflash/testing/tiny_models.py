"""Models of transformers, with two layers of random weights each, and batches for them. Seeds are fixed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
import transformers

WINDOW = 6  # of sliding-window layers; prompts are longer
LENGTH = 14
VOCABULARY = 99

# Weights large enough that one key more or less is visible in the logits, which are of order 1.
_SPREAD = {"initializer_range": 0.2}
_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
_DECODER = {
    **_SIZES,
    **_SPREAD,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "pad_token_id": 0,
    "eos_token_id": None,
    "bos_token_id": None,
}
_ALTERNATING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": WINDOW}
_GPT2 = {
    "vocab_size": VOCABULARY,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 128,
    "pad_token_id": 0,
    "eos_token_id": None,
    "bos_token_id": None,
    **dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0),
    **_SPREAD,
}

DECODERS: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaConfig(**_DECODER),
    "gpt2": lambda: transformers.GPT2Config(**_GPT2),
    "mistral": lambda: transformers.MistralConfig(**_DECODER, sliding_window=WINDOW),
    "qwen2": lambda: transformers.Qwen2Config(**_DECODER, use_sliding_window=True, **_ALTERNATING),
    "qwen3": lambda: transformers.Qwen3Config(**_DECODER),
    "gemma2": lambda: transformers.Gemma2Config(**_DECODER, **_ALTERNATING, query_pre_attn_scalar=8),
    "gemma3": lambda: transformers.Gemma3TextConfig(**_DECODER, **_ALTERNATING, query_pre_attn_scalar=8),
    "gpt_oss": lambda: transformers.GptOssConfig(
        **_DECODER, **_ALTERNATING, num_local_experts=2, num_experts_per_tok=1
    ),
}
# PyTorch's attention has neither softcap nor sinks; the reference is then transformers' own.
REFERENCE = {"gemma2": "eager", "gpt_oss": "eager"}


@lru_cache(maxsize=16)
def decoder(family: str) -> Any:
    """A model for causal language modelling, in eval mode."""
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(DECODERS[family](), attn_implementation="eager").eval()
    for name, weights in model.named_parameters():
        if name.endswith("sinks"):
            weights.data.normal_()
    return model


def new_decoder(family: str) -> Any:
    """The same for a single test: transformers stores compiled functions in a model, which then cannot be pickled."""
    return decoder.__wrapped__(family)


def reference_of(family: str) -> str:
    """The attn_implementation to compare with."""
    return REFERENCE.get(family, "sdpa")


@contextmanager
def attention_by(model: Any, name: str) -> Iterator[Any]:
    """A model with another attn_implementation."""
    before = model.config._attn_implementation
    model.set_attn_implementation(name)
    try:
        yield model
    finally:
        model.set_attn_implementation(before)


def tokens(batch: int = 3, length: int = LENGTH) -> torch.Tensor:
    """Ids without padding."""
    return torch.randint(1, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(7))


def padding(kind: str) -> torch.Tensor | None:
    """A padding mask for `tokens()`: "none", "ones", or with padding on the left, the right, both or in the middle."""
    if kind == "none":
        return None
    mask = torch.ones(3, LENGTH, dtype=torch.int64)
    if kind in ("left", "both"):
        mask[0, :5], mask[2, :1] = 0, 0
    if kind in ("right", "both"):
        mask[1, 9:], mask[2, -2:] = 0, 0
    if kind == "holes":
        mask[0, 4:7], mask[1, 0], mask[1, 2] = 0, 0, 0
    return mask


def positions(mask: torch.Tensor | None) -> torch.Tensor | None:
    """Positions of tokens, as generate() counts them."""
    return None if mask is None else (mask.cumsum(1) - 1).clamp(min=0)


@lru_cache(maxsize=1)
def whisper() -> Any:
    """Encoder, cross attention and decoder."""
    sizes = dict.fromkeys(("encoder_layers", "decoder_layers"), 2)
    sizes |= dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4)
    sizes |= dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 64)
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    config = transformers.WhisperConfig(
        **sizes, **special, vocab_size=VOCABULARY, d_model=32, num_mel_bins=8, max_source_positions=20,
        max_target_positions=40, init_std=0.2, suppress_tokens=[], begin_suppress_tokens=[],
    )  # fmt: skip
    torch.manual_seed(1)
    return transformers.WhisperForConditionalGeneration(config).eval()


@lru_cache(maxsize=1)
def bart() -> Any:
    """The same for text, with a padded encoder."""
    config = transformers.BartConfig(
        vocab_size=VOCABULARY, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64, init_std=0.2, max_position_embeddings=64,
        forced_eos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(1)
    return transformers.BartForConditionalGeneration(config).eval()


@lru_cache(maxsize=1)
def bert() -> Any:
    """A text encoder."""
    torch.manual_seed(1)
    return transformers.BertModel(transformers.BertConfig(**_SIZES, **_SPREAD)).eval()


@lru_cache(maxsize=1)
def modernbert() -> Any:
    """A text encoder, one layer of which has a window to both sides."""
    special = {"pad_token_id": 0, "bos_token_id": 1, "cls_token_id": 1, "eos_token_id": 2, "sep_token_id": 2}
    config = transformers.ModernBertConfig(
        **_SIZES, **_SPREAD, **special, local_attention=WINDOW, global_attn_every_n_layers=2, max_position_embeddings=64
    )
    torch.manual_seed(1)
    return transformers.ModernBertModel(config).eval()


@lru_cache(maxsize=1)
def vit() -> Any:
    """An encoder for images of 32 by 32."""
    sizes = {name: size for name, size in _SIZES.items() if name != "vocab_size"}
    torch.manual_seed(1)
    return transformers.ViTModel(transformers.ViTConfig(**sizes, **_SPREAD, image_size=32, patch_size=8)).eval()
