"""Bad input to attention with Quantized arrays: the error names the argument, what came and what is allowed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import qflash
from qflash import NoKernelError, dispatch
from qflash.call.spec import Spec

RNG = np.random.default_rng(0)
FLOAT_Q, FLOAT_K = (
    RNG.standard_normal(shape, np.float32).astype(np.float16) for shape in ((2, 6, 4, 8), (2, 40, 2, 8))
)
Q = qflash.quantize(FLOAT_Q, granularity="token")
K = qflash.quantize(FLOAT_K, granularity="group", smooth=True)
V = FLOAT_K
ZQ, ZK = (qflash.quantize(x, symmetric=False) for x in (FLOAT_Q, FLOAT_K))
ROPE = qflash.Rope(*qflash.rope_tables(40, 8))


def call(q=Q, k=K, v=V, **words):
    return qflash.attention(q, k, v, **words)


BAD = {
    "float q": (lambda: call(q=FLOAT_Q), TypeError, "q is numpy.ndarray and k qflash.Quantized; allowed: Quantized q"),
    "float k": (lambda: call(k=FLOAT_K), TypeError, "k is numpy.ndarray and q qflash.Quantized; allowed: Quantized q"),
    "only v": (lambda: call(FLOAT_Q, FLOAT_K, K), TypeError, "q is numpy.ndarray and v qflash.Quantized; allowed"),
    "v None": (lambda: call(v=None), TypeError, "v is None; allowed: an array, or qflash.Quantized"),
    "v list": (lambda: call(v=[1.0]), TypeError, "v is builtins.list; allowed"),
    "v int8": (lambda: call(v=K.values), TypeError, "v has dtype int8; allowed: float32, float16, bfloat16"),
    "v shape": (lambda: call(v=V[:, :39]), ValueError, r"v has shape .*39.*; allowed: k's"),
    "rope": (lambda: call(rope=ROPE), ValueError, r"rope is given .*; allowed: None, apply it in qflash.quantize"),
    "precision": (
        lambda: call(precision="int8_fp8"),
        ValueError,
        "precision is 'int8_fp8'; allowed .*: None or 'int8'",
    ),
    "kernel": (
        lambda: call(kernel="softmax"),
        ValueError,
        "kernel is 'softmax'; allowed: None, 'cpu', 'cpu_int8', ",
    ),
    "kernel type": (lambda: call(kernel=3), TypeError, "kernel is 3; allowed: None or the name"),
    "causal": (lambda: call(causal="yes"), TypeError, "causal is 'yes'; allowed: True or False"),
    "window": (lambda: call(window=(3,)), ValueError, r"window is \(3,\); allowed: None or \(left, right\)"),
    "softcap": (lambda: call(softcap=-1.0), ValueError, "softcap is -1.0; allowed: None, or 0 or more"),
    "scale": (lambda: call(scale=float("nan")), ValueError, "scale is nan; allowed: a finite number"),
    "kv_lens dtype": (lambda: call(kv_lens=np.zeros(2)), TypeError, "kv_lens has dtype float64; allowed: an integer"),
    "kv_lens shape": (lambda: call(kv_lens=np.zeros(3, "i4")), ValueError, r"kv_lens has shape \[3\]; allowed: \[2\]"),
    "kv_lens value": (
        lambda: call(kv_lens=np.array([41, 0], "i4")),
        ValueError,
        r"kv_lens\[0\] is 41; allowed: 0 to 40",
    ),
    "mixed symmetry": (lambda: call(q=ZQ), ValueError, "k.symmetric is True and q.symmetric is False; allowed: both"),
    "k by token": (
        lambda: call(k=qflash.quantize(V, granularity="token")),
        ValueError,
        "k.granularity is 'token'; allo",
    ),
    "k group 8": (
        lambda: call(k=qflash.quantize(V, granularity="group", group=8)),
        ValueError,
        "k.group is 8; allowed: a power of two, 16 or more",
    ),
    "k group 24": (
        lambda: call(k=qflash.quantize(V, granularity="group", group=24)),
        ValueError,
        "k.group is 24; allowed: a power of two, 16 or more",
    ),
    "smooth q": (
        lambda: call(q=qflash.quantize(FLOAT_Q, smooth=True)),
        ValueError,
        "q.mean is given; allowed: None, only k may be smoothed",
    ),
    "smooth v": (
        lambda: call(v=qflash.quantize(V, smooth=True)),
        ValueError,
        "v.mean is given; allowed: None, only k may be smoothed",
    ),
    "matrix": (lambda: call(q=qflash.quantize(FLOAT_Q[0, :, 0])), ValueError, r"q has shape \(6, 8\); allowed: rank 4"),
    "heads": (
        lambda: call(q=qflash.quantize(FLOAT_Q[:, :, :3])),
        ValueError,
        "k has 2 heads; allowed: a divisor of q's 3 heads",
    ),
    "values None": (lambda: call(q=replace(Q, values=None)), TypeError, "q.values is None; allowed: an array"),
    "values dtype": (lambda: call(k=replace(K, values=V)), TypeError, "k.values has dtype float16; allowed: int8"),
    "scale None": (lambda: call(k=replace(K, scale=None)), TypeError, "k.scale is None; allowed: an array"),
    "scale dtype": (
        lambda: call(k=replace(K, scale=K.scale.astype(float))),
        TypeError,
        "k.scale has dtype float64; allowed: float32",
    ),
    "scale shape": (
        lambda: call(k=replace(K, scale=K.scale[:, :, :2])),
        ValueError,
        r"k.scale has shape \[2, 2, 2\]; allowed: \[2, 2, 3\]",
    ),
    "mean shape": (
        lambda: call(k=replace(K, mean=K.mean[:, :1])),
        ValueError,
        r"k.mean has shape \[2, 1, 8\]; allowed: \[2, 2, 8\]",
    ),
    "granularity": (
        lambda: call(q=replace(Q, granularity="row")),
        ValueError,
        "q.granularity is 'row'; allowed: 'tens",
    ),
    "zero_point None": (
        lambda: call(ZQ, replace(ZK, zero_point=None)),
        ValueError,
        "k.zero_point is None and k.symmetric False; allowed: an int32 array of one element",
    ),
    "zero_point given": (
        lambda: call(q=replace(Q, zero_point=ZQ.zero_point)),
        ValueError,
        "q.zero_point is given and q.symmetric True; allowed: None",
    ),
    "sums None": (
        lambda: call(replace(ZQ, sums=None), ZK),
        ValueError,
        "q.sums is None and q has a zero point; allowed: the sums qflash.quantize gives",
    ),
    "sums shape": (
        lambda: call(ZQ, replace(ZK, sums=ZK.sums[:, :, :3])),
        ValueError,
        r"k.sums has shape \[2, 2, 3\]; allowed: \[2, 2, 40\]",
    ),
    "v dtype": (
        lambda: call(v=replace(qflash.quantize(V), dtype="int8")),
        ValueError,
        "v.dtype is 'int8'; allowed: 'float32'",
    ),
    "varlen": (
        lambda: qflash.attention_varlen(FLOAT_Q[0], K, V[0], None, None, 6, 40),
        TypeError,
        "k is qflash.Quantized; allowed: an array, only attention takes Quantized",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_named(name):
    bad, error, text = BAD[name]
    with pytest.raises(error, match=text):
        bad()


def test_good_input_is_taken():
    """What the cases above are changes of; and the result's dtype is V's, or of what V was made from."""
    assert call().dtype == call(kernel="cpu_int8", precision="int8").dtype == np.float16
    assert call(v=V.astype(np.float32)).dtype == np.float32
    assert call(ZQ, ZK, qflash.quantize(V.astype(np.float32))).dtype == np.float32
    out, lse = call(return_lse=True)
    assert out.shape == (2, 6, 4, 8) and lse.shape == (2, 4, 6) and lse.dtype == np.float32


def test_empty_arrays():
    nothing = qflash.quantize(FLOAT_K[:, :0], granularity="group")
    out, lse = call(k=nothing, v=V[:, :0], return_lse=True)
    assert not out.any() and np.isneginf(lse).all()
    assert call(q=qflash.quantize(FLOAT_Q[:, :0], granularity="token")).shape == (2, 0, 4, 8)


@pytest.mark.parametrize(("arch", "dtype"), [(75, "bfloat16"), (90, "float32")])
def test_cuda_says_what_it_does_not_take(arch, dtype):
    with pytest.raises(NoKernelError, match=r"fa_int8 .*no .*(bfloat16 needs|takes float16, bfloat16)"):
        dispatch.choose(Spec("cuda", arch, dtype, 64, "int8", kv="quantized"))
    assert dispatch.choose(Spec("cuda", 75, "float16", 64, "int8", kv="quantized")).name == "fa_int8"
