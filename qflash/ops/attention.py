"""attention on arrays, padded and packed: forward and backward.

The same C struct and Spec are used for these and for calls whose k and v are objects (attention_kv.py).
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from qflash import _native
from qflash.call.array import Array, check_device, check_dtype, check_shape, dtype_code
from qflash.call.op import Extents, Gradient, Op, Operand, Plan, Read, Result
from qflash.call.spec import KV_KINDS, PRECISIONS
from qflash.call.words import check_flag
from qflash.ops.backward_memory import (
    DEFAULT_BACKWARD_MEMORY,
    Scores,
    check_backward_memory,
    ds_within,
    get_backward_memory,
)
from qflash.ops.problem import Options, Problem, RopeArrays, check, check_packed
from qflash.ops.quantization import tables_of
from qflash.ops.run import run

STRUCT = "QfAttnParams"
BACKWARD_STRUCT = "QfAttnBwdParams"
_INDICES = ("kv_lens", "cu_seqlens_q", "cu_seqlens_k", "rope.positions_q", "rope.positions_k")
_TABLES = ("rope.cos", "rope.sin")

Fields = tuple[tuple[str, int | float | Extents], ...]


# The struct ----------------------------------------------------------------------------------------------------------


def _size(value: Any, *of: tuple[str, int]) -> Any:
    """A size, or how to compute it while it is symbolic."""
    return value if isinstance(value, int) else Extents(of)


def _strides(field: str, strides: Sequence[Any], argument: str, packed: bool) -> Fields:
    """The strides of a tensor. Symbolic ones are those of a contiguous array: products of its last extents."""
    rank = 3 if packed else 4
    steps = []
    for at, stride in enumerate(strides):
        last = range(rank - 3 + at, rank)
        steps.append(_size(stride, *((argument, dim) for dim in last)))
    return tuple((f"{field}.stride_{dim}", step) for dim, step in zip("bth", steps, strict=True))


def fields_of(problem: Problem, prefix: str = "", strided: Collection[str] = ("q", "k", "v")) -> Fields:
    """The struct's fields that a checked problem determines. `strided`: the tensors whose strides it has."""
    packed = problem.packed
    lengths = (
        (("q_len", problem.q_len, ()), ("k_len", problem.k_len, ()))
        if packed
        else (("q_len", problem.q_len, (("q", 1),)), ("k_len", problem.k_len, (("k", 1),)))
    )
    heads = 1 if packed else 2
    rows = (("q", 0),) if packed else (("q", 1),)
    row = problem.q_heads * problem.head_dim
    out = (0 if packed else problem.q_len * row, row, problem.head_dim)
    tensors = {"q": ("q", problem.q_strides), "k": ("kv.k", problem.k_strides), "v": ("kv.v", problem.v_strides)}
    fields: list[tuple[str, Any]] = [
        ("struct_bytes", _native.op_layouts[STRUCT][0]),
        ("dtype", dtype_code(problem.dtype)),
        ("precision", PRECISIONS.index(problem.precision)),
        ("batch", _size(problem.batch, ("cu_seqlens_q", ~0) if packed else ("q", 0))),
        *((name, _size(value, *of)) for name, value, of in lengths),
        ("q_heads", _size(problem.q_heads, ("q", heads))),
        ("kv_heads", _size(problem.kv_heads, ("k", heads))),
        ("head_dim", problem.head_dim),
        ("window_left", problem.window_left),
        ("window_right", problem.window_right),
        ("scale", problem.scale),
        ("softcap", problem.softcap),
        ("batch_invariant", int(problem.batch_invariant)),
        *(pair for name in strided for pair in _strides(*tensors[name], name, packed)),
        *_strides("out", out, "q", packed),
        ("lse_stride_h", _size(problem.total_q if packed else problem.q_len, *rows)),
        ("lse_stride_b", 0 if packed else _size(problem.q_heads * problem.q_len, ("q", 1), ("q", 2))),
        ("rope.rows", problem.rope_rows),
        ("rope.rotary_dim", problem.rotary_dim),
        ("rope.interleaved", int(problem.rope_interleaved)),
        ("rope.stride_positions_q_b", _size(problem.positions_q_stride or 0, ("rope.positions_q", 1))),
        ("rope.stride_positions_k_b", _size(problem.positions_k_stride or 0, ("rope.positions_k", 1))),
    ]
    if packed:
        fields += [("total_q", _size(problem.total_q, ("q", 0))), ("total_k", _size(problem.total_k, ("k", 0)))]
    return tuple((prefix + name, value) for name, value in fields)


def _bounds(problem: Problem, prefix: str = "") -> tuple[tuple[str, str, int], ...]:
    """max_seqlen of a packed call is clipped to a total that is not known before the program runs."""
    if not problem.packed:
        return ()
    totals = (("q_len", "q", problem.total_q), ("k_len", "k", problem.total_k))
    return tuple((prefix + field, name, 0) for field, name, total in totals if not isinstance(total, int))


def lse_shape(problem: Problem) -> tuple[int, ...]:
    """[batch, heads, queries], or packed [heads, total]."""
    if problem.packed:
        return problem.q_heads, problem.total_q
    return problem.batch, problem.q_heads, problem.q_len


# Arrays --------------------------------------------------------------------------------------------------------------

_EXTRAS = ("kv_lens", "cu_seqlens_q", "cu_seqlens_k", *_TABLES, "rope.positions_q", "rope.positions_k", "sinks")
_AS_FLOAT32 = (*_TABLES, "sinks")
_WORDS = (
    *("causal", "window", "softcap", "scale", "precision", "kernel", "batch_invariant"),
    *("return_lse", "interleaved", "max_seqlen_q", "max_seqlen_k", "backward_memory"),
)


def check_call(q: Array, k: Array, v: Array, extras: Sequence[Array | None], words: Sequence[Any]) -> Problem:
    """The checked problem of a call on arrays. `extras`: in the order of _EXTRAS."""
    kv_lens, cu_q, cu_k, cos, sin, positions_q, positions_k, sinks = extras
    *options, return_lse, interleaved, longest_q, longest_k, memory = words
    check_backward_memory("backward_memory", memory)
    check_flag("return_lse", return_lse)
    rope = None
    if cos is not None and sin is not None:
        rope = RopeArrays(cos, sin, interleaved, positions_q, positions_k)
    if cu_q is None or cu_k is None:
        return check(q, k, v, Options(*options), kv_lens, rope, sinks)
    return check_packed(q, k, v, cu_q, cu_k, longest_q, longest_k, Options(*options), kv_lens, rope, sinks)


def plan_of(problem: Problem, extras: Collection[str], return_lse: bool) -> Plan:
    """The plan of a checked problem on arrays; `extras`: the optional arrays that are given."""
    results = [Result("out.data", _q_shape(problem), problem.dtype)]
    if return_lse:
        results.append(Result("lse", lse_shape(problem), "float32"))
    code = dtype_code(problem.dtype)
    return Plan(
        for_spec=problem.spec(0),
        device=problem.device,
        kernel=problem.kernel,
        struct=STRUCT,
        fields=(*fields_of(problem), ("kv.kind", KV_KINDS.index("arrays")), ("kv.k_dtype", code), ("kv.v_dtype", code)),
        operands=(
            *(Operand("q", "q.data"), Operand("k", "kv.k.data"), Operand("v", "kv.v.data")),
            *(_EXTRA_OPERANDS[name] for name in _EXTRAS if name in extras and _is_read(problem, name)),
        ),
        results=tuple(results),
        bounds=_bounds(problem),
    )


_EXTRA_OPERANDS = {
    name: Operand(name, name, contiguous=True, dtype="float32" if name in _AS_FLOAT32 else None) for name in _EXTRAS
}


def _is_read(problem: Problem, name: str) -> bool:
    """Tables without rows pass the checks if no position is in use, and are then not passed to the kernel."""
    return problem.rope_rows > 0 or not name.startswith("rope.")


def _q_shape(problem: Problem) -> tuple[int, ...]:
    heads = (problem.q_heads, problem.head_dim)
    return (problem.total_q, *heads) if problem.packed else (problem.batch, problem.q_len, *heads)


def _kv_shape(problem: Problem) -> tuple[int, ...]:
    heads = (problem.kv_heads, problem.head_dim)
    return (problem.total_k, *heads) if problem.packed else (problem.batch, problem.k_len, *heads)


def _plan(q: Array, k: Array | None, v: Array | None, *rest: Any) -> Plan:
    extras, words = rest[: len(_EXTRAS)], rest[len(_EXTRAS) :]
    for name, x in (("k", k), ("v", v)):
        if x is None:
            raise TypeError(f"{name} is None; allowed: an array")
    assert k is not None and v is not None
    given = {name for name, x in zip(_EXTRAS, extras, strict=True) if x is not None}
    for one, other in (("rope.cos", "rope.sin"), ("rope.sin", "rope.cos"), *_BOTH_OFFSETS):
        if one in given and other not in given:
            raise TypeError(f"{other} is None; allowed: an array")
    problem = check_call(q, k, v, extras, words)
    return plan_of(problem, given, bool(words[_WORDS.index("return_lse")]))


_BOTH_OFFSETS = (("cu_seqlens_q", "cu_seqlens_k"), ("cu_seqlens_k", "cu_seqlens_q"))


# Gradients -----------------------------------------------------------------------------------------------------------


def plan_of_backward(
    problem: Problem,
    extras: Collection[str],
    dlse: bool,
    dsinks: bool = False,
    memory: int = DEFAULT_BACKWARD_MEMORY,
    partial: bool = False,
) -> Plan:
    """The plan of the gradients of a checked problem. `dlse`: the gradient of lse is given, not zero; `dsinks`: that of
    sinks is requested; `memory`: the bytes that dS may take; `partial`: out and lse are from more keys."""
    shapes = {"dq": _q_shape(problem), "dk": _kv_shape(problem), "dv": _kv_shape(problem)}
    like = {"dout": "q", "dq": "q", "dk": "k", "dv": "k"}
    code = dtype_code(problem.dtype)
    return Plan(
        for_spec=problem.spec(0, op="attention_backward"),
        device=problem.device,
        kernel=None,  # the forward call's is not a kernel of this operation
        struct=BACKWARD_STRUCT,
        fields=(
            *fields_of(problem, "fwd."),
            *(("fwd.kv.kind", KV_KINDS.index("arrays")), ("fwd.kv.k_dtype", code), ("fwd.kv.v_dtype", code)),
            *(pair for name, of in like.items() for pair in _contiguous_strides(problem, name, of)),
            ("ds_bytes", _memory_of_ds(problem, memory)),
            ("partial", int(partial)),
        ),
        operands=(
            Operand("dout", "dout.data", contiguous=True),
            *([Operand("dlse", "dlse", contiguous=True)] if dlse else []),
            *(Operand("q", "fwd.q.data"), Operand("k", "fwd.kv.k.data"), Operand("v", "fwd.kv.v.data")),
            *(
                replace(_EXTRA_OPERANDS[name], field=f"fwd.{name}")
                for name in _EXTRAS
                if name in extras and _is_read(problem, name)
            ),
            Operand("out", "fwd.out.data", contiguous=True),
            Operand("lse", "fwd.lse", contiguous=True),
        ),
        results=(
            *(Result(f"{name}.data", shape, problem.dtype) for name, shape in shapes.items()),
            *([Result("dsinks", (problem.q_heads,), "float32")] if dsinks else []),
        ),
        zeros=any(isinstance(extent, int) and extent == 0 for extent in lse_shape(problem)),  # no queries at all
        bounds=_bounds(problem, "fwd."),
    )


def scores_of(problem: Problem) -> Scores:
    """The properties of a problem that determine the size of dS."""
    window = (problem.window_left, problem.window_right)
    return Scores(
        problem.batch, problem.q_heads, problem.kv_heads, problem.q_len, problem.k_len, window, problem.packed
    )


def _memory_of_ds(problem: Problem, limit: int) -> int:
    sizes = (problem.batch, problem.q_heads, problem.kv_heads, problem.q_len, problem.k_len)
    if not all(isinstance(size, int) for size in sizes):  # not known until the program runs
        return limit
    kept = ds_within(scores_of(problem), limit)
    return kept.nbytes if kept else 0


def _contiguous_strides(problem: Problem, field: str, like: str) -> Fields:
    """Those of a contiguous array with the shape of q or k."""
    heads = problem.q_heads if like == "q" else problem.kv_heads
    length = problem.q_len if like == "q" else problem.k_len
    row = heads * problem.head_dim
    return _strides(field, (0 if problem.packed else length * row, row, problem.head_dim), like, problem.packed)


def _plan_backward(
    dout: Array, dlse: Array | None, q: Array, k: Array, v: Array, *rest: Any, partial: bool = False
) -> Plan:
    count = len(_EXTRAS)
    extras, (out, lse), words = rest[:count], rest[count : count + 2], rest[count + 2 :]
    problem = check_call(q, k, v, extras, words)
    for name, x, dtype, shape in (
        ("dout", dout, q.dtype, q.shape),
        ("out", out, q.dtype, q.shape),
        ("lse", lse, "float32", lse_shape(problem)),
        ("dlse", dlse, "float32", lse_shape(problem)),
    ):
        if x is not None:
            check_dtype(name, x, dtype)
            check_shape(name, x, shape)
            check_device(name, x, "q", q.device)
        elif name != "dlse":
            raise TypeError(f"{name} is None; allowed: an array")
    given = {name for name, x in zip(_EXTRAS, extras, strict=True) if x is not None}
    memory = words[_WORDS.index("backward_memory")]
    return plan_of_backward(problem, given, dlse is not None, "sinks" in given, memory, partial)


# The dimensions of each array: b batch, m and n query and key lengths, H and G query and key heads, d head_dim.
_PADDED = {
    "q": "bmHd", "k": "bnGd", "v": "bnGd", "kv_lens": "b", "rope.cos": "pc", "rope.sin": "pc",
    "rope.positions_q": "bm", "rope.positions_k": "bn", "sinks": "H", "out": "bmHd", "lse": "bHm",
    "dout": "bmHd", "dlse": "bHm", "dq": "bmHd", "dk": "bnGd", "dv": "bnGd",
    "dsinks": "H",
}  # fmt: skip
_PACKED = {
    "q": "mHd", "k": "nGd", "v": "nGd", "cu_seqlens_q": "s", "cu_seqlens_k": "s", "kv_lens": "t",
    "rope.cos": "pc", "rope.sin": "pc", "rope.positions_q": "m", "rope.positions_k": "n", "sinks": "H",
    "out": "mHd", "lse": "Hm", "dout": "mHd", "dlse": "Hm", "dq": "mHd", "dk": "nGd", "dv": "nGd",
    "dsinks": "H",
}  # fmt: skip


def _dims(given: Mapping[str, int]) -> Mapping[str, str]:
    dims = _PACKED if "cu_seqlens_q" in given else _PADDED
    return dims if "sinks" in given else {name: letters for name, letters in dims.items() if name != "dsinks"}


def _flops(products: int, arrays: dict[str, Any], words: dict[str, Any], read: Read) -> int:
    """FLOPs of `products` matrix products; masks are not subtracted, as in PyTorch's own count. `arrays` by name."""
    q, k = arrays["q"], arrays["k"]
    heads, head_dim = q.shape[-2:]
    if "cu_seqlens_q" not in arrays:
        return int(2 * products * q.shape[0] * q.shape[1] * k.shape[1] * heads * head_dim)
    offsets = [read(arrays[name]) for name in ("cu_seqlens_q", "cu_seqlens_k")]
    if offsets[0] is None or offsets[1] is None:  # only the bounds are known
        scores = (arrays["cu_seqlens_q"].shape[0] - 1) * words["max_seqlen_q"] * words["max_seqlen_k"]
    else:
        lengths = ([b - a for a, b in pairwise(x)] for x in offsets if x is not None)
        scores = sum(q_len * k_len for q_len, k_len in zip(*lengths, strict=True))
    return int(2 * products * scores * heads * head_dim)


ATTENTION_BACKWARD = Op(
    "attention_backward",
    ("dout", "dlse", "q", "k", "v", *_EXTRAS, "out", "lse"),
    _WORDS,
    _plan_backward,
    results=("dq", "dk", "dv", "dsinks"),
    dims=_dims,
    checked=_INDICES,
    tables=_AS_FLOAT32,
    flops=lambda *call: _flops(5, *call),  # Q Kᵀ again, dO Vᵀ, and those of dQ, dK, dV
    no_gradient="qflash.attention has no second derivative; allowed: one backward pass over it",
)
# For some of the keys that out and lse were computed from: the same arrays, words and kernels.
ATTENTION_BACKWARD_SHARE = replace(
    ATTENTION_BACKWARD, name="attention_backward_share", plan=functools.partial(_plan_backward, partial=True)
)
ATTENTION = Op(
    "attention",
    ("q", "k", "v", *_EXTRAS),
    _WORDS,
    _plan,
    results=("out", "lse"),
    dims=_dims,
    checked=_INDICES,
    indices=_INDICES,
    autocast=("q", "k", "v"),
    tables=_AS_FLOAT32,
    gradient=Gradient(ATTENTION_BACKWARD, ("q", "k", "v", "sinks"), {"return_lse": True}, refused=_TABLES),
    flops=lambda *call: _flops(2, *call),
)


def attention_gradients(
    dout: Any,
    dlse: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    *,
    partial: bool,
    offsets: tuple[Any, Any] | None = None,
    longest: tuple[int, int] = (0, 0),
    kv_lens: Any = None,
    rope: Any = None,
    sinks: Any = None,
    **options: Any,
) -> tuple[Any, ...]:
    """dq, dk, dv and, with sinks, dsinks of attention on k and v, from its results.

    partial: out, lse and their gradients dout, dlse are from more keys than k has, and the gradients are the share of
    these keys. exp(score - lse) is then the weight of a key among all of them, and the term subtracted from a row's dP,
    dout · out - dlse, is that of the whole row: shares are exact and add up. The arguments describe k as in a call on
    these keys alone; sinks are passed with one of the parts.

    dlse: None if it is zero. Arrays are of q's type, lse and dlse float32; offsets and longest are cu_seqlens and
    max_seqlen of packed sequences, of q and of k.
    """
    cos, sin, positions_q, positions_k, interleaved = tables_of(rope)
    extras = (kv_lens, *(offsets or (None, None)), cos, sin, positions_q, positions_k, sinks)
    words = (*Options(**options), True, interleaved, *longest, get_backward_memory())
    op = ATTENTION_BACKWARD_SHARE if partial else ATTENTION_BACKWARD
    return tuple(run(op, (dout, dlse, q, k, v, *extras, out, lse), words))
