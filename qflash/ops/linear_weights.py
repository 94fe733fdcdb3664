"""Weights of linear layers in INT8, and the pass that quantizes rows, with one scale per row."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, overload

import numpy as np
from numpy.typing import NDArray

from qflash.call.array import Array, check_float, dtype_code, dtype_name, row_stride
from qflash.call.op import Op, Operand, Plan, Result
from qflash.call.spec import spec_of
from qflash.call.words import INT32_MAX
from qflash.frontends.choose import frontend_of
from qflash.ops.matrices import dims_with_rows
from qflash.ops.run import run
from qflash.typing import ArrayT_co, TensorT


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedLinear(Generic[ArrayT_co]):
    """A weight in INT8 with a scale for each output channel. Returned by `quantize_linear`.

    Args:
        values: int8 `[N, K]`, one output channel per row, so that kernels read contiguous memory whatever the layout
            of the weight was.
        scale: float32 `[N]`; w[k, n] ~ scale[n] · values[n, k].
        dtype: the dtype of the weight.

    Example:
        >>> import numpy as np
        >>> import qflash
        >>> layer = qflash.quantize_linear(np.eye(4, 3, dtype=np.float32))
        >>> layer.values.shape, layer.scale.shape
        ((3, 4), (3,))
    """

    values: ArrayT_co
    scale: ArrayT_co
    dtype: str = "float32"

    def __post_init__(self) -> None:
        # JAX must have this class registered before jit sees an instance, possibly before the first call.
        if type(self.values).__module__.partition(".")[0] in ("jax", "jaxlib"):
            import qflash.frontends.jax  # noqa: F401


@overload
def quantize_linear(w: np.ndarray[Any, Any]) -> QuantizedLinear[NDArray[Any]]: ...
@overload
def quantize_linear(w: TensorT) -> QuantizedLinear[TensorT]: ...
def quantize_linear(w: Any) -> QuantizedLinear[Any]:
    """Quantize the weight of `linear`, `[K, N]`, to INT8: symmetric, -127 to 127, with a scale per output channel.

    Args:
        w: `[K, N]`, float32, float16 or bfloat16.

    Returns:
        A `QuantizedLinear`, made once per layer: `linear` and `swiglu` take it instead of the weight. A channel that
        contains NaN or an infinity has scale NaN, and its results are NaN. Forward only.

    Example:
        >>> import numpy as np
        >>> import qflash
        >>> w = np.random.default_rng(0).standard_normal((64, 32), np.float32)
        >>> x = np.random.default_rng(1).standard_normal((5, 64), np.float32)
        >>> error = qflash.linear(x, qflash.quantize_linear(w)) - x @ w
        >>> bool(np.abs(error).max() < 0.5)
        True
    """
    return quantized_weight("quantize_linear", "w", w)


def quantized_weight(function: str, name: str, w: Any) -> QuantizedLinear[Any]:
    """The weight that `function` calls `name`, quantized; returned as it is if it already is."""
    if isinstance(w, QuantizedLinear) and function != "quantize_linear":
        return w
    frontend_of(type(w), name)
    shape = tuple(w.shape)
    if len(shape) != 2 or shape[0] == 0:
        raise ValueError(f"{name} has shape {list(shape)}; allowed: rank 2, [K, N], with K 1 or more")
    values, scale = run(_QUANTIZE[function, name], (w.T,), ())
    return QuantizedLinear(values, scale, dtype_name(name, w.dtype))


def quantized_rows(function: str, x: Any) -> tuple[Any, Any]:
    """int8 `[..., K]` and a float32 scale for each row of the x of `function`. A row that contains NaN or an infinity
    has scale NaN."""
    values, scale = run(_QUANTIZE[function, "x"], (x,), ())
    return values, scale


def _plan_rows(name: str, x: Array) -> Plan:
    check_float(name, x)
    if len(x.shape) < 1 or x.shape[-1] == 0:
        raise ValueError(f"{name} has shape {list(x.shape)}; allowed: [..., K], with K 1 or more")
    rows, columns = math.prod(x.shape[:-1]), x.shape[-1]
    for what, extent in (("rows", rows), ("columns", columns)):
        if isinstance(extent, int) and extent > INT32_MAX:
            raise ValueError(f"{name} has {extent} {what}; allowed: fewer than 2^31")
    stride = row_stride(x)
    return Plan(
        for_spec=spec_of("quantize", x.device, x.dtype),
        device=x.device,
        kernel=None,
        struct="QfQuantizeParams",
        fields=(
            ("dtype", dtype_code(x.dtype)),
            ("batch", 1),
            ("length", rows),
            ("heads", 1),
            ("head_dim", columns),
            ("granularity", 1),  # QF_PER_GROUP, one row per group
            ("group", 1),
            ("symmetric", 1),
            ("x.stride_t", columns if stride is None else stride),
            ("x.stride_h", columns),
            ("values.stride_t", columns),
            ("values.stride_h", columns),
        ),
        operands=(Operand(name, "x.data", contiguous=stride is None),),
        results=(Result("values.data", x.shape, "int8"), Result("scale", x.shape[:-1], "float32")),
    )


def _more_rows(mapped: Collection[str], ranks: dict[str, int], words: dict[str, Any]) -> bool:
    return True


def _op(function: str, name: str) -> Op:
    public = function if function == "quantize_linear" else f"{function} in INT8"
    return Op(
        "quantize_linear" if function == "quantize_linear" else f"{function}_quantize_{name}",
        (name,),
        (),
        partial(_plan_rows, name),
        results=("values", "scale"),
        folds=_more_rows,
        dims=dims_with_rows({name: "*k", "values": "*k", "scale": "*"}),
        public=public,
        kernels_of="quantize",
    )


# One operation for each array that a public function quantizes, so that errors have the user's names.
_QUANTIZE = {
    (function, name): _op(function, name)
    for function, names in (("linear", "x w"), ("swiglu", "x gate up"), ("quantize_linear", "w"))
    for name in names.split()
}
QUANTIZE_ROWS = tuple(_QUANTIZE.values())
