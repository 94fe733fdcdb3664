"""attention on NumPy arrays, as a user writes it. mypy checks the types; `uses` runs too."""

from typing import Any, assert_type

import numpy as np
from numpy.typing import NDArray

import qflash

Half = NDArray[np.float16]
Single = NDArray[np.float32]


def uses(q: Half, kv_lens: NDArray[np.int32], flag: bool) -> None:
    assert_type(qflash.attention(q, q, q), Half)
    assert_type(qflash.attention(q, q, q, return_lse=False), Half)
    assert_type(qflash.attention(q, q, q, return_lse=True), tuple[Half, Single])
    assert_type(qflash.attention(q, q, q, return_lse=flag), Half | tuple[Half, Half])
    assert_type(qflash.attention(q, q, q, return_lse=np.bool_(flag)), Half | tuple[Half, Half])
    # NumPy's scalars are as good as Python's.
    assert_type(qflash.attention(q, q, q, causal=np.bool_(True), scale=np.float32(1), softcap=np.int8(3)), Half)
    assert_type(qflash.attention(q, q, q, window=(np.int64(2), 0), kv_lens=kv_lens, precision="int8"), Half)
    assert_type(qflash.attention(q, q, q, window=[2, 0]), Half)

    cos, sin = qflash.rope_tables(np.int64(16), 8, base=500000)
    assert_type(cos, Single)
    rope = qflash.Rope(cos, sin, interleaved=True)
    assert_type(rope, qflash.Rope[Single])
    assert_type(rope.cos, Single)
    assert_type(qflash.attention(q, q, q, rope=rope), Half)

    x = qflash.quantize(q, rope=rope)
    assert_type(qflash.attention(x, x, q), Half)
    assert_type(qflash.attention(x, x, q, return_lse=True), tuple[Half, Single])
    assert_type(qflash.attention(x, x, x), NDArray[Any])

    explanation = qflash.explain(q, q, q, causal=True)
    assert_type(explanation, qflash.Explanation)
    assert_type(explanation.kernel, str | None)
    assert_type(explanation.rows, list[tuple[str, str, str]])
    assert_type(explanation.notes, tuple[str, ...])
    assert_type(qflash.explain(x, x, q), qflash.Explanation)


def uses_any_dtype(q: NDArray[Any]) -> None:
    assert_type(qflash.attention(q, q, q), NDArray[Any])
    assert_type(qflash.attention(q, q, q, return_lse=True), tuple[NDArray[Any], Single])


def uses_packed(q: Half, cu: NDArray[np.int32]) -> None:
    assert_type(qflash.attention_varlen(q, q, q, cu, cu, 3, np.int64(3), causal=True), Half)
    assert_type(qflash.attention_varlen(q, q, q, cu, cu, 3, 3, return_lse=True), tuple[Half, Single])


def refused(q: Half, cu: NDArray[np.int32]) -> None:
    qflash.attention(q)  # type: ignore[call-overload]
    qflash.attention(q, q)  # type: ignore[call-overload]
    qflash.attention(q, q, q, True)  # type: ignore[call-overload]
    qflash.attention(q, q, q, causal="yes")  # type: ignore[call-overload]
    qflash.attention(q, q, q, scale="1")  # type: ignore[call-overload]
    qflash.attention(q, q, q, window=3)  # type: ignore[call-overload]
    qflash.attention(q, q, q, precision="int4")  # type: ignore[call-overload]
    qflash.attention(q, q, q, dropout=0.1)  # type: ignore[call-overload]
    qflash.attention([[1.0]], q, q)  # type: ignore[call-overload]
    qflash.attention(qflash.quantize(q), q, q)  # type: ignore[call-overload]
    qflash.attention_varlen(q, q, q, cu, cu)  # type: ignore[call-overload]
    qflash.rope_tables("16", 8)  # type: ignore[arg-type]
    qflash.explain(q, q, q, return_lse=True)  # type: ignore[call-overload]
    qflash.explain(q, q, q).kernels  # type: ignore[attr-defined]


def run() -> None:
    uses(np.ones((2, 4, 2, 8), np.float16), np.array([4, 3], np.int32), True)
    uses_any_dtype(np.ones((2, 4, 2, 8), np.float32))
    uses_packed(np.ones((5, 2, 8), np.float16), np.array([0, 3, 5], np.int32))
