"""qflash.replace_sdpa in the place of PyTorch's function: models, nesting, threads, and the way back."""

from __future__ import annotations

import threading

import pytest

import qflash
from qflash.integrations import sdpa

torch = pytest.importorskip("torch")

from qflash.testing.torch_sdpa import ORIGINAL, Block, tensors  # noqa: E402

F = torch.nn.functional
pytestmark = pytest.mark.usefixtures("pytorch_is_as_it_was")


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
