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
from qflash.testing.torch_math import ALLOWED_GRADIENT, OPTIONS, packed, plain, relative, stacked, tables, tensors  # noqa: E402

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
