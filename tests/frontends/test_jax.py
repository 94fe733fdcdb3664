"""JAX front end on the CPU: values against jax.nn and the oracle, dtypes, packed arrays, argument errors."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

import qflash
from qflash.testing import runner
from qflash.testing.cases import CASES
from qflash.testing.compare import FLOAT32_L2, HALF_FACTOR, check_contract, check_gradients
from qflash.testing.concurrency import check_threads_share_plans
from qflash.testing.jax_arrays import arrays, assert_close, relative_l2

jax = pytest.importorskip("jax")
jnp = jax.numpy


@pytest.fixture(autouse=True)
def on_cpu():
    with jax.default_device(jax.devices("cpu")[0]):
        yield


def lens(*values):
    return jnp.array(values, jnp.int32)


# qflash's words beside jax.nn's. jax.nn aligns its causal diagonal to the top left, qflash to the bottom right, so
# masks with a diagonal are compared on square problems.
SQUARE = {"q_len": 13, "k_len": 13}
VERSUS_JAX_NN = {
    "full": ({}, {}, {}),
    "causal": (SQUARE, {"causal": True}, {"is_causal": True}),
    "gqa": ({"q_heads": 8, "kv_heads": 2}, {}, {}),
    "mqa": ({"q_heads": 6, "kv_heads": 1}, {}, {}),
    "window": (SQUARE, {"window": (3, 2)}, {"local_window_size": (3, 2)}),
    "scale": ({}, {"scale": 0.4}, {"scale": 0.4}),
    "kv_lens": ({}, {"kv_lens": (5, 13)}, {"key_value_seq_lengths": (5, 13)}),
    "long": ({"q_len": 150, "k_len": 333, "head_dim": 64}, {}, {}),
}


@pytest.mark.parametrize("name", VERSUS_JAX_NN)
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "jit"])
def test_agrees_with_jax_nn(name, compiled):
    shape, ours, theirs = VERSUS_JAX_NN[name]
    q, k, v = arrays(**shape)
    ours = {word: lens(*x) if word == "kv_lens" else x for word, x in ours.items()}
    theirs = {word: lens(*x) if word == "key_value_seq_lengths" else x for word, x in theirs.items()}

    def call(q, k, v):
        return qflash.attention(q, k, v, **ours)

    got = (jax.jit(call) if compiled else call)(q, k, v)
    assert_close(got, jax.nn.dot_product_attention(q, k, v, **theirs), FLOAT32_L2)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_is_as_good_as_jax_nn(dtype):
    q, k, v = arrays(q_len=64, k_len=64, head_dim=64, dtype=dtype)
    exact = jax.nn.dot_product_attention(*(x.astype(jnp.float32) for x in (q, k, v)))
    ours, theirs = qflash.attention(q, k, v), jax.nn.dot_product_attention(q, k, v)
    assert ours.dtype == q.dtype
    errors = relative_l2(ours, exact), relative_l2(theirs, exact)
    print(f"relative L2 error: qflash {errors[0]:.2e}, jax.nn {errors[1]:.2e}")
    assert errors[0] <= HALF_FACTOR * errors[1]


WIDE = ("quick", "packed", "rope", "empty", "decode", "padding", "window")
SOME_CASES = [case for case in CASES if "quick" in case.tags or case.name.startswith(WIDE)]
SOME_CASES = [case for case in SOME_CASES if "large" not in case.tags]


@pytest.mark.parametrize("case", SOME_CASES, ids=lambda case: case.name)
def test_case_keeps_the_contract(case):
    out, lse = runner.run_case(case, "cpu", "jax")
    errors = check_contract(case, out, lse)
    print(f"relative L2 error against float64: {errors.relative_l2:.2e}")


@pytest.mark.parametrize("case", [c for c in SOME_CASES if c.finite], ids=lambda case: case.name)
def test_gradients_keep_the_contract(case):
    inputs = runner.convert(case.make_inputs(), "jax")
    dout, dlse = case.make_gradients()

    def call(q, k, v):
        return runner.call(case, replace(inputs, q=q, k=k, v=v), "cpu")

    _, pull_back = jax.vjp(call, inputs.q, inputs.k, inputs.v)
    gradients = pull_back((jnp.asarray(dout), jnp.asarray(dlse)))
    for name, errors in check_gradients(case, *(np.asarray(x) for x in gradients)).items():
        print(f"relative L2 error of {name} against float64: {errors.relative_l2:.2e}")


def test_int8_runs():
    q, k, v = arrays(q_len=64, k_len=64, head_dim=64)
    assert relative_l2(qflash.attention(q, k, v, precision="int8"), qflash.attention(q, k, v)) <= 2e-2


def test_same_bits_as_numpy():
    q, k, v = arrays(q_len=70, k_len=90, head_dim=64)
    ours = qflash.attention(q, k, v, causal=True, return_lse=True)
    numpys = qflash.attention(*(np.asarray(x) for x in (q, k, v)), causal=True, return_lse=True)
    for a, b in zip(ours, numpys, strict=True):
        np.testing.assert_array_equal(np.asarray(a), b)


def test_rope_tables_of_half_precision():
    q, k, v = arrays(**SQUARE)
    cos, sin = (jnp.asarray(x, jnp.bfloat16) for x in qflash.rope_tables(13, 16))
    got = qflash.attention(q, k, v, rope=qflash.Rope(cos, sin))
    exact = qflash.Rope(cos.astype(jnp.float32), sin.astype(jnp.float32))
    np.testing.assert_array_equal(got, qflash.attention(q, k, v, rope=exact))


def test_explain():
    explanation = qflash.explain(*arrays())
    assert explanation.kernel == "cpu"
    assert "runs on cuda" in str(explanation)


def test_disable_jit():
    q, k, v = arrays()
    with jax.disable_jit():
        got = qflash.attention(q, k, v)
    assert_close(got, qflash.attention(q, k, v), 1e-7)


def test_scale_types_do_not_mix_up():
    """XLA tells float32 attributes from float64 ones, Python's == does not: every spelling must compile right."""
    q, k, v = arrays()
    results = [qflash.attention(q, k, v, scale=scale) for scale in (np.float32(0.25), 0.25, np.float64(0.25))]
    results += [qflash.attention(q, k, v, scale=scale) for scale in (1, 1.0)]
    assert all((x == results[0]).all() for x in results[:3])
    assert (results[3] == results[4]).all()


@pytest.mark.parametrize("platform", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_threads_share_plans(platform):
    """The arrays are committed to their device, because a new thread does not inherit the default one."""
    device = jax.devices(platform)[0]

    def committed(**sizes):
        return tuple(jax.device_put(x, device) for x in arrays(**sizes))

    check_threads_share_plans(committed, np.array_equal)


def test_a_cached_plan_hides_no_bad_argument():
    """Eager calls look their plan up by arguments, and to a dict True, 1 and 1.0 are one key."""
    q, k, v = arrays()
    qflash.attention(q, k, v, scale=1.0, window=(1, 1))
    with pytest.raises(TypeError, match="scale is True"):
        qflash.attention(q, k, v, scale=True, window=(1, 1))
    with pytest.raises(TypeError, match="window is"):
        qflash.attention(q, k, v, scale=1.0, window=(1, True))


def test_importing_qflash_imports_no_framework():
    code = "import qflash, sys; assert not {'jax', 'jaxlib', 'torch'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


ERRORS = {
    "rank": (lambda q, k, v: qflash.attention(q[0], k, v), ValueError, "q has shape .*rank 4"),
    "batch": (lambda q, k, v: qflash.attention(q, k[:1], v[:1]), ValueError, "k has batch size 1; allowed: q's, 2"),
    "dtype": (lambda q, k, v: qflash.attention(q, k.astype(jnp.float16), v), TypeError, "k has dtype float16"),
    "integers": (lambda q, k, v: qflash.attention(q.astype(jnp.int32), k, v), TypeError, "q has dtype int32"),
    "numpy": (lambda q, k, v: qflash.attention(q, np.zeros(k.shape), v), TypeError, "k is numpy.ndarray; allowed: jax"),
    "number": (
        lambda q, k, v: qflash.attention(q, k, v, kv_lens=2),
        TypeError,
        "kv_lens is builtins.int; allowed: a j",
    ),
    "rope": (lambda q, k, v: qflash.attention(q, k, v, rope=(q, q)), TypeError, "rope is tuple; allowed"),
    "lens": (lambda q, k, v: qflash.attention(q, k, v, kv_lens=jnp.ones(2)), TypeError, "kv_lens has dtype float32"),
    "kernel": (lambda q, k, v: qflash.attention(q, k, v, kernel="nope"), ValueError, "kernel is 'nope'; allowed"),
    "other": (lambda q, k, v: qflash.attention(q, k, v, kernel="fa"), qflash.NoKernelError, "runs on cuda, the arrays"),
    "window": (lambda q, k, v: qflash.attention(q, k, v, window=3), TypeError, "window is 3; allowed"),
}


@pytest.mark.parametrize("name", ERRORS)
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "jit"])
def test_bad_arguments(name, compiled):
    call, kind, text = ERRORS[name]
    with pytest.raises(kind, match=text):
        (jax.jit(call) if compiled else call)(*arrays())


WORDS = {
    "causal": (True, lambda x, word: qflash.attention(x, x, x, causal=word)),
    "scale": (0.5, lambda x, word: qflash.attention(x, x, x, scale=word)),
    "softcap": (2.0, lambda x, word: qflash.attention(x, x, x, softcap=word)),
    "window": (3, lambda x, word: qflash.attention(x, x, x, window=(word, 0))),
    "precision": (1, lambda x, word: qflash.attention(x, x, x, precision=word)),
    "max_seqlen_k": (9, lambda x, word: qflash.attention_varlen(x[0], x[0], x[0], [0, 9], [0, 9], 9, word)),
    "eps": (1e-3, lambda x, word: qflash.layer_norm(x, x[0, 0, 0], x[0, 0, 0], eps=word)),
    "group": (16, lambda x, word: qflash.quantize(x, granularity="group", group=word)),
}


@pytest.mark.parametrize("name", WORDS)
def test_words_that_are_arrays(name):
    """jit traces every argument that is not static, and a kernel is chosen while it traces."""
    value, call = WORDS[name]
    x = arrays()[0]
    with pytest.raises(TypeError, match=rf"^{name} is traced; allowed: a plain value .* static_argnames='{name}'\)"):
        jax.jit(call)(x, value)
    with pytest.raises(TypeError, match=rf"^{name} is a jax\.Array; allowed: a plain value, .* {name}\.tolist\(\)"):
        call(x, jnp.asarray(value))
    if name != "precision":
        jax.jit(call, static_argnums=1)(x, value)


def test_a_shape_is_no_array():
    x = arrays()[0]
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    with pytest.raises(TypeError, match=r"^q is jax\S*\.ShapeDtypeStruct; allowed: jax\.Array$"):
        qflash.attention(shape, x, x)
    with pytest.raises(TypeError, match=r"^k is jax\S*\.ShapeDtypeStruct; allowed: jax\.Array, as q is$"):
        qflash.attention(x, shape, x)
    assert jax.eval_shape(qflash.attention, shape, shape, shape).shape == x.shape


@pytest.mark.parametrize("bad", [(2, 14), (-1, 3)])
def test_bad_lengths_are_value_errors_when_eager(bad):
    q, k, v = arrays()
    with pytest.raises(ValueError, match=r"^kv_lens"):
        qflash.attention(q, k, v, kv_lens=lens(*bad))
    assert_close(qflash.attention(q, k, v), jax.nn.dot_product_attention(q, k, v), FLOAT32_L2)


def test_bad_lengths_are_runtime_errors_when_compiled():
    q, k, v = arrays()
    with pytest.raises(jax.errors.JaxRuntimeError, match="kv_lens"):
        jax.block_until_ready(jax.jit(lambda *x: qflash.attention(*x[:3], kv_lens=x[3]))(q, k, v, lens(2, 14)))


def test_bad_cu_seqlens_are_value_errors():
    q, k, v = (x[0] for x in arrays(q_len=12, k_len=12))
    with pytest.raises(ValueError, match=r"^cu_seqlens_q"):
        qflash.attention_varlen(q, k, v, lens(0, 20, 12), lens(0, 5, 12), 12, 12)


def test_rope_position_out_of_the_table():
    q, k, v = arrays(**SQUARE)
    cos, sin = (jnp.asarray(x) for x in qflash.rope_tables(13, 16))
    with pytest.raises(ValueError, match="positions_q"):
        qflash.attention(q, k, v, rope=qflash.Rope(cos, sin, positions_q=jnp.arange(1, 14, dtype=jnp.int32)))
