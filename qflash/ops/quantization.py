"""quantize and dequantize: arrays to int8 with scales, and back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, overload

import numpy as np
from numpy.typing import NDArray

from qflash.call.array import Array, check_device, check_dtype, check_float, check_shape, dtype_code, dtype_name
from qflash.call.op import Op, Operand, Plan, Result
from qflash.call.spec import DTYPES, spec_of
from qflash.call.words import INT32_MAX, check_flag, check_int, check_kernel, check_word
from qflash.ops.problem import FULL_TABLES, TABLE_FORM
from qflash.ops.run import run
from qflash.rotary import Rope
from qflash.typing import (
    ArrayT,
    ArrayT_co,
    DType,
    Flag,
    Granularity,
    Integer,
    Lengths,
    Rounding,
    TensorT,
)

GRANULARITIES = ("tensor", "token", "group")
ROUNDINGS = ("nearest", "stochastic")
_PER_TENSOR, _PER_GROUP = 0, 1  # QfGranularity
_MOST_ROTATED = 2048  # channels that a block of the CUDA kernel holds at once: kWide


@dataclass(frozen=True, slots=True, eq=False)
class Quantized(Generic[ArrayT_co]):
    """int8 values with what dequantizes them: x ~ scale · (values - zero_point) + mean. Returned by `quantize`.

    Args:
        values: int8, shaped like x.
        scale: float32: one number for granularity "tensor", `[B, H, T]` for "token", `[B, H, ceil(T / group)]` for
            "group".
        zero_point: int32, one number; None if symmetric.
        mean: float32 `[B, H, D]`, the mean that smoothing subtracted; None without smoothing.
        sums: int32 `[B, H, T]`, the sum of each token's values, with which an integer product corrects for the zero
            point; None if symmetric.
        granularity, group, symmetric: as passed to `quantize`.
        dtype: x's dtype.

    For a matrix x `[T, D]`, B and H are omitted.

    Example:
        >>> import numpy as np
        >>> import qflash
        >>> x = np.random.default_rng(0).standard_normal((1, 128, 2, 64), np.float32)
        >>> q, k = qflash.quantize(x, granularity="token"), qflash.quantize(x, granularity="group", smooth=True)
        >>> k.values.dtype, k.scale.shape, k.mean.shape
        (dtype('int8'), (1, 2, 8), (1, 2, 64))
        >>> qflash.attention(q, k, x).shape  # k is quantized once for many calls
        (1, 128, 2, 64)
    """

    values: ArrayT_co
    scale: ArrayT_co
    zero_point: ArrayT_co | None = None
    mean: ArrayT_co | None = None
    sums: ArrayT_co | None = None
    granularity: Granularity = "tensor"
    group: int = 16
    symmetric: bool = True
    dtype: str = "float32"

    def __post_init__(self) -> None:
        # JAX must have this class registered before jit sees an instance, possibly before the first call.
        if type(self.values).__module__.partition(".")[0] in ("jax", "jaxlib"):
            import qflash.frontends.jax  # noqa: F401


@overload
def quantize(
    x: np.ndarray[Any, Any],
    *,
    granularity: Granularity = "tensor",
    group: Integer = 16,
    symmetric: Flag = True,
    smooth: Flag = False,
    rope: Rope | None = None,
    lens: Lengths | None = None,
    rounding: Rounding = "nearest",
    seed: Integer = 0,
    kernel: str | None = None,
) -> Quantized[NDArray[Any]]: ...
@overload
def quantize(
    x: TensorT,
    *,
    granularity: Granularity = "tensor",
    group: Integer = 16,
    symmetric: Flag = True,
    smooth: Flag = False,
    rope: Rope | None = None,
    lens: Lengths | None = None,
    rounding: Rounding = "nearest",
    seed: Integer = 0,
    kernel: str | None = None,
) -> Quantized[TensorT]: ...
def quantize(
    x: Any,
    *,
    granularity: Granularity = "tensor",
    group: Integer = 16,
    symmetric: Flag = True,
    smooth: Flag = False,
    rope: Rope | None = None,
    lens: Lengths | None = None,
    rounding: Rounding = "nearest",
    seed: Integer = 0,
    kernel: str | None = None,
) -> Quantized[Any]:
    """Quantize x to int8 with scales, in one pass that can also rotate and smooth it.

    Args:
        x: `[B, T, H, D]`, or a matrix `[T, D]`, of NumPy, PyTorch or JAX; float32, float16 or bfloat16.
        granularity: one scale for the "tensor", for each "token" of a head, or for each "group" of tokens of a head.
        group: the number of tokens of a group.
        symmetric: values from -127 to 127 around 0; False (only with granularity "tensor"): -128 to 127 with a zero
            point.
        smooth: first subtract the mean over tokens from each channel of a head.
        rope: rotate first; token t is at position t, or at `rope.positions_k`.
        lens: int32 `[B]`, the number of valid tokens of each sequence; the others become 0.
        rounding: "nearest" (ties to even) or "stochastic", which rounds up with a probability equal to the fraction
            that is cut off.
        seed: of stochastic rounding; the same seed gives the same bits.
        kernel: name of the kernel that must be used.

    Returns:
        A `Quantized`. Forward only.

    Symmetric: a token with NaN or an infinity is -128 throughout and is dequantized to NaN. Asymmetric: one such number
    makes the scale NaN, and with it all dequantized values.

    Example:
        >>> import numpy as np
        >>> import qflash
        >>> x = np.array([[1.27, -0.5, 0.004]], np.float32)
        >>> quantized = qflash.quantize(x)
        >>> quantized.values
        array([[127, -50,   0]], dtype=int8)
        >>> round(float(quantized.scale), 6)
        0.01
    """
    cos, sin, positions_q, positions, interleaved = tables_of(rope)
    if positions_q is not None:
        raise ValueError("rope.positions_q is given; allowed: None, x's tokens stand at rope.positions_k")
    words = (granularity, group, symmetric, smooth, rounding, seed, interleaved, kernel)
    values, scale, *more = run(QUANTIZE, (x, lens, cos, sin, positions), words)
    mean = more[-1] if smooth else None
    zero_point, sums = (None, None) if symmetric else more[:2]
    dtype = dtype_name("x", x.dtype)
    return Quantized(values, scale, zero_point, mean, sums, granularity, int(group), bool(symmetric), dtype)


def dequantize(quantized: Quantized[ArrayT], dtype: DType | None = None, *, kernel: str | None = None) -> ArrayT:
    """The array that `quantized` represents, in `dtype` (None: the dtype of the original array).

    Example:
        >>> import numpy as np
        >>> import qflash
        >>> x = np.random.default_rng(0).standard_normal((1, 128, 2, 64), np.float32)
        >>> back = qflash.dequantize(qflash.quantize(x, granularity="token"))
        >>> bool(np.abs(back - x).max() < 0.02)
        True
    """
    if not isinstance(quantized, Quantized):
        raise TypeError(f"quantized is {type(quantized).__name__}; allowed: qflash.Quantized")
    name = quantized.dtype if dtype is None else dtype_name("dtype", dtype)
    arrays = (quantized.values, quantized.scale, quantized.zero_point, quantized.mean)
    words = (quantized.granularity, quantized.group, quantized.symmetric, name, kernel)
    out: ArrayT
    (out,) = run(DEQUANTIZE, arrays, words)
    return out


@dataclass(frozen=True, slots=True)
class Shape:
    """x or values as [batch, length, heads, head_dim], and the shapes of the arrays that belong to it."""

    batch: int
    length: int
    heads: int
    head_dim: int
    matrix: bool

    def fields(self) -> tuple[tuple[str, int], ...]:
        return tuple((name, getattr(self, name)) for name in ("batch", "length", "heads", "head_dim"))

    def per_head(self, extent: int) -> tuple[int, ...]:
        return (extent,) if self.matrix else (self.batch, self.heads, extent)

    def scale(self, granularity: str, group: int) -> tuple[int, ...]:
        return () if granularity == "tensor" else self.per_head((self.length + group - 1) // group)

    def strides(self, field: str) -> tuple[tuple[str, int], ...]:
        """Those of a contiguous array of this shape, by the struct's names."""
        row = self.heads * self.head_dim
        return _strides(field, (self.length * row, row, self.head_dim))

    def strides_of(self, field: str, array: Array) -> tuple[tuple[str, int], ...] | None:
        """Those of an array of this shape, by the struct's names; None: the kernel takes a contiguous copy."""
        if array.strides is None or 0 in array.shape:
            return self.strides(field)
        strides = array.strides
        if (strides[-1] != 1 and self.head_dim != 1) or any(stride < 0 for stride in strides):
            return None
        return _strides(field, (0, strides[0], self.head_dim) if self.matrix else strides[:-1])


def _strides(field: str, strides: Sequence[int]) -> tuple[tuple[str, int], ...]:
    return tuple((f"{field}.stride_{dim}", stride) for dim, stride in zip("bth", strides, strict=True))


def shape_of(name: str, array: Array) -> Shape:
    """The shape of an array to quantize, checked."""
    if len(array.shape) not in (2, 4):
        raise ValueError(f"{name} has shape {list(array.shape)}; allowed: [B, T, H, D], or a matrix [T, D]")
    matrix = len(array.shape) == 2
    batch, length, heads, head_dim = (1, array.shape[0], 1, array.shape[1]) if matrix else array.shape
    shape = Shape(batch, length, heads, head_dim, matrix)
    for what, extent in (("heads", shape.heads), ("columns", shape.head_dim)):
        if extent == 0:
            raise ValueError(f"{name} has shape {list(array.shape)}; allowed: 1 or more {what}")
    if any(isinstance(extent, int) and extent > INT32_MAX for extent in array.shape):
        raise ValueError(f"{name} has shape {list(array.shape)}; allowed: every extent below 2^31")
    return shape


def _check_scales(
    granularity: Any, group: Any, symmetric: Any, owner: str = ""
) -> tuple[tuple[tuple[str, int], ...], int]:
    """The struct's fields, and the number of tokens that share a scale. `owner`: prefix of the argument names."""
    check_word(f"{owner}granularity", granularity, GRANULARITIES)
    group = check_int(f"{owner}group", group, 1, INT32_MAX)
    if not check_flag(f"{owner}symmetric", symmetric) and granularity != "tensor":
        raise ValueError(f"{owner}symmetric is False; allowed: True with granularity {granularity!r}")
    per_scale = group if granularity == "group" else 1
    code = _PER_TENSOR if granularity == "tensor" else _PER_GROUP
    return (("granularity", code), ("group", per_scale), ("symmetric", int(symmetric))), per_scale


def _plan_quantize(
    x: Array,
    lens: Array | None,
    cos: Array | None,
    sin: Array | None,
    positions: Array | None,
    granularity: Any,
    group: Any,
    symmetric: Any,
    smooth: Any,
    rounding: Any,
    seed: Any,
    interleaved: Any,
    kernel: Any,
) -> Plan:
    check_float("x", x)
    shape = shape_of("x", x)
    scale_fields, per_scale = _check_scales(granularity, group, symmetric)
    strides = shape.strides_of("x", x)
    operands = [Operand("x", "x.data", contiguous=strides is None)]
    if lens is not None:
        check_dtype("lens", lens, "int32")
        check_shape("lens", lens, (shape.batch,))
        check_device("lens", lens, "x", x.device)
        operands.append(Operand("lens", "lens", contiguous=True))
    rope_fields, rope_operands = check_rope(shape, x.device, cos, sin, positions, interleaved)
    results = [
        Result("values.data", x.shape, "int8"),
        Result("scale", shape.scale(granularity, per_scale), "float32"),
    ]
    if not symmetric:
        results += [Result("zero_point", (), "int32"), Result("sums", shape.per_head(shape.length), "int32")]
    if check_flag("smooth", smooth):
        results.append(Result("mean", shape.per_head(shape.head_dim), "float32"))
    return Plan(
        for_spec=spec_of("quantize", x.device, x.dtype),
        device=x.device,
        kernel=check_kernel(kernel),
        struct="QfQuantizeParams",
        fields=(
            ("dtype", dtype_code(x.dtype)),
            *shape.fields(),
            *scale_fields,
            ("rounding", ROUNDINGS.index(check_word("rounding", rounding, ROUNDINGS))),
            ("smooth", int(smooth)),
            ("seed", check_int("seed", seed, 0, 2**63 - 1)),
            *(strides or shape.strides("x")),
            *shape.strides("values"),
            *rope_fields,
        ),
        operands=(*operands, *rope_operands),
        results=tuple(results),
    )


def tables_of(rope: Rope | None) -> tuple[Any, Any, Any, Any, Flag]:
    """cos, sin, positions_q, positions_k and interleaved of an optional Rope."""
    if rope is None:
        return None, None, None, None, False
    if not isinstance(rope, Rope):
        raise TypeError(f"rope is {type(rope).__name__}; allowed: None or qflash.Rope")
    for name in ("cos", "sin"):
        if getattr(rope, name) is None:  # to a plan, None would mean no rope
            raise TypeError(f"rope.{name} is None; allowed: an array, [positions, rotary_dim / 2]")
    return rope.cos, rope.sin, rope.positions_q, rope.positions_k, rope.interleaved


def check_tables(cos: Array, sin: Array, head_dim: int, of: str, device: str) -> tuple[int, int]:
    """The rows and columns of a Rope's tables, checked for argument `of`."""
    for name, array in (("rope.cos", cos), ("rope.sin", sin)):
        check_float(name, array)
        if len(array.shape) != 2 or array.shape[1] < 1:
            raise ValueError(f"{name} has shape {list(array.shape)}; allowed: {TABLE_FORM}{FULL_TABLES}")
        check_device(name, array, of, device)
    check_shape("rope.sin", sin, cos.shape)
    rows, half = cos.shape
    if 2 * half > head_dim:
        advice = FULL_TABLES if half == head_dim else ""
        raise ValueError(f"rope.cos has {half} columns; allowed: at most half of {of}'s, {head_dim / 2:g}{advice}")
    return rows, half


def check_rope(
    shape: Shape,
    device: str,
    cos: Array | None,
    sin: Array | None,
    positions: Array | None,
    interleaved: Any,
    of: str = "x",
    prefix: str = "",
    needed: int | None = None,
) -> tuple[tuple[tuple[str, int], ...], tuple[Operand, ...]]:
    """The struct's fields and operands of a Rope for the keys of argument `of`. `prefix`: of field names.

    needed: number of rows that the tables must have; None: one for each token, unless positions are given.
    """
    if cos is None or sin is None:  # both or neither: see tables_of
        return (), ()
    rows, half = check_tables(cos, sin, shape.head_dim, of, device)
    if shape.head_dim > _MOST_ROTATED:
        raise ValueError(f"rope is given for {of} of {shape.head_dim} columns; allowed: up to {_MOST_ROTATED}")
    operands = [Operand(name, prefix + name, contiguous=True, dtype="float32") for name in ("rope.cos", "rope.sin")]
    least, stride = shape.length, 0
    if positions is not None:
        check_dtype("rope.positions_k", positions, "int32")
        check_shape("rope.positions_k", positions, (shape.length,), (shape.batch, shape.length))
        check_device("rope.positions_k", positions, of, device)
        operands.append(Operand("rope.positions_k", f"{prefix}rope.positions_k", contiguous=True))
        stride = shape.length if len(positions.shape) == 2 else 0
        least = 0 if 0 in positions.shape else 1  # any position needs at least one row
    least = least if needed is None else needed
    if rows < least:
        raise ValueError(f"rope.cos has {rows} rows; allowed: at least {least}, one for each position in use")
    fields = (
        (f"{prefix}rope.rows", rows),
        (f"{prefix}rope.rotary_dim", 2 * half),
        (f"{prefix}rope.interleaved", int(bool(interleaved))),
        (f"{prefix}rope.stride_positions_k_b", stride),
    )
    return fields, tuple(operands)


def _plan_dequantize(
    values: Array,
    scale: Array | None,
    zero_point: Array | None,
    mean: Array | None,
    granularity: Any,
    group: Any,
    symmetric: Any,
    dtype: Any,
    kernel: Any,
) -> Plan:
    check_dtype("quantized.values", values, "int8")
    shape = shape_of("quantized.values", values)
    scale_fields, per_scale = _check_scales(granularity, group, symmetric, "quantized.")
    if dtype not in DTYPES:
        raise ValueError(f"dtype is {dtype!r}; allowed: {', '.join(map(repr, DTYPES))}")
    if (zero_point is None) != symmetric:
        came, allowed = ("given", "None") if symmetric else ("None", "an int32 array of one element")
        raise ValueError(f"quantized.zero_point is {came} and quantized.symmetric {symmetric}; allowed: {allowed}")
    strides = shape.strides_of("values", values)
    operands = [Operand("quantized.values", "values.data", contiguous=strides is None)]
    for field, array, kind, shapes in (
        ("scale", scale, "float32", ((), (1,)) if granularity == "tensor" else (shape.scale(granularity, per_scale),)),
        ("zero_point", zero_point, "int32", ((), (1,))),
        ("mean", mean, "float32", (shape.per_head(shape.head_dim),)),
    ):
        name = f"quantized.{field}"
        if array is not None:
            check_dtype(name, array, kind)
            check_shape(name, array, *shapes)
            check_device(name, array, "quantized.values", values.device)
            operands.append(Operand(name, field, contiguous=True))
        elif field == "scale":
            raise TypeError("quantized.scale is None; allowed: an array of float32")
    return Plan(
        for_spec=spec_of("dequantize", values.device, dtype),
        device=values.device,
        kernel=check_kernel(kernel),
        struct="QfDequantizeParams",
        fields=(
            ("dtype", dtype_code(dtype)),
            *shape.fields(),
            *scale_fields,
            *(strides or shape.strides("values")),
            *shape.strides("out"),
        ),
        operands=tuple(operands),
        results=(Result("out.data", values.shape, dtype),),
    )


QUANTIZE = Op(
    "quantize",
    ("x", "lens", "rope.cos", "rope.sin", "rope.positions_k"),
    ("granularity", "group", "symmetric", "smooth", "rounding", "seed", "interleaved", "kernel"),
    _plan_quantize,
    checked=("lens", "rope.positions_k"),
    indices=("lens", "rope.positions_k"),
)
DEQUANTIZE = Op(
    "dequantize",
    ("quantized.values", "quantized.scale", "quantized.zero_point", "quantized.mean"),
    ("granularity", "group", "symmetric", "dtype", "kernel"),
    _plan_dequantize,
)
