"""attention whose k and v are objects: q, k and v from `quantize`, or keys and values from `quantize_kv`.

The operation, struct and Spec are the same as for arrays; the kind of KV is a column of the Spec. These variants exist
because their arrays have other names, and there are more of them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from qflash.call.array import Array, check_device, check_dtype, check_float, check_shape, dtype_code, takes_a_copy
from qflash.call.op import Extents, Op, Operand, Plan, Result
from qflash.call.spec import DTYPES, KV_KINDS
from qflash.call.words import INT32_MAX, check_flag, check_int, check_word
from qflash.ops.attention import STRUCT, fields_of, lse_shape
from qflash.ops.kv import KV_FIELDS, KV_PRECISIONS, QuantizedKV, kept_fields, results_of
from qflash.ops.problem import Options, Problem, RopeArrays, check, check_options
from qflash.ops.quantization import GRANULARITIES, Quantized, tables_of
from qflash.typing import Flag

_LEAST_KEY_GROUP = 16  # keys per lane of the CUDA kernel
_ONLY_E4M3 = ("v_scale", "v_exponents", "v_nonfinite", "v_mean")
_INT8 = dtype_code("int8")


# Quantized q, k and perhaps v ----------------------------------------------------------------------------------------


def quantized_call(
    q: Any, k: Any, v: Any, options: Options, kv_lens: Any, rope: Any, sinks: Any, return_lse: Flag
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """The arrays and words of ATTENTION_QUANTIZED, from the arguments of `attention`."""
    for name, x in (("q", q), ("k", k)):
        if not isinstance(x, Quantized):
            given = ", ".join(other for other, y in (("q", q), ("k", k), ("v", v)) if isinstance(y, Quantized))
            raise TypeError(
                f"{name} is {class_of(x)} and {given} qflash.Quantized; allowed: Quantized q and k, with v either way"
            )
    tables_of(rope)  # raises if it is not a Rope
    if rope is not None:
        raise ValueError(
            "rope is given and q and k are Quantized; allowed: None, apply it in qflash.quantize(..., rope=...)"
        )
    shape = getattr(q.values, "shape", ())
    words = check_options(options, shape[-1] if shape and shape[-1] else 1)  # the plan raises for 0
    if options.precision not in (None, "int8"):
        raise ValueError(f"precision is {options.precision!r}; allowed with Quantized q and k: None or 'int8'")
    _check_parts("q", q, smooth=False)
    _check_parts("k", k, smooth=True)
    if q.symmetric != k.symmetric:
        raise ValueError(
            f"k.symmetric is {k.symmetric} and q.symmetric is {q.symmetric}; allowed: both True or both False"
        )
    integer_v = isinstance(v, Quantized)
    if integer_v:
        _check_parts("v", v, smooth=False)
    arrays = (
        *(q.values, q.scale, q.zero_point, None if q.symmetric else q.sums),
        *(k.values, k.scale, k.zero_point, None if k.symmetric else k.sums, k.mean),
        *((v.values, v.scale, v.zero_point) if integer_v else (v, None, None)),
        *(kv_lens, sinks),
    )
    groups = [*(word for x in (q, k) for word in (x.granularity, x.group))]
    groups += [v.granularity, v.group, v.dtype] if integer_v else [GRANULARITIES[0], 1, None]
    numbers = [words[name] for name in ("window_left", "window_right", "softcap", "scale")]
    return arrays, (*groups, *numbers, check_flag("return_lse", return_lse), options.kernel, words["batch_invariant"])


def class_of(x: Any) -> str:
    """The name of a class, for messages."""
    return f"{type(x).__module__}.{type(x).__qualname__}"


def _check_parts(name: str, x: Quantized, smooth: bool) -> None:
    """Checks that a plan cannot make: which parts are present."""
    for part in ("values", "scale"):
        if getattr(x, part) is None:
            raise TypeError(f"{name}.{part} is None; allowed: an array")
    check_flag(f"{name}.symmetric", x.symmetric)
    if (x.zero_point is None) != bool(x.symmetric):
        came, allowed = ("given", "None") if x.symmetric else ("None", "an int32 array of one element")
        raise ValueError(f"{name}.zero_point is {came} and {name}.symmetric {x.symmetric}; allowed: {allowed}")
    if not x.symmetric and x.sums is None and name != "v":
        raise ValueError(f"{name}.sums is None and {name} has a zero point; allowed: the sums qflash.quantize gives")
    if x.mean is not None and not smooth:
        raise ValueError(f"{name}.mean is given; allowed: None, only k may be smoothed")


def _plan_quantized(
    q: Array,
    q_scale: Array,
    q_zero_point: Array | None,
    q_sums: Array | None,
    k: Array,
    k_scale: Array,
    k_zero_point: Array | None,
    k_sums: Array | None,
    k_mean: Array | None,
    v: Array | None,
    v_scale: Array | None,
    v_zero_point: Array | None,
    kv_lens: Array | None,
    sinks: Array | None,
    q_granularity: Any,
    q_group: Any,
    k_granularity: Any,
    k_group: Any,
    v_granularity: Any,
    v_group: Any,
    v_dtype: Any,
    window_left: int,
    window_right: int,
    softcap: float,
    scale: float,
    return_lse: bool,
    kernel: Any,
    batch_invariant: bool,
) -> Plan:
    if v is None:
        raise TypeError("v is None; allowed: an array, or qflash.Quantized")
    for name, array in (("q.values", q), ("k.values", k)):
        check_dtype(name, array, "int8")
    if v_scale is None:
        check_float("v", v)
        dtype = v.dtype
    else:
        check_dtype("v.values", v, "int8")
        dtype = check_word("v.dtype", v_dtype, DTYPES)
    if k_granularity == "token":
        raise ValueError("k.granularity is 'token'; allowed: 'tensor' or 'group'")
    copied = {name: takes_a_copy(x) for name, x in (("q", q), ("k", k), ("v", v))}
    # With a common dtype these are like the arrays of any attention call.
    alike = {
        name: replace(x, dtype=dtype, strides=None if copied[name] else x.strides)
        for name, x in (("q", q), ("k", k), ("v", v))
    }
    problem = check(
        *(alike["q"], alike["k"], alike["v"]),
        Options(False, (window_left, window_right), softcap, scale, None, kernel, batch_invariant),
        kv_lens,
        sinks=sinks,
    )
    operands = [
        Operand(argument, field, contiguous=copied[name])
        for argument, name, field in (
            ("q.values", "q", "q.data"),
            ("k.values", "k", "kv.k.data"),
            ("v", "v", "kv.v.data"),
        )
    ]
    fields: list[tuple[str, int | float | Extents]] = []

    def add(argument: str, field: str, array: Array | None, dtype: str, *shapes: tuple[int, ...]) -> None:
        if array is not None:
            check_dtype(argument, array, dtype)
            check_shape(argument, array, *shapes)
            check_device(argument, array, "q.values", q.device)
            operands.append(Operand(argument, field, contiguous=True))

    for name, x, granularity, group, parts in (
        ("q", q, q_granularity, q_group, (q_scale, q_zero_point, q_sums)),
        ("k", k, k_granularity, k_group, (k_scale, k_zero_point, k_sums)),
        ("v", v, v_granularity, v_group, (v_scale, v_zero_point, None)),
    ):
        if parts[0] is None:
            continue
        batch, length, heads, _ = x.shape
        tokens = _tokens_of_a_scale(name, granularity, group)
        shapes: tuple[tuple[int, ...], ...] = ((), (1,))
        strides = (0, 0, INT32_MAX)
        if tokens is not None:
            groups = (length + tokens - 1) // tokens
            shapes, strides = ((batch, heads, groups),), (heads * groups, groups, tokens)
        scales = f"{'' if name == 'q' else 'kv.'}{name}_scales"
        fields += zip((f"{scales}.{part}" for part in ("stride_b", "stride_h", "group")), strides, strict=True)
        add(f"{name}.scale", f"{scales}.scale", parts[0], "float32", *shapes)
        add(f"{name}.zero_point", f"{scales}.zero_point", parts[1], "int32", (), (1,))
        add(f"{name}.sums", f"{scales}.sums", parts[2], "int32", (batch, heads, length))
    add("k.mean", "kv.k_mean", k_mean, "float32", (problem.batch, problem.kv_heads, problem.head_dim))
    operands += _last_operands(kv_lens, sinks)
    problem = replace(problem, precision="int8")
    v_code = dtype_code(dtype) if v_scale is None else _INT8
    fields += [("kv.kind", KV_KINDS.index("quantized")), ("kv.k_dtype", _INT8), ("kv.v_dtype", v_code)]
    return Plan(
        for_spec=problem.spec(0, kv="quantized"),
        device=q.device,
        kernel=problem.kernel,
        struct=STRUCT,
        fields=(*fields_of(problem), *fields),
        operands=tuple(operands),
        results=_results(problem, tuple(q.shape), return_lse),
    )


def _last_operands(kv_lens: Array | None, sinks: Array | None) -> list[Operand]:
    """Those of the arrays that are given, checked."""
    operands = [] if kv_lens is None else [Operand("kv_lens", "kv_lens", contiguous=True)]
    return operands if sinks is None else [*operands, Operand("sinks", "sinks", contiguous=True, dtype="float32")]


def _results(problem: Problem, shape: tuple[int, ...], return_lse: bool) -> tuple[Result, ...]:
    out = Result("out.data", shape, problem.dtype)
    return (out, Result("lse", lse_shape(problem), "float32")) if return_lse else (out,)


def _tokens_of_a_scale(name: str, granularity: Any, group: Any) -> int | None:
    """The number of tokens that share a scale; None: all of them."""
    check_word(f"{name}.granularity", granularity, GRANULARITIES)
    if granularity != "group":
        return None if granularity == "tensor" else 1
    tokens = check_int(f"{name}.group", group, 1, INT32_MAX)
    if name == "k" and (tokens < _LEAST_KEY_GROUP or tokens & (tokens - 1)):
        raise ValueError(f"k.group is {tokens}; allowed: a power of two, {_LEAST_KEY_GROUP} or more")
    return tokens


# What quantize_kv returns ---------------------------------------------------------------------------------------------


def kept_call(
    q: Any, kv: Any, v: Any, options: Options, kv_lens: Any, rope: Any, sinks: Any, return_lse: Flag
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """The arrays and words of ATTENTION_KEPT, from the arguments of `attention`."""
    for name, x in (("q", q), ("v", v)):
        if type(x) is QuantizedKV:
            raise TypeError(f"{name} is qflash.QuantizedKV; allowed: in the place of k, without v")
    if type(q) is Quantized:
        raise TypeError("q is qflash.Quantized and k qflash.QuantizedKV; allowed: an array, quantized on the way")
    if v is not None:
        raise TypeError(f"v is {class_of(v)} and k qflash.QuantizedKV, which has v in it; allowed: None")
    if type(kv.precision) is not str or type(kv.dtype) is not str:  # checked before a front end processes words
        check_word("kv.precision", kv.precision, KV_PRECISIONS)
        check_word("kv.dtype", kv.dtype, DTYPES)
    cos, sin, positions, _, interleaved = tables_of(rope)
    arrays = (
        *(q, kv.k, kv.k_scale, kv.k_mean, kv.k_nonfinite, kv.v, kv.v_scale, kv.v_exponents, kv.v_nonfinite, kv.v_mean),
        *(kv.lens if kv_lens is None else kv_lens, cos, sin, positions, sinks),
    )
    return arrays, (kv.precision, kv.dtype, *options, return_lse, interleaved)


def _check_kept(parts: dict[str, Array | None], kv_precision: Any, dtype: Any, precision: Any) -> None:
    """Check which parts of a QuantizedKV are given: the required ones and no others."""
    check_word("kv.precision", kv_precision, KV_PRECISIONS)
    check_word("kv.dtype", dtype, DTYPES)
    if precision not in (None, kv_precision):
        raise ValueError(f"precision is {precision!r}; allowed with this kv: None or {kv_precision!r}")
    for part, array in parts.items():
        if part not in _ONLY_E4M3:
            if array is None:
                raise TypeError(f"kv.{part} is None; allowed: an array")
        elif (array is None) != (kv_precision == "int8"):
            came, allowed = ("given", "None") if kv_precision == "int8" else ("None", "an array")
            raise TypeError(f"kv.{part} is {came} and kv.precision {kv_precision!r}; allowed: {allowed}")


def _plan_kept(
    q: Array,
    k: Array | None,
    k_scale: Array | None,
    k_mean: Array | None,
    k_nonfinite: Array | None,
    v: Array | None,
    v_scale: Array | None,
    v_exponents: Array | None,
    v_nonfinite: Array | None,
    v_mean: Array | None,
    kv_lens: Array | None,
    cos: Array | None,
    sin: Array | None,
    positions: Array | None,
    sinks: Array | None,
    precision: Any,
    dtype: Any,
    causal: Any,
    window: Any,
    softcap: Any,
    scale: Any,
    asked_precision: Any,
    kernel: Any,
    batch_invariant: Any,
    return_lse: Any,
    interleaved: Any,
) -> Plan:
    given = {"k": k, "k_scale": k_scale, "k_mean": k_mean, "k_nonfinite": k_nonfinite, "v": v}
    given |= {"v_scale": v_scale, "v_exponents": v_exponents, "v_nonfinite": v_nonfinite, "v_mean": v_mean}
    check_flag("return_lse", return_lse)
    options = Options(causal, window, softcap, scale, asked_precision, kernel, batch_invariant)
    check_options(options, q.shape[-1] if q.shape and q.shape[-1] else 1)  # _check_q raises for 0
    _check_kept(given, precision, dtype, asked_precision)
    parts = {part: array for part, array in given.items() if array is not None}
    k, k_mean, v = parts["k"], parts["k_mean"], parts["v"]
    _check_q(q, k, k_mean, dtype)
    batch, length, kv_heads, _ = k.shape
    head_dim = k_mean.shape[-1]
    copied = takes_a_copy(q)
    operands = [Operand("q", "q.data", contiguous=copied)]
    for part, (kind, shape) in results_of(batch, length, kv_heads, head_dim, precision).items():
        check_dtype(f"kv.{part}", parts[part], kind)
        check_shape(f"kv.{part}", parts[part], shape)
        operands.append(Operand(f"kv.{part}", KV_FIELDS[part], contiguous=True))
    # For the checks that all kinds of attention share, keys and values are ordinary arrays.
    keys = values = Array((batch, length, kv_heads, head_dim), None, q.dtype, q.device)
    if precision == "int8":
        check_dtype("kv.v", v, dtype)
        check_shape("kv.v", v, keys.shape)
        copy = takes_a_copy(v)
        values = Array(v.shape, None if copy else v.strides, v.dtype, q.device)
        operands.append(Operand("kv.v", KV_FIELDS["v"], contiguous=copy))
    for part, array in parts.items():
        check_device(f"kv.{part}", array, "q", q.device)
    rope = None
    if cos is not None and sin is not None:  # both or neither: see tables_of
        at = Array((length,), None, "int32", q.device)  # keys were already rotated, with a table of their own
        rope = RopeArrays(cos, sin, interleaved, positions, at)
        operands += [Operand(name, name, contiguous=True, dtype="float32") for name in ("rope.cos", "rope.sin")]
        if positions is not None:
            operands.append(Operand("rope.positions_q", "rope.positions_q", contiguous=True))
    problem = check(
        Array(q.shape, None if copied else q.strides, q.dtype, q.device),
        keys,
        values,
        options._replace(precision=None),
        kv_lens,
        rope,
        sinks,
    )
    problem = replace(problem, precision=precision, positions_k_stride=None)
    operands += _last_operands(kv_lens, sinks)
    return Plan(
        for_spec=problem.spec(0, kv="kept"),
        device=q.device,
        kernel=problem.kernel,
        struct=STRUCT,
        fields=(
            *fields_of(problem, strided=("q", "v") if precision == "int8" else ("q",)),
            *kept_fields(batch, length, kv_heads, head_dim, precision, dtype),
        ),
        operands=tuple(operands),
        results=_results(problem, tuple(q.shape), return_lse),
    )


def _check_q(q: Array, k: Array, k_mean: Array, dtype: str) -> None:
    """Check that q and kv match."""
    check_float("q", q)
    for name, array, form in (
        ("q", q, "rank 4, [batch, length, heads, head_dim]"),
        ("kv.k", k, "rank 4, [batch, length, heads, head_dim rounded up to 16]"),
        ("kv.k_mean", k_mean, "rank 3, [batch, heads, head_dim]"),
    ):
        if len(array.shape) != (3 if array is k_mean else 4):
            raise ValueError(f"{name} has shape {list(array.shape)}; allowed: {form}")
    if dtype != q.dtype:
        raise TypeError(f"kv.dtype is {dtype!r}; allowed: q's, {q.dtype!r}")
    if k_mean.shape[-1] != q.shape[-1]:
        raise ValueError(f"kv.head_dim is {k_mean.shape[-1]}; allowed: q's, {q.shape[-1]}")
    if k.shape[0] != q.shape[0]:
        raise ValueError(f"kv.k has batch size {k.shape[0]}; allowed: q's, {q.shape[0]}")
    if k.shape[2] < 1 or q.shape[2] % k.shape[2]:
        raise ValueError(f"kv.k has {k.shape[2]} heads; allowed: a divisor of q's {q.shape[2]} heads")


def _flops(arrays: dict[str, Any], q: str, k: str) -> int:
    """FLOPs of Q Kᵀ and P V."""
    batch, length, heads, head_dim = arrays[q].shape
    return 4 * int(batch * heads * length * arrays[k].shape[1] * head_dim)


ATTENTION_QUANTIZED = Op(
    "attention_quantized",
    (
        *("q.values", "q.scale", "q.zero_point", "q.sums"),
        *("k.values", "k.scale", "k.zero_point", "k.sums", "k.mean"),
        *("v", "v.scale", "v.zero_point"),
        *("kv_lens", "sinks"),
    ),
    (
        *("q_granularity", "q_group", "k_granularity", "k_group", "v_granularity", "v_group", "v_dtype"),
        *("window_left", "window_right", "softcap", "scale", "return_lse", "kernel", "batch_invariant"),
    ),
    _plan_quantized,
    public="attention on quantized arrays",
    checked=("kv_lens",),
    indices=("kv_lens",),
    flops=lambda arrays, *_: _flops(arrays, "q.values", "k.values"),
)
ATTENTION_KEPT = Op(
    "attention_kv",
    (
        *("q", "kv.k", "kv.k_scale", "kv.k_mean", "kv.k_nonfinite"),
        *("kv.v", "kv.v_scale", "kv.v_exponents", "kv.v_nonfinite", "kv.v_mean"),
        *("kv_lens", "rope.cos", "rope.sin", "rope.positions_q", "sinks"),
    ),
    (
        *("kv_precision", "dtype", "causal", "window", "softcap", "scale", "precision", "kernel", "batch_invariant"),
        *("return_lse", "interleaved"),
    ),
    _plan_kept,
    public="attention on a QuantizedKV",
    indices=("kv_lens", "rope.positions_q"),
    flops=lambda arrays, *_: _flops(arrays, "q", "kv.k"),
)
