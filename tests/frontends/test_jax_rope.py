"""qflash.rope in JAX: gradients of every order, jit, vmap, remat, scan, exported programs; what is refused."""

from __future__ import annotations

import numpy as np
import pytest

import qflash
from qflash.testing.rotations import check_rotated

jax = pytest.importorskip("jax")
jnp = jax.numpy
export = pytest.importorskip("jax.export")

RNG = np.random.default_rng(7)
COS, SIN = qflash.rope_tables(9, 12)
POSITIONS = np.array([[0, -1, 8, -8, 3, 3], [7, 6, -5, 4, 0, 1]], np.int32)
# interleaved, positions, and x's shape.
CALLS = {
    "half": (False, None, (2, 6, 3, 16)),
    "interleaved": (True, None, (2, 6, 3, 16)),
    "each": (False, POSITIONS, (2, 6, 3, 13)),
    "all": (True, POSITIONS[1], (2, 6, 3, 12)),
    "packed": (False, POSITIONS[0], (6, 3, 16)),
}
EVERY = pytest.mark.parametrize("name", CALLS)
ALLOW = [export.DisabledSafetyCheck.custom_call("qflash_call")]


def drawn(*shape: int, dtype="float32"):
    return jnp.asarray(RNG.standard_normal(shape, np.float32), dtype)


def tables(interleaved=False, **positions):
    return qflash.Rope(jnp.asarray(COS), jnp.asarray(SIN), interleaved, **positions)


def call_of(name: str):
    interleaved, positions, shape = CALLS[name]
    rope = tables(interleaved)
    return lambda x: qflash.rope(x, rope, positions=positions), shape


@EVERY
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "jit"])
def test_the_gradient_is_the_rotation_back(name, dtype, compiled):
    call, shape = call_of(name)
    interleaved, positions, _ = CALLS[name]
    x, top = drawn(*shape, dtype=dtype), drawn(*shape, dtype=dtype)

    def pull_back(x, top):
        return jax.vjp(call, x)[1](top)[0]

    got = (jax.jit(pull_back) if compiled else pull_back)(x, top)
    check_rotated(np.asarray(got), np.asarray(top), qflash.Rope(COS, SIN, interleaved), positions, inverse=True)


@EVERY
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "jit"])
def test_every_order(name, compiled):
    """y is linear in x, so d(y³)/dx has further derivatives; JAX's own operations have them, too."""
    call, shape = call_of(name)
    matrix = jax.jacrev(call)(jnp.zeros(shape)).reshape(np.prod(shape), -1)

    def derivatives(call, x):
        first = jax.grad(lambda x: (call(x) ** 3).sum())
        second = jax.grad(lambda x: (first(x) ** 2).sum())
        third = jax.grad(lambda x: (second(x) * first(x)).sum())
        return first(x), second(x), third(x)

    x = drawn(*shape)
    of_call = jax.jit(lambda x: derivatives(call, x)) if compiled else lambda x: derivatives(call, x)

    @jax.jit
    def of_matrix(x):
        return derivatives(lambda x: jnp.matmul(matrix, x.ravel(), precision="highest").reshape(shape), x)

    for got, want in zip(of_call(x), of_matrix(x), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-2)


@EVERY
def test_remat_and_scan(name):
    call, shape = call_of(name)
    x, top = drawn(*shape), drawn(*shape)
    want = jax.grad(lambda x: (call(x) * top).sum())(x)
    np.testing.assert_array_equal(jax.grad(lambda x: (jax.checkpoint(call)(x) * top).sum())(x), want)

    def three_times(x):
        return jax.lax.scan(lambda carry, _: (call(carry), None), x, length=3)[0]

    np.testing.assert_array_equal(three_times(x), call(call(call(x))))
    back = lambda top: jax.vjp(call, x)[1](top)[0]  # noqa: E731
    np.testing.assert_array_equal(jax.vjp(three_times, x)[1](top)[0], back(back(back(top))))


@pytest.mark.parametrize("shape", [(6, 3, 16), (2, 6, 3, 16)], ids=["packed", "batch"])
@pytest.mark.parametrize("mapped", [("x",), ("positions",), ("x", "positions"), ("x", "rope"), ("rope",)], ids=str)
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_vmap_is_a_loop(shape, mapped, direction):
    count = 3
    places = jnp.stack([POSITIONS[0], POSITIONS[1], -POSITIONS[0]])
    many = (drawn(count, *shape), places, jnp.stack([SIN, -SIN, 0 * SIN]))
    axes = tuple(0 if name in mapped else None for name in ("x", "positions", "rope"))
    arrays = [x if axis == 0 else x[0] for x, axis in zip(many, axes, strict=True)]

    def forward(x, positions, sin):
        return qflash.rope(x, qflash.Rope(jnp.asarray(COS), sin), positions=positions)

    def backward(x, positions, sin):
        return jax.grad(lambda y: (forward(y, positions, sin) ** 3).sum())(x)

    call = forward if direction == "forward" else backward
    got = jax.vmap(call, axes)(*arrays)
    for i in range(count):
        one = call(*(x[i] if axis == 0 else x for x, axis in zip(arrays, axes, strict=True)))
        np.testing.assert_array_equal(got[i], one)


@pytest.mark.parametrize("positions", [None, POSITIONS[0]], ids=["none", "all"])
@pytest.mark.parametrize("shape", [(4, 6, 3, 16), (4, 2, 6, 3, 16), (3, 4, 2, 6, 3, 16)], ids=str)
def test_a_batch_of_sequences_is_one_call(shape, positions):
    """However often it is mapped."""
    call = lambda x: qflash.rope(x, tables(), positions=positions)  # noqa: E731
    for _ in shape[: -3 if len(shape) == 4 else -4]:
        call = jax.vmap(call)
    text = str(jax.make_jaxpr(jax.grad(lambda x: (call(x) ** 2).sum()))(jnp.zeros(shape)))
    assert "scan" not in text and "while" not in text and "call=rope(" in text


def test_positions_of_the_rope_are_traced():
    x = drawn(2, 6, 3, 16)
    want = qflash.rope(x, tables(), positions=POSITIONS)
    rope = tables(positions_k=jnp.asarray(POSITIONS))
    np.testing.assert_array_equal(jax.jit(qflash.rope)(x, rope), want)
    np.testing.assert_array_equal(qflash.rope(x, rope), want)


def test_a_position_outside_the_tables_is_refused():
    x, positions = drawn(2, 6, 3, 16), jnp.asarray(POSITIONS).at[1, 2].set(9)
    with pytest.raises(ValueError, match=r"^positions\[2\] is 9; allowed: -8 to 8, the rows of rope.cos"):
        qflash.rope(x, tables(), positions=positions)
    with pytest.raises(Exception, match=r"rope.positions_k\[2\] is 9; allowed: -8 to 8"):
        jax.block_until_ready(jax.jit(qflash.rope)(x, tables(positions_k=positions)))


def test_gradients_of_tables_are_refused_by_name():
    x = drawn(2, 6, 3, 16)
    for table in ("cos", "sin"):
        both = {"cos": jnp.asarray(COS), "sin": jnp.asarray(SIN)}

        def loss(x, angles, table=table, both=both):
            return qflash.rope(x, qflash.Rope(**{**both, table: angles})).sum()

        for grad in (jax.grad(loss, 1), jax.jit(jax.grad(loss, (0, 1)))):
            with pytest.raises(NotImplementedError, match=f"rope.{table} has no gradient in qflash; put jax.lax.stop"):
                grad(x, both[table])
        assert jax.grad(loss)(x, both[table]).shape == x.shape
    # What was refused leaves nothing behind that the next one would find.
    assert jax.grad(jax.checkpoint(lambda x: (qflash.rope(x, tables()) ** 2).sum()))(x).shape == x.shape


def test_no_forward_mode():
    x = drawn(2, 6, 3, 16)
    with pytest.raises(NotImplementedError, match=r"qflash\.rope has no forward-mode derivative .* around x"):
        jax.jvp(lambda x: qflash.rope(x, tables()), (x,), (x,))


def test_an_exported_program_may_have_symbolic_sizes():
    """A batch, a length that the tables are known to have rows for, heads; positions for each token."""
    sizes = export.symbolic_shape("batch, length, heads", constraints=["length <= 9"])
    like = [jax.ShapeDtypeStruct((*sizes, 16), jnp.float32), jax.ShapeDtypeStruct(sizes[:2], jnp.int32)]

    def plain(x, _):
        return qflash.rope(x, tables())

    def placed(x, positions):
        return jax.grad(lambda x: (qflash.rope(x, tables(), positions=positions) ** 2).sum())(x)

    for function in (plain, placed):
        program = export.export(jax.jit(function), platforms=["cpu"], disabled_checks=ALLOW)(*like)
        for shape in ((1, 9, 2), (3, 4, 5)):
            x, positions = drawn(*shape, 16), jnp.asarray(RNG.integers(-8, 9, shape[:2]), jnp.int32)
            np.testing.assert_array_equal(program.call(x, positions), function(x, positions))


def test_results_have_names_for_checkpoint_policies():
    policy = jax.checkpoint_policies.save_only_these_names("qflash.rope.out")
    x = drawn(2, 6, 3, 16)
    loss = jax.checkpoint(lambda x: (qflash.rope(x, tables()) ** 3).sum(), policy=policy)
    jaxpr = str(jax.make_jaxpr(jax.grad(loss))(x))
    assert jaxpr.count("call=rope(") == 2, jaxpr  # there and back
