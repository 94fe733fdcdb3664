"""quantize_kv and attention on its result where no kernel runs: shapes from fake tensors and tracers, pytrees."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

import qflash
from qflash.ops.kv import results_of

SHAPE = (2, 200, 2, 72)
PRECISIONS = ("int8", "int8_fp8")


def check_parts(kv, precision):
    """Everything that should be there, shaped as it should be."""
    wanted = results_of(*SHAPE, precision)
    for name in ("k", "k_scale", "k_mean", "k_nonfinite", "v", "v_scale", "v_exponents", "v_nonfinite", "v_mean"):
        part = getattr(kv, name)
        if name in wanted:
            dtype, shape = wanted[name]
            assert (str(part.dtype).removeprefix("torch."), tuple(part.shape)) == (dtype, shape)
        elif name != "v":
            assert part is None
    assert (kv.length, kv.head_dim, kv.precision, kv.dtype) == (200, 72, precision, "bfloat16")


@ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_void_p)
def four_kilobytes(_params):
    return 4096


class TestTorch:
    @pytest.fixture(autouse=True)
    def torch(self):
        self.torch = pytest.importorskip("torch")

    def tensors(self, device):
        q = self.torch.empty(2, 130, 4, 72, dtype=self.torch.bfloat16, device=device)
        return q, *(self.torch.empty(SHAPE, dtype=self.torch.bfloat16, device=device) for _ in range(2))

    def both(self, q, k, v, precision):
        """One Rope for both calls."""
        tables = (self.torch.zeros(200, 8, device=q.device) for _ in range(2))
        lens = self.torch.zeros(2, dtype=self.torch.int32, device=q.device)
        rope = qflash.Rope(*tables, positions_k=self.torch.zeros(2, 200, dtype=self.torch.int32, device=q.device))
        kv = qflash.quantize_kv(k, v, precision=precision, rope=rope, lens=lens)
        return kv, qflash.attention(q, kv, causal=True, rope=rope, return_lse=True)

    @pytest.mark.parametrize("precision", PRECISIONS)
    @pytest.mark.parametrize("device", ["meta", "cuda"])
    def test_fake_tensors_tell_shapes(self, device, precision):
        from torch._subclasses import FakeTensorMode

        with FakeTensorMode():
            q, k, v = self.tensors(device)
            if (
                device == "cuda"
                and self.torch.cuda.is_available()
                and self.torch.cuda.get_device_capability() != (9, 0)
            ):
                pytest.skip("this GPU is no Hopper, and has no kernel")
            kv, (out, lse) = self.both(q, k, v, precision)
        check_parts(kv, precision)
        assert precision == "int8_fp8" or kv.v is v
        assert (out.shape, out.dtype, lse.shape, lse.dtype) == (q.shape, q.dtype, (2, 4, 130), self.torch.float32)

    @pytest.mark.parametrize("precision", PRECISIONS)
    def test_compiles_as_one_graph(self, precision):
        self.torch.compiler.reset()
        graphs = []

        def backend(graph, _):
            graphs.append(graph)
            return graph.forward

        function = self.torch.compile(lambda q, k, v: self.both(q, k, v, precision)[1], fullgraph=True, backend=backend)
        out, lse = function(*self.tensors("meta"))
        assert out.shape == (2, 130, 4, 72) and lse.shape == (2, 4, 130)
        called = [str(node.target) for node in graphs[0].graph.nodes if "qflash" in str(node.target)]
        assert called == ["qflash.quantize_kv.default", "qflash.attention_kv.default"]

    def test_the_cpu_has_no_kernel(self):
        with pytest.raises(qflash.NoKernelError, match="no kernel serves this quantize_kv"):
            qflash.quantize_kv(*self.tensors("cpu")[1:])

    def test_gradients_are_refused_by_name(self):
        _, k, v = self.tensors("cpu")
        with pytest.raises(NotImplementedError, match=r"v requires a gradient and qflash.quantize_kv is forward only"):
            qflash.quantize_kv(k, v.requires_grad_())

    def test_devices_must_agree(self):
        q, k, v = self.tensors("meta")
        kv = qflash.quantize_kv(k, v)
        with pytest.raises(ValueError, match="v is on cpu; allowed: k's device, meta"):
            qflash.quantize_kv(k, self.torch.zeros(SHAPE, dtype=k.dtype))
        with pytest.raises(ValueError, match=r"kv.k is on meta; allowed: q's device, cpu"):
            qflash.attention(self.torch.zeros(q.shape, dtype=q.dtype), kv)


class TestJax:
    @pytest.fixture(autouse=True)
    def jax(self):
        self.jax = pytest.importorskip("jax")
        self.jnp = self.jax.numpy

    def both(self, q, k, v, precision):
        kv = qflash.quantize_kv(k, v, precision=precision, lens=self.jnp.zeros(2, self.jnp.int32))
        return kv, qflash.attention(q, kv, causal=True, return_lse=True)

    def avals(self):
        shapes = ((2, 130, 4, 72), SHAPE, SHAPE)
        return [self.jax.ShapeDtypeStruct(shape, self.jnp.bfloat16) for shape in shapes]

    @pytest.mark.parametrize("precision", PRECISIONS)
    def test_traced_arrays_tell_shapes(self, precision):
        kv, (out, lse) = self.jax.eval_shape(lambda *xs: self.both(*xs, precision), *self.avals())
        check_parts(kv, precision)
        assert (out.shape, out.dtype, lse.shape) == ((2, 130, 4, 72), self.jnp.bfloat16, (2, 4, 130))

    def test_a_kv_goes_in_and_out_of_jit(self):
        kv, _ = self.jax.eval_shape(lambda *xs: self.both(*xs, "int8_fp8"), *self.avals())
        leaves, tree = self.jax.tree.flatten(kv)
        assert len(leaves) == 10
        again = self.jax.tree.unflatten(tree, leaves)
        assert (again.precision, again.dtype) == ("int8_fp8", "bfloat16")
        out = self.jax.eval_shape(qflash.attention, self.avals()[0], again)
        assert out.shape == (2, 130, 4, 72)

    def test_known_to_jax_before_any_call(self):
        zeros = {name: self.jnp.zeros(shape, dtype) for name, (dtype, shape) in results_of(*SHAPE, "int8").items()}
        kv = qflash.QuantizedKV(**zeros, v=self.jnp.zeros(SHAPE, self.jnp.bfloat16))
        moved = self.jax.jit(lambda kv: self.jax.tree.map(lambda x: x + 1, kv))(kv)
        assert isinstance(moved, qflash.QuantizedKV) and int(moved.k_nonfinite[0, 0]) == 1

    @pytest.mark.parametrize("precision", PRECISIONS)
    def test_the_cpu_has_no_kernel(self, precision):
        k = self.jax.device_put(np.zeros(SHAPE, np.float16), self.jax.devices("cpu")[0])
        for call in (qflash.quantize_kv, self.jax.jit(qflash.quantize_kv, static_argnames="precision")):
            with pytest.raises(qflash.NoKernelError, match="no kernel serves this quantize_kv"):
                call(k, k, precision=precision)

    @pytest.mark.parametrize("precision", PRECISIONS)
    def test_lowering_for_hopper_without_a_gpu(self, monkeypatch, precision):
        """Both calls and attention itself, each with the kernel of its precision; stand-ins for the kernels."""
        from jax import export

        from qflash import backends
        from qflash.backends import Entry
        from qflash.backends.arch import asked
        from qflash.call.prepare import prepare

        if any(device.platform == "gpu" for device in self.jax.devices()):
            pytest.skip("a GPU's own architecture would be used")
        workspace = ctypes.cast(four_kilobytes, ctypes.c_void_p).value
        monkeypatch.setattr(backends, "load", lambda kernel, spec: Entry(1, 0, workspace))
        monkeypatch.setenv("QFLASH_CUDA_ARCH", "90")
        remembered = (prepare, asked)
        for cache in remembered:
            cache.cache_clear()

        def everything(q, k, v):
            return self.both(q, k, v, precision), qflash.attention(q, k, v, precision=precision)

        checks = [export.DisabledSafetyCheck.custom_call("qflash_call")]
        try:
            program = export.export(self.jax.jit(everything), platforms=["cuda"], disabled_checks=checks)(*self.avals())
        finally:
            for cache in remembered:
                cache.cache_clear()
        calls = [line for line in program.mlir_module().splitlines() if "custom_call @qflash" in line]
        wanted = (("sm90_quantize", "arrays"), ("sm90_int8", "kept"), ("sm90_int8", "arrays"))
        for found, (name, kind) in zip(calls, wanted, strict=True):
            assert "@qflash_call(" in found and rf"\22{name}\22," in found and "tensor<4096xui8>" in found
            assert rf"\22{precision}\22," in found and rf"\22{kind}\22," in found

    @pytest.mark.parametrize("precision", PRECISIONS)
    def test_attention_says_why_the_cpu_does_not(self, precision):
        q, k, v = (self.jax.device_put(np.zeros((1, 9, 2, 8), "f2"), self.jax.devices("cpu")[0]) for _ in range(3))
        attend = self.jax.jit(lambda q, k, v: qflash.attention(q, k, v, precision=precision))
        if precision == "int8":
            assert attend(q, k, v).shape == (1, 9, 2, 8)
            return
        with pytest.raises(qflash.NoKernelError, match=r"sm90_int8 +no +runs on cuda, the arrays are on cpu"):
            attend(q, k, v)

    def test_derivatives_are_refused_by_name(self):
        def loss(v):
            return qflash.quantize_kv(v, v, precision="int8_fp8").v_scale.sum()

        with pytest.raises(NotImplementedError, match=r"qflash.quantize_kv is forward only and k is being differ"):
            self.jax.grad(loss)(self.jnp.zeros(SHAPE, self.jnp.bfloat16))
