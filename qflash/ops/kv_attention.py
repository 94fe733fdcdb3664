"""attention on what `quantize_kv` returns: q comes as it is, and is quantized on the way."""

from __future__ import annotations

from typing import Any

from qflash.frontends.choose import op_frontend_of
from qflash.ops.attention import attention_flops, attention_struct, class_of, takes_a_copy
from qflash.ops.kv import KV_FIELDS, KV_PRECISIONS, QuantizedKV, kept_fields, results_of
from qflash.ops.plan import Op, Operand, Plan, Result, check_device, check_dtype, check_float, check_shape
from qflash.ops.quantization import Quantized, tables_of
from qflash.ops.run import run
from qflash.problem import Array, Options, RopeArrays, check, check_options
from qflash.spec import DTYPES, OpSpec
from qflash.typing import Flag
from qflash.words import check_word

_ONLY_E4M3 = ("v_scale", "v_lift", "v_wild", "v_mean")


def attention_on_kv(q: Any, k: Any, v: Any, options: Options, kv_lens: Any, rope: Any, return_lse: Flag) -> Any:
    """`qflash.attention` with a QuantizedKV among q, k and v."""
    results = run(ATTENTION_KV, *call_of(q, k, v, options, kv_lens, rope, return_lse))
    return tuple(results) if return_lse else results[0]


def spec_on_kv(q: Any, k: Any, v: Any, options: Options, kv_lens: Any, rope: Any) -> OpSpec:
    """What selects its kernel, for `qflash.explain`."""
    arrays, words = call_of(q, k, v, options, kv_lens, rope, False)
    spec: OpSpec = op_frontend_of(type(arrays[0]), ATTENTION_KV.arrays[0]).spec_of(ATTENTION_KV, arrays, words)
    return spec


def call_of(
    q: Any, kv: Any, v: Any, options: Options, kv_lens: Any, rope: Any, return_lse: Flag
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """The arrays and the words of ATTENTION_KV, from those of `attention`."""
    for name, x in (("q", q), ("v", v)):
        if type(x) is QuantizedKV:
            raise TypeError(f"{name} is qflash.QuantizedKV; allowed: in the place of k, without v")
    if type(q) is Quantized:
        raise TypeError("q is qflash.Quantized and k qflash.QuantizedKV; allowed: an array, quantized on the way")
    if v is not None:
        raise TypeError(f"v is {class_of(v)} and k qflash.QuantizedKV, which has v in it; allowed: None")
    check_word("kv.precision", kv.precision, KV_PRECISIONS)
    check_word("kv.dtype", kv.dtype, DTYPES)
    if options.precision not in (None, kv.precision):
        raise ValueError(f"precision is {options.precision!r}; allowed with this kv: None or {kv.precision!r}")
    for part in ("k", "k_scale", "k_mean", "k_wild", "v"):
        if getattr(kv, part) is None:
            raise TypeError(f"kv.{part} is None; allowed: an array")
    for part in _ONLY_E4M3:
        if (getattr(kv, part) is None) != (kv.precision == "int8"):
            allowed = "None" if kv.precision == "int8" else "an array"
            raise TypeError(f"kv.{part} does not fit kv.precision, {kv.precision!r}; allowed: {allowed}")
    cos, sin, positions, _, interleaved = tables_of(rope)
    shape = getattr(q, "shape", ())
    words = check_options(options, shape[-1] if shape and shape[-1] else 1)  # the plan says what is wrong with 0
    arrays = (
        *(q, kv.k, kv.k_scale, kv.k_mean, kv.k_wild, kv.v, kv.v_scale, kv.v_lift, kv.v_wild, kv.v_mean),
        *(kv.lens if kv_lens is None else kv_lens, cos, sin, positions),
    )
    numbers = [words[name] for name in ("window_left", "window_right", "softcap", "scale")]
    return arrays, (kv.precision, kv.dtype, *numbers, interleaved, bool(return_lse), options.kernel)


def _plan(
    q: Array,
    k: Array,
    k_scale: Array,
    k_mean: Array,
    k_wild: Array,
    v: Array,
    v_scale: Array | None,
    v_lift: Array | None,
    v_wild: Array | None,
    v_mean: Array | None,
    kv_lens: Array | None,
    cos: Array | None,
    sin: Array | None,
    positions: Array | None,
    precision: str,
    dtype: str,
    window_left: int,
    window_right: int,
    softcap: float,
    scale: float,
    interleaved: bool,
    return_lse: bool,
    kernel: Any,
) -> Plan:
    parts = {"k": k, "k_scale": k_scale, "k_mean": k_mean, "k_wild": k_wild}
    only_e4m3 = {"v_scale": v_scale, "v_lift": v_lift, "v_wild": v_wild, "v_mean": v_mean}
    parts |= {"v": v, **{part: array for part, array in only_e4m3.items() if array is not None}}
    _check_q(q, k, k_mean, dtype)
    batch, length, kv_heads, _ = k.shape
    head_dim = k_mean.shape[-1]
    copied = takes_a_copy(q)
    operands = [Operand("q", "q.data", contiguous=copied)]
    fields = [*kept_fields(batch, length, kv_heads, head_dim, precision, dtype)]
    for part, (kind, shape) in results_of(batch, length, kv_heads, head_dim, precision).items():
        check_dtype(f"kv.{part}", parts[part], kind)
        check_shape(f"kv.{part}", parts[part], shape)
        operands.append(Operand(f"kv.{part}", KV_FIELDS[part], contiguous=True))
    # To the checks that all attention shares, keys and values are arrays like any others.
    keys = values = Array((batch, length, kv_heads, head_dim), None, q.dtype, q.device)
    if precision == "int8":
        check_dtype("kv.v", v, dtype)
        check_shape("kv.v", v, keys.shape)
        copy = takes_a_copy(v)
        values = Array(v.shape, None if copy else v.strides, v.dtype, q.device)
        operands.append(Operand("kv.v", "kv.v.data", contiguous=copy))
    for part, array in parts.items():
        check_device(f"kv.{part}", array, "q", q.device)
    rope = None
    if cos is not None and sin is not None:  # together: see tables_of
        at = Array((length,), None, "int32", q.device)  # keys were turned before, by a table of their own
        rope = RopeArrays(cos, sin, interleaved, positions, at)
    problem = check(
        Array(q.shape, None if copied else q.strides, q.dtype, q.device),
        keys,
        values,
        Options(False, (window_left, window_right), softcap, scale, None, kernel),
        kv_lens,
        rope,
    )
    if kv_lens is not None:
        operands.append(Operand("kv_lens", "kv_lens", contiguous=True))
    if cos is not None:
        fields += [
            ("rope.rows", cos.shape[0]),
            ("rope.rotary_dim", problem.rotary_dim),
            ("rope.interleaved", int(problem.rope_interleaved)),
            ("rope.stride_positions_q_b", problem.positions_q_stride or 0),
        ]
        operands += [Operand(name, name, contiguous=True, dtype="float32") for name in ("rope.cos", "rope.sin")]
        if positions is not None:
            operands.append(Operand("rope.positions_q", "rope.positions_q", contiguous=True))
    results = [Result("out.data", tuple(q.shape), q.dtype)]
    if return_lse:
        results.append(Result("lse", (problem.batch, problem.q_heads, problem.q_len), "float32"))
    strided = ("q", "kv.v", "out") if precision == "int8" else ("q", "out")
    return Plan(
        op="attention_kv",
        device=q.device,
        dtype=q.dtype,
        kernel=problem.kernel,
        struct="QfAttnParams",
        fields=(*attention_struct(problem, q.dtype, precision, strided), *fields),
        operands=tuple(operands),
        results=tuple(results),
        head_dim=int(problem.head_dim),  # selects the kernel, so compiled programs are made for it
        precision=precision,
    )


def _check_q(q: Array, k: Array, k_mean: Array, dtype: str) -> None:
    """What q and kv must have in common."""
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


ATTENTION_KV = Op(
    "attention_kv",
    (
        *("q", "kv.k", "kv.k_scale", "kv.k_mean", "kv.k_wild"),
        *("kv.v", "kv.v_scale", "kv.v_lift", "kv.v_wild", "kv.v_mean"),
        *("kv_lens", "rope.cos", "rope.sin", "rope.positions_q"),
    ),
    (
        *("precision", "dtype", "window_left", "window_right", "softcap", "scale"),
        *("interleaved", "return_lse", "kernel"),
    ),
    _plan,
    indices=("kv_lens", "rope.positions_q"),
    flops=lambda shapes: attention_flops(shapes["q"], shapes["kv.k"]),
)
