"""Bad torch input: every refusal names the argument, what came and what is allowed."""

from __future__ import annotations

import numpy as np
import pytest

import qflash

torch = pytest.importorskip("torch")

from qflash.testing.torch_math import packed, tables, tensors  # noqa: E402

Q, K, V = tensors()
ROPE = tables()
INT32 = torch.int32
H = Q.shape[2]


def lens(*values, dtype=INT32):
    return torch.tensor(values, dtype=dtype)


def rope(**changes):
    fields = {"cos": ROPE.cos, "sin": ROPE.sin, **changes}
    return qflash.Rope(**fields)


# id: (what changes in a good call, the exception, its text)
BAD = {
    "q numpy, k torch": ({"q": Q.numpy()}, TypeError, r"k is torch\.Tensor; allowed: numpy\.ndarray"),
    "k numpy": ({"k": K.numpy()}, TypeError, r"k is numpy\.ndarray; allowed: torch\.Tensor"),
    "v list": ({"v": V.tolist()}, TypeError, r"v is builtins\.list; allowed: torch\.Tensor"),
    "v None": ({"v": None}, TypeError, r"v is None; allowed: an array"),
    "rank": ({"q": Q[0]}, ValueError, r"q has shape \(9, 4, 16\); allowed: rank 4"),
    "batch": ({"k": K[:1], "v": V[:1]}, ValueError, "k has batch size 1; allowed: q's, 2"),
    "v length": ({"v": V[:, :5]}, ValueError, r"v has shape \(2, 5, 2, 16\); allowed: k's, \(2, 13, 2, 16\)"),
    "heads": ({"q": Q[:, :, :3]}, ValueError, "k has 2 heads; allowed: a divisor of q's 3 heads"),
    "head_dim": ({"k": K[..., :8]}, ValueError, "k has head_dim 8; allowed: q's, 16"),
    "last stride": ({"q": Q.repeat_interleave(2, -1)[..., ::2]}, ValueError, "q has stride 2 in its last dimension"),
    "dtype": ({"k": K.half()}, TypeError, "k has dtype float16; allowed: q's, float32"),
    "integers": ({"q": Q.int()}, TypeError, "q has dtype int32; allowed: float32, float16, bfloat16"),
    "complex": ({"q": Q.to(torch.complex64)}, TypeError, "q has dtype complex64; allowed: float32"),
    "double": ({"q": Q.double(), "k": K.double(), "v": V.double()}, TypeError, "q has dtype float64; allowed: float32"),
    "sparse": ({"k": K.to_sparse()}, TypeError, r"k is a sparse_coo tensor; allowed: a dense"),
    "sparse q": ({"q": Q.to_sparse()}, TypeError, r"q is a sparse_coo tensor; allowed: a dense"),
    "mkldnn": ({"v": V.to_mkldnn()}, TypeError, r"v is a _mkldnn tensor; allowed: a dense"),
    "quantized": (
        {"q": torch.quantize_per_tensor(Q, 0.1, 0, torch.qint8)},
        TypeError,
        "q has dtype qint8; allowed: float32",
    ),
    "nested": (
        {"q": torch.nested.nested_tensor([Q[0], Q[1, :3]], layout=torch.jagged)},
        TypeError,
        "q is a nested tensor; allowed: a dense",
    ),
    "device": ({"k": K.to("meta"), "v": V.to("meta")}, ValueError, "k is on meta; allowed: q's device, cpu"),
    "causal": ({"causal": "yes"}, TypeError, "causal is 'yes'; allowed: True or False"),
    "causal tensor": ({"causal": torch.tensor(True)}, TypeError, r"causal is a torch\.Tensor; allowed: True or False"),
    "window int": ({"window": 4}, TypeError, r"window is 4; allowed: None or \(left, right\)"),
    "window long": ({"window": (1, 2, 3)}, ValueError, r"window is \(1, 2, 3\)"),
    "window float": ({"window": (1.5, 0)}, TypeError, r"window is \(1\.5, 0\)"),
    "window bool": ({"window": (True, 0)}, TypeError, r"window is \(True, 0\)"),
    "window list": ({"window": [1, -2]}, ValueError, r"window is \[1, -2\]"),
    "scale text": ({"scale": "big"}, TypeError, "scale is 'big'; allowed: None or a number"),
    "scale bool": ({"scale": True}, TypeError, "scale is True; allowed: None or a number"),
    "scale tensor": ({"scale": torch.tensor(0.5)}, TypeError, r"scale is a torch\.Tensor; allowed: None or a number"),
    "scale array": (
        {"scale": np.array([1.0, 2.0])},
        TypeError,
        r"scale is a numpy\.ndarray; allowed: None or a number",
    ),
    "scale nan": ({"scale": float("nan")}, ValueError, "scale is nan; allowed: a finite number"),
    "softcap": ({"softcap": -1.0}, ValueError, r"softcap is -1\.0; allowed: None, or 0 or more"),
    "precision": ({"precision": "int4"}, ValueError, "precision is 'int4'; allowed: None, 'int8', 'int8_fp8'"),
    "kernel": ({"kernel": "nope"}, ValueError, "kernel is 'nope'; allowed: None, 'cpu'"),
    "kernel type": ({"kernel": 3}, TypeError, "kernel is 3; allowed: None or the name of a kernel"),
    "kernel device": ({"kernel": "fa"}, qflash.NoKernelError, "'fa' cannot serve .*runs on cuda"),
    "no kernel": ({"precision": "int8_fp8"}, qflash.NoKernelError, "no kernel serves this problem"),
    "lens dtype": ({"kv_lens": torch.ones(2)}, TypeError, "kv_lens has dtype float32; allowed: int32"),
    "lens shape": ({"kv_lens": lens(3, 4, 5)}, ValueError, r"kv_lens has shape \[3\]; allowed: \[2\]"),
    "lens list": ({"kv_lens": [3, 4.0]}, TypeError, r"kv_lens contains 4\.0; allowed: ints"),
    "lens set": (
        {"kv_lens": {3, 4}},
        TypeError,
        r"kv_lens is builtins\.set; allowed: torch\.Tensor, or ints as a list",
    ),
    "lens wide": ({"kv_lens": torch.tensor([3, 2**32 + 4])}, ValueError, r"kv_lens\[1\] is 2147483647"),
    "lens device": ({"kv_lens": lens(3, 4).to("meta")}, ValueError, "kv_lens is on meta; allowed: q's device, cpu"),
    "lens high": ({"kv_lens": lens(3, 14)}, ValueError, r"kv_lens\[1\] is 14"),
    "lens low": ({"kv_lens": lens(-1, 3)}, ValueError, r"kv_lens\[0\] is -1"),
    "sinks ints": ({"sinks": torch.ones(H, dtype=INT32)}, TypeError, "sinks has dtype int32; allowed: float32, .*64"),
    "sinks shape": (
        {"sinks": torch.ones(H + 1)},
        ValueError,
        rf"sinks has shape \[{H + 1}\]; allowed: \[{H}\], one for",
    ),
    "sinks rank": ({"sinks": torch.ones(1, H)}, ValueError, rf"sinks has shape \[1, {H}\]"),
    "sinks device": ({"sinks": torch.ones(H).to("meta")}, ValueError, "sinks is on meta; allowed: q's device, cpu"),
    "sinks list": ({"sinks": [0.0] * H}, TypeError, "sinks is builtins.list"),
    "rope type": ({"rope": (ROPE.cos, ROPE.sin)}, TypeError, r"rope is tuple; allowed: None or qflash\.Rope"),
    "rope none": ({"rope": rope(cos=None)}, TypeError, r"rope\.cos is None; allowed: an array"),
    "rope array": ({"rope": rope(sin=ROPE.sin.numpy())}, TypeError, r"rope\.sin is numpy\.ndarray"),
    "rope short": ({"rope": rope(cos=ROPE.cos[:9], sin=ROPE.sin[:9])}, ValueError, r"rope\.cos has 9 rows; .* 13"),
    "rope wide": ({"rope": tables(half=9)}, ValueError, r"rope\.cos has 9 columns; allowed: at most head_dim / 2 = 8"),
    "rope apart": ({"rope": rope(sin=ROPE.sin[:20])}, ValueError, r"rope\.sin has shape \(20, 4\)"),
    "rope ints": ({"rope": rope(cos=ROPE.cos.int())}, TypeError, r"rope\.cos has dtype int32"),
    "positions": (
        {"rope": rope(positions_q=torch.arange(9.0))},
        TypeError,
        r"rope\.positions_q has dtype float32; allowed: int32",
    ),
    "positions shape": (
        {"rope": rope(positions_k=torch.arange(9, dtype=INT32))},
        ValueError,
        r"rope\.positions_k has shape \[9\]; allowed: \[13\] or \[2, 13\]",
    ),
    "positions far": (
        {"rope": rope(positions_q=torch.arange(9, dtype=INT32) + 30)},
        ValueError,
        r"rope\.positions_q.* is 3[0-9]",
    ),
}


@pytest.mark.parametrize(("changes", "error", "text"), BAD.values(), ids=BAD.keys())
def test_refused(changes, error, text):
    good = {"q": Q, "k": K, "v": V}
    qflash.attention(**good, scale=1.0, window=(1, 0))  # a plan that True == 1 must not find
    with pytest.raises(error, match=text):
        qflash.attention(**{**good, **changes})


@pytest.mark.parametrize(("changes", "error", "text"), BAD.values(), ids=BAD.keys())
def test_refused_alike_through_the_dispatcher(changes, error, text):
    """The same words where a parameter or a transform sends the call through torch.ops."""
    good = {"q": torch.nn.Parameter(Q, requires_grad=False), "k": K, "v": V}
    with pytest.raises(error, match=text):
        qflash.attention(**{**good, **changes})


PACKED = dict(zip(("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k"), packed([tensors(batch=1)] * 2), strict=True))
BAD_PACKED = {
    "rank": ({"q": Q}, ValueError, "q has shape .*; allowed: rank 3"),
    "cu type": ({"cu_seqlens_q": "0918"}, TypeError, r"cu_seqlens_q is builtins\.str; allowed: torch\.Tensor"),
    "cu none": ({"cu_seqlens_q": None}, TypeError, r"cu_seqlens_q is None; allowed: int32 offsets"),
    "cu_k none": ({"cu_seqlens_k": None}, TypeError, r"cu_seqlens_k is None; allowed: int32 offsets"),
    "cu dtype": ({"cu_seqlens_k": torch.tensor([0.0, 13, 26])}, TypeError, "cu_seqlens_k has dtype float32"),
    "cu short": ({"cu_seqlens_k": lens(0, 26)}, ValueError, r"cu_seqlens_k has shape \[2\]; allowed: \[3\]"),
    "cu rank": ({"cu_seqlens_q": lens(0, 18)[None]}, ValueError, "cu_seqlens_q has shape .*; allowed: .batch . 1"),
    "cu falls": ({"cu_seqlens_q": lens(0, 19, 18)}, ValueError, "cu_seqlens_q"),
    "cu start": ({"cu_seqlens_q": lens(1, 9, 18)}, ValueError, "cu_seqlens_q"),
    "max type": ({"max_seqlen_q": 9.0}, TypeError, r"max_seqlen_q is 9\.0; allowed: an int"),
    "max high": ({"max_seqlen_k": 2**31}, ValueError, "max_seqlen_k is 2147483648; allowed: 0 to 2147483647"),
    "max low": ({"max_seqlen_k": 12}, ValueError, "cu_seqlens_k"),
}


@pytest.mark.parametrize(("changes", "error", "text"), BAD_PACKED.values(), ids=BAD_PACKED.keys())
def test_refused_packed(changes, error, text):
    good = {**PACKED, "max_seqlen_q": 9, "max_seqlen_k": 13}
    assert qflash.attention_varlen(**good).shape == PACKED["q"].shape
    with pytest.raises(error, match=text):
        qflash.attention_varlen(**{**good, **changes})


def forward_only():
    """Calls on keys and values that have no gradients: what is asked for one of its arrays, and what the call is on."""
    pages, table = torch.zeros(2, 2, 16, 16), torch.tensor([[0, 1]], dtype=torch.int32)
    q, lens = torch.zeros(1, 5, 4, 16), torch.tensor([20], dtype=torch.int32)
    kept = torch.zeros(1, 130, 2, 16, dtype=torch.bfloat16, device="meta")
    return {
        "q": (q, "a PagedKV", lambda q: qflash.attention(q, qflash.PagedKV(pages, pages, table, lens))),
        "kv.k_pages": (pages, "a PagedKV", lambda x: qflash.attention(q, qflash.PagedKV(x, pages, table, lens))),
        "v": (q, "quantized arrays", lambda v: qflash.attention(qflash.quantize(q), qflash.quantize(q), v)),
        "q of kept": (kept, "a QuantizedKV", lambda q: qflash.attention(q, qflash.quantize_kv(kept, kept))),
    }


@pytest.mark.parametrize("name", forward_only())
def test_keys_and_values_without_gradients_are_named(name):
    x, kind, call = forward_only()[name]
    text = rf"^{name.split()[0]} requires a gradient and qflash\.attention on {kind} is forward only; allowed: "
    with pytest.raises(NotImplementedError, match=text):
        call(x.clone().requires_grad_())
    with torch.no_grad():
        assert call(x.clone().requires_grad_()).shape[-1] == 16


def test_the_straight_through_estimate_of_quantized_attention():
    """As docs/decisions/0016 writes it: the gradient where the rounded arrays are."""

    def rounded(x):
        return qflash.dequantize(qflash.quantize(x.detach()))

    q, k = (x.clone().requires_grad_() for x in (Q, K))
    straight = [x + (rounded(x) - x).detach() for x in (q, k)]
    got = torch.autograd.grad(qflash.attention(*straight, V).sum(), (q, k))
    there = [rounded(x).requires_grad_() for x in (Q, K)]
    want = torch.autograd.grad(qflash.attention(*there, V).sum(), there)
    torch.testing.assert_close(got, want)
