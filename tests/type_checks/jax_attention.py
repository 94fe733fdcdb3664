"""attention on JAX arrays, as a user writes it. mypy checks the types; `uses` runs too."""

from typing import assert_type

import jax
import jax.numpy as jnp
from jax import Array

import qflash


def uses(q: Array, kv_lens: Array) -> None:
    assert_type(qflash.attention(q, q, q), Array)
    assert_type(qflash.attention(q, q, q, causal=True, kv_lens=kv_lens), Array)
    assert_type(qflash.attention(q, q, q, return_lse=True), tuple[Array, Array])
    cos, sin = (jnp.asarray(table) for table in qflash.rope_tables(16, 8))
    assert_type(qflash.Rope(cos, sin), qflash.Rope[Array])
    x = qflash.quantize(q)
    assert_type(qflash.attention(x, x, q), Array)


def loss(q: Array) -> Array:
    """A function of the user's own, strictly typed."""
    return qflash.attention(q, q, q).sum()


def uses_packed(q: Array, cu: Array) -> None:
    assert_type(qflash.attention_varlen(q, q, q, cu, cu, 3, 3), Array)
    assert_type(qflash.attention_varlen(q, q, q, cu, cu, 3, 3, return_lse=True), tuple[Array, Array])


def uses_on_hopper(q: Array, kv: qflash.QuantizedKV[Array]) -> None:
    assert_type(qflash.attention(q, kv), Array)


def refused(q: Array) -> None:
    qflash.attention(q)  # type: ignore[call-overload]
    qflash.attention(q, q, q, causal="yes")  # type: ignore[call-overload]


def run() -> None:
    q = jnp.ones((2, 4, 2, 8))
    uses(q, jnp.array([4, 3], jnp.int32))
    uses_packed(jnp.ones((5, 2, 8)), jnp.array([0, 3, 5], jnp.int32))
    jax.grad(loss)(q)
