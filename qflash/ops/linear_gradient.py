"""The gradients of linear and swiglu, as an operation of its own: nobody calls it by name."""

from __future__ import annotations

import math
from typing import Any

from qflash.call.array import Array, check_device, check_dtype, check_shape, dtype_code, row_stride
from qflash.call.op import Op, Operand, Plan, Result
from qflash.call.spec import ACTIVATIONS, spec_of
from qflash.call.words import check_flag
from qflash.ops.matrices import Fields, layout_of


def _plan(
    dout: Array,
    x: Array | None,
    w: Array | None,
    bias: Array | None,
    up: Array | None,
    up_bias: Array | None,
    pre: Array | None,
    pre_up: Array | None,
    activation: Any,
    weights_transposed: Any,
    with_residual: Any,
    *_: Any,
) -> Plan:
    assert x is not None and w is not None and not weights_transposed  # integers, which have no gradient
    if dout.dtype != x.dtype:
        raise NotImplementedError(
            f"out_dtype is {dout.dtype!r} and x has dtype {x.dtype}; allowed where a gradient is wanted: x's dtype"
        )
    (k, n), rows = w.shape, tuple(x.shape[:-1])
    check_shape("dout", dout, (*rows, n))
    check_device("dout", dout, "x", x.device)
    operands, fields = [], Fields()
    for name, array in (("dout", dout), ("x", x)):
        stride = row_stride(array)
        operands.append(Operand(name, name, contiguous=stride is None))
        fields.append((f"{name}_stride_m", array.shape[-1] if stride is None else stride))
    weights = [("w", w), *([] if up is None else [("up", up)])]
    layouts = [layout_of(weight) for _, weight in weights]
    if len({layout and layout[0] for layout in layouts}) > 1:
        layouts = [None] * len(layouts)  # both weights must run the same way
    for (name, _), layout in zip(weights, layouts, strict=True):
        _, stride_k, stride_n = layout or ("n", n, 1)
        operands.append(Operand(name, name, contiguous=layout is None))
        fields += [(f"{name}_stride_k", stride_k), (f"{name}_stride_n", stride_n)]
    for name, array in (("pre", pre), ("pre_up", pre_up)):
        if array is not None:
            check_dtype(name, array, x.dtype)
            operands.append(Operand(name, name, contiguous=True))
    results = [Result("dx", x.shape, x.dtype), Result("dw", (k, n), x.dtype)]
    bias_dtype = x.dtype
    if bias is not None:
        bias_dtype = bias.dtype
        results.append(Result("dbias", (n,), bias.dtype))
    if up is not None:
        results.append(Result("dup", (k, n), x.dtype))
    if up_bias is not None:
        bias_dtype = up_bias.dtype
        results.append(Result("dup_bias", (n,), up_bias.dtype))
    if check_flag("with_residual", with_residual):
        results.append(Result("dresidual", (*rows, n), x.dtype))
    word = activation or ""
    layout = (layouts[0] or ("n",))[0]
    return Plan(
        for_spec=spec_of("linear_backward", x.device, x.dtype, layout=layout, activation=word),
        device=x.device,
        kernel=None,  # the forward call's is no kernel of this operation
        struct="QfLinearBwdParams",
        fields=(
            ("dtype", dtype_code(x.dtype)),
            ("bias_dtype", dtype_code(bias_dtype)),
            ("activation", ACTIVATIONS.index(word)),
            ("m", math.prod(rows)),
            ("n", n),
            ("k", k),
            *fields,
        ),
        operands=tuple(operands),
        results=tuple(results),
    )


LINEAR_BACKWARD = Op(
    "linear_backward",
    ("dout", "x", "w", "bias", "up", "up_bias", "pre", "pre_up"),
    ("activation", "weights_transposed", "with_residual", "out_dtype", "keep_pre", "kernel"),
    _plan,
    results=("dx", "dw", "dbias", "dup", "dup_bias", "dresidual"),
    flops=lambda arrays, *_: (
        2 * 2 * math.prod(arrays["x"].shape) * int(arrays["w"].shape[1]) * (2 if "up" in arrays else 1)
    ),
    no_gradient="qflash.linear has no second derivative; allowed: one backward pass over it",
)
