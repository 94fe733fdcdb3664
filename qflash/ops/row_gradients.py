"""The gradients of softmax, layer_norm and cross_entropy, as internal operations."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from qflash.call.array import Array, check_device, check_dtype, check_shape, dtype_code
from qflash.call.op import Op, Operand, Plan, Result
from qflash.call.spec import spec_of
from qflash.call.words import INT32_MAX, check_int, check_number, check_word
from qflash.ops.row_arrays import check_rows, rows_operand

REDUCTIONS = ("mean", "sum", "none")


def _check_like(name: str, array: Array | None, dtype: str, shape: Sequence[int], device: str, first: str) -> None:
    """Reject an array that is missing, or of another dtype, shape or device."""
    if array is None:
        raise TypeError(f"{name} is None; allowed: an array")
    check_dtype(name, array, dtype)
    check_shape(name, array, shape)
    check_device(name, array, first, device)


def _per_row(like: Array, **arrays: Array | None) -> list[Operand]:
    """Operands of the given float32 arrays, with one number for each row of `like`."""
    found = []
    for name, array in arrays.items():
        if array is not None:
            _check_like(name, array, "float32", like.shape[:-1], like.device, "x")
            found.append(Operand(name, name, contiguous=True))
    return found


def _plan_softmax(dout: Array, out: Array | None, scale: Any, kernel: Any) -> Plan:
    rows, columns = check_rows("dout", dout), dout.shape[-1]
    _check_like("out", out, dout.dtype, dout.shape, dout.device, "dout")
    assert out is not None
    (of_dout, dout_stride), (of_out, out_stride) = rows_operand("dout", dout), rows_operand("out", out)
    return Plan(
        for_spec=spec_of("softmax_backward", dout.device, dout.dtype),
        device=dout.device,
        kernel=None,  # the forward call's is not a kernel of this operation
        struct="QfSoftmaxBwdParams",
        fields=(
            ("dtype", dtype_code(dout.dtype)),
            ("rows", rows),
            ("columns", columns),
            ("out_stride", out_stride),
            ("dout_stride", dout_stride),
            ("dx_stride", columns),
            ("scale", check_number("scale", scale)),
        ),
        operands=(of_dout, of_out),
        results=(Result("dx", dout.shape, dout.dtype),),
    )


def _plan_layer_norm(
    dout: Array,
    dmean: Array | None,
    drstd: Array | None,
    x: Array | None,
    weight: Array | None,
    bias: Array | None,
    mean: Array | None,
    rstd: Array | None,
    *_: Any,
) -> Plan:
    rows, columns = check_rows("dout", dout), dout.shape[-1]
    _check_like("x", x, dout.dtype, dout.shape, dout.device, "dout")
    assert x is not None
    for name, array in (("mean", mean), ("rstd", rstd)):
        _check_like(name, array, "float32", x.shape[:-1], x.device, "x")
    (of_dout, dout_stride), (of_x, x_stride) = rows_operand("dout", dout), rows_operand("x", x)
    operands = [of_dout, of_x, *_per_row(x, mean=mean, rstd=rstd, dmean=dmean, drstd=drstd)]
    results = [Result("dx", x.shape, x.dtype)]
    for name, array in (("weight", weight), ("bias", bias)):
        if array is not None:
            _check_like(name, array, x.dtype, (columns,), x.device, "x")
            results.append(Result(f"d{name}", (columns,), x.dtype))
    if weight is not None:
        operands.append(Operand("weight", "weight", contiguous=True))
    return Plan(
        for_spec=spec_of("layer_norm_backward", x.device, x.dtype),
        device=x.device,
        kernel=None,
        struct="QfLayerNormBwdParams",
        fields=(
            ("dtype", dtype_code(x.dtype)),
            ("rows", rows),
            ("columns", columns),
            ("x_stride", x_stride),
            ("dout_stride", dout_stride),
            ("dx_stride", columns),
            ("sums", int(len(results) > 1)),
        ),
        operands=tuple(operands),
        results=tuple(results),
    )


def _plan_cross_entropy(
    dlosses: Array,
    dlse: Array | None,
    dtotal: Array | None,
    logits: Array | None,
    targets: Array | None,
    lse: Array | None,
    reduction: Any,
    ignore_index: Any,
    label_smoothing: Any,
    *_: Any,
) -> Plan:
    if logits is None:
        raise TypeError("logits is None; allowed: an array")
    rows, columns = check_rows("logits", logits), logits.shape[-1]
    if targets is None:
        raise TypeError("targets is None; allowed: an array of int32 or int64")
    check_dtype("targets", targets, "int32", "int64")
    check_shape("targets", targets, logits.shape[:-1])
    check_device("targets", targets, "logits", logits.device)
    for name, array in (("dlosses", dlosses), ("lse", lse)):
        _check_like(name, array, "float32", logits.shape[:-1], logits.device, "logits")
    operand, stride = rows_operand("logits", logits)
    operands = [
        *_per_row(logits, dlosses=dlosses),
        operand,
        Operand("targets", "targets", contiguous=True, dtype="int32"),
        *_per_row(logits, lse=lse, dlse=dlse),
    ]
    if dtotal is not None:
        _check_like("dtotal", dtotal, "float32", (), logits.device, "logits")
        operands.append(Operand("dtotal", "dtotal", contiguous=True))
    return Plan(
        for_spec=spec_of("cross_entropy_backward", logits.device, logits.dtype),
        device=logits.device,
        kernel=None,
        struct="QfCrossEntropyBwdParams",
        fields=(
            ("dtype", dtype_code(logits.dtype)),
            ("rows", rows),
            ("columns", columns),
            ("logits_stride", stride),
            ("dlogits_stride", columns),
            ("ignore_index", check_int("ignore_index", ignore_index, -INT32_MAX, INT32_MAX - 1)),
            ("label_smoothing", check_number("label_smoothing", label_smoothing)),
            ("mean", int(check_word("reduction", reduction, REDUCTIONS) == "mean")),
        ),
        operands=tuple(operands),
        results=(Result("dlogits", logits.shape, logits.dtype),),
    )


def _more_rows(mapped: Collection[str], ranks: dict[str, int], words: dict[str, Any]) -> bool:
    """Samples are more rows, unless a result is a sum over the rows of each sample."""
    return (
        set(mapped) == set(ranks) and not {"weight", "bias"} & set(ranks) and words.get("reduction") in (None, "none")
    )


def _once(operation: str) -> str:
    return f"qflash.{operation} has no second derivative; allowed: one backward pass over it"


SOFTMAX_BACKWARD = Op(
    "softmax_backward",
    ("dout", "out"),
    ("scale", "kernel"),
    _plan_softmax,
    results=("dx",),
    folds=_more_rows,
    no_gradient=_once("softmax"),
)
LAYER_NORM_BACKWARD = Op(
    "layer_norm_backward",
    ("dout", "dmean", "drstd", "x", "weight", "bias", "mean", "rstd"),
    ("eps", "return_stats", "kernel"),
    _plan_layer_norm,
    results=("dx", "dweight", "dbias"),
    folds=_more_rows,
    no_gradient=_once("layer_norm"),
)
CROSS_ENTROPY_BACKWARD = Op(
    "cross_entropy_backward",
    ("dlosses", "dlse", "dtotal", "logits", "targets", "lse"),
    ("reduction", "ignore_index", "label_smoothing", "return_lse", "kernel"),
    _plan_cross_entropy,
    results=("dlogits",),
    folds=_more_rows,
    checked=("targets",),
    no_gradient=_once("cross_entropy"),
)
