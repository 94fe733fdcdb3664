"""quantize_kv and attention on its result on a GPU: through graphs, streams, torch.compile, vmap, and from JAX."""

from __future__ import annotations

import numpy as np
import pytest

import qflash
from qflash import dispatch
from qflash.testing.op_cases import flat

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.gpu
PRECISIONS = ("int8", "int8_fp8")


@pytest.fixture(autouse=True)
def hopper():
    if not torch.cuda.is_available():
        pytest.skip("this torch was built without CUDA")
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("this GPU is no Hopper")


def arrays(seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    shapes = ((2, 150, 4, 64), (2, 260, 2, 64), (2, 260, 2, 64))
    return [rng.standard_normal(shape, np.float32).astype(np.float16) for shape in shapes]


def tensors(seed: int = 0) -> list:
    return [torch.from_numpy(x).cuda() for x in arrays(seed)]


def both(q, k, v, precision):
    kv = qflash.quantize_kv(k, v, precision=precision)
    return qflash.attention(q, kv, causal=True, return_lse=True)


def wanted(precision, seed: int = 0):
    """What attention in that precision gives, which is held against the oracle elsewhere."""
    return qflash.attention(*tensors(seed), causal=True, return_lse=True, precision=precision)


def check_same(got, want):
    assert [torch.equal(a, b) for a, b in zip(got, want, strict=True)] == [True, True]


@pytest.mark.parametrize("precision", PRECISIONS)
def test_eager(precision):
    check_same(both(*tensors(), precision), wanted(precision))


@pytest.mark.parametrize("precision", PRECISIONS)
def test_strides_do_not_matter(precision):
    transposed = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in tensors()]
    check_same(both(*transposed, precision), wanted(precision))
    gaps = [torch.stack([x, x], -1).flatten(-2)[..., ::2] for x in tensors()]
    check_same(both(*gaps, precision), wanted(precision))


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_graph_replays_on_new_values(precision):
    xs = tensors()
    both(*xs, precision)  # loads the kernels, which a capture may not
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = both(*xs, precision)
    for x, new in zip(xs, tensors(1), strict=True):
        x.copy_(new)
    graph.replay()
    check_same(outs, wanted(precision, 1))


@pytest.mark.parametrize("precision", PRECISIONS)
def test_another_stream(precision):
    xs = tensors()
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        got = both(*xs, precision)
    torch.cuda.synchronize()
    check_same(got, wanted(precision))


@pytest.mark.parametrize("precision", PRECISIONS)
def test_compiled(precision):
    torch.compiler.reset()
    compiled = torch.compile(lambda q, k, v: both(q, k, v, precision), fullgraph=True)
    check_same(compiled(*tensors()), wanted(precision))


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_kv_goes_into_a_compiled_function(precision):
    torch.compiler.reset()
    q, k, v = tensors()
    kv = qflash.quantize_kv(k, v, precision=precision)
    compiled = torch.compile(lambda q, kv: qflash.attention(q, kv, causal=True, return_lse=True), fullgraph=True)
    check_same(compiled(q, kv), wanted(precision))


@pytest.mark.parametrize("precision", PRECISIONS)
def test_opcheck(precision):
    q, k, v = tensors()
    kv = qflash.quantize_kv(k, v, precision=precision)  # first, because the front end defines the ops as it is loaded
    words = (precision, "nearest", 0, False, None)
    torch.library.opcheck(torch.ops.qflash.quantize_kv.default, (k, v, None, None, None, None, *words))
    parts = (kv.k, kv.k_scale, kv.k_mean, kv.k_nonfinite, kv.v, kv.v_scale, kv.v_exponents, kv.v_nonfinite, kv.v_mean)
    words = (precision, "float16", True, None, None, 0.125, None, None, False, True, False)
    torch.library.opcheck(torch.ops.qflash.attention_kv.default, (q, *parts, *[None] * 5, *words))


@pytest.mark.parametrize("precision", PRECISIONS)
def test_vmap_is_a_loop(precision):
    xs = [torch.stack(pair) for pair in zip(tensors(), tensors(1), strict=True)]
    got = torch.vmap(lambda q, k, v: both(q, k, v, precision))(*xs)
    for i in range(2):
        check_same([x[i] for x in got], wanted(precision, i))


@pytest.mark.parametrize("precision", PRECISIONS)
def test_no_keys_and_no_queries(precision):
    q, k, v = tensors()
    out, lse = both(q, k[:, :0], v[:, :0], precision)
    assert not out.any() and (lse == -torch.inf).all()
    out, lse = both(q[:, :0], k, v, precision)
    assert out.shape == (2, 0, 4, 64) and lse.shape == (2, 4, 0)
    out, lse = both(q[:0], k[:0], v[:0], precision)
    assert out.shape == (0, 150, 4, 64)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_length_out_of_range_is_nan_for_its_sequence_only(precision):
    q, k, v = tensors()
    lens = torch.tensor([260, 261], dtype=torch.int32, device="cuda")
    out = qflash.attention(q, qflash.quantize_kv(k, v, precision=precision, lens=lens), causal=True)
    assert out[1].isnan().all() and torch.equal(out[0], wanted(precision)[0][0])


def test_explain():
    q, k, v = tensors()
    for precision in PRECISIONS:
        said = qflash.explain(q, k, v, precision=precision)
        assert said.kernel == "sm90_int8" and "sm90_fwd is usually faster" in said.notes[0]
        other = qflash.quantize_kv(k, v, precision=precision)
        said = qflash.explain(q, other)
        assert said.kernel == "sm90_int8" and "sm90_fwd on k and v" in said.notes[0]
        assert (said.spec.kv, said.spec.precision) == ("kept", precision)
        with pytest.raises(qflash.NoKernelError, match="takes precision None"):
            qflash.attention(q, other, kernel="sm90_fwd")
    assert dispatch.BY_NAME["sm90_quantize"].op == "quantize_kv"


class TestJax:
    @pytest.fixture(autouse=True)
    def device(self):
        self.jax = pytest.importorskip("jax")
        try:
            self.cuda = self.jax.devices("cuda")[0]
        except RuntimeError as error:
            pytest.skip(f"this JAX cannot use the GPU: {error}")

    def on_gpu(self, seed: int = 0):
        return [self.jax.device_put(x, self.cuda) for x in arrays(seed)]

    def check(self, got, precision, seed: int = 0):
        for mine, theirs in zip(flat(got), wanted(precision, seed), strict=True):
            np.testing.assert_array_equal(np.asarray(mine), theirs.cpu().numpy())

    @pytest.mark.parametrize("precision", PRECISIONS)
    def test_attention_has_both_precisions(self, precision):
        def attend(*xs):
            return qflash.attention(*xs, causal=True, return_lse=True, precision=precision)

        self.check(attend(*self.on_gpu()), precision)
        self.check(self.jax.jit(attend)(*self.on_gpu()), precision)

    @pytest.mark.parametrize("precision", PRECISIONS)
    def test_quantize_kv(self, precision):
        self.check(both(*self.on_gpu(), precision), precision)
        self.check(self.jax.jit(lambda *xs: both(*xs, precision))(*self.on_gpu()), precision)

    @pytest.mark.parametrize("precision", PRECISIONS)
    def test_a_kv_goes_in_and_out_of_jit(self, precision):
        q, k, v = self.on_gpu()
        kv = self.jax.jit(lambda k, v: qflash.quantize_kv(k, v, precision=precision))(k, v)
        assert isinstance(kv, qflash.QuantizedKV)
        attend = self.jax.jit(lambda q, kv: qflash.attention(q, kv, causal=True, return_lse=True))
        self.check(attend(q, kv), precision)

    @pytest.mark.parametrize("precision", PRECISIONS)
    def test_vmap(self, precision):
        xs = [self.jax.numpy.stack(pair) for pair in zip(self.on_gpu(), self.on_gpu(1), strict=True)]
        got = self.jax.vmap(lambda *xs: both(*xs, precision))(*xs)
        for i in range(2):
            self.check([x[i] for x in got], precision, i)
