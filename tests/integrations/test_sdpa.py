"""qflash.scaled_dot_product_attention against PyTorch's, what it refuses, and the replacement of PyTorch's function."""

from __future__ import annotations

import subprocess
import sys
import threading

import numpy as np
import pytest

import qflash
from qflash.integrations import sdpa
from qflash.testing.compare import FLOAT32_L2, GRADIENT_L2, HALF_FACTOR, UNIT_ROUNDOFF

torch = pytest.importorskip("torch")

from torch.nn.attention.bias import causal_lower_right, causal_upper_left  # noqa: E402

from qflash.call.spec import DTYPES  # noqa: E402
from qflash.integrations import sdpa_limits, sdpa_torch  # noqa: E402
from qflash.ops.problem import MAX_HEAD_DIM  # noqa: E402

F = torch.nn.functional
ORIGINAL = F.scaled_dot_product_attention
ALLOWED = {
    torch.float32: FLOAT32_L2,
    torch.float16: HALF_FACTOR * UNIT_ROUNDOFF["float16"],
    torch.bfloat16: HALF_FACTOR * UNIT_ROUNDOFF["bfloat16"],
}


@pytest.fixture(autouse=True)
def pytorch_is_as_it_was():
    sdpa.totals.served = 0
    sdpa.totals.fallbacks.clear()
    yield
    assert F.scaled_dot_product_attention is ORIGINAL
    assert torch.backends.mha.get_fastpath_enabled()
    assert sdpa_torch._replacements == []


def tensors(q=(2, 4, 9, 16), k=None, v=None, dtype=torch.float32, grad=False, seed=0):
    generator = torch.Generator().manual_seed(seed)
    k = k or q
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_(grad) for shape in (q, k, v if v else k)]


def relative(got, want):
    return ((got.double() - want).norm() / want.norm()).item()


def check(q, k, v, allowed=None, **words):
    """Our result, held against PyTorch's in float64; and PyTorch took no part in it."""
    before = sdpa.totals.served
    got = qflash.scaled_dot_product_attention(q, k, v, **words)
    assert (sdpa.totals.served, sdpa.totals.fallbacks) == (before + 1, {})
    want = ORIGINAL(q.double(), k.double(), v.double(), **words)
    assert (got.shape, got.dtype) == (want.shape, q.dtype)
    if want.numel() and want.any():
        assert relative(got, want) <= (ALLOWED[q.dtype] if allowed is None else allowed)
    else:
        assert not got.any()
    return got


# Values


@pytest.mark.parametrize("dtype", ALLOWED)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("lengths", [(33, 33), (1, 40), (40, 1), (7, 50), (50, 7)], ids=str)
def test_lengths_masks_and_dtypes(dtype, is_causal, lengths):
    shapes = [(2, 3, length, 16) for length in lengths]
    check(*tensors(*shapes, dtype=dtype), is_causal=is_causal)


@pytest.mark.parametrize("dim", [1, 3, 64, MAX_HEAD_DIM])
def test_head_dims(dim):
    check(*tensors((2, 2, 40, dim)), is_causal=True)


@pytest.mark.parametrize("scale", [0.3, -0.2, 0, 2])
def test_scale(scale):
    check(*tensors((2, 2, 40, 16)), scale=scale)


def test_scale_and_gqa_by_position():
    q, k, v = tensors((2, 4, 5, 16), (2, 2, 5, 16))
    got = qflash.scaled_dot_product_attention(q, k, v, None, 0.0, True, 0.5, True)
    torch.testing.assert_close(got, ORIGINAL(q, k, v, is_causal=True, scale=0.5, enable_gqa=True))


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(
    ("q", "kv"),
    [
        ((2, 6, 20, 16), (2, 2, 30, 16)),
        ((2, 6, 30, 16), (2, 1, 20, 16)),
        ((6, 20, 16), (3, 20, 16)),
        ((2, 3, 6, 20, 16), (2, 3, 2, 20, 16)),
        ((2, 6, 20, 16), (1, 2, 20, 16)),
        ((2, 6, 20, 16), (2, 20, 16)),
    ],
    ids=str,
)
def test_grouped_queries(q, kv, is_causal):
    check(*tensors(q, kv), is_causal=is_causal, enable_gqa=True)


def test_more_dimensions_that_begin_alike():
    check(*tensors((2, 2, 20, 16), (2, 2, 2, 16, 16)))
    check(*tensors((2, 2, 2, 16, 16), (2, 2, 20, 16)))


SHAPES = [
    ((20, 16), (30, 16), (30, 16)),
    ((3, 20, 16), (3, 30, 16), (3, 30, 16)),
    ((2, 3, 2, 20, 16), (2, 3, 2, 30, 16), (2, 3, 2, 30, 16)),
    # broadcast
    ((4, 3, 20, 16), (1, 3, 30, 16), (1, 3, 30, 16)),
    ((4, 3, 20, 16), (4, 1, 30, 16), (4, 1, 30, 16)),
    ((4, 3, 20, 16), (4, 3, 30, 16), (1, 3, 30, 16)),
    ((4, 3, 20, 16), (4, 3, 30, 16), (4, 1, 30, 16)),
    ((1, 1, 20, 16), (4, 3, 30, 16), (4, 3, 30, 16)),
    ((4, 1, 20, 16), (1, 3, 30, 16), (4, 1, 30, 16)),
    ((4, 3, 20, 16), (3, 30, 16), (30, 16)),
    ((3, 20, 16), (4, 3, 30, 16), (4, 3, 30, 16)),
    ((3, 20, 16), (30, 16), (30, 16)),
    ((2, 1, 3, 20, 16), (5, 1, 30, 16), (30, 16)),
    # empty
    ((2, 3, 0, 16), (2, 3, 30, 16), (2, 3, 30, 16)),
    ((2, 3, 20, 16), (2, 3, 0, 16), (2, 3, 0, 16)),
    ((0, 3, 20, 16), (0, 3, 30, 16), (0, 3, 30, 16)),
    ((0, 20, 16), (0, 30, 16), (0, 30, 16)),
    ((0, 20, 16), (1, 30, 16), (1, 30, 16)),
    ((2, 0, 3, 20, 16), (2, 0, 3, 30, 16), (2, 0, 3, 30, 16)),
]


@pytest.mark.parametrize("shapes", SHAPES, ids=str)
@pytest.mark.parametrize("is_causal", [False, True])
def test_ranks_broadcasting_and_nothing(shapes, is_causal):
    check(*tensors(*shapes), is_causal=is_causal)


def test_one_shared_head_is_not_multiplied(monkeypatch):
    seen = []
    monkeypatch.setattr(
        sdpa_torch, "attention", lambda q, k, v, **words: seen.append(k.shape) or qflash.attention(q, k, v, **words)
    )
    check(*tensors((2, 4, 20, 16), (2, 1, 20, 16)))
    assert seen == [(2, 20, 1, 16)]


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(
    "shapes", [((2, 6, 9, 16), (2, 6, 13, 16)), ((2, 6, 13, 16), (2, 6, 9, 16)), *SHAPES[:1], *SHAPES[3:13]], ids=str
)
def test_gradients(shapes, is_causal):
    q, k, v = tensors(*shapes, grad=True)
    out = check(q, k, v, is_causal=is_causal)
    want = ORIGINAL(q.double(), k.double(), v.double(), is_causal=is_causal)
    dout = torch.randn(out.shape)
    got = torch.autograd.grad(out, (q, k, v), dout)
    for ours, theirs in zip(got, torch.autograd.grad(want, (q, k, v), dout.double()), strict=True):
        assert ours.shape == theirs.shape
        assert relative(ours, theirs.double()) < GRADIENT_L2["float32"]


def test_strides():
    q, k, v = tensors((2, 3, 20, 16))
    want = qflash.scaled_dot_product_attention(q, k, v)
    length_first = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    fused = torch.stack((q, k, v), -2).flatten(-2)  # [..., 48], as one projection leaves them
    for other in (length_first, fused.unflatten(-1, (3, 16)).unbind(-2), [x.mT.contiguous().mT for x in (q, k, v)]):
        assert torch.equal(check(*other), want)


def test_layout_of_the_result():
    """That of PyTorch's memory-efficient kernel, whatever the query's: a model's next step copies nothing."""
    for q in (tensors()[0], tensors()[0].transpose(1, 2).contiguous().transpose(1, 2)):
        out = qflash.scaled_dot_product_attention(q, q, q)
        rows = out.transpose(1, 2).reshape(2, 9, 64)
        assert rows.data_ptr() == out.data_ptr()
    for q in (tensors((5, 9, 16))[0], tensors((9, 16))[0]):
        assert qflash.scaled_dot_product_attention(q, q, q).is_contiguous()


@pytest.mark.parametrize("bias", [causal_lower_right, causal_upper_left])
@pytest.mark.parametrize("lengths", [(9, 13), (13, 9), (9, 9)], ids=str)
@pytest.mark.filterwarnings("ignore:Lower right causal bias")
def test_causal_biases_of_pytorch(bias, lengths):
    q, k, v = tensors(*((2, 4, length, 16) for length in lengths))
    words = {"attn_mask": bias(*lengths)}
    got = qflash.scaled_dot_product_attention(q, k, v, **words)
    assert sdpa.totals.served == 1
    torch.testing.assert_close(got, ORIGINAL(q, k, v, **words))


# Refusals

UNSERVED = {
    "mask": ({"attn_mask": torch.ones(9, 9, dtype=torch.bool)}, "attn_mask is a bool tensor"),
    "bias": ({"attn_mask": torch.zeros(9, 9)}, "attn_mask is a float32 tensor"),
    "dropout": ({"dropout_p": 0.25}, "dropout_p is 0.25"),
    "float64": ({"dtype": torch.float64}, "query has dtype float64"),
    "head_dim": ({"q": (1, 2, 3, 257)}, "query has head_dim 257"),
    "no head_dim": ({"q": (1, 2, 3, 0)}, "query has head_dim 0"),
    "head_dim of value": ({"v": (2, 4, 9, 8)}, "value has head_dim 8"),
    "no heads": ({"q": (2, 0, 9, 16)}, "query, key or value has 0 heads"),
    "heads of value": ({"q": (2, 4, 9, 16), "k": (2, 2, 9, 16), "v": (2, 1, 9, 16), "enable_gqa": True}, "value has 1"),
}


def arguments(words):
    given = {name: words[name] for name in ("q", "k", "v", "dtype") if name in words}
    return tensors(**given), {name: word for name, word in words.items() if name not in given}


@pytest.mark.parametrize(("words", "came"), UNSERVED.values(), ids=UNSERVED)
def test_what_is_not_served_is_refused_by_name_or_handed_to_pytorch(words, came):
    arrays, words = arguments(words)
    with pytest.raises(NotImplementedError, match=f"^{came}.*; allowed: .*, or fallback=True$"):
        qflash.scaled_dot_product_attention(*arrays, **words)
    assert (sdpa.totals.served, sdpa.totals.fallbacks) == (0, {})
    torch.manual_seed(0)
    got = qflash.scaled_dot_product_attention(*arrays, **words, fallback=True)
    torch.manual_seed(0)
    assert torch.equal(got, ORIGINAL(*arrays, **words))
    (reason,) = sdpa.totals.fallbacks
    assert reason.startswith(came)
    assert (sdpa.totals.served, sdpa.totals.fallbacks[reason]) == (0, 1)


WRONG = {
    "one dimension": ({"q": (16,)}, ValueError, r"query has shape \(16,\); allowed: \[\.\.\., heads"),
    "gqa of two": (
        {"q": (9, 16), "enable_gqa": True},
        ValueError,
        r"query has shape \(9, 16\); allowed: \[\.\.\., heads",
    ),
    "head_dim of key": ({"k": (2, 4, 9, 8)}, ValueError, "key has head_dim 8; allowed: query's, 16$"),
    "lengths": ({"v": (2, 4, 7, 16)}, ValueError, "value has length 7; allowed: key's, 9$"),
    "heads": ({"k": (2, 2, 9, 16)}, ValueError, r"key has shape \(2, 2, 9, 16\) .* or enable_gqa=True where"),
    "batches": ({"k": (3, 4, 9, 16)}, ValueError, r"key has shape \(3, 4, 9, 16\) .*broadcast with those of query's"),
    "groups": (
        {"k": (2, 3, 9, 16), "enable_gqa": True},
        ValueError,
        "key has 3 heads; allowed: a divisor of query's 4",
    ),
    "batches of groups": ({"k": (3, 2, 9, 16), "enable_gqa": True}, ValueError, "the 3 last that broadcast"),
    "mask": ({"attn_mask": [[True]]}, TypeError, "attn_mask is list; allowed: None or torch.Tensor$"),
}


@pytest.mark.parametrize(("words", "kind", "message"), WRONG.values(), ids=WRONG)
def test_what_pytorch_refuses_too(words, kind, message):
    arrays, words = arguments(words)
    with pytest.raises(kind, match=message) as caught:
        qflash.scaled_dot_product_attention(*arrays, **words)
    assert "fallback" not in str(caught.value)


@pytest.mark.parametrize("name", ["one dimension", "heads", "groups", "mask", "head_dim of key"])
def test_with_fallback_pytorch_refuses_in_its_own_words(name):
    arrays, words = arguments(WRONG[name][0])
    with pytest.raises((RuntimeError, TypeError)) as theirs:
        ORIGINAL(*arrays, **words)
    with pytest.raises(type(theirs.value)) as ours:
        qflash.scaled_dot_product_attention(*arrays, **words, fallback=True)
    assert str(ours.value) == str(theirs.value)
    assert sdpa.totals.fallbacks == {}


def test_kinds_of_tensors():
    q, k, v = tensors()
    sdpa_of = qflash.scaled_dot_product_attention
    with pytest.raises(TypeError, match=r"key is numpy\.ndarray; allowed: torch\.Tensor$"):
        sdpa_of(q, k.numpy(), v)
    with pytest.raises(TypeError, match=r"value has dtype float16; allowed: query's, float32$"):
        sdpa_of(q, k, v.half())
    with pytest.raises(ValueError, match=r"key is on meta; allowed: query's device, cpu$"):
        sdpa_of(q, k.to("meta"), v)
    with pytest.raises(NotImplementedError, match=r"query is a sparse_coo tensor; allowed: .* or fallback=True$"):
        sdpa_of(q.to_sparse(), k, v)
    nested = torch.nested.nested_tensor([torch.randn(3, 4, 16), torch.randn(5, 4, 16)], layout=torch.jagged)
    nested = nested.transpose(1, 2)
    with pytest.raises(NotImplementedError, match=r"query is a nested tensor; allowed: .*attention_varlen"):
        sdpa_of(nested, nested, nested)
    assert sdpa_of(nested, nested, nested, fallback=True).is_nested
    assert sdpa_of(*(x.to("meta") for x in (q, k, v))).shape == q.shape


def test_a_mask_and_is_causal():
    q, k, v = tensors()
    with pytest.raises(NotImplementedError, match=r"attn_mask is given with is_causal=True; allowed: .*fallback=True"):
        qflash.scaled_dot_product_attention(q, k, v, torch.ones(9, 9, dtype=torch.bool), is_causal=True)
    with pytest.raises(ValueError, match=r"attn_mask is a CausalBias of \(9, 8\); allowed: .* lengths, \(9, 9\)$"):
        qflash.scaled_dot_product_attention(q, k, v, causal_upper_left(9, 8))


def test_limits_are_those_of_attention():
    assert sdpa_limits.MAX_HEAD_DIM == MAX_HEAD_DIM
    assert {sdpa_limits.short(dtype) for dtype in sdpa_limits.DTYPES} == set(DTYPES)


REFUSALS = {
    "gradient": NotImplementedError("q requires a gradient and kernel 'x' has no backward pass; allowed: detach()"),
    "kernel": qflash.NoKernelError("no kernel serves this problem\nkernel | why\nx | is not here"),
}


def refuse_gradients(error):
    """A stand-in for attention on a device where only calls that need no gradient are served."""

    def attention(q, k, v, **words):
        if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
            raise error
        return qflash.attention(q, k, v, **words)

    return attention


@pytest.mark.parametrize("error", REFUSALS.values(), ids=REFUSALS)
@pytest.mark.parametrize("compiled", [False, True])
def test_refusals_of_attention(monkeypatch, error, compiled):
    monkeypatch.setattr(sdpa_torch, "attention", refuse_gradients(error))
    q, k, v = tensors(grad=True)
    with pytest.raises(type(error), match=r"allowed: .*fallback=True$") as caught:
        qflash.scaled_dot_product_attention(q, k, v)
    assert str(error) in str(caught.value)

    def call(q, k, v):
        return qflash.scaled_dot_product_attention(q, k, v, is_causal=True, fallback=True)

    torch.compiler.reset()
    call = torch.compile(call, fullgraph=True, backend="aot_eager") if compiled else call
    torch.testing.assert_close(call(q, k, v), ORIGINAL(q, k, v, is_causal=True))
    reason = "q requires a gradient and kernel 'x' has no backward pass"
    reason = reason if isinstance(error, NotImplementedError) else "no kernel serves this problem"
    assert (sdpa.totals.served, set(sdpa.totals.fallbacks)) == (0, {reason})
    with torch.no_grad():
        call(q, k, v)
    assert sdpa.totals.served >= 1


# The replacement


class Block(torch.nn.Module):
    """Attention as models write it."""

    def __init__(self, width=32, heads=4, kv_heads=2):
        super().__init__()
        self.heads, self.kv_heads, self.dim = heads, kv_heads, width // heads
        self.qkv = torch.nn.Linear(width, (heads + 2 * kv_heads) * self.dim)
        self.out = torch.nn.Linear(width, width)

    def forward(self, x, attn_mask=None):
        heads = self.qkv(x).unflatten(-1, (-1, self.dim)).transpose(1, 2)
        q, k, v = heads.split((self.heads, self.kv_heads, self.kv_heads), 1)
        seen = F.scaled_dot_product_attention(
            q, k, v, attn_mask=attn_mask, is_causal=attn_mask is None, enable_gqa=True
        )
        return self.out(seen.transpose(1, 2).reshape(x.shape))


def test_a_model_one_did_not_write():
    torch.manual_seed(0)
    model, x, mask = Block(), torch.randn(2, 9, 32), torch.ones(9, 9, dtype=torch.bool)
    want = model(x), model(x, mask)
    want[0].sum().backward()
    grads = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    with qflash.replace_sdpa(fallback=True) as report:
        got = model(x), model(x, mask)
        got[0].sum().backward()
    torch.testing.assert_close(got, want)
    for p, grad in zip(model.parameters(), grads, strict=True):
        torch.testing.assert_close(p.grad, grad, atol=1e-5, rtol=1e-5)
    assert (report.served, report.fallbacks) == (1, {"attn_mask is a bool tensor": 1})
    assert str(report).splitlines() == [
        "qflash served 1 of 2 calls of scaled_dot_product_attention",
        "PyTorch served 1: attn_mask is a bool tensor",
    ]
    model(x)
    assert report.served == 1
    with qflash.replace_sdpa() as report, pytest.raises(NotImplementedError, match="attn_mask is a bool tensor"):
        model(x, mask)
    assert (report.served, report.fallbacks, sdpa.totals.served) == (0, {}, 0)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("grad", [False, True])
def test_layers_of_pytorch(training, grad):
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True).train(training)
    heads = torch.nn.MultiheadAttention(32, 4, batch_first=True).train(training)
    x = torch.randn(2, 9, 32)
    with torch.set_grad_enabled(grad):
        want = layer(x), heads(x, x, x, need_weights=False)[0]
        with qflash.replace_sdpa() as report:
            got = layer(x), heads(x, x, x, need_weights=False)[0]
            causal = torch.nn.Transformer.generate_square_subsequent_mask(9)
            layer(x, src_mask=causal, is_causal=True)
    torch.testing.assert_close(got, want)
    assert report.served == 3


def test_padding_masks_and_dropout_of_layers_go_to_pytorch():
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(32, 4, 64, dropout=0.5, batch_first=True)
    x = torch.randn(2, 9, 32)
    with qflash.replace_sdpa(fallback=True) as report:
        layer(x)
        layer.eval()(x, src_key_padding_mask=torch.arange(9).expand(2, 9) > 6)
    assert (report.served, report.fallbacks) == (0, {"dropout_p is 0.5": 1, "attn_mask is a float32 tensor": 1})


def test_an_exception_restores():
    before = torch.backends.mha.get_fastpath_enabled()
    with pytest.raises(ZeroDivisionError), qflash.replace_sdpa():
        assert F.scaled_dot_product_attention is not ORIGINAL
        raise ZeroDivisionError
    assert F.scaled_dot_product_attention is ORIGINAL
    assert torch.backends.mha.get_fastpath_enabled() == before


def test_a_disabled_fastpath_stays_disabled():
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with qflash.replace_sdpa():
            pass
        assert not torch.backends.mha.get_fastpath_enabled()
    finally:
        torch.backends.mha.set_fastpath_enabled(True)


def test_nesting():
    """The innermost decides and counts, and what it hands over goes to PyTorch, not to the outer one."""
    q, k, v = tensors()
    with qflash.replace_sdpa() as outer:
        F.scaled_dot_product_attention(q, k, v)
        with qflash.replace_sdpa(fallback=True) as inner:
            F.scaled_dot_product_attention(q, k, v)
            F.scaled_dot_product_attention(q, k, v, dropout_p=0.5)
            qflash.scaled_dot_product_attention(q, k, v)
        with pytest.raises(NotImplementedError):
            F.scaled_dot_product_attention(q, k, v, dropout_p=0.5)
        kept = F.scaled_dot_product_attention
    assert (outer.served, outer.fallbacks) == (1, {})
    assert (inner.served, inner.fallbacks) == (2, {"dropout_p is 0.5": 1})
    kept(q, k, v)  # a name bound inside works outside
    assert sdpa.totals.served == 1


def test_threads_that_leave_in_another_order():
    q, k, v = tensors()
    entered, leave = threading.Event(), threading.Event()

    def other():
        with qflash.replace_sdpa(fallback=True) as reports["other"]:
            entered.set()
            leave.wait(10)

    reports = {}
    thread = threading.Thread(target=other)
    with qflash.replace_sdpa() as mine:
        thread.start()
        assert entered.wait(10)
    F.scaled_dot_product_attention(q, k, v, dropout_p=0.5)  # the other's is still in place
    leave.set()
    thread.join()
    assert F.scaled_dot_product_attention is ORIGINAL
    assert (mine.served, reports["other"].fallbacks) == (0, {"dropout_p is 0.5": 1})


def test_counting_from_many_threads():
    q, k, v = tensors()

    def work():
        for _ in range(200):
            F.scaled_dot_product_attention(q, k, v)
            F.scaled_dot_product_attention(q, k, v, dropout_p=0.5)

    with qflash.replace_sdpa(fallback=True) as report:
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert (report.served, report.fallbacks) == (800, {"dropout_p is 0.5": 800})


def test_as_a_decorator():
    @qflash.replace_sdpa()
    def call(q, k, v):
        assert F.scaled_dot_product_attention is not ORIGINAL
        return F.scaled_dot_product_attention(q, k, v)

    for _ in range(2):
        call(*tensors())


# Compiled and transformed


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("words", [{}, {"is_causal": True}, {"fallback": True, "is_causal": True}], ids=str)
def test_compiled(words, dynamic):
    torch.compiler.reset()

    def call(q, k, v):
        return qflash.scaled_dot_product_attention(q * 2, k, v, **words) + 1

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for lengths in ((9, 9), (9, 13), (13, 9), (5, 9)):
        q, k, v = tensors(*((2, 4, length, 16) for length in lengths), grad=True)
        out, want = compiled(q, k, v), ORIGINAL(q * 2, k, v, is_causal="is_causal" in words) + 1
        torch.testing.assert_close(out, want)
        for got, expected in zip(
            torch.autograd.grad(out.sum(), (q, k, v)), torch.autograd.grad(want.sum(), (q, k, v)), strict=True
        ):
            torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    assert sdpa.totals.served >= 1


def test_a_compiled_call_with_new_lengths_is_not_compiled_for_each():
    torch.compiler.reset()
    compiled = torch.compile(qflash.scaled_dot_product_attention, fullgraph=True, backend="eager")
    for lengths in ((9, 13), (10, 14), (15, 11), (12, 12), (3, 20)):
        compiled(*tensors(*((2, 4, length, 16) for length in lengths)))
    assert sdpa.totals.served == 2  # as it came, and with lengths as symbols


def test_a_compiled_fallback():
    torch.compiler.reset()
    q, k, v = tensors()
    mask = torch.ones(9, 9, dtype=torch.bool).tril()
    compiled = torch.compile(
        lambda q, k, v: qflash.scaled_dot_product_attention(q, k, v, mask, fallback=True),
        fullgraph=True,
        backend="eager",
    )
    torch.testing.assert_close(compiled(q, k, v), ORIGINAL(q, k, v, mask))
    assert set(sdpa.totals.fallbacks) == {"attn_mask is a bool tensor"}


def test_a_compiled_model():
    """Compiled inside and outside of contexts; entering one again compiles nothing again."""
    torch.compiler.reset()
    torch.manual_seed(0)
    model, x = Block(), torch.randn(2, 9, 32)
    want = model(x)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    served = []
    for _ in range(3):
        torch.testing.assert_close(compiled(x), want)
        with qflash.replace_sdpa(fallback=True) as report:
            torch.testing.assert_close(compiled(x), want)
            torch.testing.assert_close(compiled(x), want)
        served.append(report.served)
    assert served == [1, 0, 0]
    assert sdpa.totals.served == 0


def test_a_compiled_layer_of_pytorch():
    torch.compiler.reset()
    torch.manual_seed(0)
    layer, x = torch.nn.TransformerEncoderLayer(32, 4, 64, batch_first=True).eval(), torch.randn(2, 9, 32)
    with torch.no_grad():
        want = layer(x)
        with qflash.replace_sdpa(fallback=True) as report:
            torch.testing.assert_close(torch.compile(layer, fullgraph=True, backend="aot_eager")(x), want)
    assert report.served >= 1
    torch.compiler.reset()


def test_torch_func():
    q, k, v = tensors((3, 2, 4, 9, 16))
    call = qflash.scaled_dot_product_attention
    torch.testing.assert_close(torch.func.vmap(call)(q, k, v), ORIGINAL(q, k, v))
    out = torch.func.vmap(call, in_dims=(0, None, None))(q, k[0], v[0])
    torch.testing.assert_close(out, ORIGINAL(q, k[0], v[0]))
    got = torch.func.grad(lambda q: call(q, k, v).square().sum())(q)
    want = torch.func.grad(lambda q: ORIGINAL(q, k, v).square().sum())(q)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("mixed", [False, True])
def test_autocast(mixed):
    q, k, v = tensors()
    k = k.bfloat16() if mixed else k
    with torch.autocast("cpu", torch.bfloat16):
        theirs = ORIGINAL(q, k, v)
        got = qflash.scaled_dot_product_attention(q, k, v)
    assert got.dtype == theirs.dtype == torch.bfloat16
    want = qflash.scaled_dot_product_attention(*(x.bfloat16() for x in (q, k, v)))
    torch.testing.assert_close(got, want, atol=0, rtol=0)


# Imports


def test_neither_name_imports_torch():
    code = (
        "import sys, qflash\n"
        "from qflash import replace_sdpa, scaled_dot_product_attention\n"
        "from qflash.integrations import sdpa\n"
        "qflash.replace_sdpa()\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_numpy_arrays_are_told_who_serves_them():
    x = np.ones((1, 2, 3, 4), np.float32)
    with pytest.raises(TypeError, match=r"query is numpy\.ndarray; allowed: torch\.Tensor"):
        qflash.scaled_dot_product_attention(x, x, x)


# On a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("lengths", [(128, 128), (1, 200), (70, 300), (300, 70)], ids=str)
def test_values_on_a_gpu(is_causal, lengths):
    shapes = [(2, heads, length, 64) for heads, length in zip((8, 2), lengths, strict=True)]
    check(*(x.cuda() for x in tensors(*shapes, dtype=torch.bfloat16)), is_causal=is_causal, enable_gqa=True)


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
def test_gradients_on_a_gpu_are_served_or_handed_to_pytorch(compiled):
    torch.compiler.reset()
    q, k, v = (x.cuda().requires_grad_() for x in tensors((2, 4, 128, 64), dtype=torch.bfloat16))

    def call(q, k, v):
        return qflash.scaled_dot_product_attention(q, k, v, is_causal=True, fallback=True)

    call = torch.compile(call, fullgraph=True, backend="aot_eager") if compiled else call
    want = ORIGINAL(q.double(), k.double(), v.double(), is_causal=True)
    assert relative(call(q, k, v), want) <= ALLOWED[torch.bfloat16]
    got = torch.autograd.grad(call(q, k, v).float().sum(), (q, k, v))
    for ours, theirs in zip(got, torch.autograd.grad(want.sum(), (q, k, v)), strict=True):
        assert relative(ours, theirs.double()) < GRADIENT_L2["bfloat16"]
    assert sdpa.totals.served + sdpa.totals.fallbacks.total() >= 1
