"""qflash.linear and qflash.swiglu in JAX: grad, vjp, jit, vmap, remat, scan; QuantizedLinear as a pytree; refusals."""

from __future__ import annotations

import numpy as np
import pytest

import qflash
from qflash import reference
from qflash.testing import compare
from qflash.testing.op_cases import check_equal

jax = pytest.importorskip("jax")
jnp = jax.numpy

RNG = np.random.default_rng(5)
X, W, U = (RNG.standard_normal(shape, np.float32) for shape in ((2, 3, 19), (19, 13), (19, 13)))
B, C, R, TOP = (RNG.standard_normal(shape, np.float32) for shape in ((13,), (13,), (2, 3, 13), (2, 3, 13)))
IN_JAX = {name: jnp.asarray(x) for name, x in (("x", X), ("w", W), ("b", B))}

# Name -> (what is differentiated, qflash's call, the gradients in float64).
CALLS = {
    **{
        f"linear {activation}": (
            (X, W, B, R),
            lambda x, w, b, r, activation=activation: qflash.linear(x, w, b, activation=activation, residual=r),
            lambda activation=activation: [*reference.linear_backward(X, W, B, TOP, activation), TOP],
        )
        for activation in (None, "gelu", "gelu_tanh", "silu")
    },
    "linear transposed": (
        (X, W.T),
        lambda x, w: qflash.linear(x, w.T, activation="gelu"),
        lambda: [g if i == 0 else g.T for i, g in enumerate(reference.linear_backward(X, W, None, TOP, "gelu")[:2])],
    ),
    "swiglu": (
        (X, W, U, B, C, R),
        lambda x, w, u, b, c, r: qflash.swiglu(x, w, u, b, c, residual=r),
        lambda: [*reference.swiglu_backward(X, W, U, B, C, TOP), TOP],
    ),
    "swiglu plain": (
        (X, W, U),
        qflash.swiglu,
        lambda: list(reference.swiglu_backward(X, W, U, None, None, TOP)[:3]),
    ),
}
EVERY = pytest.mark.parametrize("name", CALLS)


def loss_of(name: str):
    call = CALLS[name][1]
    return lambda *xs: (call(*xs).astype(jnp.float32) * TOP).sum()


def gradients(name: str, wrap=lambda loss: loss):
    inputs = [jnp.asarray(x) for x in CALLS[name][0]]
    return jax.grad(wrap(loss_of(name)), tuple(range(len(inputs)))), inputs


def same(got, want) -> None:
    for one, other in zip(got, want, strict=True):
        np.testing.assert_array_equal(one, other)


@EVERY
@pytest.mark.parametrize("way", [lambda grad: grad, jax.jit], ids=["plain", "jit"])
def test_against_float64(name, way):
    grad, inputs = gradients(name)
    for got, want in zip(way(grad)(*inputs), CALLS[name][2](), strict=True):
        assert got.shape == want.shape
        assert compare.errors(np.asarray(got), want).relative_l2 <= compare.GRADIENT_L2["float32"]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", ["linear gelu", "swiglu"])
def test_half_precision(name, dtype):
    grad, inputs = gradients(name)
    halves = [x.astype(dtype) for x in inputs]
    got = grad(*halves)
    exact = gradients(name)[0](*(x.astype(jnp.float32) for x in halves))
    for one, want in zip(got, exact, strict=True):
        assert one.dtype == dtype
        error = compare.errors(np.asarray(one).astype(np.float64), np.asarray(want).astype(np.float64)).relative_l2
        assert error <= compare.GRADIENT_L2[dtype]


@EVERY
def test_remat_and_vjp_give_the_same_bits(name):
    grad, inputs = gradients(name)
    want = grad(*inputs)
    same(gradients(name, jax.checkpoint)[0](*inputs), want)
    same(jax.vjp(loss_of(name), *inputs)[1](jnp.float32(1)), want)


@pytest.mark.parametrize("name", ["linear gelu", "linear transposed", "swiglu"])
def test_vmap_is_a_loop(name):
    """Over x, and with it the residual: one call forward. Over weights, and of gradients: a loop."""
    _, call, _ = CALLS[name]
    inputs = [jnp.asarray(x) for x in CALLS[name][0]]
    rows = [0] if len(inputs) in (2, 3) else [0, len(inputs) - 1]
    for mapped in (rows, [1], range(len(inputs))):
        stacked = [jnp.stack([x, 2 * x, x - 1]) if at in mapped else x for at, x in enumerate(inputs)]
        axes = tuple(0 if at in mapped else None for at in range(len(inputs)))
        got = jax.vmap(call, axes)(*stacked)
        one = [[x[i] if at in mapped else x for at, x in enumerate(stacked)] for i in range(3)]
        for i in range(3):
            np.testing.assert_array_equal(got[i], call(*one[i]))
        grad, _ = gradients(name)
        of_all = jax.vmap(grad, axes)(*stacked)
        for i in range(3):
            same([g[i] for g in of_all], grad(*one[i]))
    text = str(jax.make_jaxpr(jax.vmap(lambda x: qflash.linear(x, IN_JAX["w"])))(IN_JAX["x"]))
    assert "scan" not in text and "while" not in text


def test_in_a_scan():
    """Layers one after another, each with a weight of its own."""
    weights, x = RNG.standard_normal((4, 19, 19), np.float32) / 19, X[0]

    def loss(call):
        return lambda weights, x: jax.lax.scan(lambda x, w: (call(x, w), None), x, weights)[0][:, 0].sum()

    ours = jax.grad(loss(lambda x, w: qflash.linear(x, w, activation="silu", residual=x)), (0, 1))(weights, x)
    theirs = jax.grad(loss(lambda x, w: jax.nn.silu(x @ w) + x), (0, 1))(weights, x)
    for got, want in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("activation", [None, "gelu"])
def test_a_float32_result_of_halves_has_gradients(dtype, activation):
    x, w = jnp.asarray(X, dtype), jnp.asarray(W, dtype)

    def loss(x, w, r):
        out = qflash.linear(x, w, activation=activation, residual=r, out_dtype="float32")
        assert out.dtype == jnp.float32
        return (out * TOP).sum()

    got = jax.jit(jax.grad(loss, (0, 1, 2)))(x, w, jnp.asarray(R))
    exact = [np.asarray(a).astype(np.float64) for a in (x, w)]
    for one, want in zip(got, reference.linear_backward(*exact, None, TOP, activation)[:2], strict=False):
        assert one.dtype == dtype
        assert compare.errors(np.asarray(one).astype(np.float64), want).relative_l2 <= compare.GRADIENT_L2[dtype]
    np.testing.assert_array_equal(got[2], TOP)


def test_only_the_residual_is_differentiated():
    x, w = IN_JAX["x"], IN_JAX["w"]
    got = jax.grad(lambda r: (qflash.linear(x, w, residual=r) * TOP).sum())(jnp.asarray(R))
    np.testing.assert_array_equal(got, TOP)


@EVERY
def test_no_second_derivative_and_no_forward_mode(name):
    loss, (_, inputs) = loss_of(name), gradients(name)
    function = name.split()[0]
    with pytest.raises(NotImplementedError, match=rf"qflash\.{function} has no second derivative; allowed: one"):
        jax.grad(lambda *xs: (jax.grad(loss)(*xs) ** 2).sum())(*inputs)
    with pytest.raises(NotImplementedError, match=rf"qflash\.{function} has no forward-mode derivative"):
        jax.jvp(loss, tuple(inputs), tuple(inputs))


def test_results_have_names_for_checkpoint_policies():
    """pre kept: the forward product is not computed again."""
    policy = jax.checkpoint_policies.save_only_these_names("qflash.linear.pre")
    loss = jax.checkpoint(lambda x: (qflash.linear(x, IN_JAX["w"], activation="gelu") * TOP).sum(), policy=policy)
    jaxpr = str(jax.make_jaxpr(jax.grad(loss))(jnp.asarray(X)))
    assert [jaxpr.count(f"call={op}(") for op in ("linear", "linear_backward")] == [1, 1], jaxpr


# INT8 ----------------------------------------------------------------------------------------------------------------


def test_a_quantized_layer_is_a_pytree():
    """Through jit, as an argument and as a result, through vmap, scan and tree_map."""
    x, w, b = IN_JAX.values()
    layer = qflash.quantize_linear(w)
    want = qflash.linear(X, qflash.quantize_linear(W), B, activation="gelu")
    check_equal(qflash.linear(x, layer, b, activation="gelu"), want)
    check_equal(jax.jit(lambda x, layer: qflash.linear(x, layer, b, activation="gelu"))(x, layer), want)
    again = jax.jit(qflash.quantize_linear)(w)
    assert isinstance(again, qflash.QuantizedLinear) and again.dtype == "float32"
    check_equal([again.values, again.scale], [layer.values, layer.scale])
    weights = jnp.stack([W, U])
    many = jax.vmap(qflash.quantize_linear)(weights)
    assert many.values.shape == (2, 13, 19) and many.scale.shape == (2, 13)
    both = [qflash.linear(x, jax.tree.map(lambda part, i=i: part[i], many)) for i in range(2)]
    check_equal(jax.vmap(lambda layer: qflash.linear(x, layer))(many), jnp.stack(both))
    _, scanned = jax.lax.scan(lambda _, layer: (None, qflash.linear(x, layer)), None, many)
    check_equal(scanned, jnp.stack(both))
    check_equal(qflash.swiglu(x, *(jax.tree.map(lambda part, i=i: part[i], many) for i in range(2))),
                qflash.swiglu(X, *map(qflash.quantize_linear, (W, U))))  # fmt: skip


def test_a_layer_made_before_jax_was_asked_for_anything(tmp_path):
    """The class registers itself: jit sees an instance that no call of qflash has made."""
    import subprocess
    import sys

    code = (
        "import jax, jax.numpy as jnp, qflash\n"
        "layer = qflash.QuantizedLinear(jnp.ones((3, 4), jnp.int8), jnp.ones(3))\n"
        "print(jax.jit(lambda layer: layer.scale.sum())(layer))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0 and done.stdout.strip() == "3.0", done.stderr


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (
            lambda x, w, b: qflash.linear(x, IN_JAX["w"], precision="int8"),
            r"qflash\.linear in INT8 is forward only and x is",
        ),
        (
            lambda x, w, b: qflash.linear(IN_JAX["x"], w, precision="int8"),
            r"qflash\.linear in INT8 is forward only and w is",
        ),
        (
            lambda x, w, b: qflash.linear(IN_JAX["x"], IN_JAX["w"], b, precision="int8"),
            r"qflash\.linear in INT8 is forward only and bias is",
        ),
        (
            lambda x, w, b: qflash.swiglu(IN_JAX["x"], IN_JAX["w"], w, precision="int8"),
            r"qflash\.swiglu in INT8 is forward only and up is",
        ),
        (lambda x, w, b: qflash.quantize_linear(w).scale, r"qflash\.quantize_linear is forward only and w is"),
    ],
)
def test_int8_has_no_gradient(call, text):
    inputs = list(IN_JAX.values())
    for way in (lambda grad: grad, jax.jit):
        with pytest.raises(NotImplementedError, match=text):
            way(jax.grad(lambda *xs: call(*xs).sum(), (0, 1, 2)))(*inputs)
    stopped = jax.grad(lambda *xs: call(*map(jax.lax.stop_gradient, xs)).sum(), (0, 1, 2))(*inputs)
    assert not any(g.any() for g in stopped)
