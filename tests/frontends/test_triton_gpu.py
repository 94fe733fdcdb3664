"""Kernels in Triton through PyTorch and JAX on a GPU. tests/numerics holds them to the contract there."""

from __future__ import annotations

import threading

import pytest

import qflash
from qflash.backends import triton as backend

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(backend.why_not()), reason=backend.why_not())]

# kernel: (what it is called with, the kernel that its result is held against)
CALLS = {
    "triton_fwd": ({"causal": True}, "fa_mma"),
    "triton_int8": ({"causal": True, "precision": "int8"}, "fa_int8"),
    "triton_decode": ({}, "decode"),
}


def tensors(kernel: str, head_dim: int = 64):
    """q, k and v; few queries for a kernel that decodes."""
    generator = torch.Generator().manual_seed(3)
    lengths = (1 if kernel == "triton_decode" else 200, 700, 700)
    heads = (4, 2, 2)
    return tuple(
        torch.randn(2, length, count, head_dim, generator=generator).to(torch.float16).cuda()
        for length, count in zip(lengths, heads, strict=True)
    )


def check(out, wanted) -> None:
    torch.testing.assert_close(out.float(), wanted.float(), atol=2e-3, rtol=2e-2)


@pytest.mark.parametrize("kernel", CALLS)
def test_eager(kernel):
    words, other = CALLS[kernel]
    q, k, v = tensors(kernel)
    wanted = qflash.attention(q, k, v, kernel=other, **words)
    first, again = (qflash.attention(q, k, v, kernel=kernel, **words) for _ in range(2))
    check(first, wanted)
    assert torch.equal(first, again)


@pytest.mark.parametrize("kernel", CALLS)
def test_rows_that_are_not_whole_vectors(kernel):
    words, other = CALLS[kernel]
    q, k, v = tensors(kernel, 68)
    q, k, v = q[..., 1:65], k[..., 3:67], v[..., 1:65]
    wanted = qflash.attention(*(x.contiguous() for x in (q, k, v)), kernel=other, **words)
    check(qflash.attention(q, k, v, kernel=kernel, **words), wanted)


@pytest.mark.parametrize("kernel", CALLS)
def test_a_thread_that_has_not_called_cuda_yet(kernel):
    words, _ = CALLS[kernel]
    q, k, v = tensors(kernel)
    wanted, found = qflash.attention(q, k, v, kernel=kernel, **words), []
    thread = threading.Thread(target=lambda: found.append(qflash.attention(q, k, v, kernel=kernel, **words)))
    thread.start()
    thread.join()
    assert torch.equal(found[0], wanted)


@pytest.mark.parametrize("kernel", CALLS)
def test_a_graph_replays_it(kernel):
    words, _ = CALLS[kernel]
    q, k, v = tensors(kernel)
    qflash.attention(q, k, v, kernel=kernel, **words)  # compiles and loads it
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = qflash.attention(q, k, v, kernel=kernel, **words)
    q.copy_(torch.randn_like(q))
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, qflash.attention(q, k, v, kernel=kernel, **words))


@pytest.mark.parametrize("kernel", CALLS)
def test_compiled_code_calls_it(kernel):
    words, _ = CALLS[kernel]
    q, k, v = tensors(kernel)
    call = torch.compile(
        lambda q, k, v: qflash.attention(q, k, v, kernel=kernel, **words), backend="aot_eager", fullgraph=True
    )
    assert torch.equal(call(q, k, v), qflash.attention(q, k, v, kernel=kernel, **words))


def test_gradients_are_the_cuda_kernels():
    q, k, v = (x.requires_grad_() for x in tensors("triton_fwd"))
    ours = torch.autograd.grad(
        qflash.attention(q, k, v, causal=True, kernel="triton_fwd").float().square().sum(), (q, k, v)
    )
    theirs = torch.autograd.grad(
        qflash.attention(q, k, v, causal=True, kernel="fa_mma").float().square().sum(), (q, k, v)
    )
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one.float(), other.float(), atol=5e-2, rtol=5e-2)


def test_softmax():
    for shape in ((5, 40), (3, 5000), (2, 40001)):
        x = torch.randn(*shape, device="cuda", dtype=torch.bfloat16)
        torch.testing.assert_close(qflash.softmax(x, kernel="triton_softmax"), qflash.softmax(x, kernel="softmax"))


@pytest.mark.parametrize("interleaved", [False, True])
def test_rope(interleaved):
    tables = (torch.from_numpy(table).cuda() for table in qflash.rope_tables(70, 48))
    rope = qflash.Rope(*tables, interleaved)
    x = torch.randn(2, 70, 5, 64, device="cuda", dtype=torch.bfloat16)
    torch.testing.assert_close(qflash.rope(x, rope, kernel="triton_rope"), qflash.rope(x, rope, kernel="rope"))


@pytest.mark.parametrize("precision", [None, "int8"])
@pytest.mark.parametrize(("m", "n", "k"), [(8, 256, 512), (300, 520, 264), (37, 75, 45)])
def test_linear(m, n, k, precision):
    x, weight = (torch.randn(*shape, device="cuda").to(torch.bfloat16) for shape in ((m, k), (n, k)))
    bias = torch.randn(n, device="cuda")
    words = {"activation": "gelu", "precision": precision}
    other = "gemm_mma" if precision is None else "int8_gemm_tc"
    wanted = qflash.linear(x, weight.T, bias, kernel=other, **words)
    check(qflash.linear(x, weight.T, bias, kernel="triton_linear", **words), wanted)
    if precision is None:
        gates = qflash.swiglu(x, weight.T, weight.T, kernel="triton_linear")
        torch.testing.assert_close(gates, qflash.swiglu(x, weight.T, weight.T, kernel=other), atol=0.5, rtol=2e-2)


@pytest.mark.parametrize("kernel", CALLS)
def test_jax_runs_it(kernel):
    jax = pytest.importorskip("jax")
    if jax.default_backend() != "gpu":
        pytest.skip("JAX has no GPU here")
    words, _ = CALLS[kernel]
    tensors_ = tensors(kernel)
    arrays = [jax.numpy.asarray(x.cpu().numpy()) for x in tensors_]
    call = jax.jit(lambda q, k, v: qflash.attention(q, k, v, kernel=kernel, **words))
    wanted = qflash.attention(*tensors_, kernel=kernel, **words)
    found = torch.from_numpy(jax.device_get(call(*arrays)).copy())
    assert torch.equal(found, wanted.cpu())
