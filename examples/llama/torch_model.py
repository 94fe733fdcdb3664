"""The model in PyTorch, with qflash's attention and loss, or with PyTorch's own."""

from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch.nn import functional

import qflash
from llama.shape import Shape

Tensor = torch.Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return functional.rms_norm(x, x.shape[-1:], weight, eps)


def qflash_attention(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return qflash.attention(q, k, v, causal=True, rope=qflash.Rope(cos, sin))


def own_attention(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (rotated(q, cos, sin), rotated(k, cos, sin), v))
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of [B, T, H, D]: pairs are channels d and d + D / 2."""
    a, b = x.float().chunk(2, -1)
    c, s = cos[: x.shape[1], None], sin[: x.shape[1], None]
    return torch.cat([a * c - b * s, a * s + b * c], -1).to(x.dtype)


def own_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten().long())


KINDS: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {
    "qflash": (qflash_attention, qflash.cross_entropy),
    "sdpa": (own_attention, own_loss),
}


def forward(
    w: dict[str, Tensor], tokens: Tensor, shape: Shape, attend: Callable[[Tensor, Tensor, Tensor], Tensor]
) -> Tensor:
    """Logits [B, T, 256]."""
    x = w["embedding"][tokens]
    for layer in range(shape.layers):
        h = rms_norm(x, w[f"{layer}.attention_norm"], shape.eps)
        q, k, v = ((h @ w[f"{layer}.{name}"]).unflatten(-1, (-1, shape.head_dim)) for name in "qkv")
        x = x + attend(q, k, v).flatten(2) @ w[f"{layer}.o"]
        h = rms_norm(x, w[f"{layer}.mlp_norm"], shape.eps)
        x = x + (functional.silu(h @ w[f"{layer}.gate"]) * (h @ w[f"{layer}.up"])) @ w[f"{layer}.down"]
    return rms_norm(x, w["norm"], shape.eps) @ w["head"]


def train(
    weights: dict[str, np.ndarray],
    shape: Shape,
    attention: str,
    device: str,
    rate: float,
    given: Iterator[np.ndarray],
) -> Iterator[float]:
    """The loss of every step. Weights are float32; on a GPU matrix products are in bfloat16."""
    attend, loss_of = KINDS[attention]
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    params = {name: torch.tensor(x, device=device, requires_grad=True) for name, x in weights.items()}
    tables = [torch.from_numpy(x).to(device) for x in qflash.rope_tables(shape.length, shape.head_dim)]
    optimizer = torch.optim.Adam(params.values(), lr=rate, betas=(0.9, 0.95))
    for tokens in given:
        there = torch.from_numpy(tokens).to(device)
        compute = {name: x.to(dtype) for name, x in params.items()}
        logits = forward(compute, there[:, :-1], shape, lambda q, k, v: attend(q, k, v, *tables))
        loss = loss_of(logits, there[:, 1:].contiguous())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss.item()
