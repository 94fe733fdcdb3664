"""JAX front end: kv_lens, cu_seqlens and positions as lists, NumPy integers and arrays of int64."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import numpy as np
import pytest

import qflash
from qflash.call import cache
from qflash.frontends import jax as frontend
from qflash.testing.jax_arrays import arrays

jax = pytest.importorskip("jax")
jnp = jax.numpy

LENS = (13, 4)
AT_Q, AT_K = tuple(range(3, 12)), tuple(range(12, -1, -1))
OFFSETS = (0, 4, 9), (0, 6, 13)
TABLES = tuple(jnp.asarray(x) for x in qflash.rope_tables(40, 8))

FORMS = {
    "list": list,
    "tuple": tuple,
    "int8": lambda x: np.array(x, np.int8),
    "int32": lambda x: np.array(x, np.int32),
    "int64": lambda x: np.array(x, np.int64),
    "uint64": lambda x: np.array(x, np.uint64),
    "strided": lambda x: np.repeat(np.array(x), 2)[::2],
    "numpy scalars": lambda x: [np.int64(n) for n in x],
    "jax int16": lambda x: jnp.array(x, jnp.int16),
}


@pytest.fixture(autouse=True)
def on_cpu():
    with jax.default_device(jax.devices("cpu")[0]):
        yield


def attend(q, k, v, form, of_lens=LENS):
    rope = qflash.Rope(*TABLES, positions_q=form(AT_Q), positions_k=form(AT_K))
    return qflash.attention(q, k, v, kv_lens=form(of_lens), rope=rope, return_lse=True)


def attend_packed(q, k, v, form, of_lens=(5, 4)):
    cu_q, cu_k = map(form, OFFSETS)
    return qflash.attention_varlen(q[0], k[0], v[0], cu_q, cu_k, 5, 7, kv_lens=form(of_lens), return_lse=True)


def int32(x):
    return jnp.array(x, jnp.int32)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("call", [attend, attend_packed])
def test_every_form_is_int32(form, call):
    operands = arrays()
    want = call(*operands, int32)
    for wrap in (lambda f: f, jax.jit):
        for a, b in zip(wrap(lambda *x: call(*x, FORMS[form]))(*operands), want, strict=True):
            np.testing.assert_array_equal(a, b)


def test_under_transformations():
    """A list is a constant of the program: vmap, grad and scan see it as one."""
    q, k, v = arrays()
    loss = lambda q, form: (attend(q, k, v, form)[0] ** 2).sum()  # noqa: E731
    np.testing.assert_array_equal(jax.grad(loss)(q, list), jax.grad(loss)(q, int32))
    many = jnp.stack([q, 2 * q])
    np.testing.assert_array_equal(
        jax.vmap(lambda q: attend(q, k, v, list)[0])(many), jax.vmap(lambda q: attend(q, k, v, int32)[0])(many)
    )
    looped = jax.lax.scan(lambda q, _: (qflash.attention(q, k, v, kv_lens=[3, 4]), None), q, None, length=2)[0]
    once = qflash.attention(q, k, v, kv_lens=int32([3, 4]))
    np.testing.assert_array_equal(looped, qflash.attention(once, k, v, kv_lens=int32([3, 4])))


def test_positions_of_each_sequence():
    q, k, v = arrays()
    at = np.arange(18).reshape(2, 9)
    want = qflash.attention(q, k, v, rope=qflash.Rope(*TABLES, positions_q=int32(at)))
    for form in (at, at.tolist(), at.astype(np.uint16)):
        np.testing.assert_array_equal(qflash.attention(q, k, v, rope=qflash.Rope(*TABLES, positions_q=form)), want)


def test_explain_takes_them():
    assert qflash.explain(*arrays(), kv_lens=[1, 2]).kernel == "cpu"


def test_the_other_operations():
    q, k, v = arrays()
    spin = lambda form: qflash.Rope(*TABLES, positions_k=form(AT_Q))  # noqa: E731
    want = qflash.quantize(q, lens=int32(LENS[1:] * 2), rope=spin(int32))
    got = qflash.quantize(q, lens=list(LENS[1:] * 2), rope=spin(np.array))
    np.testing.assert_array_equal(got.values, want.values)
    integers = [qflash.quantize(x) for x in (q, k)]
    np.testing.assert_array_equal(
        qflash.attention(*integers, v, kv_lens=np.array(LENS)), qflash.attention(*integers, v, kv_lens=int32(LENS))
    )
    with pytest.raises(ValueError, match=r"^lens contains 2147483648; allowed: what int32 holds"):
        qflash.quantize(q, lens=[2**31, 1])


def compiled_programs() -> list[int]:
    """How many programs each call that was checked has."""
    checked = [x for x in cache._plans.values() if isinstance(x, frontend.Checked)]
    return [x.program._cache_size() for x in checked]


def test_no_call_compiles_anew():
    """New values, and another form of them, run the program that is there."""
    q, k, v = arrays(seed=5, head_dim=24)
    qflash.attention(q, k, v, kv_lens=int32([1, 2]))
    before = compiled_programs()
    for of_lens in ([3, 4], (13, 0), np.array([5, 6]), np.array([7, 7], np.uint8)):
        qflash.attention(q, k, v, kv_lens=of_lens)
    assert compiled_programs() == before


def test_a_user_may_write_to_the_array_afterwards():
    q, k, v = arrays()
    of_lens = np.array(LENS, np.int32)
    compiled = jax.jit(lambda q: qflash.attention(q, k, v, kv_lens=of_lens))
    want = compiled(q)
    of_lens[:] = 1
    np.testing.assert_array_equal(compiled(q), want)


BAD_VALUES = {
    "above": ([2**31, 1], r"kv_lens contains 2147483648; allowed: what int32 holds, -2147483648 to 2147483647"),
    "numpy": (np.array([1, -(2**40)]), r"kv_lens contains -1099511627776; allowed: what int32 holds"),
    "ragged": ([[1], [1, 2]], r"kv_lens is a ragged list"),
    "shape": ([1, 2, 3], r"kv_lens has shape \[3\]; allowed: \[2\]"),
}
BAD_TYPES = {
    "bool": ([True, False], r"kv_lens contains True; allowed: ints"),
    "float": ([1.0, 2.0], r"kv_lens contains 1\.0; allowed: ints"),
    "floats": (np.ones(2), r"kv_lens has dtype float64; allowed: an integer dtype"),
    "jax floats": (jnp.ones(2), r"kv_lens has dtype float32; allowed: int32"),
    "number": (3, r"kv_lens is builtins\.int; allowed: a jax\.Array of int32, a numpy\.ndarray of integers, or a list"),
    "text": ("13", r"kv_lens is builtins\.str; allowed: a jax\.Array of int32"),
}


@pytest.mark.parametrize("name", [*BAD_VALUES, *BAD_TYPES])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "jit"])
def test_bad_lengths(name, compiled):
    (value, text), kind = ({**BAD_VALUES, **BAD_TYPES}[name], ValueError if name in BAD_VALUES else TypeError)
    call = lambda q, k, v: qflash.attention(q, k, v, kv_lens=value)  # noqa: E731
    with pytest.raises(kind, match=f"^{text}"):
        (jax.jit(call) if compiled else call)(*arrays())


@pytest.mark.parametrize("name", ["cu_seqlens_q", "cu_seqlens_k", "rope.positions_q", "rope.positions_k"])
def test_the_argument_is_named(name):
    q, k, v = arrays()
    bad = [0, 2**33]
    with pytest.raises(ValueError, match=rf"^{re.escape(name)} contains 8589934592; allowed: what int32 holds"):
        if name.startswith("rope"):
            rope = qflash.Rope(*TABLES, **{name.removeprefix("rope."): bad})
            qflash.attention(q, k, v, rope=rope)
        else:
            offsets = {"cu_seqlens_q": [0, 9], "cu_seqlens_k": [0, 13], name: bad}
            qflash.attention_varlen(q[0], k[0], v[0], **offsets, max_seqlen_q=9, max_seqlen_k=13)


def test_a_list_that_crosses_jit():
    """To jit a list is a tree, and each number in it an argument."""
    q, k, v = arrays()
    with pytest.raises(TypeError, match=r"^kv_lens is a list of jax\.Arrays.*jnp\.asarray\(kv_lens, jnp\.int32\)"):
        jax.jit(lambda q, n: qflash.attention(q, k, v, kv_lens=n))(q, [13, 4])
    rope = qflash.Rope(*TABLES, positions_q=list(AT_Q))
    with pytest.raises(TypeError, match=r"^rope\.positions_q is a list of jax\.Arrays"):
        jax.jit(lambda q, rope: qflash.attention(q, k, v, rope=rope))(q, rope)
    # A NumPy array is a leaf.
    np.testing.assert_array_equal(
        jax.jit(lambda q, n: qflash.attention(q, k, v, kv_lens=n))(q, np.array(LENS)),
        qflash.attention(q, k, v, kv_lens=int32(LENS)),
    )


def test_a_traced_array_whose_values_might_not_fit():
    q, k, v = arrays()
    text = r"^kv_lens has dtype uint32 and is traced; allowed: int32, cast it with kv_lens\.astype\(jnp\.int32\)"
    with pytest.raises(TypeError, match=text):
        jax.jit(lambda q, n: qflash.attention(q, k, v, kv_lens=n))(q, jnp.array(LENS, jnp.uint32))


IN_64_BITS = """
import jax, numpy as np, qflash
import jax.numpy as jnp

jax.config.update("jax_enable_x64", True)
here, there = jax.devices("cpu")
q = jnp.asarray(np.random.default_rng(0).standard_normal((2, 5, 2, 8)), jnp.float32)
want = qflash.attention(q, q, q, kv_lens=jnp.array([5, 2], jnp.int32))
lens = jnp.array([5, 2])
assert lens.dtype == jnp.int64
np.testing.assert_array_equal(qflash.attention(q, q, q, kv_lens=lens), want)
np.testing.assert_array_equal(jax.jit(lambda q: qflash.attention(q, q, q, kv_lens=lens))(q), want)  # a constant
np.testing.assert_array_equal(qflash.attention(q, q, q, kv_lens=[5, 2]), want)


def refused(kind, text, call, *args):
    try:
        call(*args)
    except kind as error:
        assert str(error).startswith(text), error
    else:
        raise AssertionError(text)


attend = lambda q, n: qflash.attention(q, q, q, kv_lens=n)
refused(ValueError, "kv_lens contains 4294967296; allowed: what int32 holds", attend, q, jnp.array([2**32, 1]))
refused(TypeError, "kv_lens has dtype int64 and is traced; allowed: int32, cast it with", jax.jit(attend), q, lens)
# An int64 array that is committed stays where it is; a list goes where q is.
moved = jax.device_put(q, there)
assert attend(moved, [5, 2]).devices() == {there}
assert attend(moved, lens).devices() == {there}
assert attend(moved, jax.device_put(lens, there)).devices() == {there}
refused(ValueError, "kv_lens is on cpu:0; allowed: q's device, cpu:1", attend, moved, jax.device_put(lens, here))
"""


def test_int64_and_several_devices():
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
    }
    done = subprocess.run([sys.executable, "-c", IN_64_BITS], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.gpu
def test_values_on_a_gpu_that_might_not_fit_are_refused_without_waiting():
    with jax.default_device(jax.devices("cuda")[0]):
        q, k, v = arrays(dtype="float16")
        with pytest.raises(TypeError, match=r"^kv_lens has dtype uint32 and is on a device.*astype\(jnp\.int32\)"):
            qflash.attention(q, k, v, kv_lens=jnp.array(LENS, jnp.uint32))
        got = qflash.attention(q, k, v, kv_lens=list(LENS))
        assert got.devices() == q.devices()
        np.testing.assert_array_equal(got, qflash.attention(q, k, v, kv_lens=int32(LENS)))
