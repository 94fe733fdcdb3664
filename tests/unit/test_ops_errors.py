"""Bad input to the operations beside attention: the error names the argument, what came and what is allowed."""

from __future__ import annotations

import numpy as np
import pytest

import qflash

X = np.zeros((3, 4), np.float32)
T = np.zeros(3, np.int64)
A, B = np.zeros((3, 4), np.int8), np.zeros((4, 5), np.int8)
Q = np.zeros((2, 6, 3, 8), np.float32)
ROPE = qflash.Rope(*qflash.rope_tables(6, 8))
QUANTIZED = qflash.Quantized(A, np.ones((), np.float32))

HUGE = np.broadcast_to(np.zeros((), np.int8), (2, 131072))


def changed(**words):
    fields = {name: getattr(QUANTIZED, name) for name in QUANTIZED.__slots__}
    return qflash.dequantize(qflash.Quantized(**{**fields, **words}))


BAD = {
    # softmax
    "x list": (lambda: qflash.softmax([1.0]), TypeError, "x is builtins.list; allowed: numpy.ndarray, torch.Tensor"),
    "x None": (lambda: qflash.softmax(None), TypeError, "x is builtins.NoneType; allowed"),
    "x dtype": (lambda: qflash.softmax(X.astype(int)), TypeError, "x has dtype int64; allowed: float32, float16"),
    "x double": (lambda: qflash.softmax(X.astype(float)), TypeError, "x has dtype float64; allowed: float32"),
    "x rank": (lambda: qflash.softmax(np.zeros((), "f4")), ValueError, r"x has shape \(\); allowed: rank 1 or more"),
    "x order": (lambda: qflash.softmax(X.astype(">f4")), TypeError, "x has dtype >f4, a foreign byte order"),
    "x masked": (lambda: qflash.softmax(np.ma.masked_array(X)), TypeError, "x is a masked array; allowed: a plain"),
    "scale nan": (lambda: qflash.softmax(X, scale=float("nan")), ValueError, "scale is nan; allowed: a finite number"),
    "scale big": (lambda: qflash.softmax(X, scale=1e39), ValueError, r"scale is 1e\+39; allowed: a finite number, up"),
    "scale text": (lambda: qflash.softmax(X, scale="1"), TypeError, "scale is '1'; allowed: a number"),
    "scale bool": (lambda: qflash.softmax(X, scale=True), TypeError, "scale is True; allowed: a number"),
    "scale array": (lambda: qflash.softmax(X, scale=X), TypeError, "scale is a numpy.ndarray; allowed: a number"),
    "kernel": (lambda: qflash.softmax(X, kernel="cpu"), ValueError, "kernel is 'cpu'; allowed: None, '"),
    "kernel type": (lambda: qflash.softmax(X, kernel=3), TypeError, "kernel is 3; allowed: None or the name"),
    # layer_norm
    "ln columns": (lambda: qflash.layer_norm(X[:, :0]), ValueError, r"x has shape \[3, 0\]; allowed: at least 1"),
    "weight shape": (lambda: qflash.layer_norm(X, X[0, :3]), ValueError, r"weight has shape \[3\]; allowed: \[4\]"),
    "weight dtype": (
        lambda: qflash.layer_norm(X, X[0].astype("f2")),
        TypeError,
        "weight has dtype float16; allowed: f",
    ),
    "bias list": (lambda: qflash.layer_norm(X, None, [0.0]), TypeError, "bias is builtins.list; .*as x is"),
    "bias shape": (lambda: qflash.layer_norm(X, None, X), ValueError, r"bias has shape \[3, 4\]; allowed: \[4\]"),
    "eps": (lambda: qflash.layer_norm(X, eps=-1.0), ValueError, r"eps is -1.0; allowed: 0 or more"),
    "eps nan": (lambda: qflash.layer_norm(X, eps=float("inf")), ValueError, "eps is inf; allowed: a finite number"),
    "stats": (lambda: qflash.layer_norm(X, return_stats=2), TypeError, "return_stats is 2; allowed: True or False"),
    # cross_entropy
    "targets None": (lambda: qflash.cross_entropy(X, None), TypeError, "targets is None; allowed: an array of int32"),
    "targets list": (lambda: qflash.cross_entropy(X, [0, 1, 2]), TypeError, "targets is builtins.list; .*as logits is"),
    "targets dtype": (lambda: qflash.cross_entropy(X, X[:, 0]), TypeError, "targets has dtype float32; allowed: int32"),
    "targets shape": (lambda: qflash.cross_entropy(X, T[:2]), ValueError, r"targets has shape \[2\]; allowed: \[3\]"),
    "classes": (lambda: qflash.cross_entropy(X[:, :0], T), ValueError, "logits has 0 classes; allowed: 1 to"),
    "reduction": (
        lambda: qflash.cross_entropy(X, T, reduction="max"),
        ValueError,
        "reduction is 'max'; allowed: 'mean'",
    ),
    "reduction None": (lambda: qflash.cross_entropy(X, T, reduction=None), TypeError, "reduction is None; allowed"),
    "ignore": (
        lambda: qflash.cross_entropy(X, T, ignore_index=2**31),
        ValueError,
        "ignore_index is 2147483648; allowed",
    ),
    "ignore type": (
        lambda: qflash.cross_entropy(X, T, ignore_index=1.0),
        TypeError,
        "ignore_index is 1.0; allowed: an",
    ),
    "smoothing": (
        lambda: qflash.cross_entropy(X, T, label_smoothing=1.5),
        ValueError,
        "label_smoothing is 1.5; allowed",
    ),
    "lse": (lambda: qflash.cross_entropy(X, T, return_lse=None), TypeError, "return_lse is None; allowed: True or"),
    # int8_matmul
    "a list": (lambda: qflash.int8_matmul([[1]], B), TypeError, "a is builtins.list; allowed: numpy.ndarray"),
    "a dtype": (lambda: qflash.int8_matmul(X, B), TypeError, "a has dtype float32; allowed: int8"),
    "b dtype": (lambda: qflash.int8_matmul(A, B.astype("u1")), TypeError, "b has dtype uint8; allowed: int8"),
    "b None": (lambda: qflash.int8_matmul(A, None), TypeError, "b is None; allowed: an int8 matrix"),
    "a rank": (lambda: qflash.int8_matmul(A[0], B), ValueError, r"a has shape \[4\]; allowed: rank 2 or more"),
    "b rank": (lambda: qflash.int8_matmul(A, B[None]), ValueError, r"b has shape \[1, 4, 5\]; allowed: rank 2"),
    "b rows": (lambda: qflash.int8_matmul(A, B[:3]), ValueError, r"b has shape \[3, 5\]; .*a has columns, 4"),
    "k": (lambda: qflash.int8_matmul(HUGE, HUGE.T), ValueError, "a has 131072 columns; allowed: at most 131071"),
    "a_scale nan": (lambda: qflash.int8_matmul(A, B, float("nan")), ValueError, "a_scale is nan; allowed: a finite"),
    "b_scale bool": (lambda: qflash.int8_matmul(A, B, None, True), TypeError, "b_scale is True; allowed: a number"),
    "a_scale shape": (
        lambda: qflash.int8_matmul(A, B, X[0]),
        ValueError,
        r"a_scale has shape \[4\]; .*\[\] or \[1\] or",
    ),
    "b_scale dtype": (
        lambda: qflash.int8_matmul(A, B, None, T),
        TypeError,
        "b_scale has dtype int64; allowed: float32",
    ),
    "bias dtype": (lambda: qflash.int8_matmul(A, B, bias=B[0]), TypeError, "bias has dtype int8; allowed: float32"),
    "mm bias": (lambda: qflash.int8_matmul(A, B, bias=X[0]), ValueError, r"bias has shape \[4\]; allowed: \[5\]"),
    "out": (
        lambda: qflash.int8_matmul(A, B, out_dtype="int8"),
        ValueError,
        "out_dtype is 'int8'; allowed: 'int32', 'f",
    ),
    "out int32": (
        lambda: qflash.int8_matmul(A, B, 2.0, out_dtype="int32"),
        ValueError,
        "out_dtype is 'int32'; .*because",
    ),
    "out type": (lambda: qflash.int8_matmul(A, B, out_dtype=[1]), TypeError, r"out_dtype is \[1\]; allowed: a dtype"),
    # quantize
    "q dtype": (lambda: qflash.quantize(A), TypeError, "x has dtype int8; allowed: float32"),
    "q rank": (lambda: qflash.quantize(Q[0]), ValueError, r"x has shape \[6, 3, 8\]; allowed: \[B, T, H, D\], or a"),
    "q heads": (lambda: qflash.quantize(Q[:, :, :0]), ValueError, "x has shape .*allowed: 1 or more heads"),
    "q columns": (lambda: qflash.quantize(X[:, :0]), ValueError, "x has shape .*allowed: 1 or more columns"),
    "granularity": (
        lambda: qflash.quantize(Q, granularity="row"),
        ValueError,
        "granularity is 'row'; allowed: 'tensor'",
    ),
    "group": (lambda: qflash.quantize(Q, group=0), ValueError, "group is 0; allowed: 1 to"),
    "group type": (lambda: qflash.quantize(Q, group=2.0), TypeError, "group is 2.0; allowed: an int"),
    "symmetric": (lambda: qflash.quantize(Q, symmetric="no"), TypeError, "symmetric is 'no'; allowed: True or False"),
    "asymmetric": (
        lambda: qflash.quantize(Q, granularity="token", symmetric=False),
        ValueError,
        "symmetric is False; allowed: True with granularity 'token'",
    ),
    "smooth": (lambda: qflash.quantize(Q, smooth="yes"), TypeError, "smooth is 'yes'; allowed: True or False"),
    "rounding": (lambda: qflash.quantize(Q, rounding="up"), ValueError, "rounding is 'up'; allowed: 'nearest', 'stoch"),
    "seed": (lambda: qflash.quantize(Q, seed=-1), ValueError, "seed is -1; allowed: 0 to"),
    "seed type": (lambda: qflash.quantize(Q, seed="a"), TypeError, "seed is 'a'; allowed: an int"),
    "lens dtype": (lambda: qflash.quantize(Q, lens=X[0]), TypeError, "lens has dtype float32; allowed: an integer"),
    "lens shape": (
        lambda: qflash.quantize(Q, lens=T.astype("i4")),
        ValueError,
        r"lens has shape \[3\]; allowed: \[2\]",
    ),
    "rope": (lambda: qflash.quantize(Q, rope=(1, 2)), TypeError, "rope is tuple; allowed: None or qflash.Rope"),
    "rope queries": (
        lambda: qflash.quantize(Q, rope=qflash.Rope(ROPE.cos, ROPE.sin, positions_q=T)),
        ValueError,
        "rope.positions_q is given; allowed: None",
    ),
    "rope sin": (
        lambda: qflash.quantize(Q, rope=qflash.Rope(ROPE.cos, ROPE.sin[:3])),
        ValueError,
        r"rope.sin has shape \[3, 4\]; allowed: \[6, 4\]",
    ),
    "rope rows": (
        lambda: qflash.quantize(Q, rope=qflash.Rope(ROPE.cos[:5], ROPE.sin[:5])),
        ValueError,
        "rope.cos has 5 rows; allowed: at least 6",
    ),
    "rope wide": (
        lambda: qflash.quantize(Q[..., :6], rope=ROPE),
        ValueError,
        "rope.cos has 4 columns; allowed: at most half of x's, 3",
    ),
    "rope positions": (
        lambda: qflash.quantize(Q, rope=qflash.Rope(ROPE.cos, ROPE.sin, positions_k=np.zeros(5, np.int32))),
        ValueError,
        r"rope.positions_k has shape \[5\]; allowed: \[6\] or \[2, 6\]",
    ),
    # dequantize
    "quantized": (lambda: qflash.dequantize(A), TypeError, "quantized is ndarray; allowed: qflash.Quantized"),
    "dtype": (
        lambda: qflash.dequantize(QUANTIZED, "int8"),
        ValueError,
        "dtype is 'int8'; allowed: 'float32', 'float16'",
    ),
    "dtype type": (lambda: qflash.dequantize(QUANTIZED, 3.5), TypeError, "dtype is 3.5; allowed: a dtype, or its name"),
    "values": (lambda: changed(values=X), TypeError, "quantized.values has dtype float32; allowed: int8"),
    "no scale": (lambda: changed(scale=None), TypeError, "quantized.scale is None; allowed: an array of float32"),
    "scale shape": (
        lambda: changed(scale=X),
        ValueError,
        r"quantized.scale has shape \[3, 4\]; allowed: \[\] or \[1\]",
    ),
    "token scale": (
        lambda: changed(granularity="token"),
        ValueError,
        r"quantized.scale has shape \[\]; allowed: \[3\]",
    ),
    "zero": (
        lambda: changed(symmetric=False),
        ValueError,
        "quantized.zero_point is None and quantized.symmetric False",
    ),
    "mean": (lambda: changed(mean=X), ValueError, r"quantized.mean has shape \[3, 4\]; allowed: \[4\]"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_named(name):
    call, error, text = BAD[name]
    with pytest.raises(error, match=text):
        call()


def test_no_kernel_for_a_device_carries_the_table():
    spec = qflash.ops.rows.SOFTMAX.plan(qflash.ops.problem.Array((2, 3), None, "float32", "tpu"), 1.0, None).spec(0)
    with pytest.raises(qflash.NoKernelError, match=r"cpu_softmax +no +runs on cpu, the arrays are on tpu"):
        qflash.dispatch.choose(spec)
