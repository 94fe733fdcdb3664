"""The model in JAX, with qflash's attention and loss, or with JAX's own. A step, gradients included, is one jit."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import qflash
from llama.shape import Shape

Weights = dict[str, Any]


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    y = x.astype(jnp.float32)
    return (y * jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + eps)).astype(x.dtype) * weight


def qflash_attention(q: jax.Array, k: jax.Array, v: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    return qflash.attention(q, k, v, causal=True, rope=qflash.Rope(cos, sin))


def own_attention(q: jax.Array, k: jax.Array, v: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    return jax.nn.dot_product_attention(rotated(q, cos, sin), rotated(k, cos, sin), v, is_causal=True)


def rotated(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotary embedding of [B, T, H, D]: pairs are channels d and d + D / 2."""
    a, b = jnp.split(x.astype(jnp.float32), 2, -1)
    c, s = cos[: x.shape[1], None], sin[: x.shape[1], None]
    return jnp.concatenate([a * c - b * s, a * s + b * c], -1).astype(x.dtype)


def own_loss(logits: jax.Array, targets: jax.Array) -> jax.Array:
    logs = jax.nn.log_softmax(logits.astype(jnp.float32))
    return -jnp.take_along_axis(logs, targets[..., None], -1).mean()


KINDS: dict[str, tuple[Callable[..., jax.Array], Callable[..., jax.Array]]] = {
    "qflash": (qflash_attention, qflash.cross_entropy),
    "sdpa": (own_attention, own_loss),
}


def forward(w: Weights, tokens: jax.Array, shape: Shape, attend: Callable[..., jax.Array]) -> jax.Array:
    """Logits [B, T, 256]."""
    x = w["embedding"][tokens]
    for layer in range(shape.layers):
        h = rms_norm(x, w[f"{layer}.attention_norm"], shape.eps)
        q, k, v = ((h @ w[f"{layer}.{name}"]).reshape(*h.shape[:2], -1, shape.head_dim) for name in "qkv")
        x = x + attend(q, k, v).reshape(x.shape) @ w[f"{layer}.o"]
        h = rms_norm(x, w[f"{layer}.mlp_norm"], shape.eps)
        x = x + (jax.nn.silu(h @ w[f"{layer}.gate"]) * (h @ w[f"{layer}.up"])) @ w[f"{layer}.down"]
    return rms_norm(x, w["norm"], shape.eps) @ w["head"]


def adam(weights: Weights, gradients: Weights, first: Weights, second: Weights, step: jax.Array, rate: float):
    """Adam as in torch.optim: (weights, first moments, second moments)."""
    slow, slower = 0.9, 0.95
    first = jax.tree.map(lambda m, g: slow * m + (1 - slow) * g, first, gradients)
    second = jax.tree.map(lambda m, g: slower * m + (1 - slower) * g * g, second, gradients)

    def moved(w: jax.Array, m: jax.Array, n: jax.Array) -> jax.Array:
        return w - rate * (m / (1 - slow**step)) / (jnp.sqrt(n / (1 - slower**step)) + 1e-8)

    return jax.tree.map(moved, weights, first, second), first, second


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
    dtype = jnp.bfloat16 if device == "cuda" else jnp.float32
    place = jax.devices(device)[0]
    tables = jax.device_put(qflash.rope_tables(shape.length, shape.head_dim), place)

    def loss(params: Weights, tokens: jax.Array) -> jax.Array:
        compute = jax.tree.map(lambda x: x.astype(dtype), params)
        logits = forward(compute, tokens[:, :-1], shape, lambda q, k, v: attend(q, k, v, *tables))
        return loss_of(logits, tokens[:, 1:])

    @partial(jax.jit, donate_argnums=(0, 1, 2))
    def step(params: Weights, first: Weights, second: Weights, count: jax.Array, tokens: jax.Array):
        value, gradients = jax.value_and_grad(loss)(params, tokens)
        return value, *adam(params, gradients, first, second, count, rate)

    params = jax.device_put(weights, place)
    first, second = (jax.tree.map(jnp.zeros_like, params) for _ in range(2))
    for count, tokens in enumerate(given, start=1):
        value, params, first, second = step(params, first, second, jnp.float32(count), jax.device_put(tokens, place))
        yield float(value)
