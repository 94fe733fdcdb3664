"""PyTorch front end on a GPU: CUDA kernels, streams, graphs, compiled code, and what is refused."""

from __future__ import annotations

from threading import Thread

import pytest

import qflash

torch = pytest.importorskip("torch")

from qflash.testing.compare import GRADIENT_L2, LSE  # noqa: E402
from qflash.testing.torch_math import ALLOWED, OPTIONS, packed, plain, relative, tables, tensors  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("cuda_torch")]
KERNELS = ["fa", "unfused"]
ALL_KERNELS = {  # and the dtype they are tried in
    "fa": torch.float32,
    "unfused": torch.float32,
    "fa_mma": torch.bfloat16,
    "sm90_fwd": torch.bfloat16,
}


def to_gpu(value):
    """A tensor, a Rope or a plain word, on the GPU."""
    if isinstance(value, torch.Tensor):
        return value.cuda()
    if isinstance(value, qflash.Rope):
        arrays = (to_gpu(x) for x in (value.cos, value.sin))
        return qflash.Rope(*arrays, value.interleaved, to_gpu(value.positions_q), to_gpu(value.positions_k))
    return value


def gpu(options):
    return {name: to_gpu(value) for name, value in options.items()}


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", ALLOWED.keys(), ids=str)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_matches_plain_math(options, dtype, kernel):
    args = tensors(dtype=dtype)
    if kernel == "unfused" and "rope" in options:
        with pytest.raises(qflash.NoKernelError, match="takes no rope"):
            qflash.attention(*map(to_gpu, args), kernel=kernel, **gpu(options))
        return
    out, lse = qflash.attention(*map(to_gpu, args), kernel=kernel, return_lse=True, **gpu(options))
    want, want_lse = plain(*args, **options)
    assert (out.dtype, out.device.type, lse.dtype) == (dtype, "cuda", torch.float32)
    assert relative(out.cpu(), want) < ALLOWED[dtype]
    torch.testing.assert_close(lse.cpu().double(), want_lse, rtol=LSE, atol=LSE)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dim", [1, 3, 64, 100, 128, 256])
def test_head_dims(dim, kernel):
    args = tensors(q_len=70, k_len=133, dim=dim)
    out = qflash.attention(*map(to_gpu, args), kernel=kernel, causal=True)
    assert relative(out.cpu(), plain(*args, causal=True)[0]) < ALLOWED[torch.float32]


@pytest.mark.parametrize("kernel", ["fa", "fa_warps", "fa_tc", "fa_mma", "sm90_fwd"])
def test_long_contexts_in_linear_memory(kernel):
    """T = 131072 at head_dim 128: a matrix of scores would take 34 GB or more. The last rows stand for all."""
    dtype = torch.float32 if kernel in ("fa", "fa_warps") else torch.bfloat16
    args = tensors(batch=1, q_len=131072, k_len=131072, q_heads=1, kv_heads=1, dim=128, dtype=dtype)
    q, k, v = map(to_gpu, args)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = qflash.attention(q, k, v, kernel=kernel, causal=True)
    assert torch.cuda.max_memory_allocated() - before <= 2 * out.nbytes
    want = plain(args[0][:, -64:], *args[1:], causal=True)[0]
    assert relative(out[:, -64:].cpu(), want) < ALLOWED[dtype]


@pytest.mark.parametrize("kernel", ["fa"])
def test_packed_matches_the_cpu(kernel):
    args = packed([tensors(batch=1, q_len=n, k_len=m, seed=n) for n, m in ((5, 5), (0, 3), (70, 81), (2, 1))])
    options = {"causal": True, "return_lse": True, "rope": tables(rows=128)}
    got = qflash.attention_varlen(*map(to_gpu, args), 70, 81, kernel=kernel, **gpu(options))
    for a, b in zip(got, qflash.attention_varlen(*args, 70, 81, **options), strict=True):
        torch.testing.assert_close(a.cpu(), b)


@pytest.mark.parametrize("kernel", ALL_KERNELS)
def test_strided_views(kernel):
    q, k, v = map(to_gpu, tensors(dtype=ALL_KERNELS[kernel]))
    want = qflash.attention(q, k, v, kernel=kernel)
    heads_first = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    torch.testing.assert_close(qflash.attention(*heads_first, kernel=kernel), want, rtol=0, atol=0)


@pytest.mark.parametrize("kernel", ["sm90_fwd"])
def test_views_that_the_copy_engine_cannot_walk(kernel):
    """Strides of no whole 16 bytes, an address of none, and both."""
    q, k, v = map(to_gpu, tensors(dim=64, dtype=torch.bfloat16))
    want = qflash.attention(q, k, v, kernel=kernel)
    for before, after in ((0, 1), (3, 5), (1, 2)):
        views = [torch.nn.functional.pad(x, (before, after))[..., before:-after] for x in (q, k, v)]
        torch.testing.assert_close(qflash.attention(*views, kernel=kernel), want, rtol=0, atol=0)


@pytest.mark.parametrize("kernel", ALL_KERNELS)
def test_runs_on_the_current_stream(kernel):
    """The inputs are written on a side stream behind a long wait; only a launch on that stream sees them."""
    args = [x.cuda() for x in tensors(q_len=64, k_len=64, dtype=ALL_KERNELS[kernel])]
    want = qflash.attention(*args, kernel=kernel)
    late = [torch.zeros_like(x) for x in args]
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)
        for x, y in zip(late, args, strict=True):
            x.copy_(y)
        out = qflash.attention(*late, kernel=kernel)
    assert not stream.query()  # and the call did not wait
    stream.synchronize()
    torch.testing.assert_close(out, want, rtol=0, atol=0)


@pytest.mark.parametrize("kernel", ALL_KERNELS)
def test_captured_in_a_cuda_graph(kernel):
    q, k, v = (x.cuda() for x in tensors(dtype=torch.float16))
    rope = gpu({"rope": tables()})["rope"]
    rope = qflash.Rope(rope.cos.bfloat16(), rope.sin.bfloat16())  # converted inside the graph as well
    lens = torch.tensor([13, 4], dtype=torch.int32, device="cuda")
    options = {"kernel": kernel, "causal": True, "kv_lens": lens, "rope": None if kernel == "unfused" else rope}
    qflash.attention(q, k, v, **options)  # compiled before the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = qflash.attention(q, k, v, **options)
    for seed in (1, 2):
        for x, y in zip((q, k, v), tensors(dtype=torch.float16, seed=seed), strict=True):
            x.copy_(y)
        lens.copy_(torch.tensor([seed + 2, 13], dtype=torch.int32))
        rope.cos.mul_(0.5)
        graph.replay()
        torch.cuda.synchronize()
        torch.testing.assert_close(out, qflash.attention(q, k, v, **options), rtol=0, atol=0)


@pytest.mark.parametrize("kernel", ["sm90_fwd"])
def test_dynamic_schedules_on_streams_and_in_graphs_share_no_counter(kernel):
    """Two graphs and two streams at the same time, again and again. Somebody else's draws would leave tiles out, in
    that call or in the next."""
    q, k, v = map(
        to_gpu, tensors(batch=2, q_len=3000, k_len=3000, q_heads=16, kv_heads=4, dim=64, dtype=torch.bfloat16)
    )
    options = {"kernel": kernel, "causal": True}
    want = qflash.attention(q, k, v, **options)  # 512 work tiles: more than any GPU has multiprocessors
    graphs = [torch.cuda.CUDAGraph() for _ in range(2)]
    outs = []
    for graph in graphs:
        with torch.cuda.graph(graph):
            outs.append(qflash.attention(q, k, v, **options))
    streams = [torch.cuda.Stream() for _ in range(4)]
    torch.cuda.synchronize()
    for _ in range(20):
        for graph, stream in zip(graphs, streams[:2], strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        for stream in streams[2:]:
            with torch.cuda.stream(stream):
                outs.append(qflash.attention(q, k, v, **options))
    torch.cuda.synchronize()
    for out in outs:
        torch.testing.assert_close(out, want, rtol=0, atol=0)


@pytest.mark.parametrize("kernel", ALL_KERNELS)
def test_compiled_whole(kernel):
    torch._dynamo.reset()
    q, k, v = (x.cuda() for x in tensors(dtype=ALL_KERNELS[kernel]))
    compiled = torch.compile(lambda q, k, v: qflash.attention(q * 2, k, v, kernel=kernel, causal=True), fullgraph=True)
    want = qflash.attention(q * 2, k, v, kernel=kernel, causal=True)
    torch.testing.assert_close(compiled(q, k, v), want, rtol=0, atol=0)


def test_opcheck():
    arrays = [x.cuda() for x in tensors()]
    qflash.attention(*arrays)  # first, because the front end defines the ops as it is loaded
    words = (True, None, None, None, None, None, False, True, False, 0, 0, 0)
    torch.library.opcheck(torch.ops.qflash.attention.default, (*arrays, *[None] * 8, *words))


def gradients_of(call, *tensors):
    """Gradients of a loss that out and lse are part of."""
    leaves = [x.detach().requires_grad_() for x in tensors]
    out, lse = call(*leaves)
    loss = (out.double() * torch.linspace(-1, 1, out.shape[-1], device=out.device)).sum() + (0.1 * lse).sum()
    return torch.autograd.grad(loss, leaves)


GRADIENT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@pytest.mark.parametrize("dtype", GRADIENT_DTYPES, ids=str)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_gradients_match_plain_math(options, dtype):
    args = tensors(dim=64, dtype=dtype)
    seen = plain(*args, **options)[1] > -torch.inf

    def with_seen(call, words, where):
        def both(q, k, v):
            out, lse = call(q, k, v, words)
            return out, lse.where(where, 0.0)

        return both

    got = gradients_of(
        with_seen(lambda q, k, v, w: qflash.attention(q, k, v, return_lse=True, **w), gpu(options), seen.cuda()),
        *map(to_gpu, args),
    )
    want = gradients_of(with_seen(lambda q, k, v, w: plain(q, k, v, **w), options, seen), *(x.double() for x in args))
    for x, y in zip(got, want, strict=True):
        assert x.dtype == dtype
        assert relative(x.cpu(), y) < GRADIENT_L2[str(dtype).removeprefix("torch.")]


@pytest.mark.parametrize("dtype", GRADIENT_DTYPES, ids=str)
def test_gradients_compiled_checkpointed_and_by_torch_func(dtype):
    q, k, v = (x.cuda() for x in tensors(q_len=70, k_len=70, dim=64, dtype=dtype))
    assert qflash.explain(q, k, v).backward is not None

    def attend(q, k, v):
        return qflash.attention(q, k, v, causal=True, return_lse=True)

    want = gradients_of(attend, q, k, v)
    ways = {
        "again": attend,
        "compiled": torch.compile(attend, fullgraph=True),
        "checkpointed": lambda *x: torch.utils.checkpoint.checkpoint(attend, *x, use_reentrant=False),
    }
    for name, way in ways.items():
        for got, expected in zip(gradients_of(way, q, k, v), want, strict=True):
            assert torch.equal(got, expected), name

    def loss(q):
        out, lse = attend(q, k, v)
        return (out.double() * torch.linspace(-1, 1, 64, device="cuda")).sum() + (0.1 * lse).sum()

    assert torch.equal(torch.func.grad(loss)(q), want[0])
    batched = torch.vmap(torch.func.grad(loss))(torch.stack([q, 2 * q]))
    torch.testing.assert_close(batched[0], want[0], rtol=0, atol=0)


@pytest.mark.parametrize("dtype", GRADIENT_DTYPES, ids=str)
def test_gradients_of_expanded_and_strided_outputs(dtype):
    """sum() gives a gradient of stride 0, a transposed view one in another order."""
    q, k, v = (x.cuda().requires_grad_() for x in tensors(q_len=33, k_len=50, dim=64, dtype=dtype))
    out = qflash.attention(q, k, v)
    dout = torch.randn(out.shape[0], out.shape[2], out.shape[1], 64, device="cuda").to(dtype).transpose(1, 2)
    for given in (torch.ones((), device="cuda", dtype=dtype).expand(out.shape), dout):
        got = torch.autograd.grad(out, (q, k, v), given, retain_graph=True)
        want = torch.autograd.grad(out, (q, k, v), given.contiguous(), retain_graph=True)
        assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True))


def test_gradients_on_another_stream_and_in_a_graph():
    q, k, v = (x.cuda().requires_grad_() for x in tensors(q_len=70, k_len=70, dim=64, dtype=torch.bfloat16))
    dout = torch.ones_like(q)
    want = torch.autograd.grad(qflash.attention(q, k, v, causal=True), (q, k, v), dout)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):  # what a graph captures must have run before
            torch.autograd.grad(qflash.attention(q, k, v, causal=True), (q, k, v), dout)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = torch.autograd.grad(qflash.attention(q, k, v, causal=True), (q, k, v), dout)
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(x, y) for x, y in zip(captured, want, strict=True))


def test_opcheck_of_gradients():
    arrays = [x.cuda() for x in tensors()]
    out, lse = qflash.attention(*arrays, return_lse=True)
    words = (True, None, None, None, None, None, False, True, False, 0, 0, 0)
    operands = (torch.ones_like(out), torch.ones_like(lse), *arrays, *[None] * 8, out, lse)
    torch.library.opcheck(torch.ops.qflash.attention_backward.default, (*operands, *words))


def test_gradients_that_are_refused():
    q, k, v = (x.cuda().half().requires_grad_() for x in tensors(dim=64))
    with pytest.raises(NotImplementedError, match=r"no backward pass.*torch\.no_grad\(\).*detach\(\)"):
        qflash.attention(q, k, v, precision="int8")
    (dq,) = torch.autograd.grad(qflash.attention(q, k, v).sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="no second derivative"):
        torch.autograd.grad(dq.sum(), q)


def test_devices_must_agree():
    q, k, v = (x.cuda() for x in tensors())
    with pytest.raises(ValueError, match="k is on cpu; allowed: q's device, cuda:0"):
        qflash.attention(q, k.cpu(), v.cpu())
    with pytest.raises(ValueError, match="kv_lens is on cpu; allowed: q's device, cuda:0"):
        qflash.attention(q, k, v, kv_lens=torch.tensor([1, 2], dtype=torch.int32))
    with pytest.raises(ValueError, match=r"rope\.cos is on cpu; allowed: q's device, cuda:0"):
        qflash.attention(q, k, v, rope=tables())


def test_a_length_out_of_range_gives_nan_for_that_sequence_alone():
    """A kernel must not stop to tell, so it marks the rows."""
    args = tensors()
    lens = torch.tensor([14, 4], dtype=torch.int32, device="cuda")
    out = qflash.attention(*map(to_gpu, args), kv_lens=lens)
    assert out[0].isnan().all()
    want, _ = plain(*(x[1:] for x in args), kv_lens=torch.tensor([4]))
    assert relative(out[1:].cpu(), want) < ALLOWED[torch.float32]


def test_vmap_and_inference_mode_and_autocast():
    q, k, v = (x.cuda() for x in tensors())
    want = qflash.attention(q, k, v)
    stacked = torch.stack([q, q])
    torch.testing.assert_close(torch.vmap(lambda q: qflash.attention(q, k, v))(stacked)[1], want, rtol=0, atol=0)
    with torch.inference_mode():
        torch.testing.assert_close(qflash.attention(q, k, v), want, rtol=0, atol=0)
    with torch.autocast("cuda", torch.float16):
        got = qflash.attention(q, k, v)
    torch.testing.assert_close(got, qflash.attention(*(x.half() for x in (q, k, v))), rtol=0, atol=0)


def test_explain_names_the_kernel():
    q, k, v = (x.cuda() for x in tensors())
    explanation = qflash.explain(q, k, v)
    major, minor = torch.cuda.get_device_capability()
    assert (explanation.kernel, explanation.spec.arch) == ("fa", 10 * major + minor)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_sixteen_bit_arrays_get_the_kernel_of_the_gpu(dtype):
    q, k, v = (torch.randn(1, 100, 2, 64, device="cuda", dtype=dtype) for _ in "qkv")  # too many rows to decode
    hopper = torch.cuda.get_device_capability() == (9, 0)
    kernel, backward = ("sm90_fwd", "sm90_bwd") if hopper else ("fa_mma", "fa_mma_bwd")
    assert qflash.explain(q, k, v).kernel == kernel
    assert torch.equal(qflash.attention(q, k, v), qflash.attention(q, k, v, kernel=kernel))
    assert qflash.explain(q, k, v).backward == backward


@pytest.mark.parametrize("name", ["attention", "linear"])
def test_a_thread_that_has_asked_nothing_of_the_gpu(name):
    """It has no context, which the driver wants for a tensor map."""
    q = torch.randn(1, 300, 2, 64, device="cuda", dtype=torch.float16)
    x = torch.randn(256, 256, device="cuda", dtype=torch.float16)
    call = {"attention": lambda: qflash.attention(q, q, q), "linear": lambda: qflash.linear(x, x)}[name]
    want, found = call(), []  # which leaves PyTorch memory for another result
    thread = Thread(target=lambda: found.append(call()))
    thread.start()
    thread.join()
    assert torch.equal(found[0], want)


@pytest.mark.parametrize("dim", [20, 100])
def test_head_dims_that_the_copy_engine_refuses(dim):
    q, k, v = (x.cuda() for x in tensors(dim=dim, dtype=torch.bfloat16))
    explanation = qflash.explain(q, k, v)
    assert explanation.kernel == "fa_mma"
    why = next(why for name, _, why in explanation.rows if name == "sm90_fwd")
    assert f"head_dim is {dim}; the copy engine takes multiples of 8" in why
    with pytest.raises(qflash.NoKernelError, match="copy engine takes multiples of 8"):
        qflash.attention(q, k, v, kernel="sm90_fwd")


@pytest.mark.parametrize("kernel", KERNELS)
def test_another_device_than_the_current_one(kernel):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    args = [x.to("cuda:1") for x in tensors()]
    with torch.cuda.device(0):
        out = qflash.attention(*args, kernel=kernel)
        assert torch.cuda.current_device() == 0
    assert out.device.index == 1
    assert relative(out.cpu(), plain(*tensors())[0]) < ALLOWED[torch.float32]
