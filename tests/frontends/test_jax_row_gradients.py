"""Gradients of softmax, layer_norm and cross_entropy in JAX: grad, vjp, jit, vmap, remat, scan; what is refused."""

from __future__ import annotations

import numpy as np
import pytest

import qflash
from qflash import reference
from qflash.testing import compare

jax = pytest.importorskip("jax")
jnp = jax.numpy

RNG = np.random.default_rng(5)
X, WEIGHT, BIAS = (RNG.standard_normal(shape, np.float32) for shape in ((6, 19), (19,), (19,)))
TOP, PER_ROW = RNG.standard_normal((6, 19), np.float32), RNG.standard_normal(6, np.float32)
TARGETS = np.array([0, 18, -100, 3, 4, -100], np.int32)
COUNT = int((TARGETS != -100).sum())

# Name -> (what is differentiated, a loss of it, the gradients in float64).
LOSSES = {
    "softmax": (
        (X,),
        lambda x: (qflash.softmax(x, scale=0.7) * TOP).sum(),
        lambda: [reference.softmax_backward(reference.softmax(X, 0.7), TOP, 0.7)],
    ),
    "layer_norm": (
        (X, WEIGHT, BIAS),
        lambda x, weight, bias: (qflash.layer_norm(x, weight, bias) * TOP).sum(),
        lambda: reference.layer_norm_backward(X, WEIGHT, TOP),
    ),
    "layer_norm rstd": (
        (X,),
        lambda x: (qflash.layer_norm(x, return_stats=True)[2] * PER_ROW).sum(),
        lambda: [reference.layer_norm_backward(X, None, 0 * TOP, drstd=PER_ROW)[0]],
    ),
    "cross_entropy": (
        (X,),
        lambda x: qflash.cross_entropy(x, jnp.asarray(TARGETS), label_smoothing=0.1),
        lambda: [reference.cross_entropy_backward(X, TARGETS, np.full(6, 1 / COUNT), label_smoothing=0.1)],
    ),
    "cross_entropy none": (
        (X,),
        lambda x: (qflash.cross_entropy(x, jnp.asarray(TARGETS), reduction="none") * PER_ROW).sum(),
        lambda: [reference.cross_entropy_backward(X, TARGETS, PER_ROW)],
    ),
    "cross_entropy lse": (
        (X,),
        lambda x: (qflash.cross_entropy(x, jnp.asarray(TARGETS), return_lse=True)[1] * PER_ROW).sum(),
        lambda: [reference.cross_entropy_backward(X, TARGETS, 0 * PER_ROW, PER_ROW)],
    ),
}
WAYS = {
    "plain": lambda grad: grad,
    "jit": lambda grad: jax.jit(grad),
}
EVERY = pytest.mark.parametrize("name", LOSSES)


def gradients(name: str, wrap=lambda loss: loss):
    inputs, loss, _ = LOSSES[name]
    return jax.grad(wrap(loss), tuple(range(len(inputs)))), [jnp.asarray(x) for x in inputs]


def same(got, want) -> None:
    for one, other in zip(got, want, strict=True):
        np.testing.assert_array_equal(one, other)


@EVERY
@pytest.mark.parametrize("way", WAYS)
def test_against_float64(name, way):
    grad, inputs = gradients(name)
    for got, want in zip(WAYS[way](grad)(*inputs), LOSSES[name][2](), strict=True):
        error = compare.errors(np.asarray(got), want).relative_l2
        assert error <= compare.GRADIENT_L2["float32"], f"off by {error:.3g}"


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision(dtype):
    x, weight, bias = (jnp.asarray(one, dtype) for one in (X, WEIGHT, BIAS))
    got = jax.grad(lambda *xs: (qflash.layer_norm(*xs) * jnp.asarray(TOP, dtype)).sum(), (0, 1, 2))(x, weight, bias)
    exact = [np.asarray(one).astype(np.float64) for one in (x, weight, jnp.asarray(TOP, dtype))]
    for one, want in zip(got, reference.layer_norm_backward(*exact), strict=True):
        assert one.dtype == dtype
        assert compare.errors(np.asarray(one).astype(np.float64), want).relative_l2 <= compare.GRADIENT_L2[dtype]


@EVERY
def test_remat_and_vjp_give_the_same_bits(name):
    grad, inputs = gradients(name)
    want = grad(*inputs)
    same(gradients(name, jax.checkpoint)[0](*inputs), want)
    same(jax.vjp(LOSSES[name][1], *inputs)[1](jnp.float32(1)), want)


@EVERY
def test_vmap_is_a_loop(name):
    grad, (x, *more) = gradients(name)
    many = jnp.stack([x, 2 * x, x - 1])
    got = jax.vmap(lambda x: grad(x, *more))(many)
    for i in range(3):
        for one, want in zip(got, grad(many[i], *more), strict=True):
            np.testing.assert_allclose(one[i], want, rtol=1e-6, atol=1e-6)


def test_in_a_scan():
    def loss(x):
        return jax.lax.scan(lambda carry, _: (qflash.softmax(carry, scale=2.0), None), x, length=3)[0][:, 0].sum()

    def exact(x):
        return jax.lax.scan(lambda carry, _: (jax.nn.softmax(2.0 * carry), None), x, length=3)[0][:, 0].sum()

    np.testing.assert_allclose(jax.grad(loss)(X), jax.grad(exact)(X), rtol=1e-4, atol=1e-6)


@EVERY
def test_no_second_derivative_and_no_forward_mode(name):
    _, loss, _ = LOSSES[name]
    _, inputs = gradients(name)
    operation = name.split()[0]
    with pytest.raises(NotImplementedError, match=rf"qflash\.{operation} has no second derivative; allowed: one"):
        jax.grad(lambda *xs: (jax.grad(loss)(*xs) ** 2).sum())(*inputs)
    with pytest.raises(NotImplementedError, match=rf"qflash\.{operation} has no forward-mode derivative"):
        jax.jvp(loss, tuple(inputs), tuple(inputs))


def test_results_have_names_for_checkpoint_policies():
    policy = jax.checkpoint_policies.save_only_these_names("qflash.softmax.out")
    loss = jax.checkpoint(lambda x: (qflash.softmax(x) * TOP).sum(), policy=policy)
    jaxpr = str(jax.make_jaxpr(jax.grad(loss))(X))
    forward, backward = (jaxpr.count(f"call={op}(") for op in ("softmax", "softmax_backward"))
    assert (forward, backward) == (1, 1), jaxpr
