"""NumPy arrays: always the CPU engine. bfloat16 comes from ml_dtypes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import ml_dtypes  # noqa: F401  (teaches NumPy the name "bfloat16")
import numpy as np

from qflash.lengths import lengths
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
    if any(stride % size for stride in x.strides):
        raise ValueError(f"{name} has byte strides {x.strides}; allowed: multiples of the item size, {size}")
    if not x.flags.aligned:
        raise ValueError(
            f"{name} starts at an address that is no multiple of the alignment of {x.dtype.name}, "
            f"{x.dtype.alignment} bytes; allowed: an aligned array, such as {name}.copy()"
        )
    return Array(x.shape, tuple(s // size for s in x.strides), x.dtype.name, "cpu")


class _Extras(NamedTuple):
    """The optional arrays as the engine reads them: contiguous, indices int32, tables float32."""

    kv_lens: np.ndarray | None = None
    cu_seqlens_q: np.ndarray | None = None
    cu_seqlens_k: np.ndarray | None = None
    cos: np.ndarray | None = None
    sin: np.ndarray | None = None
    positions_q: np.ndarray | None = None
    positions_k: np.ndarray | None = None


def index(name: str, x: Any) -> np.ndarray | None:
    """Lengths or positions as int32."""
    if x is None or (type(x) is np.ndarray and x.dtype == np.int32):
        return x
    return lengths(name, x)


def _with_extras(
    q: Any, k: Any, v: Any, options: Options, kv_lens: Any, rope: Rope | None, packed: tuple = ()
) -> tuple[Problem, _Extras]:
    """The checked problem of a call that has any, and what the engine reads of them."""
    arrays = describe("q", q), describe("k", k), describe("v", v)
    kv_lens = index("kv_lens", kv_lens)
    lens = None if kv_lens is None else describe("kv_lens", kv_lens)
    extras, tables = [kv_lens, None, None], None
    if rope is not None:
        if not isinstance(rope, Rope):
            raise TypeError(f"rope is {type(rope).__name__}; allowed: None or qflash.Rope")
        positions_q = index("rope.positions_q", rope.positions_q)
        positions_k = index("rope.positions_k", rope.positions_k)
        tables = RopeArrays(
            describe("rope.cos", rope.cos),
            describe("rope.sin", rope.sin),
            rope.interleaved,
            None if positions_q is None else describe("rope.positions_q", positions_q),
            None if positions_k is None else describe("rope.positions_k", positions_k),
        )
        extras += [rope.cos, rope.sin, positions_q, positions_k]
    if packed:
        cu_q, cu_k, longest_q, longest_k = packed
        cu_q, cu_k = _required_index("cu_seqlens_q", cu_q), _required_index("cu_seqlens_k", cu_k)
        extras[1:3] = cu_q, cu_k
        cu_seqlens = describe("cu_seqlens_q", cu_q), describe("cu_seqlens_k", cu_k)
        problem = check_packed(*arrays, *cu_seqlens, longest_q, longest_k, options, lens, tables)
    else:
        problem = check(*arrays, options, lens, tables)
    return problem, _Extras(*extras)


def _required_index(name: str, x: Any) -> np.ndarray | None:
    if x is None:
        raise TypeError(f"{name} is None; allowed: ints, as an array or a list")
    return index(name, x)


def problem_of(q, k, v, options: Options, kv_lens=None, rope: Rope | None = None, packed: tuple = ()) -> Problem:
    """The checked problem behind `attention`, or with `packed` behind `attention_varlen`, for `explain`."""
    return _with_extras(q, k, v, options, kv_lens, rope, packed)[0]


def arch_of(q: np.ndarray) -> int:
    """Compute capability times ten of the array's device: 0, the CPU."""
    return 0


_plans: dict[tuple, Prepared] = {}


def attention(q, k, v, options: Options, kv_lens=None, rope: Rope | None = None, return_lse: bool = False):
    """See qflash.attention."""
    if kv_lens is not None or rope is not None:
        problem, extras = _with_extras(q, k, v, options, kv_lens, rope)
        return _run(prepare(problem), q, k, v, return_lse, extras)
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
    packed = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    problem, extras = _with_extras(q, k, v, options, kv_lens, rope, packed)
    return _run(prepare(problem), q, k, v, return_lse, extras)


_NO_ADDRESSES = (0,) * len(_Extras._fields)


def _run(prepared: Prepared, q, k, v, return_lse: bool, extras: _Extras | None = None):
    problem = prepared.problem
    out = np.empty(q.shape, q.dtype)
    lse = None
    if return_lse:
        rows = (problem.q_heads, problem.total_q) if problem.packed else (problem.batch, problem.q_heads, problem.q_len)
        lse = np.empty(rows, np.float32)
    addresses: Sequence[int] = _NO_ADDRESSES
    if extras is not None:
        dtypes = (np.float32 if name in ("cos", "sin") else np.int32 for name in _Extras._fields)
        # Named, so that converted copies outlive the call.
        ready = [None if x is None else np.ascontiguousarray(x, dtype) for x, dtype in zip(extras, dtypes, strict=True)]
        addresses = [0 if x is None else x.ctypes.data for x in ready]
    own = (q.ctypes.data, k.ctypes.data, v.ctypes.data, out.ctypes.data, 0 if lse is None else lse.ctypes.data)
    prepared.call(*own, *addresses, 0, 0, 0)
    return (out, lse) if return_lse else out
