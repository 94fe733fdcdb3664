"""attention on arrays that are INT8 already: what `quantize` returns for q and k, and for v if one likes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from qflash.frontends.choose import op_frontend_of
from qflash.ops.plan import Op, Operand, Plan, Result, check_device, check_dtype, check_float, check_shape, dtype_code
from qflash.ops.quantization import GRANULARITIES, Quantized
from qflash.ops.run import run
from qflash.problem import Array, Options, Problem, check, check_options
from qflash.spec import DTYPES, KV_KINDS, PRECISIONS, OpSpec
from qflash.typing import Flag
from qflash.words import INT32_MAX, check_int, check_word

_LEAST_KEY_GROUP = 16  # keys of one lane of the CUDA kernel


def attention_on_integers(q: Any, k: Any, v: Any, options: Options, kv_lens: Any, rope: Any, return_lse: Flag) -> Any:
    """`qflash.attention` with a Quantized among q, k and v."""
    results = run(ATTENTION_INT8, *call_of(q, k, v, options, kv_lens, rope, return_lse))
    return tuple(results) if return_lse else results[0]


def spec_on_integers(q: Any, k: Any, v: Any, options: Options, kv_lens: Any, rope: Any) -> OpSpec:
    """What selects its kernel, for `qflash.explain`."""
    arrays, words = call_of(q, k, v, options, kv_lens, rope, False)
    spec: OpSpec = op_frontend_of(type(arrays[0]), ATTENTION_INT8.arrays[0]).spec_of(ATTENTION_INT8, arrays, words)
    return spec


def call_of(
    q: Any, k: Any, v: Any, options: Options, kv_lens: Any, rope: Any, return_lse: Flag
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """The arrays and the words of ATTENTION_INT8, from those of `attention`."""
    for name, x in (("q", q), ("k", k)):
        if not isinstance(x, Quantized):
            given = ", ".join(other for other, y in (("q", q), ("k", k), ("v", v)) if isinstance(y, Quantized))
            raise TypeError(
                f"{name} is {class_of(x)} and {given} qflash.Quantized; allowed: Quantized q and k, with v either way"
            )
    if rope is not None:
        raise ValueError(
            "rope is given and q and k are Quantized; allowed: None, apply it in qflash.quantize(..., rope=...)"
        )
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
    shape = getattr(q.values, "shape", ())
    words = check_options(options, shape[-1] if shape and shape[-1] else 1)  # the plan says what is wrong with 0
    arrays = (
        *(q.values, q.scale, q.zero_point, None if q.symmetric else q.sums),
        *(k.values, k.scale, k.zero_point, None if k.symmetric else k.sums, k.mean),
        *((v.values, v.scale, v.zero_point) if integer_v else (v, None, None)),
        kv_lens,
    )
    groups = [*(word for x in (q, k) for word in (x.granularity, x.group))]
    groups += [v.granularity, v.group, v.dtype] if integer_v else [GRANULARITIES[0], 1, None]
    numbers = [words[name] for name in ("window_left", "window_right", "softcap", "scale")]
    return arrays, (*groups, *numbers, bool(return_lse), options.kernel)


def class_of(x: Any) -> str:
    """A class in a message."""
    return f"{type(x).__module__}.{type(x).__qualname__}"


def _check_parts(name: str, x: Quantized, smooth: bool) -> None:
    """What no plan sees: parts that are there and should not be, or the other way round."""
    for part in ("values", "scale"):
        if getattr(x, part) is None:
            raise TypeError(f"{name}.{part} is None; allowed: an array")
    if (x.zero_point is None) != (x.symmetric is True):
        allowed = "None" if x.symmetric else "an int32 array of one element"
        raise ValueError(f"{name}.zero_point does not fit {name}.symmetric, {x.symmetric}; allowed: {allowed}")
    if not x.symmetric and x.sums is None and name != "v":
        raise ValueError(f"{name}.sums is None and {name} has a zero point; allowed: the sums qflash.quantize gives")
    if x.mean is not None and not smooth:
        raise ValueError(f"{name}.mean is given; allowed: None, only k may be smoothed")


def _plan(
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
    # With a common dtype these are the arrays of any attention.
    alike = {
        name: replace(x, dtype=dtype, strides=None if copied[name] else x.strides)
        for name, x in (("q", q), ("k", k), ("v", v))
    }
    problem = check(
        *(alike["q"], alike["k"], alike["v"]),
        Options(False, (window_left, window_right), softcap, scale, None, kernel),
        kv_lens,
    )
    operands = [
        Operand(argument, f"{field}.data", contiguous=copied[name])
        for argument, name, field in (("q.values", "q", "q"), ("k.values", "k", "kv.k"), ("v", "v", "kv.v"))
    ]
    fields: list[tuple[str, int | float]] = [
        ("kv.kind", KV_KINDS.index("quantized")),
        ("kv.k_dtype", dtype_code("int8")),
        ("kv.v_dtype", dtype_code(v.dtype)),
    ]

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
        field = "q_scales" if name == "q" else f"kv.{name}_scales"
        fields += zip((f"{field}.{part}" for part in ("stride_b", "stride_h", "group")), strides, strict=True)
        add(f"{name}.scale", f"{field}.scale", parts[0], "float32", *shapes)
        add(f"{name}.zero_point", f"{field}.zero_point", parts[1], "int32", (), (1,))
        add(f"{name}.sums", f"{field}.sums", parts[2], "int32", (batch, heads, length))
    add("k.mean", "kv.k_mean", k_mean, "float32", (problem.batch, problem.kv_heads, problem.head_dim))
    if kv_lens is not None:
        operands.append(Operand("kv_lens", "kv_lens", contiguous=True))
    results = [Result("out.data", tuple(q.shape), dtype)]
    if return_lse:
        results.append(Result("lse", (problem.batch, problem.q_heads, problem.q_len), "float32"))
    return Plan(
        op="attention_int8",
        device=q.device,
        dtype=dtype,
        kernel=problem.kernel,
        struct="QfAttnParams",
        fields=(*attention_struct(problem, dtype, "int8", ("q", "kv.k", "kv.v", "out")), *fields),
        operands=tuple(operands),
        results=tuple(results),
        head_dim=problem.head_dim,
    )


def attention_struct(
    problem: Problem, dtype: str, precision: str, strided: Sequence[str]
) -> tuple[tuple[str, int | float], ...]:
    """The fields of QfAttnParams, but for rope and what `kv` alone has. `strided`: the tensors that have strides."""
    row = problem.q_heads * problem.head_dim
    strides = {
        "q": problem.q_strides,
        "kv.k": problem.k_strides,
        "kv.v": problem.v_strides,
        "out": (problem.q_len * row, row, problem.head_dim),
    }
    sizes = ("batch", "q_len", "k_len", "q_heads", "kv_heads", "head_dim")
    words = ("window_left", "window_right", "scale", "softcap")
    return (
        ("dtype", dtype_code(dtype)),
        ("precision", PRECISIONS.index(precision)),
        *((name, getattr(problem, name)) for name in (*sizes, *words)),
        *(
            (f"{name}.stride_{dim}", stride)
            for name in strided
            for dim, stride in zip("bth", strides[name], strict=True)
        ),
        ("lse_stride_b", problem.q_heads * problem.q_len),
        ("lse_stride_h", problem.q_len),
    )


def attention_flops(q: Sequence[int], k: Sequence[int]) -> int:
    """Of Q Kᵀ and P V; no mask takes anything off, as in PyTorch's own count."""
    batch, length, heads, head_dim = q
    return 4 * batch * heads * length * k[1] * head_dim


def takes_a_copy(x: Array) -> bool:
    """Kernels read whole heads, forwards."""
    if x.strides is None or 0 in x.shape:
        return False
    return (x.strides[-1] != 1 and x.shape[-1] != 1) or any(stride < 0 for stride in x.strides)


def _tokens_of_a_scale(name: str, granularity: Any, group: Any) -> int | None:
    """How many tokens share a scale; None: all of them."""
    check_word(f"{name}.granularity", granularity, GRANULARITIES)
    if granularity != "group":
        return None if granularity == "tensor" else 1
    tokens = check_int(f"{name}.group", group, 1, INT32_MAX)
    if name == "k" and (tokens < _LEAST_KEY_GROUP or tokens & (tokens - 1)):
        raise ValueError(f"k.group is {tokens}; allowed: a power of two, {_LEAST_KEY_GROUP} or more")
    return tokens


ATTENTION_INT8 = Op(
    "attention_int8",
    (
        *("q.values", "q.scale", "q.zero_point", "q.sums"),
        *("k.values", "k.scale", "k.zero_point", "k.sums", "k.mean"),
        *("v", "v.scale", "v.zero_point"),
        "kv_lens",
    ),
    (
        *("q_granularity", "q_group", "k_granularity", "k_group", "v_granularity", "v_group", "v_dtype"),
        *("window_left", "window_right", "softcap", "scale", "return_lse", "kernel"),
    ),
    _plan,
    checked=("kv_lens",),
    indices=("kv_lens",),
    flops=lambda shapes: attention_flops(shapes["q.values"], shapes["k.values"]),
)
