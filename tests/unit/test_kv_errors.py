"""Bad input to quantize_kv, and to attention on what it returns: the error names the argument, what came, what may."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import qflash
from qflash import NoKernelError
from qflash.ops.kv import results_of

SHAPE = (2, 40, 2, 24)
Q = np.zeros((2, 6, 4, 24), np.float16)
K = np.zeros(SHAPE, np.float16)
ROPE = qflash.Rope(*qflash.rope_tables(40, 8))
LENS = np.array([40, 7], np.int32)


def made(precision="int8", **changes) -> qflash.QuantizedKV:
    """What quantize_kv would return on a GPU that has it."""
    parts = {name: np.zeros(shape, dtype) for name, (dtype, shape) in results_of(*SHAPE, precision).items()}
    return replace(qflash.QuantizedKV(**{"v": K, **parts}, dtype="float16", precision=precision), **changes)


KV, KV8 = made(), made("int8_fp8")


def quantize(k=K, v=K, **words):
    return qflash.quantize_kv(k, v, **words)


def attend(q=Q, kv=KV, v=None, **words):
    return qflash.attention(q, kv, v, **words)


def rope(**changes):
    return replace(ROPE, **changes)


BAD_QUANTIZE = {
    "k list": (lambda: quantize(k=[1.0]), TypeError, "k is builtins.list; allowed: numpy.ndarray, torch.Tensor"),
    "k None": (lambda: quantize(k=None), TypeError, "k is builtins.NoneType; allowed"),
    "k dtype": (lambda: quantize(k=K.astype(int)), TypeError, "k has dtype int64; allowed: float32, float16"),
    "k rank": (lambda: quantize(k=K[0]), ValueError, r"k has shape \[40, 2, 24\]; allowed: rank 4"),
    "k heads": (lambda: quantize(K[:, :, :0], K[:, :, :0]), ValueError, "k has shape .*; allowed: 1 or more heads"),
    "k wide": (
        lambda: quantize(*[np.zeros((1, 2, 1, 264), "f2")] * 2),
        ValueError,
        "k has head_dim 264; allowed: 1 to 256",
    ),
    "v None": (lambda: quantize(v=None), TypeError, "v is None; allowed: an array like k"),
    "v list": (lambda: quantize(v=[1.0]), TypeError, "v is builtins.list; allowed: numpy.ndarray, as k is"),
    "v dtype": (lambda: quantize(v=K.astype("f4")), TypeError, "v has dtype float32; allowed: float16"),
    "v shape": (lambda: quantize(v=K[:, :39]), ValueError, r"v has shape \[2, 39, 2, 24\]; allowed: \[2, 40, 2, 24\]"),
    "precision": (lambda: quantize(precision="fp8"), ValueError, "precision is 'fp8'; allowed: 'int8', 'int8_fp8'"),
    "precision None": (lambda: quantize(precision=None), TypeError, "precision is None; allowed: 'int8', 'int8_fp8'"),
    "rounding": (lambda: quantize(rounding="up"), ValueError, "rounding is 'up'; allowed: 'nearest', 'stochastic'"),
    "seed": (lambda: quantize(seed=-1), ValueError, "seed is -1; allowed: 0 to"),
    "seed type": (lambda: quantize(seed=0.5), TypeError, "seed is 0.5; allowed: an int"),
    "kernel": (lambda: quantize(kernel="fa"), ValueError, "kernel is 'fa'; allowed: None"),
    "kernel type": (lambda: quantize(kernel=3), TypeError, "kernel is 3; allowed: None or the name"),
    "lens dtype": (lambda: quantize(lens=LENS.astype(float)), TypeError, "lens has dtype float64; allowed: an integer"),
    "lens shape": (lambda: quantize(lens=LENS[:1]), ValueError, r"lens has shape \[1\]; allowed: \[2\]"),
    "rope type": (lambda: quantize(rope=3), TypeError, "rope is int; allowed: None or qflash.Rope"),
    "rope None": (lambda: quantize(rope=rope(cos=None)), TypeError, "rope.cos is None; allowed: an array"),
    "rope rows": (lambda: quantize(rope=qflash.Rope(*qflash.rope_tables(39, 8))), ValueError, "rope.cos has 39 rows"),
    "rope wide": (
        lambda: quantize(rope=qflash.Rope(*qflash.rope_tables(40, 26))),
        ValueError,
        "rope.cos has 13 columns; allowed: at most half of k's, 12",
    ),
    "positions": (
        lambda: quantize(rope=rope(positions_k=LENS)),
        ValueError,
        r"rope.positions_k has shape \[2\]; allowed: \[40\] or \[2, 40\]",
    ),
}

BAD_ATTENTION = {
    "as q": (lambda: attend(q=KV, kv=K), TypeError, "q is qflash.QuantizedKV; allowed: in the place of k, without v"),
    "as v": (lambda: attend(kv=K, v=KV), TypeError, "v is qflash.QuantizedKV; allowed: in the place of k, without v"),
    "with v": (lambda: attend(v=K), TypeError, "v is numpy.ndarray and k qflash.QuantizedKV, which has v.*: None"),
    "Quantized q": (
        lambda: attend(q=qflash.quantize(Q)),
        TypeError,
        "q is qflash.Quantized and k qflash.QuantizedKV; allowed: an array",
    ),
    "q list": (lambda: attend(q=[1.0]), TypeError, "q is builtins.list; allowed: numpy.ndarray, torch.Tensor"),
    "q dtype": (lambda: attend(q=Q.astype(int)), TypeError, "q has dtype int64; allowed: float32"),
    "q rank": (lambda: attend(q=Q[0]), ValueError, r"q has shape \[6, 4, 24\]; allowed: rank 4"),
    "other dtype": (lambda: attend(q=Q.astype("f4")), TypeError, "kv.dtype is 'float16'; allowed: q's, 'float32'"),
    "head_dim": (lambda: attend(q=Q[..., :16]), ValueError, "kv.head_dim is 24; allowed: q's, 16"),
    "batch": (lambda: attend(q=Q[:1]), ValueError, "kv.k has batch size 2; allowed: q's, 1"),
    "heads": (lambda: attend(q=Q[:, :, :3]), ValueError, "kv.k has 2 heads; allowed: a divisor of q's 3 heads"),
    "precision": (lambda: attend(precision="int8_fp8"), ValueError, "precision is 'int8_fp8'; .*: None or 'int8'"),
    "kv.precision": (
        lambda: attend(kv=replace(KV, precision=None)),
        TypeError,
        "kv.precision is None; allowed: 'int8'",
    ),
    "kv.dtype": (lambda: attend(kv=replace(KV, dtype="int8")), ValueError, "kv.dtype is 'int8'; allowed: 'float32'"),
    "part None": (lambda: attend(kv=replace(KV, k_scale=None)), TypeError, "kv.k_scale is None; allowed: an array"),
    "part list": (
        lambda: attend(kv=replace(KV, k_nonfinite=[0])),
        TypeError,
        "kv.k_nonfinite is builtins.list; allowed: .*as q",
    ),
    "part dtype": (
        lambda: attend(kv=replace(KV, k=KV.k.astype("i2"))),
        TypeError,
        "kv.k has dtype int16; allowed: int8",
    ),
    "k rank": (lambda: attend(kv=replace(KV, k=KV.k[0])), ValueError, r"kv.k has shape \[40, 2, 32\]; allowed: rank 4"),
    "mean rank": (lambda: attend(kv=replace(KV, k_mean=KV.k_mean[0])), ValueError, "kv.k_mean has shape .*: rank 3"),
    "k width": (
        lambda: attend(kv=replace(KV, k=KV.k[..., :24])),
        ValueError,
        r"kv.k has shape \[2, 40, 2, 24\]; allowed: \[2, 40, 2, 32\]",
    ),
    "scale shape": (
        lambda: attend(kv=replace(KV, k_scale=np.zeros((2, 2, 2), "f4"))),
        ValueError,
        r"kv.k_scale has shape \[2, 2, 2\]; allowed: \[2, 2, 1\]",
    ),
    "v dtype": (
        lambda: attend(kv=replace(KV, v=K.astype("f4"))),
        TypeError,
        "kv.v has dtype float32; allowed: float16",
    ),
    "v shape": (lambda: attend(kv=replace(KV, v=K[:, :39])), ValueError, "kv.v has shape .*39.*; allowed"),
    "v not E4M3": (lambda: attend(kv=replace(KV8, v=K)), TypeError, "kv.v has dtype float16; allowed: uint8"),
    "v not transposed": (
        lambda: attend(kv=replace(KV8, v=np.zeros((2, 128, 2, 24), "u1"))),
        ValueError,
        r"kv.v has shape \[2, 128, 2, 24\]; allowed: \[2, 2, 24, 128\]",
    ),
    "E4M3 without exponents": (
        lambda: attend(kv=replace(KV8, v_exponents=None)),
        TypeError,
        "kv.v_exponents is None and kv.precision 'int8_fp8'; allowed: an array",
    ),
    "E4M3 without mean": (
        lambda: attend(kv=replace(KV8, v_mean=None)),
        TypeError,
        "kv.v_mean is None and kv.precision 'int8_fp8'; allowed: an array",
    ),
    "v_mean dtype": (
        lambda: attend(kv=replace(KV8, v_mean=KV8.v_mean.astype("f8"))),
        TypeError,
        "kv.v_mean has dtype float64; allowed: float32",
    ),
    "v_mean shape": (
        lambda: attend(kv=replace(KV8, v_mean=KV8.v_mean[..., :8])),
        ValueError,
        r"kv.v_mean has shape \[2, 2, 8\]; allowed: \[2, 2, 24\]",
    ),
    "int8 with scale": (
        lambda: attend(kv=replace(KV, v_scale=KV8.v_scale)),
        TypeError,
        "kv.v_scale is given and kv.precision 'int8'; allowed: None",
    ),
    "kv_lens dtype": (lambda: attend(kv_lens=np.zeros(2)), TypeError, "kv_lens has dtype float64; allowed: an integer"),
    "kv_lens shape": (lambda: attend(kv_lens=LENS[:1]), ValueError, r"kv_lens has shape \[1\]; allowed: \[2\]"),
    "kv.lens": (lambda: attend(kv=replace(KV, lens=LENS[:1])), ValueError, r"kv_lens has shape \[1\]; allowed: \[2\]"),
    "window": (lambda: attend(window=(3,)), ValueError, r"window is \(3,\); allowed: None or \(left, right\)"),
    "causal": (lambda: attend(causal="yes"), TypeError, "causal is 'yes'; allowed: True or False"),
    "return_lse": (lambda: attend(return_lse=2), TypeError, "return_lse is 2; allowed: True or False"),
    "kernel": (lambda: attend(kernel="softmax"), ValueError, "kernel is 'softmax'; allowed: None"),
    "rope rows": (lambda: attend(rope=qflash.Rope(*qflash.rope_tables(39, 8))), ValueError, "rope.cos has 39 rows"),
    "rope positions": (
        lambda: attend(rope=rope(positions_q=LENS)),
        ValueError,
        r"rope.positions_q has shape \[2\]; allowed: \[6\] or \[2, 6\]",
    ),
    "varlen": (
        lambda: qflash.attention_varlen(Q[0], KV, None, LENS, LENS, 6, 40),
        TypeError,
        "k is qflash.QuantizedKV; allowed: an array, only attention takes QuantizedKV",
    ),
}


@pytest.mark.parametrize("name", BAD_QUANTIZE)
def test_bad_input_to_quantize_kv_is_named(name):
    call, error, text = BAD_QUANTIZE[name]
    with pytest.raises(error, match=text):
        call()


@pytest.mark.parametrize("name", BAD_ATTENTION)
def test_bad_input_to_attention_is_named(name):
    call, error, text = BAD_ATTENTION[name]
    with pytest.raises(error, match=text):
        call()


GOOD = {
    "plain": lambda: attend(),
    "E4M3": lambda: attend(kv=KV8, precision="int8_fp8", causal=True, return_lse=True),
    "lens": lambda: attend(kv=replace(KV, lens=LENS), window=(3, 4), softcap=2.0, scale=0.1),
    "rope": lambda: attend(rope=ROPE),
    "few rows": lambda: attend(rope=qflash.Rope(*qflash.rope_tables(9, 8), positions_q=np.zeros(6, "i4"))),
    "strided": lambda: attend(q=Q[..., ::-1], kv=replace(KV, v=np.moveaxis(np.zeros((2, 2, 24, 40), "f2"), 3, 1))),
}


@pytest.mark.parametrize("name", GOOD)
def test_what_is_allowed_gets_as_far_as_the_table(name):
    """Arrays of the CPU, which has no kernel for them."""
    with pytest.raises(NoKernelError, match=r"no kernel serves this problem\n(?s:.*) +sm90_int8 +no +runs on cuda"):
        GOOD[name]()


@pytest.mark.parametrize("precision", ["int8", "int8_fp8"])
def test_the_cpu_quantizes_no_kv(precision):
    with pytest.raises(NoKernelError, match=r"no kernel serves this quantize_kv\n +sm90_quantize +no +runs on cuda"):
        quantize(precision=precision, rope=rope(positions_q=LENS), lens=LENS)  # positions_q: of no interest here


def test_v_may_be_left_out_for_kv_alone():
    with pytest.raises(TypeError, match=r"v is None; allowed: an array"):
        qflash.attention(Q, K)
    with pytest.raises(TypeError, match=r"v is None; allowed: an array"):
        qflash.explain(Q, K)


@pytest.mark.parametrize("precision", ["int8", "int8_fp8"])
def test_explain_takes_kv(precision):
    said = qflash.explain(Q, made(precision), causal=True)
    assert said.kernel is None and said.notes == ()
    assert (said.spec.op, said.spec.kv, said.spec.precision, said.spec.head_dim) == ("attention", "kept", precision, 24)
    with pytest.raises(ValueError, match=r"kv.head_dim is 24"):
        qflash.explain(Q[..., :16], made(precision))


def test_sizes_of_what_it_was_made_from():
    assert (KV.length, KV.head_dim) == (40, 24) and (KV8.length, KV8.head_dim) == (40, 24)
