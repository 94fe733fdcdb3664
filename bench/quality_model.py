"""A model of transformers in one mode of computation: its predictions, its greedy text, its layers' outputs.

Imported only where a model is measured, not where tables are made: it needs torch and transformers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from bench.quality_modes import Mode
from qflash.integrations.transformers import PagedCache, quantize_linears, register

Tensor = torch.Tensor
BYTES = 256
PAGE_SIZE = 64
CHUNK = 256  # tokens per forward pass on pages: later passes read what earlier ones wrote


@dataclass(frozen=True)
class Predictions:
    """Predictions for windows [N, T + 1], on the CPU: the mean negative log-likelihood, and the first choices."""

    nats: float
    choices: Tensor  # [N, T]


def load(checkpoint: Path, mode: Mode, dtype: str, device: str) -> Any:
    """The model of a checkpoint as `mode` computes it."""
    register()
    words = {"dtype": getattr(torch, mode.dtype or dtype), "attn_implementation": mode.attention}
    model = AutoModelForCausalLM.from_pretrained(checkpoint, **words).to(device).eval()
    if model.config.vocab_size != BYTES:
        raise ValueError(f"checkpoint has {model.config.vocab_size} tokens; allowed: a model of {BYTES}, the bytes")
    if mode.int8_linear:
        quantize_linears(model)
    return model


def cache_of(model: Any, mode: Mode, sequences: int, length: int) -> PagedCache | None:
    """Pages for that many tokens, if the mode uses any."""
    if not mode.int8_pages:
        return None
    return PagedCache(model.config, pages=sequences * -(-length // PAGE_SIZE), page_size=PAGE_SIZE, precision="int8")


@torch.inference_mode()
def predictions(model: Any, mode: Mode, windows: Tensor, batch: int) -> Predictions:
    """Predictions for every token of the windows but the first, given the tokens before it."""
    nats, choices = 0.0, []
    for part in windows.split(batch):
        logits = _logits(model, mode, part[:, :-1]).float()
        logs = logits.log_softmax(-1).gather(-1, part[:, 1:, None])
        nats -= logs.double().sum().item()
        choices.append(logits.argmax(-1).cpu())
    return Predictions(nats / windows[:, 1:].numel(), torch.cat(choices))


def _logits(model: Any, mode: Mode, ids: Tensor) -> Tensor:
    cache = cache_of(model, mode, *ids.shape)
    if cache is None:
        return model(ids, use_cache=False).logits
    return torch.cat([model(chunk, past_key_values=cache).logits for chunk in ids.split(CHUNK, 1)], 1)


@torch.inference_mode()
def greedy_text(model: Any, mode: Mode, prompts: Tensor, count: int) -> Tensor:
    """`count` new tokens after each prompt, on the CPU."""
    cache = cache_of(model, mode, len(prompts), prompts.shape[1] + count)
    words = {} if cache is None else {"past_key_values": cache}
    mask = torch.ones_like(prompts)  # nothing is padding; without a mask transformers looks for a padding token
    found = model.generate(prompts, attention_mask=mask, max_new_tokens=count, do_sample=False, **words)
    return found[:, prompts.shape[1] :].cpu()


# Layers ---------------------------------------------------------------------------------------------------------------

Inputs = list[
    tuple[Tensor, Any, Tensor]
]  # of each layer: hidden states and rope of attention; hidden states of the MLP


@torch.inference_mode()
def layer_inputs(model: Any, ids: Tensor) -> Inputs:
    """The inputs of attention and the MLP of every layer in a pass over ids."""
    found = []
    hooks = []
    for layer in model.model.layers:
        kept: list[Any] = []
        found.append(kept)
        hooks.append(layer.self_attn.register_forward_pre_hook(_keeper_of_attention(kept), with_kwargs=True))
        hooks.append(layer.mlp.register_forward_pre_hook(lambda _, words, kept=kept: kept.append(words[0])))
    try:
        model(ids, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return [(hidden, rope, mlp) for hidden, rope, mlp in found]


def _keeper_of_attention(kept: list[Any]) -> Any:
    def keep(_: Any, arguments: tuple[Any, ...], words: dict[str, Any]) -> None:
        hidden = words["hidden_states"] if "hidden_states" in words else arguments[0]
        kept.extend((hidden, words["position_embeddings"]))

    return keep


@torch.inference_mode()
def layer_outputs(model: Any, mode: Mode, inputs: Inputs) -> tuple[list[Tensor], list[Tensor]]:
    """Outputs of attention (before its last linear layer) and MLP of every layer, on the same inputs in every mode."""
    dtype, attention, mlps = model.dtype, [], []
    cache = cache_of(model, mode, *inputs[0][0].shape[:2])
    for layer, (hidden, rope, mlp) in zip(model.model.layers, inputs, strict=True):
        with _input_of(layer.self_attn.o_proj) as seen:
            layer.self_attn(
                hidden_states=hidden.to(dtype),
                position_embeddings=tuple(x.to(dtype) for x in rope),
                attention_mask=None,
                past_key_values=cache,
            )
        attention.append(seen[0].float())
        mlps.append(layer.mlp(mlp.to(dtype)).float())
    return attention, mlps


@contextmanager
def _input_of(module: torch.nn.Module) -> Iterator[list[Tensor]]:
    seen: list[Tensor] = []
    hook = module.register_forward_pre_hook(lambda _, words: seen.append(words[0]))
    try:
        yield seen
    finally:
        hook.remove()


def cosine(got: Tensor, want: Tensor) -> float:
    got, want = got.double().flatten(), want.double().flatten()
    return float(got @ want / (got.norm() * want.norm()))
