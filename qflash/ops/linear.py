"""linear and swiglu: a product with a weight, and what follows it in the same pass: bias, activation, residual."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

from qflash.call.array import (
    Array,
    check_device,
    check_dtype,
    check_float,
    check_shape,
    dtype_code,
    dtype_name,
    row_stride,
)
from qflash.call.op import Gradient, Op, Operand, Plan, Result
from qflash.call.spec import ACTIVATIONS, DTYPES, spec_of
from qflash.call.words import check_flag, check_kernel, shown
from qflash.ops.linear_gradient import LINEAR_BACKWARD
from qflash.ops.linear_weights import QuantizedLinear, quantize_linear, quantize_rows
from qflash.ops.matrices import MOST_INT8_K, Fields, layout_of, scale_operand, transposed
from qflash.ops.run import run
from qflash.typing import Activation, ArrayT, DType, FrameworkArray, LinearPrecision

Weight = FrameworkArray | QuantizedLinear
_AFTER_ONE = ACTIVATIONS[1:4]  # activations of one product


def linear(
    x: ArrayT,
    w: Weight,
    bias: FrameworkArray | None = None,
    *,
    activation: Activation | None = None,
    residual: FrameworkArray | None = None,
    precision: LinearPrecision | None = None,
    out_dtype: DType | None = None,
    kernel: str | None = None,
) -> ArrayT:
    """activation(x w + bias) + residual in one pass, for NumPy, PyTorch and JAX arrays on the CPU or a CUDA GPU.

    x: `[..., K]`, float32, float16 or bfloat16; w: `[K, N]` of x's dtype, with either dimension contiguous, so that the
    transpose of a `[N, K]` weight is taken as it is; bias: `[N]`, float32 or of x's dtype; residual: `[..., N]` of the
    result's dtype. activation: None, "gelu" (with erf), "gelu_tanh" or "silu". out_dtype: x's dtype (the default) or
    float32. Returns `[..., N]`; sums are float32. Differentiable in PyTorch and JAX.

    precision="int8" multiplies integers: each row of x is quantized with a scale of its own in a pass before, each
    column of w as `quantize_linear` does. A plain w is quantized anew in every call; a layer that is used again should
    keep what `quantize_linear` returns, which stands in the place of w and needs no `precision`. Forward only.

    Example:
        >>> import numpy as np
        >>> import qflash
        >>> x, w = np.ones((2, 3), np.float32), np.full((3, 4), 0.5, np.float32)
        >>> qflash.linear(x, w, activation="silu").round(4)[0]
        array([1.2264, 1.2264, 1.2264, 1.2264], dtype=float32)
        >>> layer = qflash.quantize_linear(w)
        >>> qflash.linear(x, layer).round(2)[0]
        array([1.5, 1.5, 1.5, 1.5], dtype=float32)
    """
    _check_activation(activation)
    out: ArrayT
    if _is_quantized("w", w, precision):
        out = _run_int8(x, w, None, bias, None, residual, activation, out_dtype, kernel)
        return out
    words = (activation, False, residual is not None, _dtype_word(out_dtype), False, kernel)
    out, *_ = run(LINEAR, (x, w, bias, None, None, residual, None, None, None), words)
    return out


def swiglu(
    x: ArrayT,
    gate: Weight,
    up: Weight,
    gate_bias: FrameworkArray | None = None,
    up_bias: FrameworkArray | None = None,
    *,
    residual: FrameworkArray | None = None,
    precision: LinearPrecision | None = None,
    out_dtype: DType | None = None,
    kernel: str | None = None,
) -> ArrayT:
    """silu(x gate + gate_bias) · (x up + up_bias) + residual in one pass over x: the first half of a Llama MLP.

    gate, up: `[K, N]` each, as `linear` takes w (two halves of one array do); gate_bias, up_bias: `[N]`. The other
    words are those of `linear`. Differentiable in PyTorch and JAX, but for precision="int8".

    Example:
        >>> import numpy as np
        >>> import qflash
        >>> x, w = np.ones((2, 3), np.float32), np.full((3, 4), 0.5, np.float32)
        >>> qflash.swiglu(x, w, 2 * w).round(4)[0]  # silu(1.5) * 3
        array([3.6791, 3.6791, 3.6791, 3.6791], dtype=float32)
    """
    out: ArrayT
    if up is None:
        raise TypeError("up is None; allowed: a matrix [K, N], or qflash.QuantizedLinear")
    quantized = [_is_quantized(name, w, precision) for name, w in (("gate", gate), ("up", up))]
    if quantized[0] != quantized[1]:
        raise TypeError(
            f"gate is a {type(gate).__name__} and up a {type(up).__name__}; allowed: both quantized, or neither"
        )
    if quantized[0]:
        out = _run_int8(x, gate, up, gate_bias, up_bias, residual, "swiglu", out_dtype, kernel)
        return out
    words = ("swiglu", False, residual is not None, _dtype_word(out_dtype), False, kernel)
    out, *_ = run(LINEAR, (x, gate, gate_bias, up, up_bias, residual, None, None, None), words)
    return out


def _check_activation(activation: Any) -> None:
    if activation is not None and activation not in _AFTER_ONE:
        raise ValueError(
            f"activation is {shown(activation)}; allowed: None, {', '.join(map(repr, _AFTER_ONE))}; for two weights "
            "there is qflash.swiglu"
        )


def _is_quantized(name: str, w: Any, precision: Any) -> bool:
    """Whether integers are multiplied."""
    if precision not in (None, "int8"):
        raise ValueError(f"precision is {shown(precision)}; allowed: None, 'int8'")
    if w is None:
        raise TypeError(f"{name} is None; allowed: a matrix [K, N], or qflash.QuantizedLinear")
    return isinstance(w, QuantizedLinear) or precision == "int8"


def _dtype_word(out_dtype: Any) -> str | None:
    return None if out_dtype is None else dtype_name("out_dtype", out_dtype)


def _run_int8(
    x: Any,
    w: Any,
    up: Any,
    bias: Any,
    up_bias: Any,
    residual: Any,
    activation: str | None,
    out_dtype: Any,
    kernel: str | None,
) -> Any:
    """Rows of x quantized in a pass of their own, then products of integers."""
    weights = [
        layer if isinstance(layer, QuantizedLinear) else quantize_linear(layer)
        for layer in (w, up)
        if layer is not None
    ]
    values, scale = quantize_rows(x)
    first, second = weights[0], weights[1] if up is not None else None
    arrays = (
        *(values, first.values, bias, None if second is None else second.values, up_bias, residual),
        *(scale, first.scale, None if second is None else second.scale),
    )
    name = dtype_name("x", x.dtype) if out_dtype is None else _dtype_word(out_dtype)
    out, *_ = run(LINEAR, arrays, (activation, True, residual is not None, name, False, kernel))
    return out


def _check_weight(name: str, w: Array | None, x: Array, first: str = "x") -> Array:
    if w is None:
        raise TypeError(f"{name} is None; allowed: a matrix [K, N]")
    check_dtype(name, w, x.dtype)
    if len(w.shape) != 2:
        raise ValueError(f"{name} has shape {list(w.shape)}; allowed: rank 2, [K, N]")
    if w.shape[0] != x.shape[-1]:
        raise ValueError(f"{name} has shape {list(w.shape)}; allowed: as many rows as x has columns, {x.shape[-1]}")
    check_device(name, w, first, x.device)
    return w


def _plan(
    x: Array,
    w: Array | None,
    bias: Array | None,
    up: Array | None,
    up_bias: Array | None,
    residual: Array | None,
    x_scale: Array | None,
    w_scale: Array | None,
    up_scale: Array | None,
    activation: Any,
    weights_transposed: Any,
    with_residual: Any,
    out_dtype: Any,
    keep_pre: Any,
    kernel: Any,
) -> Plan:
    integers = x.dtype == "int8"
    if not integers:
        check_float("x", x)
    if len(x.shape) < 1:
        raise ValueError(f"x has shape {list(x.shape)}; allowed: rank 1 or more, [..., K]")
    turned = check_flag("weights_transposed", weights_transposed)
    given = [("w" if up is None else "gate", w, "w"), *([] if up is None else [("up", up, "up")])]
    weights = [
        (name, field, _check_weight(name, transposed(weight) if turned and weight is not None else weight, x))
        for name, weight, field in given
    ]
    k, n = weights[0][2].shape
    if len(weights) == 2:
        check_shape("up", weights[1][2], (k, n))
    if integers and isinstance(k, int) and k > MOST_INT8_K:
        raise ValueError(f"x has {k} columns; allowed: at most {MOST_INT8_K}, so that no int32 sum can overflow")
    stride = row_stride(x)
    operands = [Operand("x", "x", contiguous=stride is None)]
    fields: Fields = [("x_stride_m", k if stride is None else stride), ("x_stride_k", 1)]

    layouts = [layout_of(weight) for _, _, weight in weights]
    known = {layout[0] for layout in layouts if layout is not None}
    copied = ("k", 1, k) if turned else ("n", n, 1)  # what a copy without gaps looks like
    if len(known) > 1 or (None in layouts and known != {copied[0]}):
        layouts = [None] * len(layouts)  # both weights must run the same way
    for (_, field, _), layout in zip(weights, layouts, strict=True):
        _, stride_k, stride_n = layout or copied
        operands.append(Operand(field, field, contiguous=layout is None))
        fields += [(f"{field}_stride_k", stride_k), (f"{field}_stride_n", stride_n)]
    contiguous_dim = (layouts[0] or copied)[0]

    dtype = "float32" if integers else x.dtype
    out_dtype = dtype if out_dtype is None else out_dtype
    allowed = DTYPES if integers else tuple(dict.fromkeys((x.dtype, "float32")))
    if out_dtype not in allowed:
        raise ValueError(f"out_dtype is {out_dtype!r}; allowed: {', '.join(map(repr, allowed))}")
    rows = tuple(x.shape[:-1])
    biases = [
        (name, field, array)
        for name, field, array in (
            ("bias" if up is None else "gate_bias", "bias", bias),
            ("up_bias", "up_bias", up_bias),
        )
        if array is not None
    ]
    bias_dtype = biases[0][2].dtype if biases else "float32"
    for name, field, array in biases:
        check_dtype(name, array, *dict.fromkeys(("float32", out_dtype if integers else x.dtype)))
        check_shape(name, array, (n,))
        check_device(name, array, "x", x.device)
        if array.dtype != bias_dtype:
            raise TypeError(f"up_bias has dtype {array.dtype}; allowed: gate_bias's, {bias_dtype}")
        operands.append(Operand(field, field, contiguous=True))
    if residual is not None:
        check_dtype("residual", residual, out_dtype)
        check_shape("residual", residual, (*rows, n))
        check_device("residual", residual, "x", x.device)
        residual_stride = row_stride(residual)
        operands.append(Operand("residual", "residual", contiguous=residual_stride is None))
        fields.append(("residual_stride_m", n if residual_stride is None else residual_stride))
    scales = (("x_scale", x_scale, rows), ("w_scale", w_scale, (n,)), ("up_scale", up_scale, (n,)))
    for name, array, each in scales:
        more, strides = scale_operand(name, name, array, each, x.device, "x")
        operands += more
        fields += strides

    word = activation or ""
    results = [Result("out", (*rows, n), out_dtype)]
    if check_flag("keep_pre", keep_pre) and word:
        results += [Result(field, (*rows, n), out_dtype) for field in ("pre", "pre_up")[: len(weights)]]
    spec_dtype, precision = (out_dtype, "int8") if integers else (x.dtype, "native")
    return Plan(
        for_spec=spec_of("linear", x.device, spec_dtype, precision=precision, layout=contiguous_dim, activation=word),
        device=x.device,
        kernel=check_kernel(kernel),
        struct="QfLinearParams",
        fields=(
            ("dtype", dtype_code(x.dtype)),
            ("out_dtype", dtype_code(out_dtype)),
            ("bias_dtype", dtype_code(bias_dtype)),
            ("activation", ACTIVATIONS.index(word)),
            ("m", math.prod(rows)),
            ("n", n),
            ("k", k),
            ("out_stride_m", n),
            *fields,
        ),
        operands=tuple(operands),
        results=tuple(results),
    )


def _folds(mapped: Collection[str], ranks: dict[str, int], words: dict[str, Any]) -> bool:
    """Mapped rows are more rows."""
    rows = {"x", "residual", "x_scale"} & set(ranks)
    return set(mapped) == rows and ranks.get("x_scale", 1) > 0


def _flops(arrays: dict[str, Any], words: dict[str, Any], _: Any) -> int:
    out_features = arrays["w"].shape[0 if words["weights_transposed"] else 1]
    products = 1 if "up" not in arrays else 2
    return products * 2 * math.prod(arrays["x"].shape) * int(out_features)


LINEAR = Op(
    "linear",
    ("x", "w", "bias", "up", "up_bias", "residual", "x_scale", "w_scale", "up_scale"),
    ("activation", "weights_transposed", "with_residual", "out_dtype", "keep_pre", "kernel"),
    _plan,
    results=("out", "pre", "pre_up"),
    folds=_folds,
    autocast=("x", "w", "bias", "up", "up_bias", "residual"),
    gradient=Gradient(
        LINEAR_BACKWARD,
        ("x", "w", "bias", "up", "up_bias", "residual"),
        {"keep_pre": True},
    ),
    flops=_flops,
)
