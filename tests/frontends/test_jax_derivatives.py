"""JAX front end, derivatives that do not exist: refused in words, whatever transformation asks for them."""

from __future__ import annotations

import numpy as np
import pytest

import qflash
from qflash.testing import jax_arrays

jax = pytest.importorskip("jax")
jnp = jax.numpy

SECOND_DERIVATIVE = r"^qflash\.attention has no second derivative; allowed: one backward pass over it"
FORWARD_MODE = (
    r"^qflash\.attention has no forward-mode derivative \(jvp, jacfwd, linearize\); allowed: reverse mode \(grad, vjp, "
    r"jacrev\), or jax\.lax\.stop_gradient around q, k and v"
)


@pytest.fixture(autouse=True)
def on_cpu():
    with jax.default_device(jax.devices("cpu")[0]):
        yield


def arrays():
    return jax_arrays.arrays(batch=1, q_len=3, k_len=3, q_heads=2, kv_heads=2, head_dim=4)


def in_a_scan(f):
    """f twice in a loop, of which JAX makes programs of its own before it differentiates."""
    return lambda x: jax.lax.scan(lambda carry, _: (f(carry), None), x, None, length=2)[0]


def with_rows(f):
    """f under vmap."""
    return lambda x: jax.vmap(f)(x[None])[0]


WAYS = {"plain": lambda f: f, "jit": jax.jit, "checkpoint": jax.checkpoint, "scan": in_a_scan, "vmap": with_rows}

SECOND = {
    "grad-grad": lambda f, x: jax.grad(lambda x: jax.grad(f)(x).sum())(x),
    "jit-grad-grad": lambda f, x: jax.jit(jax.grad(lambda x: jax.grad(f)(x).sum()))(x),
    "hessian": lambda f, x: jax.hessian(f)(x),
    "jit-hessian": lambda f, x: jax.jit(jax.hessian(f))(x),
    "jvp-grad": lambda f, x: jax.jvp(jax.grad(f), (x,), (x,)),
    "jacrev-grad": lambda f, x: jax.jacrev(jax.grad(f))(x),
    "vmap-grad-grad": lambda f, x: jax.vmap(jax.grad(lambda x: jax.grad(f)(x).sum()))(x[None]),
    "grad-vmap-grad": lambda f, x: jax.grad(lambda x: jax.vmap(jax.grad(f))(x).sum())(x[None]),
}

FORWARD = {
    "jvp": lambda f, x: jax.jvp(f, (x,), (x,)),
    "jit-jvp": lambda f, x: jax.jit(lambda x: jax.jvp(f, (x,), (x,)))(x),
    "jacfwd": lambda f, x: jax.jacfwd(f)(x),
    "jit-jacfwd": lambda f, x: jax.jit(jax.jacfwd(f))(x),
    "linearize": lambda f, x: jax.linearize(f, x)[1](x),
    "vmap-linearize": lambda f, x: jax.vmap(jax.linearize(f, x)[1])(x[None]),
    "vmap-jvp": lambda f, x: jax.vmap(lambda x: jax.jvp(f, (x,), (x,)))(x[None]),
    "jvp-vmap": lambda f, x: jax.jvp(jax.vmap(f), (x[None],), (x[None],)),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("transform", SECOND)
def test_no_second_derivative(way, transform):
    q, k, v = arrays()
    attend = WAYS[way](lambda q: qflash.attention(q, k, v, causal=True))
    with pytest.raises(NotImplementedError, match=SECOND_DERIVATIVE):
        SECOND[transform](lambda q: (attend(q) ** 2).sum(), q)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("transform", FORWARD)
def test_no_forward_mode(way, transform):
    q, k, v = arrays()
    with pytest.raises(NotImplementedError, match=FORWARD_MODE):
        FORWARD[transform](WAYS[way](lambda q: qflash.attention(q, k, v)), q)


@pytest.mark.parametrize("argument", range(3))
def test_no_forward_mode_in_any_argument_nor_through_lse(argument):
    operands = arrays()

    def call(x):
        return qflash.attention(*operands[:argument], x, *operands[argument + 1 :], return_lse=True)[1]

    with pytest.raises(NotImplementedError, match=FORWARD_MODE):
        jax.jvp(call, (operands[argument],), (operands[argument],))


def test_second_derivative_of_packed_and_through_lse():
    q, k, v = (x[0] for x in arrays())
    cu = jnp.array([0, 1, 3], jnp.int32)

    def loss(q):
        out, lse = qflash.attention_varlen(q, k, v, cu, cu, 2, 2, return_lse=True)
        return (out**2).sum() + lse.sum()

    with pytest.raises(NotImplementedError, match=SECOND_DERIVATIVE):
        jax.hessian(loss)(q)


def test_without_jit():
    q, k, v = arrays()
    with jax.disable_jit():
        with pytest.raises(NotImplementedError, match=FORWARD_MODE):
            jax.jvp(lambda q: qflash.attention(q, k, v), (q,), (q,))
        with pytest.raises(NotImplementedError, match=SECOND_DERIVATIVE):
            jax.hessian(lambda q: (qflash.attention(q, k, v) ** 2).sum())(q)


@pytest.mark.parametrize("way", WAYS)
def test_what_is_constant_has_every_derivative(way):
    """Of something else, or behind stop_gradient; and one backward pass stays possible all the while."""
    q, k, v = arrays()
    attend = WAYS[way](lambda q: qflash.attention(q, k, v))
    stopped = WAYS[way](lambda q: qflash.attention(*map(jax.lax.stop_gradient, (q, k, v))))
    out = attend(q)
    np.testing.assert_allclose(jax.hessian(lambda x: (x**2 * attend(q)).sum())(1.0), 2 * out.sum(), rtol=1e-5)
    assert not jax.jvp(stopped, (q,), (q,))[1].any()
    assert not jax.hessian(lambda q: stopped(q).sum())(q).any()
    assert jax.grad(lambda q: attend(q).sum())(q).any()
    assert jax.jacrev(attend)(q).shape == out.shape + q.shape


def test_a_recorded_derivative_can_be_transposed():
    """jax.linearize only records, and the record of reverse mode is the same."""
    q, k, v = arrays()
    _, derivative = jax.linearize(lambda q: qflash.attention(q, k, v).sum(), q)
    (got,) = jax.linear_transpose(derivative, q)(1.0)
    np.testing.assert_array_equal(got, jax.grad(lambda q: qflash.attention(q, k, v).sum())(q))


ROWS = jnp.asarray(np.random.default_rng(0).standard_normal((3, 4), np.float32))
OPERATIONS = {
    "quantize": ("x", lambda x: x * qflash.quantize(x).scale),
    "dequantize": (
        "quantized.scale",
        lambda x: x * qflash.dequantize(qflash.Quantized(jnp.ones((3, 4), jnp.int8), x[0, 0], dtype="float32")),
    ),
    "int8_matmul": (
        "a_scale",
        lambda x: x * qflash.int8_matmul(jnp.ones((3, 4), jnp.int8), jnp.ones((4, 4), jnp.int8), a_scale=x[:, 0]),
    ),
}

PAGES = jnp.zeros((1, 1, 16, 4)), jnp.zeros((1, 1, 16, 4)), jnp.zeros((1, 1), jnp.int32), jnp.full(1, 3, jnp.int32)
OPERATIONS |= {
    "attention on a PagedKV": (
        "q", lambda x: x * qflash.attention(x[None, :, None], qflash.PagedKV(*PAGES))[0, :, 0],
    ),
    "attention on quantized arrays": (
        "v", lambda x: x * qflash.attention(*(qflash.quantize(jnp.ones((1, 3, 1, 4))),) * 2, x[None, :, None])[0, :, 0],
    ),
}  # fmt: skip


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("way", WAYS)
def test_the_other_operations_are_forward_only(operation, way):
    wanted, call = OPERATIONS[operation]
    text = (
        rf"^qflash\.{operation.strip()} is forward only and {wanted} is being differentiated; put jax\.lax\.stop_grad"
    )
    call = WAYS[way](call)
    with pytest.raises(NotImplementedError, match=text):
        jax.linearize(call, ROWS)
    for transform in (jax.grad, jax.hessian, lambda f: jax.jit(jax.grad(f)), jax.jacfwd):
        with pytest.raises(NotImplementedError, match=text):
            transform(lambda x: call(x).sum())(ROWS)
    with pytest.raises(NotImplementedError, match=text):
        jax.jvp(call, (ROWS,), (ROWS,))


def test_forward_only_in_a_loop_that_something_else_is_differentiated_in():
    """The inner derivative is of `a`, so that JAX quantizes b beforehand; the outer one is of b."""

    def inner(b):
        loop = in_a_scan(lambda carry: carry * carry * qflash.quantize(b).scale)
        return jax.grad(lambda a: loop(a).sum())(ROWS).sum()

    assert np.isfinite(inner(ROWS))
    with pytest.raises(NotImplementedError, match=r"^qflash\.quantize is forward only and x is being differentiated"):
        jax.grad(inner)(ROWS)


def test_the_straight_through_estimate_of_quantized_attention():
    """As docs/decisions/0016 writes it: the gradient where the rounded arrays are."""

    def rounded(x):
        return qflash.dequantize(qflash.quantize(jax.lax.stop_gradient(x)))

    def straight(x):
        return x + jax.lax.stop_gradient(rounded(x) - x)

    q, k, v = arrays()
    got = jax.grad(lambda q, k: qflash.attention(straight(q), straight(k), v).sum(), (0, 1))(q, k)
    want = jax.grad(lambda q, k: qflash.attention(q, k, v).sum(), (0, 1))(rounded(q), rounded(k))
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
