"""Llama-like models over bytes built with transformers: their sizes, and a learner that trains one."""

import math
from pathlib import Path

import torch
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

from llama.shape import BYTES
from qflash.integrations.transformers import fuse_layers, register

# Name in curves -> transformers' name of the attention. With FUSED the other layers are qflash's, too.
ATTENTION = {"qflash": "qf", "qflash-fused": "qf", "sdpa": "sdpa"}
FUSED = ("qflash-fused",)
SIZES = {
    "small": {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 6, "num_attention_heads": 4},
    "base": {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 6},
}


def config_of(size: str, length: int, attention: str) -> LlamaConfig:
    """A model of SIZES: two key heads, and no token that ends a text."""
    register()
    return LlamaConfig(
        vocab_size=BYTES,
        num_key_value_heads=2,
        max_position_embeddings=length,
        bos_token_id=None,
        eos_token_id=None,
        attn_implementation=ATTENTION[attention],
        **SIZES[size],
    )


class Learner:
    """A model and AdamW. Weights are float32; on a GPU products are in bfloat16, with weights rounded in each step."""

    def __init__(
        self, config: LlamaConfig, device: str, rate: float, steps: int, seed: int, is_fused: bool = False
    ) -> None:
        torch.manual_seed(seed)
        self.model = LlamaForCausalLM(config).to(device)
        if is_fused:
            fuse_layers(self.model)
        self.dtype = torch.bfloat16 if device == "cuda" else torch.float32
        self.weights = [x.detach().clone() for x in self.model.parameters()]
        for x in self.model.parameters():  # not model.to, which would also round the frequencies of rope
            x.data = x.data.to(self.dtype)
        self.optimizer = torch.optim.AdamW(self.weights, lr=rate, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: slowing(step, steps))

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        """The loss on tokens [B, T + 1], before this step's update. Does not wait for the device."""
        self.model.train()
        loss = self.loss(tokens)
        loss.backward()
        for weight, x in zip(self.weights, self.model.parameters(), strict=True):
            weight.grad, x.grad = x.grad.float(), None
        torch.nn.utils.clip_grad_norm_(self.weights, 1.0)
        self.optimizer.step()
        self.schedule.step()
        with torch.no_grad():
            torch._foreach_copy_(list(self.model.parameters()), self.weights)
        return loss.detach()

    def loss(self, tokens: torch.Tensor) -> torch.Tensor:
        """Nats per byte."""
        logits = self.model(tokens[:, :-1], use_cache=False).logits
        return functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())

    @torch.no_grad()
    def held_out_loss(self, windows: torch.Tensor, batch: int) -> float:
        """The mean over windows [N, T + 1], `batch` at a time."""
        self.model.eval()
        parts = windows.split(batch)
        return sum(self.loss(part).item() * len(part) for part in parts) / len(windows)

    def save(self, folder: Path) -> None:
        """A checkpoint for from_pretrained, in 16 bits: the dtype that a GPU has computed in, else float16."""
        dtype = torch.float16 if self.dtype == torch.float32 else self.dtype
        names = (name for name, _ in self.model.named_parameters())
        half = {name: x.to("cpu", dtype) for name, x in zip(names, self.weights, strict=True)}
        self.model.save_pretrained(folder, state_dict=half)


def slowing(step: int, steps: int) -> float:
    """The factor of the learning rate at a step: up for a twentieth of all, then down along a cosine to a tenth."""
    warm = max(1, steps // 20)
    if step < warm:
        return (step + 1) / warm
    return 0.1 + 0.45 * (1 + math.cos(math.pi * (step - warm) / max(1, steps - warm)))
