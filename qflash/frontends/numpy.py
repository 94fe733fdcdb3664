"""NumPy arrays: always the CPU engine. bfloat16 comes from ml_dtypes."""

from __future__ import annotations

from typing import Any

import ml_dtypes  # noqa: F401  (teaches NumPy the name "bfloat16")
import numpy as np

from qflash.planning import prepare
from qflash.problem import Array, Options, Problem, RopeArrays, check, check_packed
from qflash.rope import Rope


def describe(name: str, x: Any) -> Array:
    """Shape, element strides and dtype of an array, or TypeError."""
    if not isinstance(x, np.ndarray):
        raise TypeError(f"{name} is {type(x).__module__}.{type(x).__qualname__}; allowed: numpy.ndarray, as q is")
    if not x.dtype.isnative:  # its name alone would not tell
        raise TypeError(f"{name} has dtype {x.dtype.str}, a foreign byte order; allowed: the native one")
    if any(stride % x.itemsize for stride in x.strides) or not x.flags.aligned:
        raise ValueError(f"{name} has byte strides {x.strides}; allowed: multiples of the item size, {x.itemsize}")
    return Array(x.shape, tuple(s // x.itemsize for s in x.strides), x.dtype.name, "cpu")


def _index(name: str, x: Any) -> np.ndarray | None:
    """An index array, made contiguous."""
    if x is None:
        return None
    if not isinstance(x, np.ndarray):
        raise TypeError(f"{name} is {type(x).__name__}; allowed: numpy.ndarray of int32")
    return np.ascontiguousarray(x)


class _Rope:
    """A Rope's arrays as the engine wants them: float32 tables, contiguous positions."""

    def __init__(self, rope: Rope):
        if not isinstance(rope, Rope):
            raise TypeError(f"rope is {type(rope).__name__}; allowed: None or qflash.Rope")
        cos, sin = describe("rope.cos", rope.cos), describe("rope.sin", rope.sin)
        self.positions_q = _index("rope.positions_q", rope.positions_q)
        self.positions_k = _index("rope.positions_k", rope.positions_k)
        self.arrays = RopeArrays(
            cos,
            sin,
            rope.interleaved,
            None if self.positions_q is None else describe("rope.positions_q", self.positions_q),
            None if self.positions_k is None else describe("rope.positions_k", self.positions_k),
        )
        self.cos = np.ascontiguousarray(rope.cos, dtype=np.float32)
        self.sin = np.ascontiguousarray(rope.sin, dtype=np.float32)

    def addresses(self) -> tuple[int, int, int, int]:
        return _address(self.cos), _address(self.sin), _address(self.positions_q), _address(self.positions_k)


def _address(x: np.ndarray | None) -> int:
    return 0 if x is None else x.ctypes.data


def _run(problem: Problem, q, k, v, lse_shape, kv_lens, cu_q, cu_k, rope: _Rope | None, return_lse: bool):
    out = np.empty(q.shape, q.dtype)
    lse = np.empty(lse_shape, np.float32) if return_lse else None
    prepare(problem).call(
        q.ctypes.data,
        k.ctypes.data,
        v.ctypes.data,
        out.ctypes.data,
        _address(lse),
        _address(kv_lens),
        _address(cu_q),
        _address(cu_k),
        *((0, 0, 0, 0) if rope is None else rope.addresses()),
        0,
        0,
        0,
    )
    return (out, lse) if return_lse else out


def problem_of(q, k, v, options: Options, kv_lens=None, rope: Rope | None = None) -> Problem:
    """The checked problem behind `attention`, for `explain`."""
    table = None if rope is None else _Rope(rope).arrays
    lens = None if kv_lens is None else describe("kv_lens", kv_lens)
    return check(describe("q", q), describe("k", k), describe("v", v), options, lens, table)


def attention(q, k, v, options: Options, kv_lens=None, rope: Rope | None = None, return_lse: bool = False):
    """See qflash.attention."""
    rope = None if rope is None else _Rope(rope)
    kv_lens = _index("kv_lens", kv_lens)
    problem = check(
        describe("q", q),
        describe("k", k),
        describe("v", v),
        options,
        None if kv_lens is None else describe("kv_lens", kv_lens),
        None if rope is None else rope.arrays,
    )
    lse_shape = (problem.batch, problem.q_heads, problem.q_len)
    return _run(problem, q, k, v, lse_shape, kv_lens, None, None, rope, return_lse)


def attention_varlen(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, options, kv_lens=None, rope=None, return_lse=False
):
    """See qflash.attention_varlen."""
    rope = None if rope is None else _Rope(rope)
    kv_lens = _index("kv_lens", kv_lens)
    cu_q, cu_k = _index("cu_seqlens_q", cu_seqlens_q), _index("cu_seqlens_k", cu_seqlens_k)
    problem = check_packed(
        describe("q", q),
        describe("k", k),
        describe("v", v),
        describe("cu_seqlens_q", cu_q),
        describe("cu_seqlens_k", cu_k),
        max_seqlen_q,
        max_seqlen_k,
        options,
        None if kv_lens is None else describe("kv_lens", kv_lens),
        None if rope is None else rope.arrays,
    )
    return _run(problem, q, k, v, (problem.q_heads, problem.total_q), kv_lens, cu_q, cu_k, rope, return_lse)


def arch_of(q: np.ndarray) -> int:
    """Compute capability times ten of the array's device: 0, the CPU."""
    return 0
