"""linear and swiglu: a product with a weight, fused with bias, activation and residual."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any, TypedDict, Unpack, overload

import numpy as np
from numpy.typing import NDArray

from qflash.call.array import Array, dtype_name
from qflash.call.op import Gradient, Op, Plan
from qflash.call.spec import ACTIVATIONS
from qflash.call.words import check_word
from qflash.frontends.choose import frontend_of
from qflash.ops.linear_gradient import LINEAR_BACKWARD, SWIGLU_BACKWARD
from qflash.ops.linear_plan import GATE_AND_UP, ONE_WEIGHT, check_inputs, plan_int8_layer, plan_layer
from qflash.ops.linear_weights import QuantizedLinear, quantized_rows, quantized_weight
from qflash.ops.matrices import dims_with_rows
from qflash.ops.run import run
from qflash.typing import Activation, ArrayT, DType, FrameworkArray, LinearPrecision, TensorT

Weight = FrameworkArray | QuantizedLinear
_AFTER_ONE = ACTIVATIONS[1:4]  # activations of one product


class _SwigluWords(TypedDict, total=False):
    """The keyword arguments of swiglu that do not affect the type of its result."""

    residual: FrameworkArray | None
    precision: LinearPrecision | None
    kernel: str | None


class _LinearWords(_SwigluWords, total=False):
    """Those of linear."""

    activation: Activation | None


@overload
def linear(
    x: ArrayT,
    w: Weight,
    bias: FrameworkArray | None = None,
    *,
    out_dtype: None = None,
    **words: Unpack[_LinearWords],
) -> ArrayT: ...
@overload
def linear(
    x: np.ndarray[Any, Any],
    w: Weight,
    bias: FrameworkArray | None = None,
    *,
    out_dtype: DType,
    **words: Unpack[_LinearWords],
) -> NDArray[Any]: ...
@overload
def linear(
    x: TensorT,
    w: Weight,
    bias: FrameworkArray | None = None,
    *,
    out_dtype: DType,
    **words: Unpack[_LinearWords],
) -> TensorT: ...
def linear(
    x: Any,
    w: Weight,
    bias: FrameworkArray | None = None,
    *,
    activation: Activation | None = None,
    residual: FrameworkArray | None = None,
    precision: LinearPrecision | None = None,
    out_dtype: DType | None = None,
    kernel: str | None = None,
) -> Any:
    """activation(x w + bias) + residual in one pass, for NumPy, PyTorch and JAX arrays on the CPU or a CUDA GPU.

    Args:
        x: `[..., K]`, float32, float16 or bfloat16.
        w: `[K, N]` in x's dtype; either dimension may be contiguous, so the transpose of a `[N, K]` weight needs no
            copy. May be the result of `quantize_linear`.
        bias: `[N]`, float32 or x's dtype.
        activation: None, "gelu" (with erf), "gelu_tanh" or "silu".
        residual: `[..., N]` in the dtype of the result.
        precision: None, or "int8" to multiply integers: each row of x is quantized with its own scale in a separate
            pass, and each column of w as by `quantize_linear`.
        out_dtype: x's dtype (the default) or float32.
        kernel: name of the kernel that must be used.

    Returns:
        `[..., N]`, accumulated in float32. Differentiable in PyTorch and JAX; gradients are products in x's dtype.

    With precision "int8" a plain w is quantized again in every call. For a layer that is used repeatedly, keep the
    result of `quantize_linear` and pass it instead of w, without `precision`. In INT8, bias is float32 or of the
    result's dtype, and out_dtype any of the three. Forward only.

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
    if activation is not None:
        check_word("activation", activation, (None, *_AFTER_ONE))
    if _multiplies_integers(x, {"w": w}, precision):
        layer = quantized_weight("linear", "w", w)
        values, scale = quantized_rows("linear", x)
        arrays = (values, layer.values, bias, residual, scale, layer.scale)
        (out,) = run(LINEAR_INT8, arrays, (activation, _out_dtype(x, out_dtype), kernel))
        return out
    word = None if out_dtype is None else dtype_name("out_dtype", out_dtype)
    out, *_ = run(LINEAR, (x, w, bias, residual), (activation, word, False, kernel))
    return out


@overload
def swiglu(
    x: ArrayT,
    gate: Weight,
    up: Weight,
    gate_bias: FrameworkArray | None = None,
    up_bias: FrameworkArray | None = None,
    *,
    out_dtype: None = None,
    **words: Unpack[_SwigluWords],
) -> ArrayT: ...
@overload
def swiglu(
    x: np.ndarray[Any, Any],
    gate: Weight,
    up: Weight,
    gate_bias: FrameworkArray | None = None,
    up_bias: FrameworkArray | None = None,
    *,
    out_dtype: DType,
    **words: Unpack[_SwigluWords],
) -> NDArray[Any]: ...
@overload
def swiglu(
    x: TensorT,
    gate: Weight,
    up: Weight,
    gate_bias: FrameworkArray | None = None,
    up_bias: FrameworkArray | None = None,
    *,
    out_dtype: DType,
    **words: Unpack[_SwigluWords],
) -> TensorT: ...
def swiglu(
    x: Any,
    gate: Weight,
    up: Weight,
    gate_bias: FrameworkArray | None = None,
    up_bias: FrameworkArray | None = None,
    *,
    residual: FrameworkArray | None = None,
    precision: LinearPrecision | None = None,
    out_dtype: DType | None = None,
    kernel: str | None = None,
) -> Any:
    """silu(x gate + gate_bias) · (x up + up_bias) + residual in one pass over x: the first half of a Llama MLP.

    Args:
        x: `[..., K]`, float32, float16 or bfloat16.
        gate, up: `[K, N]` each, like w of `linear`; they may be two halves of one array.
        gate_bias, up_bias: `[N]`, in the same dtype.

    The other arguments are those of `linear`. Differentiable in PyTorch and JAX, except with precision "int8".

    Example:
        >>> import numpy as np
        >>> import qflash
        >>> x, w = np.ones((2, 3), np.float32), np.full((3, 4), 0.5, np.float32)
        >>> qflash.swiglu(x, w, 2 * w).round(4)[0]  # silu(1.5) * 3
        array([3.6791, 3.6791, 3.6791, 3.6791], dtype=float32)
    """
    if _multiplies_integers(x, {"gate": gate, "up": up}, precision):
        first, second = (quantized_weight("swiglu", name, w) for name, w in (("gate", gate), ("up", up)))
        values, scale = quantized_rows("swiglu", x)
        arrays = (
            *(values, first.values, second.values, gate_bias, up_bias, residual),
            *(scale, first.scale, second.scale),
        )
        (out,) = run(SWIGLU_INT8, arrays, (_out_dtype(x, out_dtype), kernel))
        return out
    word = None if out_dtype is None else dtype_name("out_dtype", out_dtype)
    out, *_ = run(SWIGLU, (x, gate, up, gate_bias, up_bias, residual), (word, False, kernel))
    return out


def _multiplies_integers(x: Any, weights: dict[str, Any], precision: Any) -> bool:
    """Whether weights are quantized, or will be. Raises errors that would otherwise be raised only after quantizing."""
    if precision is not None:
        check_word("precision", precision, (None, "int8"))
    (first, w), *more = weights.items()
    for name, other in more:
        if precision is None and isinstance(w, QuantizedLinear) != isinstance(other, QuantizedLinear):
            raise TypeError(
                f"{name} is a {type(other).__name__} and {first} a {type(w).__name__}; allowed: both are "
                "QuantizedLinear, or neither"
            )
    if precision is None and not isinstance(w, QuantizedLinear):
        return False
    frontend = frontend_of(type(x), "x")
    for name, w in weights.items():
        if isinstance(w, QuantizedLinear):
            continue
        if w is None or frontend_of(type(w), name) is not frontend:
            kind = f"{type(w).__module__}.{type(w).__qualname__}"
            raise TypeError(f"{name} is {kind}; allowed: a matrix [K, N] of x's framework, or qflash.QuantizedLinear")
        if x.shape:
            check_inputs(name, w, x.shape[-1])
    return True


def _out_dtype(x: Any, out_dtype: Any) -> str:
    return dtype_name("x", x.dtype) if out_dtype is None else dtype_name("out_dtype", out_dtype)


def _plan(
    x: Array,
    w: Array | None,
    bias: Array | None,
    residual: Array | None,
    activation: Any,
    out_dtype: Any,
    keep_pre: Any,
    kernel: Any,
) -> Plan:
    return plan_layer(ONE_WEIGHT, x, (w,), (bias,), residual, activation or "", out_dtype, keep_pre, kernel)


def _plan_swiglu(
    x: Array,
    gate: Array | None,
    up: Array | None,
    gate_bias: Array | None,
    up_bias: Array | None,
    residual: Array | None,
    out_dtype: Any,
    keep_pre: Any,
    kernel: Any,
) -> Plan:
    biases = gate_bias, up_bias
    return plan_layer(GATE_AND_UP, x, (gate, up), biases, residual, "swiglu", out_dtype, keep_pre, kernel)


def _plan_int8(
    x: Array,
    w: Array | None,
    bias: Array | None,
    residual: Array | None,
    x_scale: Array | None,
    w_scale: Array | None,
    activation: Any,
    out_dtype: Any,
    kernel: Any,
) -> Plan:
    word = activation or ""
    return plan_int8_layer(ONE_WEIGHT, x, (w,), (bias,), residual, x_scale, (w_scale,), word, out_dtype, kernel)


def _plan_swiglu_int8(
    x: Array,
    gate: Array | None,
    up: Array | None,
    gate_bias: Array | None,
    up_bias: Array | None,
    residual: Array | None,
    x_scale: Array | None,
    gate_scale: Array | None,
    up_scale: Array | None,
    out_dtype: Any,
    kernel: Any,
) -> Plan:
    weights, biases, scales = (gate, up), (gate_bias, up_bias), (gate_scale, up_scale)
    return plan_int8_layer(GATE_AND_UP, x, weights, biases, residual, x_scale, scales, "swiglu", out_dtype, kernel)


def _folds(mapped: Collection[str], ranks: dict[str, int], words: dict[str, Any]) -> bool:
    """Mapped rows are more rows."""
    return set(mapped) == {"x", "residual", "x_scale"} & set(ranks)


def _flops(arrays: dict[str, Any], words: dict[str, Any], _: Any) -> int:
    k = arrays["x"].shape[-1]
    weights = [arrays[name] for name in ("w", "gate", "up") if name in arrays]
    return sum(2 * math.prod(arrays["x"].shape) * (math.prod(w.shape) // max(k, 1)) for w in weights)


# Dimensions as `dims_with_rows` takes them; integer weights are transposed.
_DIMS = {
    "x": "*k", "w": "kN", "gate": "kN", "up": "kN", "bias": "N", "gate_bias": "N", "up_bias": "N", "residual": "*N",
    "x_scale": "*", "w.scale": "N", "gate.scale": "N", "up.scale": "N", "out": "*N", "pre": "*N", "pre_up": "*N",
}  # fmt: skip
_DIMS_INT8 = _DIMS | dict.fromkeys(("w", "gate", "up"), "Nk")


def _op(name: str, arrays: Sequence[str], words: Sequence[str], **more: Any) -> Op:
    dims = dims_with_rows(_DIMS_INT8 if "x_scale" in arrays else _DIMS)
    return Op(name, tuple(arrays), tuple(words), folds=_folds, dims=dims, flops=_flops, kernels_of="linear", **more)


_ONE, _TWO = ("x", "w", "bias", "residual"), ("x", "gate", "up", "gate_bias", "up_bias", "residual")
# Autocast does not cast the residual: rounding would lose what a sum over many layers is kept in float32 for.
LINEAR = _op(
    "linear",
    _ONE,
    ("activation", "out_dtype", "keep_pre", "kernel"),
    plan=_plan,
    results=("out", "pre"),
    autocast=_ONE[:-1],
    gradient=Gradient(LINEAR_BACKWARD, _ONE[:-1], {"keep_pre": True}, passed=("residual",)),
)
SWIGLU = _op(
    "swiglu",
    _TWO,
    ("out_dtype", "keep_pre", "kernel"),
    plan=_plan_swiglu,
    results=("out", "pre", "pre_up"),
    autocast=_TWO[:-1],
    gradient=Gradient(SWIGLU_BACKWARD, _TWO[:-1], {"keep_pre": True}, passed=("residual",)),
)
LINEAR_INT8 = _op(
    "linear_int8",
    (*_ONE, "x_scale", "w.scale"),
    ("activation", "out_dtype", "kernel"),
    plan=_plan_int8,
    results=("out",),
    public="linear in INT8",
)
SWIGLU_INT8 = _op(
    "swiglu_int8",
    (*_TWO, "x_scale", "gate.scale", "up.scale"),
    ("out_dtype", "kernel"),
    plan=_plan_swiglu_int8,
    results=("out",),
    public="swiglu in INT8",
)
