"""What qflash.scaled_dot_product_attention does not serve: refused by name, or handed to PyTorch."""

from __future__ import annotations

import pytest

import qflash
from qflash.integrations import sdpa

torch = pytest.importorskip("torch")

from torch.nn.attention.bias import causal_upper_left  # noqa: E402

from qflash.call.spec import DTYPES  # noqa: E402
from qflash.integrations import sdpa_limits, sdpa_torch  # noqa: E402
from qflash.ops.problem import MAX_HEAD_DIM  # noqa: E402
from qflash.testing.torch_sdpa import ORIGINAL, tensors  # noqa: E402

pytestmark = pytest.mark.usefixtures("pytorch_is_as_it_was")

UNSERVED = {
    "mask": ({"attn_mask": torch.ones(9, 9, dtype=torch.bool)}, "attn_mask is a bool tensor"),
    "bias": ({"attn_mask": torch.zeros(9, 9)}, "attn_mask is a float32 tensor"),
    "dropout": ({"dropout_p": 0.25}, "dropout_p is 0.25"),
    "float64": ({"dtype": torch.float64}, "query has dtype float64"),
    "head_dim": ({"q": (1, 2, 3, 257)}, "query has head_dim 257"),
    "no head_dim": ({"q": (1, 2, 3, 0)}, "query has head_dim 0"),
    "head_dim of value": ({"v": (2, 4, 9, 8)}, "value has head_dim 8"),
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


def test_no_heads_are_refused_by_name():
    """PyTorch is not asked: the one of 2.11 divides by their number, and the process ends."""
    q, k, v = tensors(q=(2, 0, 9, 16))
    with pytest.raises(
        NotImplementedError, match=r"^query, key or value has 0 heads; allowed: 1 or more, or fallback=True$"
    ):
        qflash.scaled_dot_product_attention(q, k, v)


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
