"""PyTorch front end through the dispatcher: torch.compile, torch.export, opcheck, torch.func, fake and meta tensors."""

from __future__ import annotations

import subprocess
import sys

import pytest

import qflash

torch = pytest.importorskip("torch")

from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode  # noqa: E402

import qflash.frontends.torch  # noqa: E402  (defines the ops)
from qflash.ops.attention import ATTENTION  # noqa: E402
from qflash.testing.torch_math import ALLOWED_GRADIENT, OPTIONS, packed, plain, relative, tables, tensors  # noqa: E402

LENS = torch.tensor([13, 4], dtype=torch.int32)
ROPE = OPTIONS["rope-positions"]["rope"]


@pytest.fixture
def fresh_compiler():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield torch._dynamo.utils.counters["stats"]
    torch._dynamo.reset()


def same(got, want):
    torch.testing.assert_close(got, want, rtol=0, atol=0)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_compiled_whole(options, fresh_compiler):
    q, k, v = tensors(grad=True)

    def loss(q, k, v):
        out, lse = qflash.attention(q * 1.5, k, v, return_lse=True, **options)
        return out.square().sum() + lse.where(lse > -torch.inf, 0.0).sum()

    compiled = torch.compile(loss, fullgraph=True)
    torch.testing.assert_close(compiled(q, k, v), loss(q, k, v))
    for got, want in zip(
        torch.autograd.grad(compiled(q, k, v), (q, k, v)), torch.autograd.grad(loss(q, k, v), (q, k, v)), strict=True
    ):
        torch.testing.assert_close(got, want)


def test_compiled_program_survives_new_lengths_and_other_callers(fresh_compiler):
    compiled = torch.compile(lambda q, k, v: qflash.attention(q, k, v, causal=True), fullgraph=True)
    for n in (9, 12, 17, 30):
        args = tensors(q_len=n, k_len=n + 3)
        same(compiled(*args), qflash.attention(*args, causal=True))
    x = torch.nn.Parameter(torch.randn(1, 2, 2, 4))
    qflash.attention(x, x, x)
    compiled(*tensors(q_len=8, k_len=12))
    assert fresh_compiler["unique_graphs"] == 2  # the first shape, and all shapes


def test_compiled_with_symbolic_words(fresh_compiler):
    """Lengths, a rope built inside, a window that depends on a length."""
    rope = tables(rows=64)

    def call(q, k, v, lens):
        spin = qflash.Rope(rope.cos, rope.sin, interleaved=True)
        return qflash.attention(q, k, v, window=(q.shape[1] // 2, 0), kv_lens=lens, rope=spin, scale=0.2)

    compiled = torch.compile(call, fullgraph=True, dynamic=True)
    for n in (9, 12, 30):
        args = (*tensors(q_len=n, k_len=n + 3), torch.tensor([n + 3, 2], dtype=torch.int32))
        same(compiled(*args), call(*args))


def test_compiled_packed(fresh_compiler):
    compiled = torch.compile(qflash.attention_varlen, fullgraph=True)
    for n in (9, 12, 17, 30):
        args = packed([tensors(batch=1, q_len=n, k_len=n + 2), tensors(batch=1, q_len=4, k_len=1)])
        same(compiled(*args, n, n + 2, causal=True), qflash.attention_varlen(*args, n, n + 2, causal=True))
    assert fresh_compiler["unique_graphs"] == 2


FIRST_CALL_COMPILED = """
import warnings; warnings.simplefilter("error", UserWarning)
import qflash, torch
f = torch.compile(lambda q: qflash.attention(q, q, q), fullgraph=True, backend="aot_eager")
q = torch.randn(1, 4, 2, 8)
f(q); f(q)
assert torch.equal(f(q), qflash.attention(q, q, q)); f(q)
print(torch._dynamo.utils.counters["stats"]["unique_graphs"])
"""


def test_first_call_of_a_process_may_be_compiled():
    """qflash before torch, no eager call before: no warning, and no second compilation once eager calls come."""
    done = subprocess.run([sys.executable, "-c", FIRST_CALL_COMPILED], capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, "1"), done.stderr


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda q, k, v: qflash.attention(q, k, v[:, :5]), "v has shape"),
        (lambda q, k, v: qflash.attention(q, k, v, kernel="nope"), "kernel is 'nope'"),
        (lambda q, k, v: qflash.attention(q, k, v, kernel="fa"), "runs on cuda"),
        (
            lambda q, k, v: qflash.attention(q, k, v, precision="int8"),
            r"no backward pass.*torch\.no_grad.*None: train in the",
        ),
    ],
)
def test_compiled_program_refuses_in_the_same_words(call, text, fresh_compiler):
    q, k, v = tensors(grad=True)
    with pytest.raises((ValueError, NotImplementedError), match=text):
        call(q, k, v)
    with pytest.raises(Exception, match=text):
        torch.compile(call, fullgraph=True)(q, k, v)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("rope", [None, tables(rows=64)], ids=["plain", "rope"])
def test_export_with_dynamic_lengths(strict, rope):
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            if rope is not None:
                self.register_buffer("cos", rope.cos)
                self.register_buffer("sin", rope.sin)

        def forward(self, q, k, v):
            spin = None if rope is None else qflash.Rope(self.cos, self.sin)
            return qflash.attention(q, k, v, causal=True, rope=spin)

    rows, keys = torch.export.Dim("rows", max=64), torch.export.Dim("keys", max=64)
    shapes = {"q": {1: rows}, "k": {1: keys}, "v": {1: keys}}
    program = torch.export.export(Model(), tensors(), dynamic_shapes=shapes, strict=strict)
    args = tensors(q_len=21, k_len=64)
    same(program.module()(*args), Model()(*args))


attention_op, backward_op = torch.ops.qflash.attention.default, torch.ops.qflash.attention_backward.default


def extras(**given):
    """The optional arrays of ATTENTION, in order."""
    return tuple(given.get(name.removeprefix("rope.")) for name in ATTENTION.arrays[3:])


def words(**given):
    """The words of ATTENTION, in order."""
    plain = dict(zip(ATTENTION.words, (False, None, None, None, None, None, False, True, False, 0, 0, 0), strict=True))
    return tuple((plain | given).values())


SPUN = {"cos": ROPE.cos, "sin": ROPE.sin, "positions_q": ROPE.positions_q, "positions_k": ROPE.positions_k}
SINKS = torch.linspace(-1, 2, tensors()[0].shape[2])
CALLS = {
    "plain": (extras(), words()),
    "everything": (
        extras(kv_lens=LENS, sinks=SINKS, **SPUN),
        words(causal=True, window=[3, 2], softcap=2.0, scale=0.3, kernel="cpu"),
    ),
}


@pytest.mark.parametrize(("arrays", "said"), CALLS.values(), ids=CALLS.keys())
@pytest.mark.parametrize("grad", [False, True])
def test_opcheck(arrays, said, grad):
    torch.library.opcheck(attention_op, (*tensors(grad=grad), *arrays, *said))


def test_opcheck_packed():
    q, k, v, cu_q, cu_k = packed([tensors(batch=1, q_len=n) for n in (3, 9)])
    arrays = extras(cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)
    torch.library.opcheck(attention_op, (q, k, v, *arrays, *words(max_seqlen_q=9, max_seqlen_k=13)))


@pytest.mark.parametrize(("arrays", "said"), CALLS.values(), ids=CALLS.keys())
def test_opcheck_backward(arrays, said):
    q, k, v = tensors()
    out, lse = attention_op(q, k, v, *arrays, *said)
    grads = torch.randn_like(out), torch.randn_like(lse)
    torch.library.opcheck(backward_op, (*grads, q, k, v, *arrays, out, lse, *said))


def loss_of(**options):
    return lambda q, k, v: qflash.attention(q, k, v, **options).square().sum()


@pytest.mark.parametrize("options", [{}, {"causal": True, "kv_lens": LENS}, {"rope": ROPE, "softcap": 2.0}])
def test_func_grad(options):
    q, k, v = tensors()
    got = torch.func.grad(loss_of(**options), argnums=(0, 1, 2))(q, k, v)
    leaves = [x.requires_grad_() for x in tensors()]
    want = torch.autograd.grad(loss_of(**options)(*leaves), leaves)
    for a, b in zip(got, want, strict=True):
        same(a, b)


def stacked(count=3, **kw):
    return [torch.stack(x) for x in zip(*(tensors(seed=s, **kw) for s in range(count)), strict=True)]


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


def test_outer_autograd_sees_through_func():
    q, k, v = tensors()
    v.requires_grad_()
    out, pullback = torch.func.vjp(lambda q: qflash.attention(q, k, v), q)
    (got,) = torch.autograd.grad(out.sum(), v)
    (want,) = torch.autograd.grad(plain(q, k, v)[0].sum(), v)
    assert relative(got, want.double()) < ALLOWED_GRADIENT
    assert pullback(torch.ones_like(out))[0].shape == q.shape


@pytest.mark.parametrize(
    ("transform", "text"),
    [
        (lambda f, x: torch.func.jvp(f, (x,), (x,)), "no forward-mode derivative"),
        (lambda f, x: torch.func.jacfwd(f)(x), "no forward-mode derivative"),
        (lambda f, x: torch.func.hessian(lambda y: f(y).sum())(x), "no forward-mode derivative"),
        (
            lambda f, x: torch.func.grad(lambda y: torch.func.grad(lambda z: f(z).square().sum())(y).sum())(x),
            "no second derivative",
        ),
    ],
    ids=["jvp", "jacfwd", "hessian", "grad-grad"],
)
def test_derivatives_that_do_not_exist_are_refused_not_zero(transform, text):
    q, k, v = tensors(batch=1, q_len=2, k_len=2, q_heads=2, dim=4)
    with pytest.raises(NotImplementedError, match=text):
        transform(lambda x: qflash.attention(x, k, v), q)


def test_compiled_transforms(fresh_compiler):
    q, k, v = stacked()
    mapped = torch.vmap(torch.func.grad(loss_of(causal=True)))
    torch.testing.assert_close(torch.compile(mapped, fullgraph=True)(q, k, v), mapped(q, k, v))


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_fake_and_meta_tensors_know_the_result(options):
    q, k, v = tensors()
    out, lse = qflash.attention(q, k, v, return_lse=True, **options)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = qflash.attention(*(mode.from_tensor(x) for x in (q, k, v)), return_lse=True, **options)
    for got, want in zip(fake, (out, lse), strict=True):
        assert isinstance(got, FakeTensor)
        assert (got.shape, got.stride(), got.dtype) == (want.shape, want.stride(), want.dtype)
    if not options.keys() & {"kv_lens", "rope"}:
        meta = qflash.attention(*(x.to("meta") for x in (q, k, v)), return_lse=True, **options)
        assert [x.shape for x in meta] == [out.shape, lse.shape]
        assert meta[0].is_meta


def test_tensors_without_data_never_reach_a_kernel():
    q, k, v = tensors()
    with pytest.raises(ValueError, match="k is on meta"):
        qflash.attention(q, k.to("meta"), v)
    mode = FakeTensorMode()
    with pytest.raises(Exception, match="FakeTensor"):
        qflash.attention(q, mode.from_tensor(k), v)
    with mode, pytest.raises(Exception, match="FakeTensor"):
        qflash.attention(q, k, v)
    lens = mode.from_tensor(LENS)
    with pytest.raises(Exception, match="FakeTensor"):
        qflash.attention(q, k, v, kv_lens=lens)
    gone = LENS.clone()
    gone.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="kv_lens has no storage"):
        qflash.attention(q, k, v, kv_lens=gone)
    empty = v.clone()
    empty.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="v has no storage"):
        qflash.attention(q, k, empty)


def test_fake_cuda_tensors_need_no_gpu():
    with FakeTensorMode():
        q, k, v = (torch.empty(x.shape, device="cuda", dtype=torch.float16) for x in tensors())
        out = qflash.attention(q, k, v, causal=True)
    assert (out.device.type, out.shape, out.dtype) == ("cuda", q.shape, torch.float16)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_traced_program_computes_on_its_inputs():
    """torch.jit.trace would record a launch around the dispatcher as a constant."""
    traced = torch.jit.trace(lambda q, k, v: qflash.attention(q, k, v), tensors())
    args = tensors(seed=7)
    same(traced(*args), qflash.attention(*args))


def test_rope_tables_that_are_parameters():
    q, k, v = tensors()
    halves = [torch.nn.Parameter(x.bfloat16(), requires_grad=False) for x in (ROPE.cos, ROPE.sin)]
    want = qflash.attention(q, k, v, rope=qflash.Rope(*(x.float() for x in halves)))
    same(qflash.attention(q, k, v, rope=qflash.Rope(*halves)), want)


def test_checkpointing():
    q, k, v = tensors(grad=True)
    call = torch.utils.checkpoint.checkpoint(qflash.attention, q, k, v, use_reentrant=False)
    want = torch.autograd.grad(qflash.attention(q, k, v).sum(), (q, k, v))
    for a, b in zip(torch.autograd.grad(call.sum(), (q, k, v)), want, strict=True):
        same(a, b)


def test_sinks_under_vmap():
    """A mapped q shares them; sinks that are mapped themselves are taken in turn."""
    q, k, v = tensors()
    many, sinks = torch.stack([q, 2 * q]), torch.stack([SINKS, SINKS - 3])
    got = torch.vmap(lambda q: qflash.attention(q, k, v, sinks=SINKS))(many)
    each = torch.vmap(lambda sinks: qflash.attention(q, k, v, sinks=sinks))(sinks)
    for i in range(2):
        same(got[i], qflash.attention(many[i], k, v, sinks=SINKS))
        same(each[i], qflash.attention(q, k, v, sinks=sinks[i]))


def test_sinks_of_any_float_type_and_stride():
    q, k, v = tensors()
    want = qflash.attention(q, k, v, sinks=SINKS.half().float())
    spread = torch.stack([SINKS.half(), SINKS.half()], 1)[:, 0]
    for sinks in (SINKS.half(), SINKS.half().double(), spread):
        same(qflash.attention(q, k, v, sinks=sinks), want)


def scaled(q, k, v, sinks):
    """Attention with sinks, by what a call without them gives."""
    out, lse = qflash.attention(q, k, v, return_lse=True)
    return out * torch.sigmoid(lse - sinks[:, None]).transpose(1, 2)[..., None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
@pytest.mark.parametrize("way", ["eager", "compiled"])
def test_gradient_of_sinks(way, dtype):
    q, k, v = tensors(grad=True)
    sinks = SINKS.clone().to(dtype).requires_grad_()
    call = lambda *xs: qflash.attention(*xs[:3], sinks=xs[3])  # noqa: E731
    if way == "compiled":
        call = torch.compile(call, fullgraph=True, backend="aot_eager")
    got = torch.autograd.grad(call(q, k, v, sinks).square().sum(), (q, k, v, sinks))
    wants = torch.autograd.grad(scaled(q, k, v, sinks.float()).square().sum(), (q, k, v, sinks))
    assert got[3].dtype == dtype
    for one, want in zip(got, wants, strict=True):
        torch.testing.assert_close(one, want, rtol=1e-3 if dtype is torch.float16 else 1e-4, atol=1e-5)


def test_gradient_of_sinks_alone_and_of_each_sample_under_vmap():
    q, k, v = tensors()
    grad = torch.func.grad(lambda sinks, q: qflash.attention(q, k, v, sinks=sinks).square().sum())
    many = torch.stack([q, 2 * q, -q])
    got = torch.vmap(grad, (None, 0))(SINKS, many)
    for i in range(3):
        want = torch.func.grad(lambda sinks: scaled(many[i], k, v, sinks).square().sum())(SINKS)  # noqa: B023
        torch.testing.assert_close(got[i], want, rtol=1e-4, atol=1e-5)
