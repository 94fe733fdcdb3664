"""The gradients of linear and swiglu, as internal operations. That of the residual is the gradient of the result, which
needs no computation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from qflash.call.array import Array, check_device, check_shape, dtype_code, row_stride
from qflash.call.op import Op, Operand, Plan, Result
from qflash.call.spec import ACTIVATIONS, spec_of
from qflash.ops.linear_plan import BIASES, GATE_AND_UP, ONE_WEIGHT, WEIGHTS, Names, weight_operands
from qflash.ops.matrices import Fields, dims_with_rows


def _plan(
    names: Names,
    dout: Array,
    x: Array,
    weights: Sequence[Array],
    biases: Sequence[Array | None],
    pres: Sequence[Array | None],
    activation: str,
) -> Plan:
    """Matrix products and their gradients are in x's dtype: dout and the arguments of activations are rounded to it."""
    (k, n), rows = weights[0].shape, tuple(x.shape[:-1])
    check_shape("dout", dout, (*rows, n))
    check_device("dout", dout, "x", x.device)
    rounded = x.dtype if dout.dtype != x.dtype else None
    operands, fields = [], Fields()
    for name, array, dtype in (("dout", dout, rounded), ("x", x, None)):
        stride = row_stride(array) if dtype is None else None  # after a conversion it has other strides
        operands.append(Operand(name, name, contiguous=stride is None, dtype=dtype))
        fields.append((f"{name}_stride_m", array.shape[-1] if stride is None else stride))
    along, of_weights = weight_operands(names, weights, ("n", n, 1))
    operands += of_weights[0]
    fields += of_weights[1]
    operands += [
        Operand(name, name, contiguous=True, dtype=rounded)
        for name, pre in zip(("pre", "pre_up"), pres, strict=False)
        if pre is not None
    ]
    results = [Result("dx", x.shape, x.dtype), *(Result(f"d{w}", (k, n), x.dtype) for w in WEIGHTS[: len(weights)])]
    given = [(field, bias) for field, bias in zip(BIASES, biases, strict=False) if bias is not None]
    results += [Result(f"d{field}", (n,), bias.dtype) for field, bias in given]
    return Plan(
        for_spec=spec_of("linear_backward", x.device, x.dtype, layout=along, activation=activation),
        device=x.device,
        kernel=None,  # the forward call's is not a kernel of this operation
        struct="QfLinearBwdParams",
        fields=(
            ("dtype", dtype_code(x.dtype)),
            ("bias_dtype", dtype_code(given[0][1].dtype if given else "float32")),
            ("activation", ACTIVATIONS.index(activation)),
            ("m", math.prod(rows)),
            ("n", n),
            ("k", k),
            *fields,
        ),
        operands=tuple(operands),
        results=tuple(results),
    )


def _plan_linear(
    dout: Array, x: Array, w: Array, bias: Array | None, pre: Array | None, activation: Any, *_: Any
) -> Plan:
    return _plan(ONE_WEIGHT, dout, x, (w,), (bias,), (pre,), activation or "")


def _plan_swiglu(
    dout: Array,
    x: Array,
    gate: Array,
    up: Array,
    gate_bias: Array | None,
    up_bias: Array | None,
    pre: Array | None,
    pre_up: Array | None,
    *_: Any,
) -> Plan:
    return _plan(GATE_AND_UP, dout, x, (gate, up), (gate_bias, up_bias), (pre, pre_up), "swiglu")


def _flops(arrays: dict[str, Any], *_: Any) -> int:
    weights = [arrays[name] for name in ("w", "gate", "up") if name in arrays]
    return sum(2 * 2 * math.prod(arrays["x"].shape) * int(w.shape[1]) for w in weights)


_dims = dims_with_rows({
    "x": "*k", "dout": "*N", "pre": "*N", "pre_up": "*N", "w": "kN", "gate": "kN", "up": "kN",
    "bias": "N", "gate_bias": "N", "up_bias": "N",
    "dx": "*k", "dw": "kN", "dgate": "kN", "dup": "kN", "dbias": "N", "dgate_bias": "N", "dup_bias": "N",
})  # fmt: skip

LINEAR_BACKWARD = Op(
    "linear_backward",
    ("dout", "x", "w", "bias", "pre"),
    ("activation", "out_dtype", "keep_pre", "kernel"),
    _plan_linear,
    results=("dx", "dw", "dbias"),
    dims=_dims,
    flops=_flops,
    no_gradient="qflash.linear has no second derivative; allowed: one backward pass over it",
)
SWIGLU_BACKWARD = Op(
    "swiglu_backward",
    ("dout", "x", "gate", "up", "gate_bias", "up_bias", "pre", "pre_up"),
    ("out_dtype", "keep_pre", "kernel"),
    _plan_swiglu,
    results=("dx", "dgate", "dup", "dgate_bias", "dup_bias"),
    dims=_dims,
    kernels_of="linear_backward",
    flops=_flops,
    no_gradient="qflash.swiglu has no second derivative; allowed: one backward pass over it",
)
