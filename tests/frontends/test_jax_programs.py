"""Compiled JAX programs: they outlive the process that made them, and can be made for a platform that is not here."""

from __future__ import annotations

import ctypes
import dataclasses
import json
import os
import re
import struct
import subprocess
import sys

import numpy as np
import pytest

import qflash
from qflash import _native, backends, dispatch
from qflash.backends import Entry
from qflash.backends.arch import asked
from qflash.call.prepare import prepare
from qflash.call.spec import Spec
from qflash.testing.jax_arrays import arrays

jax = pytest.importorskip("jax")
jnp = jax.numpy
from jax import export  # noqa: E402

ALLOW = [export.DisabledSafetyCheck.custom_call("qflash_call")]


@pytest.fixture(autouse=True)
def on_cpu():
    with jax.default_device(jax.devices("cpu")[0]):
        yield


def in_a_new_process(code: str, **environment: str) -> str:
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", **environment}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def gradients(q, k, v):
    return jax.grad(lambda *x: (qflash.attention(*x, causal=True) ** 2).sum(), (0, 1, 2))(q, k, v)


LOAD = """
import sys, numpy as np, jax
from jax import export
import qflash.frontends.jax
call = export.deserialize(bytearray(open(sys.argv[1] + "/program", "rb").read())).call
inputs = np.load(sys.argv[1] + "/inputs.npz")
results = call(*(inputs[name] for name in "qkv"))
np.savez(sys.argv[1] + "/results.npz", *results)
"""


def test_an_exported_program_finds_its_kernels_in_a_new_process(tmp_path, flatbuffers):
    q, k, v = arrays()
    program = export.export(jax.jit(gradients), platforms=["cpu"], disabled_checks=ALLOW)(q, k, v)
    (tmp_path / "program").write_bytes(program.serialize())
    np.savez(tmp_path / "inputs.npz", q=q, k=k, v=v)
    in_a_new_process(f"import sys; sys.argv = ['', {str(tmp_path)!r}]\n{LOAD}")
    results = np.load(tmp_path / "results.npz")
    for got, want in zip(results.values(), gradients(q, k, v), strict=True):
        np.testing.assert_array_equal(got, want)


def test_an_exported_program_may_have_symbolic_sizes():
    batch, length = export.symbolic_shape("batch, length")
    symbolic = [jax.ShapeDtypeStruct((batch, t, h, 16), jnp.float32) for t, h in ((9, 4), (length, 2), (length, 2))]
    program = export.export(jax.jit(gradients), platforms=["cpu"], disabled_checks=ALLOW)(*symbolic)
    for size in ({"batch": 1, "k_len": 9}, {"batch": 3, "k_len": 70}):
        operands = arrays(**size)
        for got, want in zip(program.call(*operands), gradients(*operands), strict=True):
            np.testing.assert_array_equal(got, want)


def test_an_exported_program_may_have_symbolic_heads():
    (heads,) = export.symbolic_shape("heads")
    program = export.export(jax.jit(gradients), platforms=["cpu"], disabled_checks=ALLOW)(
        *[jax.ShapeDtypeStruct((2, 9, heads, 16), jnp.float32)] * 3
    )
    x = arrays()[0]
    for got, want in zip(program.call(x, x, x), gradients(x, x, x), strict=True):
        np.testing.assert_array_equal(got, want)


def test_packed_calls_may_have_symbolic_sizes():
    """The number of sequences too, which is one less than there are offsets; max_seqlen may be above the total."""
    total_q, total_k, offsets = export.symbolic_shape("total_q, total_k, offsets")
    shapes = [(total_q, 4, 16), (total_k, 2, 16), (total_k, 2, 16)]
    symbolic = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    symbolic += [jax.ShapeDtypeStruct((offsets,), jnp.int32)] * 2

    def call(q, k, v, cu_q, cu_k):
        return qflash.attention_varlen(q, k, v, cu_q, cu_k, 50, 100, causal=True, return_lse=True)

    def packed_gradients(*operands):
        return jax.grad(lambda *qkv: sum((x**2).sum() for x in call(*qkv, *operands[3:])), (0, 1, 2))(*operands[:3])

    for function in (call, packed_gradients):
        program = export.export(jax.jit(function), platforms=["cpu"], disabled_checks=ALLOW)(*symbolic)
        for cu_q, cu_k in (([0, 9], [0, 13]), ([0, 4, 9], [0, 6, 13]), ([0, 0, 30, 80], [0, 70, 150, 200])):
            operands = (x[0] for x in arrays(q_len=cu_q[-1], k_len=cu_k[-1]))
            operands = (*operands, jnp.array(cu_q, jnp.int32), jnp.array(cu_k, jnp.int32))
            for got, want in zip(program.call(*operands), function(*operands), strict=True):
                np.testing.assert_array_equal(got, want)


def test_programs_of_every_operation_find_their_kernels_again():
    """By the key alone, in a process that has not seen it."""
    from qflash.frontends.jax.kernels import register, resolve

    for spec, takes in (
        (Spec("cpu", 0, "float32", 64), "QfAttnParams"),
        (Spec("cpu", 0, "float16", 64, "int8", kv="quantized"), "QfAttnParams"),
        (Spec("cpu", 0, "float32", 64, rope="half", op="attention_backward"), "QfAttnBwdParams"),
        (Spec("cpu", 0, "int32", precision="int8", op="linear", layout="n"), "QfLinearParams"),
        (Spec("cpu", 0, "float16", op="linear_backward", layout="k", activation="gelu"), "QfLinearBwdParams"),
    ):
        kernel = dispatch.choose(spec)
        resolve(register(kernel.name, spec, backends.load(kernel, spec), takes))


CACHED = """
import jax, numpy as np, qflash
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
from jax import monitoring
hits = []
monitoring.register_event_listener(lambda name, **_: hits.append(name) if name.endswith("cache_hits") else None)
x = jax.numpy.asarray(np.random.default_rng(0).standard_normal((1, 5, 2, 8), np.float32))
print(float(qflash.attention(x, x, x, causal=True).sum()), len(hits))
"""


def test_programs_from_the_compilation_cache_run(tmp_path):
    first, second = (in_a_new_process(CACHED, JAX_COMPILATION_CACHE_DIR=str(tmp_path)).split() for _ in range(2))
    assert first[0] == second[0]
    assert int(first[1]) == 0 and int(second[1]) > 0


NOTHING = np.zeros(0, np.int64)


def test_a_key_nobody_knows_is_a_clear_error():
    q, k, v = arrays()
    result = [jax.ShapeDtypeStruct(*x) for x in ((q.shape, q.dtype), ((0,), jnp.uint8))]

    def call(q, k, v, key):
        words = dict.fromkeys(("params", "pointers", "num_bytes", "sizes", "bounds"), NOTHING)
        return jax.ffi.ffi_call("qflash_call", result)(q, k, v, kernel=key, takes="QfAttnParams", **words)

    qflash.attention(q, k, v)  # brings the front end and with it the handlers
    fewer = json.dumps([_native.ABI, "QfAttnParams", "cpu", *dataclasses.astuple(Spec("cpu", 0, "float32", 8))[:-1]])
    for key, text in (
        ('[0,"cpu"]', "qflash ABI 0; allowed: "),
        ("nonsense", "could not be loaded: JSONDecodeError"),
        (fewer, "compiled with another version of qflash; allowed: this one"),
    ):
        with pytest.raises(Exception, match=text):
            jax.block_until_ready(jax.jit(call, static_argnums=3)(q, k, v, key))


def params_in(text: str, struct_name: str) -> dict:
    """The fields of the struct in the one call of a lowered program."""
    (words,) = re.findall(r"params = dense<\[?([^\]>]*)\]?>", text)
    packed = (
        bytes.fromhex(words.strip('"')[2:]) if words.startswith('"') else np.array(words.split(","), np.int64).tobytes()
    )
    size, fields = _native.op_layouts[struct_name]
    assert len(packed) == size
    return {name: struct.unpack_from(kind, packed, offset)[0] for name, (offset, kind) in fields.items()}


@ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_void_p)
def four_kilobytes(_params):
    return 4096


@pytest.fixture
def a_cuda_kernel(monkeypatch):
    """Stands in for compiled CUDA kernels: lowering asks only for addresses and the size of the workspace."""
    workspace = ctypes.cast(four_kilobytes, ctypes.c_void_p).value
    monkeypatch.setattr(backends, "load", lambda kernel, spec: Entry(1, 0, workspace))
    monkeypatch.setenv("QFLASH_CUDA_ARCH", "90")
    for remembered in (prepare, asked):
        remembered.cache_clear()
    yield
    for remembered in (prepare, asked):
        remembered.cache_clear()


def lowered_for_cuda(function, *operands) -> str:
    return export.export(jax.jit(function), platforms=["cuda"], disabled_checks=ALLOW)(*operands).mlir_module()


def no_gpu() -> bool:
    return all(device.platform != "gpu" for device in jax.devices())


@pytest.mark.skipif(not no_gpu(), reason="there is a GPU, so its own architecture is used")
@pytest.mark.parametrize("kernel", [None, "unfused"])
def test_lowering_for_cuda_without_a_gpu(a_cuda_kernel, kernel):
    q, k, v = arrays()
    text = lowered_for_cuda(lambda *x: qflash.attention(*x, causal=True, softcap=30.0, kernel=kernel), q, k, v)
    call = next(line for line in text.splitlines() if "custom_call @qflash_call" in line)
    assert rf"{kernel or 'fa'}\22,\22cuda\22,90,\22float32\22,16" in call
    params = params_in(call, "QfAttnParams")
    for field, value in {"scale": 0.25, "softcap": 30.0, "window_left": -1, "window_right": 0, "q_len": 9}.items():
        assert params[field] == value
    assert "tensor<4096xui8>" in call


@pytest.mark.skipif(not no_gpu(), reason="there is a GPU, so its own architecture is used")
def test_lowering_for_cuda_needs_an_architecture(monkeypatch):
    monkeypatch.delenv("QFLASH_CUDA_ARCH", raising=False)
    asked.cache_clear()
    with pytest.raises(RuntimeError, match="set QFLASH_CUDA_ARCH"):
        lowered_for_cuda(qflash.attention, *arrays())


def test_symbolic_sizes_and_a_workspace(a_cuda_kernel):
    (batch,) = export.symbolic_shape("batch")
    symbolic = [jax.ShapeDtypeStruct((batch, 9, 4, 16), jnp.float32)] * 3
    with pytest.raises(NotImplementedError, match=r"^q has symbolic shape \(batch, 9, 4, 16\); .*workspace is part"):
        lowered_for_cuda(qflash.attention, *symbolic)


@pytest.mark.skipif(not no_gpu(), reason="there is a GPU, so its own architecture is used")
@pytest.mark.parametrize(("dtype", "kernel"), [(jnp.float32, "fa_bwd"), (jnp.bfloat16, "sm90_bwd")])
def test_gradients_for_cuda_without_a_gpu(a_cuda_kernel, dtype, kernel):
    text = lowered_for_cuda(gradients, *(x.astype(dtype) for x in arrays()))
    calls = [line for line in text.splitlines() if "custom_call @qflash_call" in line]
    assert len(calls) == 2 and all("tensor<4096xui8>" in call for call in calls)  # each with its workspace
    assert rf"\22{kernel}\22,\22cuda\22,90" in calls[1]
    params = params_in(calls[1], "QfAttnBwdParams")
    assert (params["fwd.q_len"], params["fwd.window_right"], params["dq.stride_h"]) == (9, 0, 16)


def test_no_backward_on_cuda(a_cuda_kernel, monkeypatch):
    """Where no row serves, which is nowhere so far."""
    monkeypatch.setattr(dispatch, "kernels_of", without_cuda_gradients)
    dispatch.choose.cache_clear()
    with pytest.raises(NotImplementedError, match="no backward pass on CUDA"):
        lowered_for_cuda(gradients, *(x.astype(jnp.float16) for x in arrays()))  # which no test before has lowered
    dispatch.choose.cache_clear()


def without_cuda_gradients(op="attention", device=None):
    rows = (row for row in dispatch.KERNELS if row.op == op and device in (None, row.device))
    return tuple(row for row in rows if (row.op, row.device) != ("attention_backward", "cuda"))


def test_a_cpu_kernel_asked_for_on_cuda(a_cuda_kernel):
    with pytest.raises(qflash.NoKernelError, match="runs on cpu, the arrays are on cuda"):
        lowered_for_cuda(lambda *x: qflash.attention(*x, kernel="cpu"), *arrays())
