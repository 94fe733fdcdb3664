"""Tests that need four devices. test_jax_sharding.py runs them in a process where XLA splits the CPU in four."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import qflash
from qflash.testing.compare import FLOAT32_L2, GRADIENT_L2
from qflash.testing.jax_arrays import arrays, assert_close, collectives, put

SPLIT = P("b", None, "h")


@pytest.fixture(params=[(2, 2), (4, 1), (1, 4)], ids=str)
def mesh(request):
    return jax.make_mesh(request.param, ("b", "h"), axis_types=(AxisType.Auto,) * 2)


def loss(*operands, **words):
    return (qflash.attention(*operands, **words) ** 2).sum()


@pytest.mark.parametrize("check_vma", [True, False])
def test_shard_map(mesh, check_vma):
    q, k, v = arrays(batch=4, q_heads=8, kv_heads=4)
    lens = jnp.array([3, 13, 0, 5], jnp.int32)

    def local(q, k, v, lens):
        return qflash.attention(q, k, v, kv_lens=lens, return_lse=True)

    specs = (SPLIT, SPLIT, SPLIT, P("b"))
    split = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=(SPLIT, P("b", "h")), check_vma=check_vma)
    assert collectives(split, q, k, v, lens) == []
    for got, want in zip(jax.jit(split)(q, k, v, lens), local(q, k, v, lens), strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("compiled", [True, False], ids=["jit", "eager"])
def test_gradient_through_shard_map(mesh, check_vma, compiled):
    q, k, v = arrays(batch=4, kv_heads=4)
    split = jax.shard_map(qflash.attention, mesh=mesh, in_specs=(SPLIT,) * 3, out_specs=SPLIT, check_vma=check_vma)
    gradient = jax.grad(lambda *x: (split(*x) ** 2).sum(), (0, 1, 2))
    got = (jax.jit(gradient) if compiled else gradient)(q, k, v)
    assert_close(got, jax.grad(loss, (0, 1, 2))(q, k, v), GRADIENT_L2["float32"])


def test_gradient_of_keys_that_all_devices_share(mesh):
    """q varies over the mesh, k and v do not: their gradients are sums over the devices."""
    q, k, v = arrays(batch=4, kv_heads=1)

    def local(q, k, v):
        return qflash.attention(q, jnp.tile(k, (q.shape[0], 1, 1, 1)), jnp.tile(v, (q.shape[0], 1, 1, 1)))

    split = jax.shard_map(local, mesh=mesh, in_specs=(P("b"), P(), P()), out_specs=P("b"))
    got = jax.jit(jax.grad(lambda *x: (split(*x) ** 2).sum(), (1, 2)))(q, k[:1], v[:1])
    want = jax.grad(lambda *x: (local(*x) ** 2).sum(), (1, 2))(q, k[:1], v[:1])
    assert_close(got, want, GRADIENT_L2["float32"])


def test_jit_splits_the_queries_of_one_key_head(mesh):
    q, k, v = arrays(batch=4, q_heads=8, kv_heads=1)
    split = (*put(mesh, SPLIT, q), *put(mesh, P("b"), k, v))
    assert collectives(qflash.attention, *split) == []
    np.testing.assert_array_equal(jax.jit(qflash.attention)(*split), qflash.attention(q, k, v))
    gradient = jax.grad(loss, (0, 1, 2))
    assert_close(jax.jit(gradient)(*split), gradient(q, k, v), GRADIENT_L2["float32"])


@pytest.mark.parametrize("kv_heads", [8, 4])
def test_jit_keeps_batch_and_heads_split(mesh, kv_heads):
    q, k, v = arrays(batch=4, q_heads=8, kv_heads=kv_heads, q_len=13)
    lens = jnp.array([3, 13, 1, 5], jnp.int32)
    rope = qflash.Rope(
        *(jnp.asarray(x) for x in qflash.rope_tables(20, 8)),
        positions_q=jnp.arange(13, dtype=jnp.int32),
        positions_k=jnp.tile(jnp.arange(13, dtype=jnp.int32), (4, 1)),
    )

    def call(q, k, v, lens, rope):
        return qflash.attention(q, k, v, kv_lens=lens, rope=rope, causal=True, return_lse=True)

    want = call(q, k, v, lens, rope)
    operands = (*put(mesh, SPLIT, q, k, v), *put(mesh, P("b"), lens), rope)
    assert collectives(call, *operands) == []
    got = jax.jit(call)(*operands)
    assert got[0].sharding.is_equivalent_to(NamedSharding(mesh, SPLIT), 4)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(a, b)


def test_gradient_of_jit_keeps_the_split(mesh):
    operands = arrays(batch=4, q_heads=8, kv_heads=4)
    gradient = jax.grad(lambda *x: loss(*x, causal=True), (0, 1, 2))
    split = put(mesh, SPLIT, *operands)
    assert "all-gather" not in collectives(gradient, *split)
    got = jax.jit(gradient)(*split)
    assert got[1].sharding.is_equivalent_to(NamedSharding(mesh, SPLIT), 4)
    assert_close(got, gradient(*operands), GRADIENT_L2["float32"])


@pytest.mark.parametrize(
    ("shape", "spec"),
    [
        ({"q_heads": 8, "kv_heads": 1}, P("b")),
        ({"q_heads": 8, "kv_heads": 4}, P("b", "h")),  # the lengths are split
        ({"q_heads": 4, "kv_heads": 4}, P(None, None, None, "h")),  # head_dim is split
        ({"q_heads": 4, "kv_heads": 4}, P(None, "b", ("h",), None)),
    ],
    ids=str,
)
def test_jit_gathers_what_it_must(mesh, shape, spec):
    operands = arrays(batch=4, q_len=16, k_len=12, **shape)
    got = jax.jit(qflash.attention)(*put(mesh, spec, *operands))
    np.testing.assert_array_equal(got, qflash.attention(*operands))


def test_few_key_heads_on_many_devices(mesh):
    """Query heads split further than there are key heads."""
    q, k, v = arrays(batch=4, q_heads=8, kv_heads=2)
    split = (*put(mesh, P(None, None, ("b", "h")), q), *put(mesh, P(), k, v))
    np.testing.assert_array_equal(jax.jit(qflash.attention)(*split), qflash.attention(q, k, v))


def test_packed_split_by_heads(mesh):
    q, k, v = (x[0] for x in arrays(q_heads=8, kv_heads=4))
    cu_q, cu_k = jnp.array([0, 4, 4, 9], jnp.int32), jnp.array([0, 6, 10, 13], jnp.int32)

    def call(q, k, v):
        return qflash.attention_varlen(q, k, v, cu_q, cu_k, 9, 13, causal=True)

    split = put(mesh, P(None, "h"), q, k, v)
    assert collectives(call, *split) == []
    np.testing.assert_array_equal(jax.jit(call)(*split), call(q, k, v))


def test_vmap_on_split_arrays(mesh):
    operands = tuple(jnp.stack([x, 2 * x]) for x in arrays(batch=4, q_heads=8, kv_heads=4))
    split = put(mesh, P(None, "b", None, "h"), *operands)
    np.testing.assert_array_equal(jax.jit(jax.vmap(qflash.attention))(*split), jax.vmap(qflash.attention)(*operands))


def test_eager_call_on_split_arrays(mesh):
    operands = arrays(batch=4, q_heads=8, kv_heads=4)
    np.testing.assert_array_equal(qflash.attention(*put(mesh, SPLIT, *operands)), qflash.attention(*operands))


def test_explicit_sharding():
    mesh = jax.make_mesh((2, 2), ("b", "h"), axis_types=(AxisType.Explicit,) * 2)
    operands = arrays(batch=4, q_heads=8, kv_heads=4)
    want = qflash.attention(*operands, return_lse=True)
    with jax.set_mesh(mesh):
        got = jax.jit(lambda *x: qflash.attention(*x, return_lse=True))(*put(mesh, SPLIT, *operands))
    assert got[0].sharding.spec == P("b", None, "h", None) and got[1].sharding.spec == P("b", "h", None)
    assert_close(got, want, FLOAT32_L2)


def test_shard_map_over_one_axis_of_two():
    """The other axis stays with the compiler."""
    mesh = jax.make_mesh((2, 2), ("b", "h"), axis_types=(AxisType.Auto,) * 2)
    operands = arrays(batch=4, q_heads=8, kv_heads=4)
    split = jax.shard_map(qflash.attention, mesh=mesh, in_specs=(P("b"),) * 3, out_specs=P("b"), axis_names={"b"})
    got = jax.jit(split)(*put(mesh, SPLIT, *operands))
    np.testing.assert_array_equal(got, qflash.attention(*operands))


def test_arrays_on_different_devices_are_named():
    zero, one = jax.devices()[:2]
    q, k, v = (jax.device_put(x, zero) for x in arrays())
    with pytest.raises(ValueError, match="k is on cpu:1; allowed: q's device, cpu:0"):
        qflash.attention(q, jax.device_put(k, one), v)
    lens = jax.device_put(jnp.array([3, 4], jnp.int32), one)
    with pytest.raises(ValueError, match="kv_lens is on cpu:1; allowed: q's device, cpu:0"):
        qflash.attention(q, k, v, kv_lens=lens)
    uncommitted = arrays()[1:]
    np.testing.assert_array_equal(qflash.attention(q, *uncommitted), qflash.attention(q, k, v))


def test_jit_splits_sinks_with_the_heads(mesh):
    q, k, v = arrays(batch=4, q_heads=8, kv_heads=4)
    sinks = jnp.linspace(-1.0, 2.0, 8)
    split = (*put(mesh, SPLIT, q, k, v), *put(mesh, P("h"), sinks))

    def call(q, k, v, sinks):
        return qflash.attention(q, k, v, sinks=sinks)

    assert collectives(call, *split) == []
    np.testing.assert_array_equal(jax.jit(call)(*split), call(q, k, v, sinks))

    def loss(*xs):
        return (call(*xs) ** 2).sum()

    got = jax.jit(jax.grad(loss, (0, 1, 2, 3)))(*split)  # that of sinks sums over sequences of every device
    for one, want in zip(got, jax.grad(loss, (0, 1, 2, 3))(q, k, v, sinks), strict=True):
        np.testing.assert_allclose(one, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("positions", [None, "all", "each"])
def test_jit_keeps_what_rope_rotates_split(mesh, positions):
    """By batch and heads, there and back, with no communication."""
    (x,) = arrays(batch=4, q_heads=8, kv_heads=8)[:1]
    rope = qflash.Rope(*(jnp.asarray(table) for table in qflash.rope_tables(20, 8)))
    at = {"all": jnp.arange(9, dtype=jnp.int32)[::-1], "each": jnp.arange(36, dtype=jnp.int32).reshape(4, 9) % 20 - 9}
    more = () if positions is None else (at[positions],)

    def call(x, *positions):
        return qflash.rope(x, rope, positions=positions[0] if positions else None)

    def gradient(x, *positions):
        return jax.grad(lambda x: (call(x, *positions) ** 3).sum())(x)

    split = put(mesh, SPLIT, x)
    for function in (call, gradient):
        assert collectives(function, *split, *more) == []
        got = jax.jit(function)(*split, *more)
        assert got.sharding.is_equivalent_to(NamedSharding(mesh, SPLIT), 4)
        np.testing.assert_array_equal(got, function(x, *more))


@pytest.mark.parametrize("spec", [P("b", "h"), P(None, None, None, "h"), P(None, "b", ("h",), None)], ids=str)
def test_jit_gathers_what_rope_must_have_whole(mesh, spec):
    """Lengths, because a token's place in its array may be its position, and channels, because they come in pairs."""
    (x,) = arrays(batch=4, q_heads=4, q_len=16)[:1]
    rope = qflash.Rope(*(jnp.asarray(table) for table in qflash.rope_tables(16, 16)))
    np.testing.assert_array_equal(jax.jit(qflash.rope)(*put(mesh, spec, x), rope), qflash.rope(x, rope))


def test_rope_of_packed_tokens_split_by_heads(mesh):
    x = arrays(q_heads=8)[0][0]
    rope = qflash.Rope(*(jnp.asarray(table) for table in qflash.rope_tables(9, 16)))
    split = put(mesh, P(None, "h"), x)
    assert collectives(lambda x: qflash.rope(x, rope), *split) == []
    np.testing.assert_array_equal(jax.jit(qflash.rope)(*split, rope), qflash.rope(x, rope))
