"""NumPy arrays: always the CPU engine. bfloat16 comes from ml_dtypes."""

from __future__ import annotations

from typing import Any

import ml_dtypes  # noqa: F401  (teaches NumPy the name "bfloat16")
import numpy as np

from qflash.planning import Prepared, prepare
from qflash.problem import Array, Options, Problem, RopeArrays, check, check_packed
from qflash.rope import Rope

_CACHE_LIMIT = 4096


def describe(name: str, x: Any, first: str = "q") -> Array:
    """Shape, element strides and dtype of an array, or TypeError. `first`: the argument that decided the framework."""
    if not isinstance(x, np.ndarray):
        kind = f"{type(x).__module__}.{type(x).__qualname__}"
        raise TypeError(f"{name} is {kind}; allowed: numpy.ndarray, as {first} is")
    if isinstance(x, np.ma.MaskedArray):  # its mask would be ignored
        instead = ", with kv_lens or window to mask keys" if first == "q" else ""
        raise TypeError(f"{name} is a masked array; allowed: a plain numpy.ndarray{instead}")
    if not x.dtype.isnative:  # its name alone would not tell
        raise TypeError(f"{name} has dtype {x.dtype.str}, a foreign byte order; allowed: the native one")
    size = max(x.itemsize, 1)  # a void dtype may have items of no bytes; `check` refuses it by name
    if any(stride % size for stride in x.strides) or not x.flags.aligned:
        raise ValueError(f"{name} has byte strides {x.strides}; allowed: multiples of the item size, {size}")
    return Array(x.shape, tuple(s // size for s in x.strides), x.dtype.name, "cpu")


def _describe_index(name: str, x: Any) -> Array | None:
    """An optional index array."""
    if x is None:
        return None
    if not isinstance(x, np.ndarray):
        raise TypeError(f"{name} is {type(x).__module__}.{type(x).__qualname__}; allowed: numpy.ndarray of int32")
    return describe(name, x)


def _describe_rope(rope: Rope | None) -> RopeArrays | None:
    if rope is None:
        return None
    if not isinstance(rope, Rope):
        raise TypeError(f"rope is {type(rope).__name__}; allowed: None or qflash.Rope")
    return RopeArrays(
        describe("rope.cos", rope.cos),
        describe("rope.sin", rope.sin),
        rope.interleaved,
        _describe_index("rope.positions_q", rope.positions_q),
        _describe_index("rope.positions_k", rope.positions_k),
    )


def problem_of(q, k, v, options: Options, kv_lens=None, rope: Rope | None = None) -> Problem:
    """The checked problem behind `attention`, for `explain`."""
    arrays = describe("q", q), describe("k", k), describe("v", v)
    return check(*arrays, options, _describe_index("kv_lens", kv_lens), _describe_rope(rope))


def arch_of(q: np.ndarray) -> int:
    """Compute capability times ten of the array's device: 0, the CPU."""
    return 0


_plans: dict[tuple, Prepared] = {}


def attention(q, k, v, options: Options, kv_lens=None, rope: Rope | None = None, return_lse: bool = False):
    """See qflash.attention."""
    if kv_lens is not None or rope is not None:
        problem = problem_of(q, k, v, options, kv_lens, rope)
        return _run(prepare(problem), q, k, v, return_lse, kv_lens, None, None, rope)
    return _run(_plan(q, k, v, options), q, k, v, return_lse)


def _plan(q: Any, k: Any, v: Any, options: Options) -> Prepared:
    """The prepared call of plain arrays without extras, looked up by everything it depends on."""
    try:
        key = (
            q.shape, k.shape, v.shape, q.strides, k.strides, v.strides, q.dtype, k.dtype, v.dtype,
            q.flags.aligned and k.flags.aligned and v.flags.aligned, type(q), type(k), type(v), options.key(),
        )  # fmt: skip
        return _plans[key]
    except KeyError:
        found = prepare(problem_of(q, k, v, options))
    except (AttributeError, TypeError, ValueError):  # not an array, or words that do not hash
        return prepare(problem_of(q, k, v, options))
    if len(_plans) >= _CACHE_LIMIT:
        _plans.clear()
    _plans[key] = found
    return found


def attention_varlen(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, options, kv_lens=None, rope=None, return_lse=False
):
    """See qflash.attention_varlen."""
    problem = check_packed(
        describe("q", q),
        describe("k", k),
        describe("v", v),
        describe("cu_seqlens_q", cu_seqlens_q),
        describe("cu_seqlens_k", cu_seqlens_k),
        max_seqlen_q,
        max_seqlen_k,
        options,
        _describe_index("kv_lens", kv_lens),
        _describe_rope(rope),
    )
    return _run(prepare(problem), q, k, v, return_lse, kv_lens, cu_seqlens_q, cu_seqlens_k, rope)


def _contiguous(x: np.ndarray | None, dtype: type) -> np.ndarray | None:
    return None if x is None else np.ascontiguousarray(x, dtype)


def _rotary(rope: Rope) -> list[np.ndarray | None]:
    tables = [_contiguous(x, np.float32) for x in (rope.cos, rope.sin)]
    return tables + [_contiguous(x, np.int32) for x in (rope.positions_q, rope.positions_k)]


def _address(x: np.ndarray | None) -> int:
    return 0 if x is None else x.ctypes.data


def _run(prepared: Prepared, q, k, v, return_lse: bool, kv_lens=None, cu_q=None, cu_k=None, rope: Rope | None = None):
    problem = prepared.problem
    out = np.empty(q.shape, q.dtype)
    lse = None
    if return_lse:
        rows = (problem.q_heads, problem.total_q) if problem.packed else (problem.batch, problem.q_heads, problem.q_len)
        lse = np.empty(rows, np.float32)
    # Both are named, so that converted copies outlive the call.
    index = [_contiguous(x, np.int32) for x in (kv_lens, cu_q, cu_k)]
    rotary = [None] * 4 if rope is None else _rotary(rope)
    prepared.call(*map(_address, (q, k, v, out, lse, *index, *rotary)), 0, 0, 0)
    return (out, lse) if return_lse else out
