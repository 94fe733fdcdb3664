"""The operations on PyTorch tensors, as a user writes them. mypy checks the types; `uses` runs too."""

from typing import assert_type

import torch
from torch import Tensor

import qflash


def uses(x: Tensor, weight: Tensor, targets: Tensor, q: Tensor, a: Tensor, flag: bool) -> None:
    assert_type(qflash.softmax(x), Tensor)
    assert_type(qflash.layer_norm(x, weight), Tensor)
    assert_type(qflash.layer_norm(x, return_stats=True), tuple[Tensor, Tensor, Tensor])
    assert_type(qflash.layer_norm(x, return_stats=flag), Tensor | tuple[Tensor, Tensor, Tensor])
    assert_type(qflash.cross_entropy(x, targets), Tensor)
    assert_type(qflash.cross_entropy(x, targets, return_lse=True), tuple[Tensor, Tensor])
    assert_type(qflash.cross_entropy(x, targets, return_lse=flag), Tensor | tuple[Tensor, Tensor])
    assert_type(qflash.int8_matmul(a, a, 0.5, out_dtype=torch.bfloat16), Tensor)
    cos, sin = map(torch.from_numpy, qflash.rope_tables(4, 8))
    rope = qflash.Rope(cos, sin)
    assert_type(qflash.rope(q, rope, positions=torch.arange(4)), Tensor)
    layer = qflash.quantize_linear(x.T)
    assert_type(layer, qflash.QuantizedLinear[Tensor])
    assert_type(layer.values, Tensor)
    assert_type(qflash.linear(x, x.T, activation="silu"), Tensor)
    assert_type(qflash.linear(x, layer, out_dtype=torch.float16), Tensor)
    assert_type(qflash.swiglu(x, x.T, x.T, residual=x @ x.T), Tensor)
    quantized = qflash.quantize(q)
    assert_type(quantized, qflash.Quantized[Tensor])
    assert_type(quantized.scale, Tensor)
    assert_type(quantized.zero_point, Tensor | None)
    assert_type(qflash.dequantize(quantized, torch.float32), Tensor)


def uses_on_hopper(k: Tensor, lens: Tensor) -> None:
    kv = qflash.quantize_kv(k, k, precision="int8_fp8", lens=lens)
    assert_type(kv, qflash.QuantizedKV[Tensor])
    assert_type(kv.k_scale, Tensor)
    assert_type(kv.v_exponents, Tensor | None)
    assert_type(kv.head_dim, int)


def of_any_framework(quantized: qflash.Quantized, kv: qflash.QuantizedKV) -> tuple[int, int]:
    return quantized.group, kv.length


def refused(x: Tensor) -> None:
    qflash.linear(x, x, precision="int4")  # type: ignore[call-overload]
    qflash.swiglu(x, x, x, activation="silu")  # type: ignore[call-overload]
    qflash.softmax(x, kernel=3)  # type: ignore[arg-type]
    qflash.layer_norm(x, epsilon=1e-5)  # type: ignore[call-overload]
    qflash.quantize_kv(x)  # type: ignore[call-arg]
    qflash.quantize_kv(x, x, precision="int4")  # type: ignore[arg-type]
    qflash.cross_entropy(x, x, return_lse=True).backward()  # type: ignore[attr-defined]


def run() -> None:
    x, q = torch.ones(4, 8), torch.ones(1, 4, 2, 8)
    uses(x, x[0], torch.zeros(4, dtype=torch.int64), q, torch.ones(4, 4, dtype=torch.int8), True)
