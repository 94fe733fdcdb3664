"""Operations beside attention on JAX arrays: NumPy's bits under jit, vmap, export and shard_map."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import numpy as np
import pytest

import qflash
from qflash import backends
from qflash.backends import Entry
from qflash.backends.arch import asked
from qflash.call.prepare import prepare
from qflash.testing.op_cases import CASES, check_equal, flat

jax = pytest.importorskip("jax")
jnp = jax.numpy
export = pytest.importorskip("jax.export")


def arrays(case) -> dict:
    return {key: jnp.asarray(x) for key, x in case.arrays.items()}


@pytest.mark.parametrize("name", CASES)
def test_eager_gives_numpys_bits(name):
    case = CASES[name]
    check_equal(case.call(**arrays(case)), case.call(**case.arrays))


@pytest.mark.parametrize("name", CASES)
def test_jit(name):
    """A Quantized comes out of a jitted function as one."""
    case = CASES[name]
    check_equal(jax.jit(lambda xs: case.call(**xs))(arrays(case)), case.call(**case.arrays))


@pytest.mark.parametrize("name", CASES)
def test_vmap_is_a_loop(name):
    case = CASES[name]
    samples = [
        {key: np.roll(x, i, 0) if key in case.mapped and x.ndim else x for key, x in case.arrays.items()}
        for i in range(3)
    ]
    stacked = {
        key: np.stack([s[key] for s in samples], -1) if key in case.mapped else x for key, x in case.arrays.items()
    }
    axes = {key: x.ndim if key in case.mapped else None for key, x in case.arrays.items()}
    got = jax.vmap(lambda xs: flat(case.call(**xs)), in_axes=(axes,))(
        {key: jnp.asarray(x) for key, x in stacked.items()}
    )
    wanted = [
        np.stack([np.asarray(x) for x in outs]) for outs in zip(*(flat(case.call(**s)) for s in samples), strict=True)
    ]
    check_equal(got, wanted)


def test_a_mapped_x_is_one_call():
    x = jnp.zeros((5, 3, 8))
    text = str(jax.make_jaxpr(jax.vmap(qflash.softmax))(x))
    assert "scan" not in text and "while" not in text
    assert "scan" in str(jax.make_jaxpr(jax.vmap(lambda x, w: qflash.layer_norm(x, w)))(x, jnp.zeros((5, 8))))


@pytest.mark.parametrize("name", CASES)
def test_vmap_over_nothing(name):
    case = CASES[name]
    xs = arrays(case)
    axes = {key: 0 if key in case.mapped else None for key in xs}
    none = {key: jnp.zeros((0, *x.shape), x.dtype) if key in case.mapped else x for key, x in xs.items()}
    got = jax.vmap(lambda xs: flat(case.call(**xs)), in_axes=(axes,))(none)
    wanted = flat(case.call(**xs))
    assert [(x.shape, x.dtype) for x in got] == [((0, *x.shape), x.dtype) for x in wanted]


@pytest.mark.parametrize("name", ["quantize"])
def test_gradients_are_refused_by_name(name):
    case = CASES[name]
    first, *_ = case.arrays
    xs = arrays(case)

    def total(x, stop=lambda x: x):
        return sum(jnp.sum(out.astype(jnp.float32)) for out in flat(case.call(**{**xs, first: stop(x)})))

    text = f"qflash.{name} is forward only and {first} is being differentiated"
    for transform in (jax.grad(total), jax.jit(jax.grad(total)), lambda x: jax.jvp(total, (x,), (x,))):
        with pytest.raises(NotImplementedError, match=text):
            transform(xs[first])
    assert not jax.grad(lambda x: total(x, jax.lax.stop_gradient))(xs[first]).any()


EXPORTED = ["softmax", "cross_entropy", "int8_matmul scaled", "linear", "swiglu of QuantizedLinear", "quantize groups"]


def test_exported_programs_run_in_another_process(tmp_path, flatbuffers):
    """One for all of them: most of its time goes into the import of JAX."""
    wanted = {name: export_program(CASES[name], tmp_path / name) for name in EXPORTED}
    code = """
import sys, numpy as np, qflash, qflash.frontends.jax
from jax import export
for folder in sys.argv[1:]:
    with np.load(folder + "/arrays.npz") as stored: xs = [stored[name] for name in stored.files]
    outs = export.deserialize(open(folder + "/program", "rb").read()).call(*xs)
    np.savez(folder + "/outs.npz", *outs)
"""
    subprocess.run([sys.executable, "-c", code, *(str(tmp_path / name) for name in EXPORTED)], check=True)
    for name in EXPORTED:
        with np.load(tmp_path / name / "outs.npz") as stored:
            check_equal([stored[key] for key in stored.files], wanted[name])


def export_program(case, folder):
    """Write a call of the case as a program, and its arrays. What it gives in this process."""
    names = list(case.arrays)
    function = jax.jit(lambda *xs: flat(case.call(**dict(zip(names, xs, strict=True)))))
    checks = [export.DisabledSafetyCheck.custom_call("qflash_call")]
    xs = [jnp.asarray(x) for x in case.arrays.values()]
    folder.mkdir()
    np.savez(folder / "arrays.npz", *xs)
    (folder / "program").write_bytes(export.export(function, disabled_checks=checks)(*xs).serialize())
    return [np.asarray(x) for x in function(*xs)]


def test_symbolic_sizes_are_refused_by_name():
    (rows,) = export.symbolic_shape("rows")
    with pytest.raises(
        NotImplementedError, match=r"x has symbolic shape \(rows, 8\); allowed in qflash.softmax: numbers"
    ):
        export.export(jax.jit(qflash.softmax))(jax.ShapeDtypeStruct((rows, 8), "float32"))


@ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_void_p)
def four_kilobytes(_params):
    return 4096


@pytest.mark.skipif(any(d.platform == "gpu" for d in jax.devices()), reason="a GPU's own architecture would be used")
def test_lowering_for_cuda_without_a_gpu(monkeypatch):
    """A stand-in for the compiled kernel: lowering asks only for addresses and the size of the workspace."""
    entry = Entry(1, 0, ctypes.cast(four_kilobytes, ctypes.c_void_p).value)
    monkeypatch.setattr(backends, "load", lambda kernel, spec: entry)
    monkeypatch.setenv("QFLASH_CUDA_ARCH", "90")
    asked.cache_clear()
    try:
        a, b = (jnp.zeros(shape, jnp.int8) for shape in ((4, 8), (8, 3)))
        checks = [export.DisabledSafetyCheck.custom_call("qflash_call")]
        program = export.export(jax.jit(qflash.int8_matmul), platforms=["cuda"], disabled_checks=checks)(a, b)
    finally:
        asked.cache_clear()
        prepare.cache_clear()
    call = next(line for line in program.mlir_module().splitlines() if "custom_call @qflash_call" in line)
    assert r"QfLinearParams\22,\22int8_gemm_tc\22,\22cuda\22,90,\22int32\22" in call
    assert r"\22linear\22,\22arrays\22,\22n\22,\22\22," in call
    assert "num_bytes = dense<[32, 24, 48]>" in call and "tensor<4096xui8>" in call


def test_bad_values_are_refused():
    logits = jnp.zeros((3, 19))
    targets = jnp.array([0, 19, 1])
    with pytest.raises(ValueError, match="target"):
        qflash.cross_entropy(logits, targets)
    with pytest.raises(Exception, match="target"):
        jax.block_until_ready(jax.jit(qflash.cross_entropy)(logits, targets))


def test_int64_targets():
    jax.config.update("jax_enable_x64", True)
    try:
        logits, targets = jnp.zeros((3, 19), jnp.float32), jnp.array([0, 2**32, 1])
        assert targets.dtype == jnp.int64
        with pytest.raises(ValueError, match="target"):
            qflash.cross_entropy(logits, targets)
        check_equal(
            qflash.cross_entropy(logits, targets % 19),
            qflash.cross_entropy(np.asarray(logits), np.asarray(targets) % 19),
        )
    finally:
        jax.config.update("jax_enable_x64", False)


def test_empty_arrays():
    none = jnp.zeros((0, 5))
    assert qflash.softmax(none).shape == (0, 5)
    assert jax.vmap(qflash.softmax)(jnp.zeros((4, 0, 5))).shape == (4, 0, 5)
    assert jnp.isnan(qflash.cross_entropy(none, jnp.zeros(0, jnp.int32)))
    assert qflash.int8_matmul(jnp.zeros((2, 0), jnp.int8), jnp.zeros((0, 3), jnp.int8)).tolist() == [[0] * 3] * 2


def test_without_jit():
    case = CASES["layer_norm"]
    with jax.disable_jit():
        check_equal(case.call(**arrays(case)), case.call(**case.arrays))


def test_scan_and_shard_map():
    x = jnp.asarray(CASES["softmax"].arrays["x"])
    _, outs = jax.lax.scan(lambda carry, row: (carry, qflash.softmax(row)), 0, x)
    check_equal(outs, qflash.softmax(x))
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("rows",))
    spec = jax.sharding.PartitionSpec("rows")
    check_equal(jax.shard_map(qflash.softmax, mesh=mesh, in_specs=spec, out_specs=spec)(x), qflash.softmax(x))


def test_quantized_is_a_pytree():
    quantized = qflash.quantize(jnp.ones((4, 8)), granularity="token")
    leaves, tree = jax.tree.flatten(quantized)
    assert len(leaves) == 2
    again = jax.tree.unflatten(tree, leaves)
    assert again.granularity == "token" and again.dtype == "float32"
    out = jax.jit(lambda q: qflash.dequantize(q, jnp.bfloat16))(quantized)
    assert out.dtype == jnp.bfloat16 and bool((out == 1).all())


BAD = {
    "mixed": (lambda x: qflash.layer_norm(x, np.zeros(8, "f4")), TypeError, "weight is numpy.ndarray; .*as x is"),
    "dtype": (lambda x: qflash.softmax(x.astype(int)), TypeError, "x has dtype int32; allowed: float32"),
    "scale": (lambda x: qflash.softmax(x, scale=jnp.ones(())), TypeError, "scale is a jax.Array; allowed: a plain"),
    "kernel": (lambda x: qflash.softmax(x, kernel="fa"), ValueError, "kernel is 'fa'; allowed: None, '"),
    "shape": (lambda x: qflash.layer_norm(x, x[0, :3]), ValueError, r"weight has shape \[3\]; allowed: \[8\]"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_named(name):
    call, error, text = BAD[name]
    with pytest.raises(error, match=text):
        call(jnp.zeros((3, 8)))
    if name not in ("mixed", "scale"):
        with pytest.raises(error, match=text):
            jax.jit(call)(jnp.zeros((3, 8)))
