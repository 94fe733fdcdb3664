"""JAX front end under transformations: vmap, grad and their mixtures, remat, scan. jax.nn is the yardstick."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

import qflash
from qflash.testing.compare import FLOAT32_L2, GRADIENT_L2
from qflash.testing.jax_arrays import arrays, assert_close

jax = pytest.importorskip("jax")
jnp = jax.numpy
BOUND = GRADIENT_L2["float32"]


@pytest.fixture(autouse=True)
def on_cpu():
    with jax.default_device(jax.devices("cpu")[0]):
        yield


def theirs(q, k, v, **words):
    return jax.nn.dot_product_attention(q, k, v, **words)


def stack(axes, count=3, **shape):
    """q, k, v with a new axis of `count` at each given place (None: no new axis)."""
    many = [arrays(seed=seed, **shape) for seed in range(count)]
    one = arrays(seed=99, **shape)
    return tuple(one[i] if axis is None else jnp.stack([x[i] for x in many], axis) for i, axis in enumerate(axes))


def loss(attention):
    return lambda *x: (attention(*x).astype(jnp.float32) ** 2).sum()


AXES = [(0, 0, 0), (0, None, None), (None, 0, 0), (1, 2, 0), (None, None, 3), (4, 0, None)]


@pytest.mark.parametrize("axes", AXES, ids=str)
def test_vmap(axes):
    operands = stack(axes)
    assert_close(jax.vmap(qflash.attention, axes)(*operands), jax.vmap(theirs, axes)(*operands), FLOAT32_L2)


@pytest.mark.parametrize("axes", AXES, ids=str)
def test_vmap_of_grad_and_grad_of_vmap(axes):
    operands = stack(axes)
    of_ours, of_theirs = (
        (jax.vmap(jax.grad(loss(f), (0, 1, 2)), axes), jax.grad(loss(jax.vmap(f, axes)), (0, 1, 2)))
        for f in (qflash.attention, theirs)
    )
    wants = jax.jit(lambda *x: [gradient(*x) for gradient in of_theirs])(*operands)
    for gradient, want in zip(of_ours, wants, strict=True):
        assert_close(gradient(*operands), want, BOUND)


def test_vmap_of_queries_alone_copies_no_keys():
    operands = stack((0, None, None), q_heads=6, kv_heads=2)
    text = jax.jit(jax.vmap(qflash.attention, (0, None, None))).lower(*operands).as_text()
    assert "tensor<2x13x2x16xf32>) -> (tensor<2x9x18x16xf32>" in text  # 3 x 6 query heads on the same 2 key heads


def test_nested_vmap():
    q, k, v = stack((0, None, None))
    kk, vv = jnp.stack([k, 2 * k]), jnp.stack([v, v + 1])

    def nest(f):
        return jax.vmap(jax.vmap(f, (0, None, None)), (None, 0, 0))(q, kk, vv)

    assert_close(nest(qflash.attention), nest(theirs), FLOAT32_L2)


def test_vmap_of_lengths_and_positions():
    q, k, v = stack((0, None, None))
    kv_lens = jnp.array([[1, 13], [0, 5], [7, 7]], jnp.int32)
    cos, sin = (jnp.asarray(x) for x in qflash.rope_tables(40, 8))
    at_q, at_k = jnp.arange(27, dtype=jnp.int32).reshape(3, 9), jnp.arange(26, dtype=jnp.int32).reshape(2, 13)

    def one(q, kv_lens, at_q):
        rope = qflash.Rope(cos, sin, True, at_q, at_k)
        return qflash.attention(q, k, v, kv_lens=kv_lens, rope=rope, return_lse=True)

    got = jax.vmap(one)(q, kv_lens, at_q)
    for i in range(3):
        for a, b in zip(got, one(q[i], kv_lens[i], at_q[i]), strict=True):
            np.testing.assert_array_equal(a[i], b)


def test_vmap_of_tables():
    q, k, v = stack((0, None, None))
    cos, sin = (jnp.stack([table[i : i + 13] for i in range(3)]) for table in qflash.rope_tables(40, 8))
    ropes = qflash.Rope(cos, sin)
    got = jax.vmap(lambda q, rope: qflash.attention(q, k, v, rope=rope))(q, ropes)
    for i in range(3):
        np.testing.assert_array_equal(got[i], qflash.attention(q[i], k, v, rope=qflash.Rope(cos[i], sin[i])))


def test_vmap_of_packed():
    q, k, v = (x[:, 0] for x in stack((0, 0, 0)))
    cu = jnp.array([[0, 4, 9], [0, 0, 9], [0, 9, 9]], jnp.int32), jnp.array([0, 6, 13], jnp.int32)

    def one(q, k, v, cu_q):
        return qflash.attention_varlen(q, k, v, cu_q, cu[1], 9, 13, causal=True)

    got = jax.vmap(one)(q, k, v, cu[0])
    gradient = jax.vmap(jax.grad(loss(one)))(q, k, v, cu[0])
    for i in range(3):
        np.testing.assert_array_equal(got[i], one(q[i], k[i], v[i], cu[0][i]))
        np.testing.assert_array_equal(gradient[i], jax.grad(loss(one))(q[i], k[i], v[i], cu[0][i]))


EMPTY = [(0, 0, 0), (0, None, None), (None, 0, None), (None, None, 0), (None, 0, 0)]
CU = jnp.array([0, 4, 9], jnp.int32), jnp.array([0, 6, 13], jnp.int32)


def with_lengths(q, k, v):
    return qflash.attention(q, k, v, kv_lens=jnp.array([4, 13], jnp.int32), return_lse=True)


def in_packs(q, k, v):
    return qflash.attention_varlen(q, k, v, *CU, 5, 7, return_lse=True)


def all_sums(f):
    return lambda *operands: sum(x.sum() for x in f(*operands))


@pytest.mark.parametrize("axes", EMPTY, ids=str)
@pytest.mark.parametrize(
    ("call", "dtype"),
    [
        (with_lengths, "float32"),
        (in_packs, "bfloat16"),
        pytest.param(with_lengths, "bfloat16", marks=pytest.mark.slow),
        pytest.param(in_packs, "float32", marks=pytest.mark.slow),
    ],
)
def test_vmap_over_nothing(axes, call, dtype):
    """Empty results and gradients; what all samples share has gradient 0."""
    one = arrays(dtype=dtype)
    one = tuple(x[0] for x in one) if call is in_packs else one
    operands = tuple(x if axis is None else jnp.zeros((0, *x.shape), dtype) for x, axis in zip(one, axes, strict=True))
    for wrap in (lambda f: f, jax.jit):
        got = wrap(jax.vmap(call, axes))(*operands)
        each = wrap(jax.vmap(jax.grad(all_sums(call), (0, 1, 2)), axes))(*operands)
        for xs, alike in ((got, call(*one)), (each, one)):
            assert [(x.shape, x.dtype) for x in xs] == [((0, *x.shape), x.dtype) for x in alike]
        whole = wrap(jax.grad(all_sums(jax.vmap(call, axes)), (0, 1, 2)))(*operands)
        for x, operand in zip(whole, operands, strict=True):
            assert (x.shape, x.dtype) == (operand.shape, operand.dtype) and not x.any()


def test_vmap_over_nothing_nested_and_of_lengths_and_tables():
    q, k, v = arrays()
    none = jnp.zeros((0, *q.shape))
    kk, vv = jnp.stack([k, k, k]), jnp.stack([v, v, v])
    nested = jax.vmap(jax.vmap(qflash.attention, (0, None, None)), (None, 0, 0))
    assert nested(none, kk, vv).shape == (3, 0, *q.shape)
    assert nested(jnp.stack([q, q]), kk[:0], vv[:0]).shape == (0, 2, *q.shape)
    mapped = jax.vmap(lambda lens: qflash.attention(q, k, v, kv_lens=lens))(jnp.zeros((0, 2), jnp.int32))
    assert mapped.shape == (0, *q.shape)
    cos, sin = (jnp.asarray(x) for x in qflash.rope_tables(13, 16))
    rotated = jax.vmap(lambda q, cos: qflash.attention(q, k, v, rope=qflash.Rope(cos, sin)))
    assert rotated(none, jnp.zeros((0, *cos.shape))).shape == none.shape


def test_gradient_through_lse():
    q, k, v = arrays()

    def ours(q, k, v):
        out, lse = qflash.attention(q, k, v, return_lse=True)
        return (out**2).sum() + jnp.sin(lse).sum()

    def plain(q, k, v):
        scores = jnp.einsum("bihd,bjhd->bhij", q, jnp.repeat(k, 2, 2)) / 4
        return (theirs(q, k, v) ** 2).sum() + jnp.sin(jax.nn.logsumexp(scores, -1)).sum()

    assert_close(jax.grad(ours, (0, 1, 2))(q, k, v), jax.jit(jax.grad(plain, (0, 1, 2)))(q, k, v), BOUND)


def test_gradient_through_lse_alone():
    q, k, v = arrays(q_heads=2)

    def plain(q):
        return jax.nn.logsumexp(jnp.einsum("bihd,bjhd->bhij", q, k) / 4, -1).sum()

    got = jax.grad(lambda q: qflash.attention(q, k, v, return_lse=True)[1].sum())(q)
    assert_close(got, jax.jit(jax.grad(plain))(q), BOUND)


def test_remat():
    operands = arrays()
    ours, want = (jax.grad(loss(jax.checkpoint(f)), (0, 1, 2))(*operands) for f in (qflash.attention, theirs))
    assert_close(ours, want, BOUND)


@pytest.mark.parametrize("kept", [True, False])
def test_remat_keeps_what_its_policy_names(kept, capsys):
    """out and lse, which the backward pass otherwise computes again."""
    names = ("qflash.attention.out", "qflash.attention.lse") if kept else ()
    policy = jax.checkpoint_policies.save_only_these_names(*names)
    operands = arrays()
    within = loss(jax.checkpoint(qflash.attention, policy=policy))
    jax.ad_checkpoint.print_saved_residuals(within, *operands)
    assert capsys.readouterr().out.count("'qflash_attention'") == len(names)
    for got, want in zip(*(jax.grad(f, (0, 1, 2))(*operands) for f in (within, loss(qflash.attention))), strict=True):
        np.testing.assert_array_equal(got, want)


def test_scan_with_a_rope():
    q, k, v = arrays(q_len=13)
    rope = qflash.Rope(*(jnp.asarray(x) for x in qflash.rope_tables(20, 16)))
    kv_lens = jnp.array([[13, 2], [4, 4], [0, 1]], jnp.int32)

    @jax.jit
    def layers(q, rope):
        def layer(carry, lens):
            q, rope = carry
            return (qflash.attention(q, k, v, rope=rope, kv_lens=lens), rope), None

        return jax.lax.scan(layer, (q, rope), kv_lens)[0][0]

    want = q
    for lens in kv_lens:
        want = qflash.attention(want, k, v, rope=rope, kv_lens=lens)
    assert_close(layers(q, rope), want, FLOAT32_L2)
    gradient = jax.grad(lambda q: (layers(q, rope) ** 2).sum())(q)
    assert gradient.shape == q.shape and bool(jnp.isfinite(gradient).all())


def test_rope_is_a_pytree_before_any_call():
    code = (
        "import jax, jax.numpy as jnp, qflash\n"
        "rope = qflash.Rope(jnp.ones((3, 2)), jnp.zeros((3, 2)), True)\n"
        "again = jax.jit(lambda rope: rope)(rope)\n"
        "assert again.interleaved and again.positions_q is None and again.cos.shape == (3, 2)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "JAX_PLATFORMS": "cpu"})


def test_no_gradient_for_int8():
    q, k, v = arrays()
    with pytest.raises(
        NotImplementedError, match=r"precision 'int8' has no backward pass; .* train in the arrays' own type, and serve"
    ):
        jax.jit(jax.grad(lambda q: qflash.attention(q, k, v, precision="int8").sum()))(q)


def test_no_gradient_for_rope_tables():
    q, k, v = arrays(q_len=13)
    cos, sin = (jnp.asarray(x) for x in qflash.rope_tables(13, 16))

    def call(cos):
        return qflash.attention(q, k, v, rope=qflash.Rope(cos, sin)).sum()

    with pytest.raises(NotImplementedError, match=r"rope\.cos has no gradient"):
        jax.grad(call)(cos)
    assert not jax.grad(lambda cos: call(jax.lax.stop_gradient(cos)))(cos).any()


def test_sinks_under_vmap():
    """A mapped q shares them, as a batch or as heads; sinks that are mapped themselves are taken in turn."""
    sinks = jnp.stack([jnp.linspace(-1, 2, 4) + i for i in range(3)])
    for axes in ((0, 0, 0), (0, None, None)):
        q, k, v = stack(axes, q_heads=4, kv_heads=2)
        got = jax.vmap(lambda q, k, v: qflash.attention(q, k, v, sinks=sinks[0]), axes)(q, k, v)
        for i in range(3):
            one = (x if axis is None else x[i] for x, axis in zip((q, k, v), axes, strict=True))
            assert_close(got[i], qflash.attention(*one, sinks=sinks[0]), FLOAT32_L2)
    q, k, v = arrays(q_heads=4, kv_heads=2)
    got = jax.vmap(lambda sinks: qflash.attention(q, k, v, sinks=sinks))(sinks)
    for i in range(3):
        np.testing.assert_array_equal(got[i], qflash.attention(q, k, v, sinks=sinks[i]))


def test_gradient_of_sinks():
    q, k, v = arrays(q_heads=4, kv_heads=2)
    sinks = jnp.linspace(-1.0, 2.0, 4)

    def scaled(q, sinks):
        """The same by what a call without sinks gives."""
        out, lse = qflash.attention(q, k, v, return_lse=True)
        return out * jax.nn.sigmoid(lse - sinks[:, None]).swapaxes(1, 2)[..., None]

    assert_close(scaled(q, sinks), qflash.attention(q, k, v, sinks=sinks), FLOAT32_L2)
    want, of_sinks = jax.grad(lambda *x: (scaled(*x) ** 2).sum(), (0, 1))(q, sinks)
    grad = jax.grad(loss(lambda q, sinks: qflash.attention(q, k, v, sinks=sinks)), (0, 1))
    for got in (grad(q, sinks), jax.jit(grad)(q, sinks)):
        assert_close(got[0], want, BOUND)
        assert_close(got[1], of_sinks, BOUND)
    half = jax.grad(loss(lambda sinks: qflash.attention(q, k, v, sinks=sinks)))(sinks.astype("float16"))
    assert half.dtype == "float16"
    np.testing.assert_allclose(half, of_sinks, rtol=2e-3)


def test_gradient_of_sinks_is_each_samples_own_under_vmap():
    q, k, v = stack((0, 0, 0), q_heads=4, kv_heads=2)
    sinks = jnp.linspace(-1.0, 2.0, 4)
    grad = jax.grad(lambda sinks, q, k, v: (qflash.attention(q, k, v, sinks=sinks) ** 2).sum(), (0, 1))
    of_sinks, of_q = jax.vmap(grad, (None, 0, 0, 0))(sinks, q, k, v)
    for i in range(3):
        want = grad(sinks, q[i], k[i], v[i])
        assert_close(of_sinks[i], want[0], FLOAT32_L2)
        assert_close(of_q[i], want[1], FLOAT32_L2)
