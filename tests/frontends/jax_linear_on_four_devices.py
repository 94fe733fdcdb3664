"""Products on sharded arrays under jit: by rows of x, by columns of w. test_jax_sharding.py runs this on 4 devices."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import qflash
from qflash.testing.compare import FLOAT32_L2, GRADIENT_L2
from qflash.testing.jax_arrays import assert_close, collectives, put

RNG = np.random.default_rng(7)
X, W, U, B, C, R = (
    jnp.asarray(RNG.standard_normal(shape, np.float32))
    for shape in ((4, 6, 8), (8, 12), (8, 12), (12,), (12,), (4, 6, 12))
)

# What is split -> specs of x, w, a bias and a residual, and that of the result.
SPLITS = {
    "rows": ((P("d"), P(), P(), P("d")), P("d")),
    "rows of two dimensions": ((P("d", "t"), P(), P(), P()), P("d", "t")),
    "columns": ((P(), P(None, "t"), P("t"), P(None, None, "t")), P(None, None, "t")),
    "both": ((P("d"), P(None, "t"), P("t"), P("d", None, "t")), P("d", None, "t")),
}
EVERY = pytest.mark.parametrize("split", SPLITS)


def linear(x, w, b, r):
    return qflash.linear(x, w, b, activation="gelu", residual=r)


def swiglu(x, w, b, r, u, c):
    return qflash.swiglu(x, w, u, b, c, residual=r)


# Each call, its arrays, and the place in specs of what each array is split as.
CALLS = {"linear": (linear, (X, W, B, R), range(4)), "swiglu": (swiglu, (X, W, B, R, U, C), (0, 1, 2, 3, 1, 2))}


def new_mesh(kind=AxisType.Auto):
    return jax.make_mesh((2, 2), ("d", "t"), axis_types=(kind,) * 2)


def placed(arrays, specs, mesh=None):
    return tuple(put(mesh or new_mesh(), spec, x)[0] for x, spec in zip(arrays, specs, strict=True))


def is_split(x, spec) -> bool:
    return x.sharding.is_equivalent_to(NamedSharding(new_mesh(), spec), x.ndim)


def gradient_of(call, count):
    return jax.grad(lambda *xs: (call(*xs).astype(jnp.float32) ** 2).sum(), tuple(range(count)))


@EVERY
@pytest.mark.parametrize("name", CALLS)
def test_a_call_stays_split(name, split):
    call, arrays, kinds = CALLS[name]
    specs, of_result = SPLITS[split]
    operands = placed(arrays, [specs[kind] for kind in kinds])
    assert collectives(call, *operands) == []
    got = jax.jit(call)(*operands)
    assert is_split(got, of_result)
    assert_close(got, call(*arrays), FLOAT32_L2)


def test_a_device_computes_its_part_alone():
    (specs, _), mesh = SPLITS["both"], new_mesh()
    program = jax.jit(linear).lower(*placed((X, W, B, R), specs, mesh)).compile().as_text()
    assert re.findall(r"= \(f32\[([\d,]+)\]\S*, \S+ custom-call\(", program) == ["2,6,6"]


@EVERY
@pytest.mark.parametrize("name", CALLS)
def test_gradients_are_sums_over_all_shards(name, split):
    """Those of weights and biases where rows are split, that of x where columns are: nothing else is communicated."""
    call, arrays, kinds = CALLS[name]
    specs, _ = SPLITS[split]
    operands = placed(arrays, [specs[kind] for kind in kinds])
    gradient = gradient_of(call, len(arrays))
    assert collectives(gradient, *operands) == ["all-reduce"]
    got = jax.jit(gradient)(*operands)
    assert all(is_split(got[at], specs[kinds[at]]) for at in (0, 1, 2))
    assert_close(got, gradient(*arrays), GRADIENT_L2["float32"])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_gradients(dtype):
    """Against those of float32, because sums over devices round in another order."""
    halves = [x.astype(dtype) for x in (X, W, B, R)]
    got = jax.jit(gradient_of(linear, 4))(*placed(halves, SPLITS["both"][0]))
    assert {x.dtype.name for x in got} == {dtype}
    assert_close(got, gradient_of(linear, 4)(*(x.astype(jnp.float32) for x in halves)), GRADIENT_L2[dtype])


@pytest.mark.parametrize(
    ("specs", "of_result"),
    [
        ((P("d"), P(None, "d"), P("d"), P()), P("d")),  # one axis for both: rows stay, weights are gathered
        ((P(("d", "t")), P("t"), P(), P()), P(("d", "t"))),  # weights split along k
        ((P(None, None, "t"), P("t"), P(), P()), P()),  # x, too: sums are not taken over devices
    ],
    ids=["axis", "k of w", "k"],
)
def test_what_must_be_whole_is_gathered(specs, of_result):
    operands = placed((X, W, B, R), specs)
    assert collectives(linear, *operands) == ["all-gather"]
    got = jax.jit(linear)(*operands)
    assert is_split(got, of_result)
    assert_close(got, linear(X, W, B, R), FLOAT32_L2)
    gradient = gradient_of(linear, 4)
    assert_close(jax.jit(gradient)(*operands), gradient(X, W, B, R), GRADIENT_L2["float32"])


def test_rows_that_devices_do_not_divide():
    def call(x, w):
        return qflash.linear(jnp.concatenate([x, x[:2]]), w)  # 6 rows over 4 devices

    x, w = placed((X, W), (P(("d", "t")), P()))
    assert_close(jax.jit(call)(x, w), call(X, W), FLOAT32_L2)


@pytest.mark.parametrize("x", [X[0, 0], X[:0], X.reshape((1,) * 25 + (24, 8))], ids=["vector", "empty", "rank 27"])
def test_x_of_other_shapes(x):
    specs = (P(), P(None, "t"), P("t"))
    gradient = gradient_of(qflash.linear, 3)
    for function, bound in ((qflash.linear, FLOAT32_L2), (gradient, GRADIENT_L2["float32"])):
        got, want = jax.jit(function)(*placed((x, W, B), specs)), function(x, W, B)
        if x.size:
            assert_close(got, want, bound)
        else:
            jax.tree.map(np.testing.assert_array_equal, got, want)


INT8 = {
    "linear": lambda x, w, b: qflash.linear(x, w, b, precision="int8"),
    "swiglu": lambda x, w, b: qflash.swiglu(x, w, w, b, b, precision="int8"),
    "quantize_linear": lambda x, w, b: qflash.linear(x, qflash.quantize_linear(w), b),
}


@pytest.mark.parametrize("name", INT8)
@EVERY
def test_int8(name, split):
    """Rows and columns have scales of their own, so quantization is split as well."""
    specs, of_result = SPLITS[split]
    operands = placed((X, W, B), specs[:3])
    assert collectives(INT8[name], *operands) == []
    got = jax.jit(INT8[name])(*operands)
    assert is_split(got, of_result)
    np.testing.assert_array_equal(got, INT8[name](X, W, B))


@pytest.mark.parametrize("leading", [(4,), (4, 6)], ids=str)
@pytest.mark.parametrize("scales", [None, "numbers", "one", "each"])
def test_int8_matmul(scales, leading):
    """A scale of one element is for all rows, or all columns, and stays whole."""
    a, b = (jnp.asarray(RNG.integers(-9, 9, shape), jnp.int8) for shape in ((*leading, 8), (8, 12)))
    shapes = {"numbers": ((), ()), "one": ((1,), (1,)), "each": (leading, (12,))}
    more = [jnp.asarray(RNG.standard_normal(shape), jnp.float32) for shape in shapes.get(scales, ())]
    operands = placed((a, b), (P("d"), P(None, "t")))
    assert collectives(qflash.int8_matmul, *operands, *more) == []
    got = jax.jit(qflash.int8_matmul)(*operands, *more)
    assert is_split(got, P("d", None, "t") if len(leading) == 2 else P("d", "t"))
    np.testing.assert_array_equal(got, qflash.int8_matmul(a, b, *more))


def test_vmap():
    """Of rows, one call; of weights, a loop of split ones."""
    rows = jax.vmap(qflash.linear, (0, None, None))
    operands = placed((X, W, B), SPLITS["both"][0][:3])
    assert collectives(rows, *operands) == []
    assert_close(jax.jit(rows)(*operands), rows(X, W, B), FLOAT32_L2)
    every = jax.vmap(gradient_of(qflash.linear, 3), (None, 0, None))
    weights = jnp.stack([W, U])
    got = jax.jit(every)(*placed((X, weights, B), (P("d"), P(None, None, "t"), P("t"))))
    assert_close(got, every(X, weights, B), GRADIENT_L2["float32"])


@pytest.mark.parametrize("name", ["rows", "both", "axis", "k"])
def test_explicit_sharding(name):
    """Shardings are types here: a gradient has that of its array, and no axis splits two dimensions."""
    more = {"axis": ((P("d"), P(None, "d"), P("d")), P("d")), "k": ((P(None, None, "t"), P(), P()), P())}
    specs, of_result = {**SPLITS, **more}[name]
    mesh = new_mesh(AxisType.Explicit)
    gradient = gradient_of(qflash.linear, 3)
    with jax.set_mesh(mesh):
        operands = placed((X, W, B), specs[:3], mesh)
        got, gradients = jax.jit(qflash.linear)(*operands), jax.jit(gradient)(*operands)
    assert got.sharding.is_equivalent_to(NamedSharding(mesh, of_result), 3)
    assert [x.sharding.spec for x in gradients] == [jax.typeof(x).sharding.spec for x in operands]
    assert_close(got, qflash.linear(X, W, B), FLOAT32_L2)
    assert_close(gradients, gradient(X, W, B), GRADIENT_L2["float32"])


def test_shard_map_over_one_axis_of_two():
    """The other axis stays with the compiler."""
    specs = (P("d"), P(), P())
    split = jax.shard_map(qflash.linear, mesh=new_mesh(), in_specs=specs, out_specs=P("d"), axis_names={"d"})
    gradient = gradient_of(split, 3)
    got = jax.jit(gradient)(*placed((X, W, B), SPLITS["both"][0][:3]))
    assert_close(got, gradient_of(qflash.linear, 3)(X, W, B), GRADIENT_L2["float32"])
