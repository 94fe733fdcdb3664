"""softmax, layer_norm and cross_entropy: one result per row of `[..., columns]`."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Literal, TypedDict, Unpack, overload

import numpy as np
from numpy.typing import NDArray

from qflash.call.array import Array, check_device, check_dtype, check_shape, dtype_code
from qflash.call.op import Gradient, Op, Operand, Plan, Result
from qflash.call.spec import spec_of
from qflash.call.words import INT32_MAX, check_flag, check_int, check_kernel, check_number, check_word
from qflash.ops.row_arrays import check_rows, rows_operand
from qflash.ops.row_gradients import CROSS_ENTROPY_BACKWARD, LAYER_NORM_BACKWARD, REDUCTIONS, SOFTMAX_BACKWARD
from qflash.ops.run import run
from qflash.typing import ArrayT, Flag, FrameworkArray, Integer, Number, NumpyT, Reduction, TensorT


def softmax(x: ArrayT, *, scale: Number = 1.0, kernel: str | None = None) -> ArrayT:
    """softmax(scale · x) over the last dimension, for NumPy, PyTorch and JAX arrays on the CPU or a CUDA GPU.

    Args:
        x: `[..., columns]`, float32, float16 or bfloat16.
        scale: factor applied to x.
        kernel: name of the kernel that must be used.

    Returns:
        An array like x, accumulated in float32. A row in which every element is -inf gives NaN, as in the definition.
        Differentiable in PyTorch and JAX.

    Example:
        >>> import numpy as np
        >>> import qflash
        >>> qflash.softmax(np.array([[0.0, 0.0, -np.inf, 0.0, 0.0]], np.float32))
        array([[0.25, 0.25, 0.  , 0.25, 0.25]], dtype=float32)
    """
    out: ArrayT
    (out,) = run(SOFTMAX, (x,), (scale, kernel))
    return out


class _LayerNormWords(TypedDict, total=False):
    """The keyword arguments of layer_norm that do not affect the type of its result."""

    eps: Number
    kernel: str | None


@overload
def layer_norm(
    x: ArrayT,
    weight: FrameworkArray | None = None,
    bias: FrameworkArray | None = None,
    *,
    return_stats: Literal[False] = False,
    **words: Unpack[_LayerNormWords],
) -> ArrayT: ...
@overload
def layer_norm(
    x: NumpyT,
    weight: FrameworkArray | None = None,
    bias: FrameworkArray | None = None,
    *,
    return_stats: Literal[True],
    **words: Unpack[_LayerNormWords],
) -> tuple[NumpyT, NDArray[np.float32], NDArray[np.float32]]: ...
@overload
def layer_norm(
    x: TensorT,
    weight: FrameworkArray | None = None,
    bias: FrameworkArray | None = None,
    *,
    return_stats: Literal[True],
    **words: Unpack[_LayerNormWords],
) -> tuple[TensorT, TensorT, TensorT]: ...
@overload
def layer_norm(
    x: ArrayT,
    weight: FrameworkArray | None = None,
    bias: FrameworkArray | None = None,
    *,
    return_stats: Flag,
    **words: Unpack[_LayerNormWords],
) -> ArrayT | tuple[ArrayT, ArrayT, ArrayT]: ...
def layer_norm(
    x: Any,
    weight: FrameworkArray | None = None,
    bias: FrameworkArray | None = None,
    *,
    eps: Number = 1e-5,
    return_stats: Flag = False,
    kernel: str | None = None,
) -> Any:
    """(x - mean) / sqrt(variance + eps) · weight + bias over the last dimension.

    Args:
        x: `[..., columns]`, float32, float16 or bfloat16.
        weight: `[columns]` in x's dtype; None means 1.
        bias: `[columns]` in x's dtype; None means 0.
        eps: added to the variance.
        return_stats: also return the mean and 1 / sqrt(variance + eps) of each row.
        kernel: name of the kernel that must be used.

    Returns:
        An array like x. With `return_stats`, a tuple of it and the two statistics, float32 `x.shape[:-1]`.
        Differentiable in PyTorch and JAX, including the statistics.

    Example:
        >>> import numpy as np
        >>> import qflash
        >>> x = np.array([[1.0, 3.0], [10.0, 30.0]], np.float32)
        >>> out, mean, rstd = qflash.layer_norm(x, return_stats=True)
        >>> np.round(out, 3), mean
        (array([[-1.,  1.],
               [-1.,  1.]], dtype=float32), array([ 2., 20.], dtype=float32))
    """
    out, *stats = run(LAYER_NORM, (x, weight, bias), (eps, return_stats, kernel))
    return (out, *stats) if return_stats else out


class _CrossEntropyWords(TypedDict, total=False):
    """The keyword arguments of cross_entropy that do not affect the type of its result."""

    reduction: Reduction
    ignore_index: Integer
    label_smoothing: Number
    kernel: str | None


@overload
def cross_entropy(
    logits: np.ndarray[Any, Any],
    targets: FrameworkArray,
    *,
    return_lse: Literal[False] = False,
    **words: Unpack[_CrossEntropyWords],
) -> NDArray[np.float32]: ...
@overload
def cross_entropy(
    logits: TensorT,
    targets: FrameworkArray,
    *,
    return_lse: Literal[False] = False,
    **words: Unpack[_CrossEntropyWords],
) -> TensorT: ...
@overload
def cross_entropy(
    logits: np.ndarray[Any, Any],
    targets: FrameworkArray,
    *,
    return_lse: Literal[True],
    **words: Unpack[_CrossEntropyWords],
) -> tuple[NDArray[np.float32], NDArray[np.float32]]: ...
@overload
def cross_entropy(
    logits: TensorT,
    targets: FrameworkArray,
    *,
    return_lse: Literal[True],
    **words: Unpack[_CrossEntropyWords],
) -> tuple[TensorT, TensorT]: ...
@overload
def cross_entropy(
    logits: ArrayT, targets: FrameworkArray, *, return_lse: Flag, **words: Unpack[_CrossEntropyWords]
) -> ArrayT | tuple[ArrayT, ArrayT]: ...
def cross_entropy(
    logits: Any,
    targets: FrameworkArray,
    *,
    reduction: Reduction = "mean",
    ignore_index: Integer = -100,
    label_smoothing: Number = 0.0,
    return_lse: Flag = False,
    kernel: str | None = None,
) -> Any:
    """Cross entropy, -log softmax(logits)[target], of each row.

    Args:
        logits: `[..., classes]`, float32, float16 or bfloat16.
        targets: int32 or int64 `logits.shape[:-1]`.
        reduction: "mean", "sum" or "none".
        ignore_index: a row with this target has loss 0 and does not count in the mean.
        label_smoothing: the fraction of the target that is spread over all classes.
        return_lse: also return the log-sum-exp of each row.
        kernel: name of the kernel that must be used.

    Returns:
        float32: a scalar, or one loss per row with reduction "none". With `return_lse`, a tuple of it and the
        log-sum-exp of each row. The mean of no rows is NaN. Differentiable in PyTorch and JAX, including the
        log-sum-exp.

    A target out of range raises ValueError on the CPU; a CUDA kernel cannot raise and gives NaN.

    Example:
        >>> import numpy as np
        >>> import qflash
        >>> logits = np.zeros((3, 4), np.float32)
        >>> targets = np.array([0, 3, -100], np.int32)  # the last is ignored
        >>> qflash.cross_entropy(logits, targets, reduction="none").round(3)  # ln 4
        array([1.386, 1.386, 0.   ], dtype=float32)
    """
    words = (reduction, ignore_index, label_smoothing, return_lse, kernel)
    results = run(CROSS_ENTROPY, (logits, targets), words)  # losses, lse if requested, the total if there is one
    losses = results[0] if reduction == "none" else results[-1]
    return (losses, results[1]) if return_lse else losses


def _plan_softmax(x: Array, scale: Any, kernel: Any) -> Plan:
    rows, columns = check_rows("x", x), x.shape[-1]
    operand, stride = rows_operand("x", x)
    return Plan(
        for_spec=spec_of("softmax", x.device, x.dtype),
        device=x.device,
        kernel=check_kernel(kernel),
        struct="QfRowsParams",
        fields=(
            ("dtype", dtype_code(x.dtype)),
            ("rows", rows),
            ("columns", columns),
            ("x_stride", stride),
            ("out_stride", columns),
            ("scale", check_number("scale", scale)),
        ),
        operands=(operand,),
        results=(Result("out", x.shape, x.dtype),),
    )


def _plan_layer_norm(x: Array, weight: Array | None, bias: Array | None, eps: Any, stats: Any, kernel: Any) -> Plan:
    rows, columns = check_rows("x", x), x.shape[-1]
    if columns == 0:
        raise ValueError(f"x has shape {list(x.shape)}; allowed: at least 1 column to normalise")
    eps = check_number("eps", eps)
    if eps < 0:
        raise ValueError(f"eps is {eps}; allowed: 0 or more")
    operand, stride = rows_operand("x", x)
    operands = [operand]
    for name, array in (("weight", weight), ("bias", bias)):
        if array is not None:
            check_dtype(name, array, x.dtype)
            check_shape(name, array, (columns,))
            check_device(name, array, "x", x.device)
            operands.append(Operand(name, name, contiguous=True))
    results = [Result("out", x.shape, x.dtype)]
    if check_flag("return_stats", stats):
        results += [Result(field, x.shape[:-1], "float32") for field in ("mean", "rstd")]
    return Plan(
        for_spec=spec_of("layer_norm", x.device, x.dtype),
        device=x.device,
        kernel=check_kernel(kernel),
        struct="QfRowsParams",
        fields=(
            ("dtype", dtype_code(x.dtype)),
            ("rows", rows),
            ("columns", columns),
            ("x_stride", stride),
            ("out_stride", columns),
            ("eps", eps),
        ),
        operands=tuple(operands),
        results=tuple(results),
    )


def _plan_cross_entropy(
    logits: Array,
    targets: Array | None,
    reduction: Any,
    ignore_index: Any,
    label_smoothing: Any,
    want_lse: Any,
    kernel: Any,
) -> Plan:
    rows, columns = check_rows("logits", logits), logits.shape[-1]
    if columns == 0 or (isinstance(columns, int) and columns > INT32_MAX):
        raise ValueError(f"logits has {columns} classes; allowed: 1 to 2^31 - 1")
    if targets is None:
        raise TypeError("targets is None; allowed: an array of int32 or int64")
    check_dtype("targets", targets, "int32", "int64")
    check_shape("targets", targets, logits.shape[:-1])
    check_device("targets", targets, "logits", logits.device)
    label_smoothing = check_number("label_smoothing", label_smoothing)
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"label_smoothing is {label_smoothing}; allowed: 0 to 1")
    operand, stride = rows_operand("logits", logits)
    per_row = tuple(logits.shape[:-1])
    results = [Result("losses", per_row, "float32")]
    if check_flag("return_lse", want_lse):
        results.append(Result("lse", per_row, "float32"))
    if check_word("reduction", reduction, REDUCTIONS) != "none":
        results.append(Result("total", (), "float32"))
    return Plan(
        for_spec=spec_of("cross_entropy", logits.device, logits.dtype),
        device=logits.device,
        kernel=check_kernel(kernel),
        struct="QfCrossEntropyParams",
        fields=(
            ("dtype", dtype_code(logits.dtype)),
            ("rows", rows),
            ("columns", columns),
            ("logits_stride", stride),
            # The limits of int32 represent int64 targets outside its range, which must never be ignored.
            ("ignore_index", check_int("ignore_index", ignore_index, -INT32_MAX, INT32_MAX - 1)),
            ("label_smoothing", label_smoothing),
            ("mean", int(reduction == "mean")),
        ),
        operands=(operand, Operand("targets", "targets", contiguous=True, dtype="int32")),
        results=tuple(results),
    )


def _more_rows(mapped: Collection[str], ranks: dict[str, int], words: dict[str, Any]) -> bool:
    """If only x is mapped, its samples are more rows."""
    return set(mapped) == {"x"}


def _more_losses(mapped: Collection[str], ranks: dict[str, int], words: dict[str, Any]) -> bool:
    """The same for logits with their targets, unless the losses of each sample are reduced."""
    return set(mapped) == {"logits", "targets"} and words["reduction"] == "none"


SOFTMAX = Op(
    "softmax",
    ("x",),
    ("scale", "kernel"),
    _plan_softmax,
    results=("out",),
    folds=_more_rows,
    gradient=Gradient(SOFTMAX_BACKWARD, ("x",)),
)
LAYER_NORM = Op(
    "layer_norm",
    ("x", "weight", "bias"),
    ("eps", "return_stats", "kernel"),
    _plan_layer_norm,
    results=("out", "mean", "rstd"),
    folds=_more_rows,
    gradient=Gradient(LAYER_NORM_BACKWARD, ("x", "weight", "bias"), {"return_stats": True}),
)
CROSS_ENTROPY = Op(
    "cross_entropy",
    ("logits", "targets"),
    ("reduction", "ignore_index", "label_smoothing", "return_lse", "kernel"),
    _plan_cross_entropy,
    results=("losses", "lse", "total"),
    folds=_more_losses,
    checked=("targets",),
    gradient=Gradient(CROSS_ENTROPY_BACKWARD, ("logits",), {"return_lse": True}),
)
