"""The decode kernels on a GPU: graphs whose lengths change between replays, repeats, streams, caches of every kind."""

from __future__ import annotations

import pytest

import qflash
from qflash import dispatch

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.gpu


KERNELS = ("sm90_decode", "decode")  # the first that serves a GPU runs there


def serves_here(kernel: str) -> bool:
    major, minor = torch.cuda.get_device_capability()
    spec = dispatch.VARIANTS[kernel].spec(10 * major + minor, "bfloat16", 128)
    return not dispatch.reasons(dispatch.BY_NAME[kernel], spec)


@pytest.fixture(params=KERNELS)
def kernel(request, cuda_torch) -> str:
    if not serves_here(request.param):
        pytest.skip(f"{request.param} does not run on this GPU")
    return request.param


def tensors(batch, q_len, k_len, q_heads, kv_heads, head_dim, dtype=torch.bfloat16, seed=0):
    generator = torch.Generator("cuda").manual_seed(seed)
    sizes = ((q_len, q_heads), (k_len, kv_heads), (k_len, kv_heads))
    shapes = [(batch, length, heads, head_dim) for length, heads in sizes]
    return [torch.randn(shape, generator=generator, device="cuda").to(dtype) for shape in shapes]


def exact(q, k, v, lens=None, causal=True):
    """In float64, sequence by sequence."""
    group, outs = q.shape[2] // k.shape[2], []
    for b in range(q.shape[0]):
        length = k.shape[1] if lens is None else int(lens[b])
        keys, values = (x[b, :length].double().repeat_interleave(group, 1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q[b].double(), keys) / q.shape[-1] ** 0.5
        if causal:
            rows = torch.arange(q.shape[1], device="cuda")[:, None] + length - q.shape[1]
            scores = scores.masked_fill(torch.arange(length, device="cuda") > rows, float("-inf"))
        outs.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1).nan_to_num(), values))
    return torch.stack(outs)


def relative(out, want):
    return ((out.double() - want).norm() / want.norm()).item()


@pytest.mark.parametrize("group", [1, 3, 4, 5, 7, 8, 16])
@pytest.mark.parametrize("q_len", [1, 2, 4, 8])
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
def test_rows_and_head_dims(kernel, group, q_len, head_dim):
    if group * q_len > 64:
        pytest.skip("more rows than a decode kernel takes")
    q, k, v = tensors(3, q_len, 1500, 2 * group, 2, head_dim, seed=group)
    lens = torch.tensor([1500, 65, 700], dtype=torch.int32, device="cuda")
    out = qflash.attention(q, k, v, causal=True, kv_lens=lens, kernel=kernel)
    assert relative(out, exact(q, k, v, lens)) < 5e-3


@pytest.mark.parametrize(("batch", "keys"), [(1, 1024), (1, 131072), (8, 8192), (128, 1024), (300, 77)])
def test_caches(kernel, batch, keys):
    q, k, v = tensors(batch, 1, keys, 32, 8, 128)
    assert relative(qflash.attention(q, k, v, kernel=kernel), exact(q, k, v, causal=False)) < 5e-3


def test_graphs_serve_lengths_that_change(kernel):
    """What is captured reads the lengths of the moment; NaN in keys and values past them does not show."""
    q, k, v = tensors(16, 2, 3000, 8, 2, 128)
    lens = torch.full((16,), 5, dtype=torch.int32, device="cuda")
    qflash.attention(q, k, v, causal=True, kv_lens=lens, kernel=kernel)  # compiled
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = qflash.attention(q, k, v, causal=True, kv_lens=lens, kernel=kernel)
    generator = torch.Generator().manual_seed(1)
    for _ in range(20):
        drawn = torch.randint(0, 3001, (16,), generator=generator, dtype=torch.int32)
        drawn[:3] = torch.tensor([0, 3000, 64])
        lens.copy_(drawn)
        poisoned = [x.clone() for x in (k, v)]
        for b, length in enumerate(drawn.tolist()):
            for x in (k, v):
                x[b, length:] = torch.nan
        graph.replay()
        torch.cuda.synchronize()
        assert not out.isnan().any()
        k.copy_(poisoned[0])
        v.copy_(poisoned[1])
        assert relative(out, exact(q, k, v, drawn)) < 5e-3


def test_many_repeats_have_the_same_bits(kernel):
    q, k, v = tensors(5, 1, 4000, 32, 8, 128)
    lens = torch.tensor([4000, 1, 3333, 128, 2000], dtype=torch.int32, device="cuda")
    first = qflash.attention(q, k, v, kv_lens=lens, kernel=kernel)
    load = torch.randn(4096, 4096, device="cuda")
    for i in range(1000):
        if i % 50 == 0:
            load = load @ load / 64  # somebody else's work beside it
        assert torch.equal(first, qflash.attention(q, k, v, kv_lens=lens, kernel=kernel))


def test_streams_and_graphs_at_once(kernel):
    """Counters of merges are a stream's own, and a graph's."""
    problems = [tensors(2, 1, keys, 16, 4, 128, seed=keys) for keys in (1000, 5000, 9000)]
    wanted = [qflash.attention(*x, kernel=kernel) for x in problems]
    streams, graphs = [torch.cuda.Stream() for _ in problems], []
    torch.cuda.synchronize()
    for x, stream in zip(problems, streams, strict=True):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            out = [qflash.attention(*x, kernel=kernel) for _ in range(3)]
        graphs.append((graph, out))
    found = []
    for _ in range(30):
        for (graph, _), x, stream in zip(graphs, problems, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
                found.append(qflash.attention(*x, kernel=kernel))
    torch.cuda.synchronize()
    assert all(torch.equal(x, wanted[i % 3]) for i, x in enumerate(found))
    assert all(torch.equal(x, want) for (_, outs), want in zip(graphs, wanted, strict=True) for x in outs)


def test_the_first_runs_for_few_rows(kernel):
    first = next(name for name in KERNELS if serves_here(name))
    q, k, _ = tensors(1, 4, 300, 16, 2, 128)
    assert qflash.explain(q, k, k).kernel == first
    q, k, _ = tensors(1, 9, 300, 16, 2, 128)
    assert qflash.explain(q, k, k).kernel not in KERNELS


@pytest.mark.parametrize("pages", [False, True])
@pytest.mark.parametrize(("q_len", "head_dim"), [(1, 128), (4, 128), (1, 64), (1, 256)])
def test_the_same_bits_in_every_batch(kernel, q_len, head_dim, pages):
    """batch_invariant: one sequence, and the same in the last place of 64 others of all lengths."""
    lens = torch.arange(64, dtype=torch.int32, device="cuda") * 331 % 9000
    lens[-1] = 8000
    q, k, v = tensors(64, q_len, 9000, 16, 4, head_dim)
    words = {"causal": True, "batch_invariant": True, "return_lse": True, "kernel": kernel}

    def attend(b, length):
        if not pages:
            return qflash.attention(q[b], k[b, :length], v[b, :length], kv_lens=lens[b].clamp(max=length), **words)
        columns, first = -(-9000 // 64), -(-length // 64)
        pools = (torch.nn.functional.pad(x, (0, 0, 0, 0, 0, columns * 64 - 9000)) for x in (k, v))
        pools = [x.reshape(64 * columns, 64, 4, head_dim) for x in pools]
        table = torch.arange(64 * columns, dtype=torch.int32, device="cuda").reshape(64, columns)
        return qflash.attention(q[b], qflash.PagedKV(*pools, table[b, :first], lens[b], layout="pthd"), **words)

    together = attend(slice(None), 9000)
    for b, alone in ((63, attend(slice(63, 64), 8000)), (7, attend(slice(7, 8), 9000))):
        assert all(torch.equal(one[0], all_of_them[b]) for one, all_of_them in zip(alone, together, strict=True))
    four = attend(slice(60, 64), 9000)
    assert all(torch.equal(some[3], all_of_them[63]) for some, all_of_them in zip(four, together, strict=True))
