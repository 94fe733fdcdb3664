"""JAX front end on a CUDA GPU: both kernels through jit, in command buffers, in programs from the cache."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys

import numpy as np
import pytest

import qflash
from qflash.backends import Entry
from qflash.testing import runner
from qflash.testing.cases import CASES
from qflash.testing.compare import FLOAT32_L2, GRADIENT_L2, HALF_FACTOR, check_contract
from qflash.testing.jax_arrays import arrays, assert_close, relative_l2

jax = pytest.importorskip("jax")
jnp = jax.numpy
pytestmark = pytest.mark.gpu

KERNELS = ("fa", "unfused")


@pytest.fixture(autouse=True)
def on_gpu():
    try:
        device = jax.devices("cuda")[0]
    except RuntimeError as error:
        pytest.skip(f"this JAX cannot use the GPU: {error}")
    with jax.default_device(device):
        yield


WIDE = ("packed", "rope", "empty", "decode", "padding", "window")
SOME_CASES = [c for c in CASES if ("quick" in c.tags or c.name.startswith(WIDE)) and "large" not in c.tags]


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("case", SOME_CASES, ids=lambda case: case.name)
def test_case_keeps_the_contract(case, kernel):
    if runner.refusals(case, kernel, 90):
        with pytest.raises(qflash.NoKernelError, match=kernel):
            runner.run_case(case, kernel, "jax")
        return
    out, lse = runner.run_case(case, kernel, "jax")
    errors = check_contract(case, out, lse)
    print(f"relative L2 error against float64: {errors.relative_l2:.2e}")


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(
    ("shape", "ours", "theirs"),
    [
        ({}, {}, {}),
        ({"q_len": 200, "k_len": 200}, {"causal": True}, {"is_causal": True}),
        ({"q_heads": 8}, {"scale": 0.1}, {"scale": 0.1}),
        ({"q_len": 99, "k_len": 99}, {"window": (20, 3)}, {"local_window_size": (20, 3)}),
        ({}, {"kv_lens": (5, 13)}, {"key_value_seq_lengths": (5, 13)}),
    ],
    ids=["full", "causal", "gqa", "window", "kv_lens"],
)
def test_agrees_with_jax_nn(kernel, shape, ours, theirs):
    q, k, v = arrays(head_dim=64, **shape)
    ours, theirs = (
        {word: jnp.array(x, jnp.int32) if "lens" in word or "lengths" in word else x for word, x in words.items()}
        for words in (ours, theirs)
    )
    got = jax.jit(lambda *x: qflash.attention(*x, kernel=kernel, **ours))(q, k, v)
    with jax.default_matmul_precision("highest"):  # the GPU's default rounds float32 to TF32
        assert_close(got, jax.nn.dot_product_attention(q, k, v, **theirs), FLOAT32_L2)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_is_as_good_as_jax_nn(dtype):
    q, k, v = arrays(q_len=128, k_len=128, head_dim=64, dtype=dtype)
    with jax.default_matmul_precision("highest"):
        exact = jax.nn.dot_product_attention(*(x.astype(jnp.float32) for x in (q, k, v)))
    errors = [relative_l2(f(q, k, v), exact) for f in (qflash.attention, jax.nn.dot_product_attention)]
    print(f"relative L2 error: qflash {errors[0]:.2e}, jax.nn {errors[1]:.2e}")
    assert errors[0] <= HALF_FACTOR * errors[1]


@pytest.mark.parametrize("kernel", [*KERNELS, "sm90_fwd"])
def test_captured_in_command_buffers(kernel, monkeypatch):
    """XLA records the launches once, under stream capture, and replays them: the handler is not called again."""
    from qflash.frontends.jax import primitive

    entry_type = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
    driver = ctypes.CDLL("libcuda.so.1")
    driver.cuStreamIsCapturing.argtypes = [ctypes.c_void_p, ctypes.POINTER(ctypes.c_int)]
    captured, alive = [], []
    register = primitive.register

    def register_spy(name, spec, entry, takes):
        launch = entry_type(entry.address)

        def spy(params, stream):
            status = ctypes.c_int(-1)
            driver.cuStreamIsCapturing(stream, ctypes.byref(status))
            captured.append(status.value == 1)
            return launch(params, stream)

        alive.append(entry_type(spy))
        address = ctypes.cast(alive[-1], ctypes.c_void_p).value
        return register(name, spec, Entry(address, entry.status_text, entry.workspace), takes)

    monkeypatch.setattr(primitive, "register", register_spy)
    layers, runs = 8, 6

    def stack(q, k, v):
        for _ in range(layers):
            q = qflash.attention(q, k, v, kernel=kernel)
        return q

    # A head_dim no other test has, so that the key registered for the spy is this test's own.
    dtype = "bfloat16" if kernel == "sm90_fwd" else "float32"
    operands = [arrays(q_len=64, k_len=64, head_dim=88, dtype=dtype, seed=seed) for seed in range(runs)]
    program = jax.jit(stack).lower(*operands[0]).compile()
    results = [program(*x) for x in operands for _ in range(2)]
    jax.block_until_ready(results)
    print(f"{len(captured)} handler calls, {sum(captured)} under capture, for {layers * len(results)} launches")
    assert any(captured)
    monkeypatch.undo()
    for i, got in enumerate(results):
        want = operands[i // 2][0]
        for _ in range(layers):
            want = qflash.attention(want, *operands[i // 2][1:], kernel=kernel)
        np.testing.assert_array_equal(got, want)


def test_vmap_and_scan():
    q, k, v = arrays(q_len=13)
    qs = jnp.stack([q, 2 * q, -q])
    got = jax.jit(jax.vmap(qflash.attention, (0, None, None)))(qs, k, v)
    for i in range(3):
        np.testing.assert_array_equal(got[i], qflash.attention(qs[i], k, v))
    looped, _ = jax.jit(lambda q: jax.lax.scan(lambda q, _: (qflash.attention(q, k, v), None), q, length=3))(q)
    for _ in range(3):
        q = qflash.attention(q, k, v)
    np.testing.assert_array_equal(looped, q)


def test_shard_map():
    mesh = jax.sharding.Mesh(np.array(jax.devices("cuda")[:1]), ("b",))
    spec = jax.sharding.PartitionSpec("b")
    split = jax.shard_map(qflash.attention, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec)
    np.testing.assert_array_equal(jax.jit(split)(*arrays()), qflash.attention(*arrays()))


def test_lengths_out_of_range_give_nan():
    """A kernel must not synchronise to look at its inputs; the rows of a sequence it cannot trust are NaN."""
    q, k, v = arrays()
    out = qflash.attention(q, k, v, kv_lens=jnp.array([14, 13], jnp.int32))
    assert bool(jnp.isnan(out[0]).all()) and not bool(jnp.isnan(out[1]).any())


def loss(q, k, v):
    out, lse = qflash.attention(q, k, v, causal=True, return_lse=True)
    return (out.astype(jnp.float32) ** 2).sum() + lse.sum()


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_gradients(dtype):
    """Against the CPU's, which the oracle holds; and the same bits by jit, remat, vjp and vmap."""
    operands = [x.astype(dtype) for x in arrays()]
    got = jax.grad(loss, (0, 1, 2))(*operands)
    cpu = jax.devices("cpu")[0]
    with jax.default_device(cpu):
        want = jax.grad(loss, (0, 1, 2))(*(jax.device_put(x, cpu) for x in operands))
    for x, y in zip(got, want, strict=True):
        assert_close(np.asarray(x, np.float32), np.asarray(y, np.float32), 2 * GRADIENT_L2[dtype])
    stacked = [jnp.stack([x, x]) for x in operands]
    ways = {
        "jit": jax.jit(jax.grad(loss, (0, 1, 2)))(*operands),
        "remat": jax.grad(jax.checkpoint(loss), (0, 1, 2))(*operands),
        "vjp under jit": jax.jit(lambda *x: jax.vjp(loss, *x)[1](jnp.float32(1)))(*operands),
        "vmap": [x[1] for x in jax.vmap(jax.grad(loss, (0, 1, 2)))(*stacked)],
    }
    for name, found in ways.items():
        for x, y in zip(found, got, strict=True):
            np.testing.assert_array_equal(np.asarray(x), np.asarray(y), err_msg=name)


def test_a_second_derivative_is_refused():
    with pytest.raises(NotImplementedError, match="no second derivative"):
        jax.grad(lambda q: jax.grad(loss)(q, *arrays()[1:]).sum())(arrays()[0])


def test_arrays_on_two_devices():
    q, k, v = (jax.device_put(x, jax.devices("cuda")[0]) for x in arrays())
    with pytest.raises(ValueError, match="k is on cpu; allowed: q's device, cuda"):
        qflash.attention(q, jax.device_put(k, jax.devices("cpu")[0]), v)


def test_the_cpu_still_serves():
    with jax.default_device(jax.devices("cpu")[0]):
        assert qflash.explain(*arrays()).kernel == "cpu"
        assert_close(qflash.attention(*arrays()), jax.nn.dot_product_attention(*arrays()), FLOAT32_L2)


CACHED = """
import jax, numpy as np, qflash
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
hits = []
jax.monitoring.register_event_listener(lambda name, **_: hits.append(name) if name.endswith("cache_hits") else None)
x = jax.numpy.asarray(np.random.default_rng(0).standard_normal((1, 5, 2, 8), np.float32))
print(float(qflash.attention(x, x, x, causal=True).sum()), len(hits))
"""


def test_programs_from_the_compilation_cache_run(tmp_path):
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cuda",
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path),
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",  # this process has taken most of the memory
    }
    outputs = []
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", CACHED], env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        outputs.append(done.stdout.split())
    assert outputs[0][0] == outputs[1][0]
    assert int(outputs[0][1]) == 0 and int(outputs[1][1]) > 0
