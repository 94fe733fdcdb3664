"""The operations on NumPy arrays, as a user writes them. mypy checks the types; `uses` runs too."""

from typing import Any, assert_type

import numpy as np
from numpy.typing import NDArray

import qflash

Half = NDArray[np.float16]
Single = NDArray[np.float32]


def uses(x: Half, weight: Half, targets: NDArray[np.int64], q: Half, a: NDArray[np.int8], flag: bool) -> None:
    assert_type(qflash.softmax(x), Half)
    assert_type(qflash.softmax(x, scale=np.float32(2)), Half)

    assert_type(qflash.layer_norm(x, weight, eps=1e-6), Half)
    assert_type(qflash.layer_norm(x, return_stats=False), Half)
    assert_type(qflash.layer_norm(x, return_stats=True), tuple[Half, Single, Single])
    assert_type(qflash.layer_norm(x, return_stats=flag), Half | tuple[Half, Half, Half])
    assert_type(qflash.layer_norm(x, return_stats=np.bool_(flag)), Half | tuple[Half, Half, Half])

    assert_type(qflash.cross_entropy(x, targets), Single)
    assert_type(qflash.cross_entropy(x, targets, reduction="none", return_lse=True), tuple[Single, Single])

    assert_type(qflash.int8_matmul(a, a), NDArray[Any])
    assert_type(qflash.int8_matmul(a, a, np.float32(2), 0.5, out_dtype=np.float16), NDArray[Any])
    assert_type(qflash.int8_matmul(a, a, out_dtype="float32"), NDArray[Any])

    rope = qflash.Rope(*qflash.rope_tables(4, 8))
    assert_type(qflash.rope(q, rope), Half)
    assert_type(qflash.rope(q, rope, positions=[0, 1, 2, 3], kernel=None), Half)

    w = x.T
    layer = qflash.quantize_linear(w)
    assert_type(layer, qflash.QuantizedLinear[NDArray[Any]])
    assert_type(layer.scale, NDArray[Any])
    assert_type(layer.dtype, str)
    assert_type(qflash.linear(x, w), Half)
    assert_type(qflash.linear(x, w, x[:, 0], activation="gelu", residual=x @ w), Half)
    assert_type(qflash.linear(x, layer, precision="int8"), Half)
    assert_type(qflash.linear(x, w, out_dtype=np.float32), NDArray[Any])
    assert_type(qflash.swiglu(x, w, w), Half)
    assert_type(qflash.swiglu(x, layer, layer, out_dtype="float32"), NDArray[Any])

    quantized = qflash.quantize(q, symmetric=np.bool_(False), smooth=True)
    assert_type(quantized, qflash.Quantized[NDArray[Any]])
    assert_type(quantized.values, NDArray[Any])
    assert_type(quantized.mean, NDArray[Any] | None)
    assert_type(quantized.symmetric, bool)
    assert_type(qflash.dequantize(quantized), NDArray[Any])
    assert_type(qflash.dequantize(quantized, np.dtype(np.float32)), NDArray[Any])


def uses_any_dtype(x: NDArray[Any]) -> None:
    assert_type(qflash.softmax(x), NDArray[Any])
    assert_type(qflash.layer_norm(x, return_stats=True), tuple[NDArray[Any], Single, Single])
    assert_type(qflash.quantize(x), qflash.Quantized[NDArray[Any]])


def refused(x: Half, targets: NDArray[np.int64], a: NDArray[np.int8]) -> None:
    qflash.softmax([1.0, 2.0])  # type: ignore[type-var]
    qflash.softmax(x, scale="2")  # type: ignore[arg-type]
    qflash.layer_norm(x, return_stats="yes")  # type: ignore[call-overload]
    qflash.cross_entropy(x)  # type: ignore[call-overload]
    qflash.cross_entropy(x, targets, reduction="average")  # type: ignore[call-overload]
    qflash.int8_matmul(a, a, "2")  # type: ignore[call-overload]
    qflash.linear(x, x, activation="relu")  # type: ignore[call-overload]
    qflash.linear(x)  # type: ignore[call-overload]
    qflash.swiglu(x, x)  # type: ignore[call-overload]
    qflash.quantize(x, granularity="row")  # type: ignore[call-overload]
    qflash.dequantize(x)  # type: ignore[arg-type]
    qflash.rope(x)  # type: ignore[call-arg]
    qflash.rope(x, None)  # type: ignore[arg-type]
    qflash.softmax(x).values  # type: ignore[attr-defined]


def run() -> None:
    x = np.ones((4, 8), np.float16)
    uses_any_dtype(x)
    uses(x, x[0], np.zeros(4, np.int64), np.ones((1, 4, 2, 8), np.float16), np.ones((4, 4), np.int8), True)
