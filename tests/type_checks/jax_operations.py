"""The operations on JAX arrays, as a user writes them. mypy checks the types; `uses` runs too."""

from typing import assert_type

import jax.numpy as jnp
from jax import Array

import qflash


def uses(x: Array, weight: Array, targets: Array, q: Array, a: Array) -> None:
    assert_type(qflash.softmax(x), Array)
    assert_type(qflash.layer_norm(x, weight), Array)
    assert_type(qflash.layer_norm(x, return_stats=True), tuple[Array, Array, Array])
    assert_type(qflash.cross_entropy(x, targets), Array)
    assert_type(qflash.cross_entropy(x, targets, return_lse=True), tuple[Array, Array])
    assert_type(qflash.int8_matmul(a, a, 0.5, out_dtype=jnp.bfloat16), Array)
    cos, sin = map(jnp.asarray, qflash.rope_tables(4, 8))
    rope = qflash.Rope(cos, sin)
    assert_type(qflash.rope(q, rope, positions=jnp.arange(4)), Array)
    layer = qflash.quantize_linear(x.T)
    assert_type(layer, qflash.QuantizedLinear[Array])
    assert_type(qflash.linear(x, layer, out_dtype=jnp.bfloat16), Array)
    assert_type(qflash.swiglu(x, x.T, x.T), Array)
    quantized = qflash.quantize(q)
    assert_type(quantized, qflash.Quantized[Array])
    assert_type(qflash.dequantize(quantized, jnp.float32), Array)


def uses_on_hopper(k: Array) -> None:
    assert_type(qflash.quantize_kv(k, k), qflash.QuantizedKV[Array])


def refused(x: Array) -> None:
    qflash.softmax(x, 2.0)  # type: ignore[call-arg]
    qflash.quantize(x, rounding="up")  # type: ignore[call-overload]


def run() -> None:
    x, q = jnp.ones((4, 8)), jnp.ones((1, 4, 2, 8))
    uses(x, x[0], jnp.zeros(4, jnp.int32), q, jnp.ones((4, 4), jnp.int8))
