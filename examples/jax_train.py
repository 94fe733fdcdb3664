"""Train one attention layer under jax.jit: the gradient goes through qflash's own backward pass.

The task is recall: every position must return the value `SHIFT` positions before it, so attention has to learn to look
back by position, which rotary embedding makes easy.

python examples/jax_train.py
"""

import jax
import jax.numpy as jnp

import qflash

BATCH, LENGTH, HEADS, HEAD_DIM, SHIFT, STEPS = 4, 64, 2, 32, 3, 80


def loss(params, values, rope):
    q, k = (jnp.broadcast_to(params[name], (BATCH, LENGTH, HEADS, HEAD_DIM)) for name in ("q", "k"))
    out = qflash.attention(q, k, values, causal=True, rope=rope)
    return jnp.mean((out[:, SHIFT:] - values[:, :-SHIFT]) ** 2)


@jax.jit
def step(params, values, rope):
    value, grads = jax.value_and_grad(loss)(params, values, rope)
    return value, jax.tree.map(lambda p, g: p - 30.0 * g, params, grads)


def main() -> None:
    rope = qflash.Rope(*map(jnp.asarray, qflash.rope_tables(LENGTH, HEAD_DIM, base=100.0)))
    keys = jax.random.split(jax.random.key(0), STEPS + 2)
    params = {name: jax.random.normal(key, (HEADS, HEAD_DIM)) for name, key in zip("qk", keys, strict=False)}
    for index, key in enumerate(keys[2:]):
        values = jax.random.normal(key, (BATCH, LENGTH, HEADS, HEAD_DIM))
        value, params = step(params, values, rope)
        if index == 0:
            first = float(value)
    print(f"mean squared error: {first:.3f} at the start, {float(value):.3f} after {STEPS} steps")
    assert float(value) < 0.5 * first


if __name__ == "__main__":
    with jax.default_device(jax.devices("cpu")[0]):  # where the backward pass runs
        main()
