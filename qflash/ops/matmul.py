"""int8_matmul: an exact integer product, scaled in the epilogue."""

from __future__ import annotations

import math
from collections.abc import Collection
from numbers import Real
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from qflash.call.array import Array, check_device, check_dtype, check_shape, dtype_code, dtype_name, row_stride
from qflash.call.op import Op, Operand, Plan, Result
from qflash.call.spec import spec_of
from qflash.call.words import check_kernel, check_number
from qflash.frontends.choose import frontend_of
from qflash.ops.matrices import MOST_INT8_K, Fields, dims_with_rows, layout_of, scale_operand
from qflash.ops.run import run
from qflash.typing import DType, FrameworkArray, Number, TensorT

OUT_DTYPES = ("int32", "float32", "float16", "bfloat16")


@overload
def int8_matmul(
    a: np.ndarray[Any, Any],
    b: FrameworkArray,
    a_scale: FrameworkArray | Number | None = None,
    b_scale: FrameworkArray | Number | None = None,
    bias: FrameworkArray | None = None,
    out_dtype: DType | None = None,
    *,
    kernel: str | None = None,
) -> NDArray[Any]: ...
@overload
def int8_matmul(
    a: TensorT,
    b: FrameworkArray,
    a_scale: FrameworkArray | Number | None = None,
    b_scale: FrameworkArray | Number | None = None,
    bias: FrameworkArray | None = None,
    out_dtype: DType | None = None,
    *,
    kernel: str | None = None,
) -> TensorT: ...
def int8_matmul(
    a: Any,
    b: FrameworkArray,
    a_scale: FrameworkArray | Number | None = None,
    b_scale: FrameworkArray | Number | None = None,
    bias: FrameworkArray | None = None,
    out_dtype: DType | None = None,
    *,
    kernel: str | None = None,
) -> Any:
    """Product a b of int8 matrices, accumulated exactly in int32, then `a_scale · b_scale · sum + bias`.

    Args:
        a: int8 `[..., M, K]`, of NumPy, PyTorch or JAX. K is at most 131071.
        b: int8 `[K, N]`; either dimension may be contiguous.
        a_scale: a number, or float32 with one element or one for each row of a (`a.shape[:-1]`).
        b_scale: a number, or float32 with one element or one for each column, `[N]`.
        bias: float32 `[N]`.
        out_dtype: "int32" (the default without scales and bias, and allowed only then), "float32" (the default
            otherwise), "float16" or "bfloat16", or the framework's own dtype object.
        kernel: name of the kernel that must be used.

    Returns:
        `[..., M, N]`. Forward only.

    Example:
        >>> import numpy as np
        >>> import qflash
        >>> a, b = np.full((2, 3), 100, np.int8), np.full((3, 2), -100, np.int8)
        >>> qflash.int8_matmul(a, b)
        array([[-30000, -30000],
               [-30000, -30000]], dtype=int32)
        >>> qflash.int8_matmul(a, b, a_scale=0.01, b_scale=0.01).dtype
        dtype('float32')
    """
    frontend = frontend_of(type(a), "a")
    a_scale, b_scale = (
        frontend.scalar(check_number(name, scale), a) if isinstance(scale, Real) else scale
        for name, scale in (("a_scale", a_scale), ("b_scale", b_scale))
    )
    name = None if out_dtype is None else dtype_name("out_dtype", out_dtype)
    (out,) = run(INT8_MATMUL, (a, b, a_scale, b_scale, bias), (name, kernel))
    return out


def _plan(
    a: Array,
    b: Array | None,
    a_scale: Array | None,
    b_scale: Array | None,
    bias: Array | None,
    out_dtype: Any,
    kernel: Any,
) -> Plan:
    if b is None:
        raise TypeError("b is None; allowed: an int8 matrix, [K, N]")
    for name, matrix in (("a", a), ("b", b)):
        check_dtype(name, matrix, "int8")
    if len(a.shape) < 2:
        raise ValueError(f"a has shape {list(a.shape)}; allowed: rank 2 or more, [..., M, K]")
    if len(b.shape) != 2:
        raise ValueError(f"b has shape {list(b.shape)}; allowed: rank 2, [K, N]")
    k, n = b.shape
    if a.shape[-1] != k:
        raise ValueError(f"b has shape {list(b.shape)}; allowed: as many rows as a has columns, {a.shape[-1]}")
    if isinstance(k, int) and k > MOST_INT8_K:
        raise ValueError(f"a has {k} columns; allowed: at most {MOST_INT8_K}, so that no int32 sum can overflow")
    check_device("b", b, "a", a.device)
    stride = row_stride(a)
    layout = layout_of(b)
    operands = [Operand("a", "x", contiguous=stride is None), Operand("b", "w", contiguous=layout is None)]
    contiguous_dim, stride_k, stride_n = layout or ("n", n, 1)
    strides: Fields = []
    for name, field, array, each in (
        ("a_scale", "x_scale", a_scale, a.shape[:-1]),
        ("b_scale", "w_scale", b_scale, (n,)),
    ):
        more, fields = scale_operand(name, field, array, each, a.device, "a")
        operands += more
        strides += fields
    if bias is not None:
        check_dtype("bias", bias, "float32")
        check_shape("bias", bias, (n,))
        check_device("bias", bias, "a", a.device)
        operands.append(Operand("bias", "bias", contiguous=True))
    whole = len(operands) == 2  # no scales, no bias: the result is the accumulators
    if out_dtype is None:
        out_dtype = "int32" if whole else "float32"
    allowed = OUT_DTYPES if whole else OUT_DTYPES[1:]
    if out_dtype not in allowed:
        why = "" if whole else ", because scales or bias were given"
        raise ValueError(f"out_dtype is {out_dtype!r}; allowed: {', '.join(map(repr, allowed))}{why}")
    return Plan(
        for_spec=spec_of("linear", a.device, out_dtype, precision="int8", layout=contiguous_dim),
        device=a.device,
        kernel=check_kernel(kernel),
        struct="QfLinearParams",
        fields=(
            ("dtype", dtype_code("int8")),
            ("out_dtype", dtype_code(out_dtype)),
            ("bias_dtype", dtype_code("float32")),
            ("m", math.prod(a.shape[:-1])),
            ("n", n),
            ("k", k),
            ("x_stride_m", k if stride is None else stride),
            ("x_stride_k", 1),
            ("w_stride_k", stride_k),
            ("w_stride_n", stride_n),
            ("out_stride_m", n),
            *strides,
        ),
        operands=tuple(operands),
        results=(Result("out", (*a.shape[:-1], n), out_dtype),),
    )


def _folds(mapped: Collection[str], ranks: dict[str, int], words: dict[str, Any]) -> bool:
    """Samples of a are more rows, unless each of its rows has a scale."""
    return set(mapped) == {"a"} and ranks.get("a_scale", 0) == 0


INT8_MATMUL = Op(
    "int8_matmul",
    ("a", "b", "a_scale", "b_scale", "bias"),
    ("out_dtype", "kernel"),
    _plan,
    results=("out",),
    folds=_folds,
    dims=dims_with_rows({"a": "*k", "b": "kN", "a_scale": "*", "b_scale": "N", "bias": "N", "out": "*N"}),
    kernels_of="linear",
    flops=lambda arrays, *_: 2 * math.prod(arrays["a"].shape) * int(arrays["b"].shape[1]),
)
