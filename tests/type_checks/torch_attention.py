"""attention on PyTorch tensors, as a user writes it. mypy checks the types; `uses` runs too."""

from typing import assert_type

import torch
from torch import Tensor

import qflash


def uses(q: Tensor, kv_lens: Tensor, flag: bool) -> None:
    assert_type(qflash.attention(q, q, q), Tensor)
    assert_type(qflash.attention(q, q, q, causal=True, kv_lens=kv_lens), Tensor)
    assert_type(qflash.attention(q, q, q, return_lse=True), tuple[Tensor, Tensor])
    assert_type(qflash.attention(q, q, q, return_lse=flag), Tensor | tuple[Tensor, Tensor])
    cos, sin = (torch.from_numpy(table) for table in qflash.rope_tables(16, 8))
    rope = qflash.Rope(cos, sin, positions_q=torch.zeros(4, dtype=torch.int32))
    assert_type(rope, qflash.Rope[Tensor])
    assert_type(rope.cos, Tensor)
    assert_type(qflash.attention(q, q, q, rope=rope), Tensor)
    assert_type(qflash.scaled_dot_product_attention(q, q, q, is_causal=True), Tensor)
    x = qflash.quantize(q)
    assert_type(qflash.attention(x, x, x), Tensor)
    assert_type(qflash.attention(x, x, q, return_lse=True), tuple[Tensor, Tensor])


def uses_packed(q: Tensor, cu: Tensor) -> None:
    assert_type(qflash.attention_varlen(q, q, q, cu, cu, 3, 3), Tensor)
    assert_type(qflash.attention_varlen(q, q, q, cu, cu, 3, 3, return_lse=True), tuple[Tensor, Tensor])


def uses_on_hopper(q: Tensor, kv: qflash.QuantizedKV[Tensor], flag: bool) -> None:
    assert_type(qflash.attention(q, kv), Tensor)
    assert_type(qflash.attention(q, kv, return_lse=True), tuple[Tensor, Tensor])
    assert_type(qflash.attention(q, kv, return_lse=flag), Tensor | tuple[Tensor, Tensor])
    assert_type(qflash.explain(q, kv), qflash.Explanation)


def rotated(q: Tensor, rope: qflash.Rope | None = None) -> Tensor:
    """A function of the user's own, strictly typed."""
    return qflash.attention(q, q, q, rope=rope)


def refused(q: Tensor, kv: qflash.QuantizedKV[Tensor]) -> None:
    qflash.attention(q)  # type: ignore[call-overload]
    qflash.attention(q, q, q, causal="yes")  # type: ignore[call-overload]
    qflash.attention(q, kv, q)  # type: ignore[call-overload]
    qflash.attention(q, q, q, rope=(q, q))  # type: ignore[call-overload]
    qflash.attention(q, q, q, return_lse=True).sum()  # type: ignore[attr-defined]
    qflash.attention_varlen(q, kv, q, q, q, 3, 3)  # type: ignore[call-overload]


def run() -> None:
    q = torch.ones(2, 4, 2, 8)
    uses(q, torch.tensor([4, 3], dtype=torch.int32), True)
    uses_packed(torch.ones(5, 2, 8), torch.tensor([0, 3, 5], dtype=torch.int32))
    rotated(q)
