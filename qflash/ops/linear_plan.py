"""Plans of linear layers: floating-point ones, which have gradients, and integer ones with scales."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from qflash.call.array import Array, check_device, check_dtype, check_float, check_shape, dtype_code, row_stride
from qflash.call.op import Operand, Plan, Result
from qflash.call.spec import ACTIVATIONS, DTYPES, spec_of
from qflash.call.words import check_flag, check_kernel, shown
from qflash.ops.matrices import MOST_INT8_K, Fields, layout_of, scale_operand, transposed

# Fields of QfLinearParams: a layer with one weight has the first of each.
WEIGHTS, BIASES, SCALES = ("w", "up"), ("bias", "up_bias"), ("w_scale", "up_scale")


@dataclass(frozen=True, slots=True)
class Names:
    """The user's names for the weights of a layer and their biases."""

    weights: tuple[str, ...]
    biases: tuple[str, ...]


ONE_WEIGHT = Names(("w",), ("bias",))
GATE_AND_UP = Names(("gate", "up"), ("gate_bias", "up_bias"))


def check_x(x: Array) -> None:
    """Reject an x without rows of floats."""
    if x.dtype == "int8":
        raise TypeError(
            f"x has dtype int8; allowed: {', '.join(DTYPES)}, which precision='int8' quantizes. Of integers there is "
            "qflash.int8_matmul"
        )
    check_float("x", x)
    if len(x.shape) < 1:
        raise ValueError(f"x has shape {list(x.shape)}; allowed: rank 1 or more, [..., K]")


def plan_layer(
    names: Names,
    x: Array,
    weights: Sequence[Array | None],
    biases: Sequence[Array | None],
    residual: Array | None,
    activation: str,
    out_dtype: Any,
    keep_pre: Any,
    kernel: Any,
) -> Plan:
    """A floating-point layer; weights are [K, N] each. keep_pre: the arguments of activations are results, too."""
    check_x(x)
    matrices = [_check_weight(name, w, x) for name, w in zip(names.weights, weights, strict=True)]
    k, n = matrices[0].shape
    for name, w in zip(names.weights[1:], matrices[1:], strict=True):
        check_shape(name, w, (k, n))
    allowed = tuple(dict.fromkeys((x.dtype, "float32")))
    out_dtype = _check_out_dtype(x.dtype if out_dtype is None else out_dtype, allowed)
    stride = row_stride(x)
    operands = [Operand("x", "x", contiguous=stride is None)]
    fields: Fields = [("x_stride_m", k if stride is None else stride), ("x_stride_k", 1)]
    along, of_weights = weight_operands(names, matrices, ("n", n, 1))
    ends, bias_dtype = _ends(names, biases, residual, x, n, x.dtype, out_dtype)
    for part in (of_weights, ends):
        operands += part[0]
        fields += part[1]
    results = [Result("out", (*x.shape[:-1], n), out_dtype)]
    if check_flag("keep_pre", keep_pre) and activation:
        results += [Result(field, results[0].shape, out_dtype) for field in ("pre", "pre_up")[: len(matrices)]]
    spec = spec_of("linear", x.device, x.dtype, layout=along, activation=activation)
    return _plan(spec, x, n, out_dtype, bias_dtype, kernel, fields, operands, results)


def plan_int8_layer(
    names: Names,
    x: Array,
    weights: Sequence[Array | None],
    biases: Sequence[Array | None],
    residual: Array | None,
    x_scale: Array | None,
    scales: Sequence[Array | None],
    activation: str,
    out_dtype: Any,
    kernel: Any,
) -> Plan:
    """An integer layer. Weights are [N, K], as in QuantizedLinear, with a scale for each of N."""
    matrices = [_check_values(name, w, x) for name, w in zip(names.weights, weights, strict=True)]
    n, k = matrices[0].shape
    for name, w in zip(names.weights[1:], matrices[1:], strict=True):
        check_shape(f"{name}.values", w, (n, k))
    if isinstance(k, int) and k > MOST_INT8_K:
        raise ValueError(f"x has {k} columns; allowed: at most {MOST_INT8_K}, so that no int32 sum can overflow")
    _check_out_dtype(out_dtype, DTYPES)
    stride = row_stride(x)
    operands = [Operand("x", "x", contiguous=stride is None)]
    fields: Fields = [("x_stride_m", k if stride is None else stride), ("x_stride_k", 1)]
    along, of_weights = weight_operands(names, [transposed(w) for w in matrices], ("k", 1, k))
    ends, bias_dtype = _ends(names, biases, residual, x, n, out_dtype, out_dtype)
    of_scales = [scale_operand("x_scale", "x_scale", x_scale, x.shape[:-1], x.device, "x")]
    for name, field, scale in zip(names.weights, SCALES, scales, strict=False):
        if scale is None:
            raise TypeError(f"{name}.scale is None; allowed: float32 [N], here [{n}]")
        check_dtype(f"{name}.scale", scale, "float32")
        check_shape(f"{name}.scale", scale, (n,))
        of_scales.append(scale_operand(f"{name}.scale", field, scale, (n,), x.device, "x"))
    for part in (of_weights, ends, *of_scales):
        operands += part[0]
        fields += part[1]
    spec = spec_of("linear", x.device, out_dtype, precision="int8", layout=along, activation=activation)
    results = [Result("out", (*x.shape[:-1], n), out_dtype)]
    return _plan(spec, x, n, out_dtype, bias_dtype, kernel, fields, operands, results)


def weight_operands(
    names: Names, matrices: Sequence[Array], copied: tuple[str, int, int]
) -> tuple[str, tuple[list[Operand], Fields]]:
    """The contiguous dimension of weights [K, N], and their operands and strides. `copied`: the layout of a contiguous
    copy, in the form of layout_of's result."""
    layouts = [layout_of(w) for w in matrices]
    known = {layout[0] for layout in layouts if layout is not None}
    if len(known) > 1 or (None in layouts and known != {copied[0]}):
        layouts = [None] * len(layouts)  # both weights must have the same layout
    operands, fields = [], Fields()
    for name, field, layout in zip(names.weights, WEIGHTS, layouts, strict=False):
        _, stride_k, stride_n = layout or copied
        operands.append(Operand(name, field, contiguous=layout is None))
        fields += [(f"{field}_stride_k", stride_k), (f"{field}_stride_n", stride_n)]
    return (layouts[0] or copied)[0], (operands, fields)


def _plan(
    spec: Any,
    x: Array,
    n: int,
    out_dtype: str,
    bias_dtype: str,
    kernel: Any,
    fields: Fields,
    operands: list[Operand],
    results: list[Result],
) -> Plan:
    return Plan(
        for_spec=spec,
        device=x.device,
        kernel=check_kernel(kernel),
        struct="QfLinearParams",
        fields=(
            ("dtype", dtype_code(x.dtype)),
            ("out_dtype", dtype_code(out_dtype)),
            ("bias_dtype", dtype_code(bias_dtype)),
            ("activation", ACTIVATIONS.index(spec.activation)),
            ("m", math.prod(x.shape[:-1])),
            ("n", n),
            ("k", x.shape[-1]),
            ("out_stride_m", n),
            *fields,
        ),
        operands=tuple(operands),
        results=tuple(results),
    )


def check_inputs(name: str, w: Any, columns: int) -> None:
    """Reject a weight [K, N] that does not match rows of `columns` elements. w: an array, or its description."""
    if len(w.shape) != 2:
        raise ValueError(f"{name} has shape {list(w.shape)}; allowed: rank 2, [K, N]")
    if w.shape[0] != columns:
        transposed = f"; the weight of a torch.nn.Linear is passed as {name}.T" if w.shape[1] == columns else ""
        raise ValueError(
            f"{name} has shape {list(w.shape)}; allowed: [K, N] with K as many as x has columns, {columns}{transposed}"
        )


def _check_weight(name: str, w: Array | None, x: Array) -> Array:
    if w is None:
        raise TypeError(f"{name} is None; allowed: a matrix [K, N], or qflash.QuantizedLinear")
    check_dtype(name, w, x.dtype)
    check_inputs(name, w, x.shape[-1])
    check_device(name, w, "x", x.device)
    return w


def _check_values(name: str, values: Array | None, x: Array) -> Array:
    """Check the values of a QuantizedLinear, or of a weight whose shape was checked before it was quantized."""
    if values is None:
        raise TypeError(f"{name}.values is None; allowed: int8 [N, K]")
    check_dtype(f"{name}.values", values, "int8")
    if len(values.shape) != 2 or values.shape[1] != x.shape[-1]:
        raise ValueError(
            f"{name}.values has shape {list(values.shape)}; allowed: [N, K] with K as many as x has columns, "
            f"{x.shape[-1]}"
        )
    check_device(name, values, "x", x.device)
    return values


def _check_out_dtype(out_dtype: Any, allowed: Sequence[str]) -> str:
    if out_dtype not in allowed:
        raise ValueError(f"out_dtype is {shown(out_dtype)}; allowed: {', '.join(map(repr, allowed))}")
    return str(out_dtype)


def _ends(
    names: Names,
    biases: Sequence[Array | None],
    residual: Array | None,
    x: Array,
    n: int,
    bias_dtype: str,
    out_dtype: str,
) -> tuple[tuple[list[Operand], Fields], str]:
    """Operands and strides of the epilogue, and the dtype of the biases. `bias_dtype`: the one that is allowed besides
    float32."""
    operands, fields = [], Fields()
    given = [
        (name, field, bias) for name, field, bias in zip(names.biases, BIASES, biases, strict=False) if bias is not None
    ]
    found = given[0][2].dtype if given else "float32"
    for name, field, bias in given:
        check_dtype(name, bias, *dict.fromkeys(("float32", bias_dtype)))
        check_shape(name, bias, (n,))
        check_device(name, bias, "x", x.device)
        if bias.dtype != found:
            raise TypeError(f"{name} has dtype {bias.dtype}; allowed: {given[0][0]}'s, {found}")
        operands.append(Operand(name, field, contiguous=True))
    if residual is not None:
        if residual.dtype != out_dtype:
            hint = ", or out_dtype='float32'" if residual.dtype == "float32" else ""
            raise TypeError(f"residual has dtype {residual.dtype}; allowed: the result's, {out_dtype}{hint}")
        check_shape("residual", residual, (*x.shape[:-1], n))
        check_device("residual", residual, "x", x.device)
        stride = row_stride(residual)
        operands.append(Operand("residual", "residual", contiguous=stride is None))
        fields.append(("residual_stride_m", n if stride is None else stride))
    return (operands, fields), found
