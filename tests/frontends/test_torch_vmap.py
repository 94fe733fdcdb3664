"""torch.vmap over the PyTorch front end: any dimension, nested, over nothing, of gradients and by autograd itself."""

from __future__ import annotations

import pytest

import qflash

torch = pytest.importorskip("torch")

from qflash.testing.torch_math import OPTIONS, packed, stacked, tensors  # noqa: E402

LENS = torch.tensor([13, 4], dtype=torch.int32)
ROPE = OPTIONS["rope-positions"]["rope"]
SINKS = torch.linspace(-1, 2, tensors()[0].shape[2])


def same(got, want):
    torch.testing.assert_close(got, want, rtol=0, atol=0)


def loss_of(**options):
    return lambda q, k, v: qflash.attention(q, k, v, **options).square().sum()


def sample(x, dim, i):
    """Sample i as a user's loop would make it: contiguous, as qflash wants a tensor that nobody maps."""
    return x if dim is None else x.select(dim, i).contiguous()


def assert_vmap_is_a_loop(call, in_dims, out_dims, *args):
    """vmap over the given dimensions gives, bit for bit, what one call per sample gives."""
    size = next(x.shape[dim] for x, dim in zip(args, in_dims, strict=True) if dim is not None)
    got = torch.vmap(call, in_dims=in_dims, out_dims=out_dims)(*args)
    samples = [call(*(sample(x, dim, i) for x, dim in zip(args, in_dims, strict=True))) for i in range(size)]
    if isinstance(samples[0], torch.Tensor):
        got, samples = (got,), [(x,) for x in samples]
    for a, b in zip(got, zip(*samples, strict=True), strict=True):
        same(a, torch.stack(b, out_dims))


def mapped_at(*dims):
    """q, k, v with a mapped dimension of 3 at each given place, and in memory too."""
    return [
        one if dim is None else many.movedim(0, dim).contiguous()
        for one, many, dim in zip(tensors(seed=9), stacked(), dims, strict=True)
    ]


def test_vmap_folds_into_the_batch():
    q, k, v = stacked()
    lens = torch.tensor([[13, 4], [1, 2], [0, 13]], dtype=torch.int32)
    positions = torch.arange(27, dtype=torch.int32).reshape(3, 9)

    def call(q, k, v, lens, positions):
        rope = qflash.Rope(ROPE.cos, ROPE.sin, positions_q=positions, positions_k=ROPE.positions_k)
        return qflash.attention(q, k, v, kv_lens=lens, rope=rope, return_lse=True)

    got = torch.vmap(call, in_dims=(0, None, 2, 0, 0))(q, k[0], v.movedim(0, 2), lens, positions)
    for i in range(3):
        for a, b in zip(got, call(q[i], k[0], v[i], lens[i], positions[i]), strict=True):
            same(a[i], b)


def test_vmap_with_a_window():
    """A word that is a list of numbers, none of which is mapped."""

    def gradients(q, k, v):
        return torch.func.grad(loss_of(window=(3, 1)), argnums=(0, 1, 2))(q, k, v)

    in_dims = (0, None, -1)
    args = mapped_at(*in_dims)
    assert_vmap_is_a_loop(lambda *x: qflash.attention(*x, window=(3, 1)), in_dims, 0, *args)
    assert_vmap_is_a_loop(gradients, in_dims, 0, *args)


def test_vmap_nested_and_over_the_last_dimension():
    q, k, v = stacked()
    got = torch.vmap(torch.vmap(lambda q: qflash.attention(q, k[0], v[0])), in_dims=-1)(q.unsqueeze(-1))
    for i in range(3):
        same(got[0, i], qflash.attention(q[i], k[0], v[0]))


IN_DIMS = [(-1, -1, -1), (-1, None, 2), (None, -1, -1), (-2, 1, -5), (4, 3, None), (None, None, -1)]
LENS_OF_EACH = torch.tensor([[13, 4], [1, 2], [0, 13]], dtype=torch.int32)


@pytest.mark.parametrize("in_dims", IN_DIMS, ids=str)
@pytest.mark.parametrize("out_dims", [0, -1, 2])
def test_vmap_over_any_dimension(in_dims, out_dims):
    assert_vmap_is_a_loop(qflash.attention, in_dims, out_dims, *mapped_at(*in_dims))


@pytest.mark.parametrize("in_dims", IN_DIMS, ids=str)
def test_vmap_of_grad_over_any_dimension(in_dims):
    def gradients(q, k, v):
        return torch.func.grad(loss_of(causal=True), argnums=(0, 1, 2))(q, k, v)

    args = mapped_at(*in_dims)
    assert_vmap_is_a_loop(gradients, in_dims, -1, *args)
    whole = torch.func.grad(lambda *x: torch.vmap(loss_of(causal=True), in_dims)(*x).sum(), argnums=(0, 1, 2))(*args)
    for got, each, x, dim in zip(whole, torch.vmap(gradients, in_dims)(*args), args, in_dims, strict=True):
        if dim is None:
            torch.testing.assert_close(got, each.sum(0))
        else:
            same(got, each.movedim(0, dim))
        assert got.shape == x.shape


def test_vmap_of_lengths_and_positions_over_the_last_dimension():
    at_q = torch.arange(27, dtype=torch.int32).reshape(3, 9)
    at_k = torch.arange(78, dtype=torch.int32).reshape(3, 2, 13).flip(0) % 27

    def call(q, k, v, lens, at_q, at_k):
        rope = qflash.Rope(ROPE.cos, ROPE.sin, positions_q=at_q, positions_k=at_k)
        return qflash.attention(q, k, v, kv_lens=lens, rope=rope, return_lse=True)

    q, k, v = mapped_at(-1, None, -1)
    in_dims = (-1, None, -1, -1, -1, -1)
    last = [x.movedim(0, -1).contiguous() for x in (LENS_OF_EACH, at_q, at_k)]
    assert_vmap_is_a_loop(call, in_dims, 0, q, k, v, *last)
    assert_vmap_is_a_loop(call, (-1, None, -1, None, -1, None), 1, q, k, v, LENS, last[1], at_k[0])

    def gradient(*args):
        return torch.func.grad(lambda *args: call(*args)[0].square().sum())(*args)

    assert_vmap_is_a_loop(gradient, in_dims, 0, q, k, v, *last)


def test_nested_vmap_over_any_dimensions():
    q, k, v = mapped_at(-1, 2, None)
    q, k = torch.stack([q, 2 * q], -1), torch.stack([k, k + 1], 1)
    for call in (qflash.attention, torch.func.grad(loss_of(causal=True), argnums=(0, 1, 2))):
        got = torch.vmap(torch.vmap(call, (-1, 2, None)), (-1, 1, None), out_dims=-1)(q, k, v)
        for i in range(2):
            for j in range(3):
                want = call(sample(q[..., i], -1, j), sample(k[:, i], 2, j), v)
                for a, b in zip(*((x,) if isinstance(x, torch.Tensor) else x for x in (got, want)), strict=True):
                    same(a[j, ..., i], b)


def test_vmap_of_packed_and_of_tables_over_the_last_dimension():
    args = packed([tensors(batch=1, q_len=n) for n in (3, 9)])
    last = [torch.stack([x, 2 * x, 3 * x], -1) for x in args[:3]]

    def varlen(q, k, v):
        return qflash.attention_varlen(q, k, v, *args[3:], 9, 13, causal=True)

    assert_vmap_is_a_loop(varlen, (-1, -1, -1), -1, *last)
    gradient = torch.func.grad(lambda *x: varlen(*x).square().sum(), argnums=(0, 1, 2))
    assert_vmap_is_a_loop(gradient, (-1, None, -1), 0, last[0], args[1], last[2])
    cos = torch.stack([ROPE.cos, ROPE.sin, ROPE.cos * 0.5], -1)
    rotated = lambda q, k, v, cos: qflash.attention(q, k, v, rope=qflash.Rope(cos, ROPE.sin))  # noqa: E731
    assert_vmap_is_a_loop(rotated, (-1, None, -1, -1), 0, *mapped_at(-1, None, -1), cos)


def quantized(x, **words):
    result = qflash.quantize(x, **words)
    return result.values, result.scale


def attention_on_integers(q, k, v):
    q, k = (qflash.quantize(x, granularity="tensor") for x in (q, k))
    return qflash.attention(q, k, v, causal=True)


ROWS = torch.randn(5, 8, 3, generator=torch.Generator().manual_seed(3))
INTEGERS = (ROWS * 40).to(torch.int8)
OTHERS = {
    "softmax": (qflash.softmax, (-1,), [ROWS]),
    "layer_norm": (qflash.layer_norm, (-1, -1, -1), [ROWS, ROWS[0], ROWS[1]]),
    "layer_norm-shared": (qflash.layer_norm, (-2, None, None), [ROWS.transpose(1, 2).contiguous(), *ROWS[:2, :, 0]]),
    "cross_entropy": (qflash.cross_entropy, (-1, -1), [ROWS, torch.arange(15).reshape(5, 3) % 8]),
    "cross_entropy-shared": (qflash.cross_entropy, (-1, None), [ROWS, torch.arange(5)]),
    "int8_matmul": (qflash.int8_matmul, (-1, -1), [INTEGERS, INTEGERS.transpose(0, 1).contiguous()]),
    "int8_matmul-shared": (qflash.int8_matmul, (-1, None), [INTEGERS, INTEGERS[..., 0].T.contiguous()]),
    "quantize": (quantized, (-1,), mapped_at(-1, None, None)[:1]),
    "attention_int8": (attention_on_integers, (-1, None, -1), mapped_at(-1, None, -1)),
}


@pytest.mark.parametrize(("call", "in_dims", "args"), OTHERS.values(), ids=OTHERS.keys())
@pytest.mark.parametrize("out_dims", [0, -1])
def test_vmap_of_the_other_operations_over_the_last_dimension(call, in_dims, args, out_dims):
    assert_vmap_is_a_loop(call, in_dims, 0 if call is qflash.cross_entropy else out_dims, *args)


def of_no_sample(args, in_dims):
    return [x if dim is None else x.narrow(dim, 0, 0) for x, dim in zip(args, in_dims, strict=True)]


@pytest.mark.parametrize(("call", "in_dims", "args"), OTHERS.values(), ids=OTHERS.keys())
def test_vmap_of_the_other_operations_over_nothing(call, in_dims, args):
    got = torch.vmap(call, in_dims)(*of_no_sample(args, in_dims))
    want = call(*(sample(x, dim, 0) for x, dim in zip(args, in_dims, strict=True)))
    for a, b in zip(*((x,) if isinstance(x, torch.Tensor) else x for x in (got, want)), strict=True):
        assert (a.shape, a.dtype) == ((0, *b.shape), b.dtype)


@pytest.mark.parametrize("kind", ["plain", "packed", "tables"])
def test_vmap_of_attention_over_nothing(kind):
    """Empty results, an empty gradient of what is mapped and zeros for what all samples share."""
    q, k, v = tensors()
    if kind == "packed":
        q, k, v, cu_q, cu_k = packed([tensors(batch=1, q_len=n) for n in (3, 9)])

    def call(q, k, cos):
        if kind == "packed":
            return qflash.attention_varlen(q, k, v, cu_q, cu_k, 9, 13, return_lse=True)
        rope = qflash.Rope(cos, ROPE.sin) if kind == "tables" else None
        return qflash.attention(q, k, v, rope=rope, return_lse=True)

    none, cos = torch.empty(0, *q.shape), torch.empty(0, *ROPE.cos.shape)
    out, lse = torch.vmap(call, (0, None, 0))(none, k, cos)
    assert out.shape == (0, *q.shape)
    assert lse.shape == (0, *call(q, k, ROPE.cos)[1].shape)
    gradients = torch.func.grad(lambda q, k: torch.vmap(call, (0, None, 0))(q, k, cos)[0].sum(), argnums=(0, 1))
    for got, x in zip(gradients(none, k), (none, k), strict=True):
        same(got, torch.zeros_like(x))
    shared = k.clone().requires_grad_()
    torch.vmap(call, (0, None, 0))(none, shared, cos)[0].sum().backward()
    same(shared.grad, torch.zeros_like(k))


def test_vmap_of_packed_and_of_tables_takes_samples_in_turn():
    args = packed([tensors(batch=1, q_len=n) for n in (3, 9)])
    batch = torch.stack([args[0], args[0] * 2])
    got = torch.vmap(lambda q: qflash.attention_varlen(q, *args[1:], 9, 13))(batch)
    for i in range(2):
        same(got[i], qflash.attention_varlen(batch[i], *args[1:], 9, 13))
    q, k, v = tensors()
    cos = torch.stack([ROPE.cos, ROPE.sin])
    got = torch.vmap(lambda cos: qflash.attention(q, k, v, rope=qflash.Rope(cos, ROPE.sin)))(cos)
    for i in range(2):
        same(got[i], qflash.attention(q, k, v, rope=qflash.Rope(cos[i], ROPE.sin)))


def test_vmap_of_grad_and_grad_of_vmap():
    q, k, v = stacked()
    per_sample = torch.vmap(torch.func.grad(loss_of(causal=True), argnums=(0, 1, 2)))(q, k, v)
    whole = torch.func.grad(lambda *x: torch.vmap(loss_of(causal=True))(*x).sum(), argnums=(0, 1, 2))(q, k, v)
    for i in range(3):
        want = torch.func.grad(loss_of(causal=True), argnums=(0, 1, 2))(q[i], k[i], v[i])
        for a, b, c in zip(per_sample, whole, want, strict=True):
            same(a[i], c)
            same(b[i], c)


def _of_one_row(call):
    """A few numbers of an output, whose gradients torch.autograd takes as one batch."""
    return lambda *arrays: call(*arrays)[0, 3, 0, :3]


@pytest.mark.parametrize(
    "call",
    [
        lambda q, k, v, sinks: qflash.attention(q, k, v, causal=True),
        lambda q, k, v, sinks: qflash.attention(q, k, v, window=(3, 1), sinks=sinks),  # each sample has its own sums
        lambda q, k, v, sinks: qflash.layer_norm(qflash.softmax(q), sinks.repeat(q.shape[-1] // len(sinks))),
    ],
    ids=["folded", "in turn", "rows"],
)
def test_gradients_that_autograd_batches(call):
    inputs = (*tensors(), torch.linspace(-1, 2, tensors()[0].shape[2]))
    got = torch.autograd.functional.jacobian(_of_one_row(call), inputs, vectorize=True)
    for a, b in zip(got, torch.autograd.functional.jacobian(_of_one_row(call), inputs), strict=True):
        torch.testing.assert_close(a, b)
    leaves = [x.requires_grad_() for x in inputs]
    out = _of_one_row(call)(*leaves)
    batched = torch.autograd.grad(out, leaves, torch.eye(3), is_grads_batched=True, allow_unused=True)
    assert all(torch.equal(a, b) for a, b in zip(batched, got, strict=True) if a is not None)


def test_sinks_under_vmap():
    """A mapped q shares them; sinks that are mapped themselves are taken in turn."""
    q, k, v = tensors()
    many, sinks = torch.stack([q, 2 * q]), torch.stack([SINKS, SINKS - 3])
    got = torch.vmap(lambda q: qflash.attention(q, k, v, sinks=SINKS))(many)
    each = torch.vmap(lambda sinks: qflash.attention(q, k, v, sinks=sinks))(sinks)
    for i in range(2):
        same(got[i], qflash.attention(many[i], k, v, sinks=SINKS))
        same(each[i], qflash.attention(q, k, v, sinks=sinks[i]))


def scaled(q, k, v, sinks):
    """Attention with sinks, by what a call without them gives."""
    out, lse = qflash.attention(q, k, v, return_lse=True)
    return out * torch.sigmoid(lse - sinks[:, None]).transpose(1, 2)[..., None]


def test_gradient_of_sinks_alone_and_of_each_sample_under_vmap():
    q, k, v = tensors()
    grad = torch.func.grad(lambda sinks, q: qflash.attention(q, k, v, sinks=sinks).square().sum())
    many = torch.stack([q, 2 * q, -q])
    got = torch.vmap(grad, (None, 0))(SINKS, many)
    for i in range(3):
        want = torch.func.grad(lambda sinks: scaled(many[i], k, v, sinks).square().sum())(SINKS)  # noqa: B023
        torch.testing.assert_close(got[i], want, rtol=1e-4, atol=1e-5)
