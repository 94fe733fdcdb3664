"""qflash.scaled_dot_product_attention in torch.compile, torch.func and autocast."""

from __future__ import annotations

import pytest

import qflash
from qflash.integrations import sdpa

torch = pytest.importorskip("torch")

from qflash.testing.torch_sdpa import ORIGINAL, Block, tensors  # noqa: E402

pytestmark = pytest.mark.usefixtures("pytorch_is_as_it_was")


CAUSAL = {"is_causal": True}


@pytest.mark.parametrize(
    ("words", "dynamic"),
    [
        *((words, None) for words in ({}, CAUSAL, {"fallback": True, **CAUSAL})),
        (CAUSAL, True),
        *(pytest.param(words, True, marks=pytest.mark.slow) for words in ({}, {"fallback": True, **CAUSAL})),
    ],
    ids=str,
)
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
