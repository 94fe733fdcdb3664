"""merge: attention to some keys and attention to others, as attention to all of them."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from qflash.call.array import Array, check_device, check_dtype, check_float, check_shape, dtype_code, takes_a_copy
from qflash.call.op import Extents, Op, Operand, Plan, Result
from qflash.call.spec import spec_of
from qflash.call.words import INT32_MAX, check_kernel
from qflash.ops.run import run
from qflash.typing import FrameworkArray, NumpyT, TensorT


@overload
def merge(
    out_a: NumpyT,
    lse_a: FrameworkArray,
    out_b: FrameworkArray,
    lse_b: FrameworkArray,
    *,
    kernel: str | None = None,
) -> tuple[NumpyT, NDArray[np.float32]]: ...
@overload
def merge(
    out_a: TensorT,
    lse_a: FrameworkArray,
    out_b: FrameworkArray,
    lse_b: FrameworkArray,
    *,
    kernel: str | None = None,
) -> tuple[TensorT, TensorT]: ...
def merge(
    out_a: Any, lse_a: FrameworkArray, out_b: FrameworkArray, lse_b: FrameworkArray, *, kernel: str | None = None
) -> Any:
    """What `attention` of the same queries gives on the keys of two calls, from the results of both.

    Args:
        out_a: `[B, T, H, D]`, or packed `[total, H, D]`: what `attention(..., return_lse=True)` gave on some keys, or
            `merge` did. float32, float16 or bfloat16.
        lse_a: its lse, float32 `[B, H, T]`, or packed `[H, total]`.
        out_b: the same of other keys, of out_a's shape. It may have another of these dtypes: sums that many parts are
            merged into are best kept in float32.
        lse_b: its lse.
        kernel: the name of the one kernel that must be used.

    Returns:
        out, of out_a's dtype, and lse. Each row is `out_a · exp(lse_a - lse) + out_b · exp(lse_b - lse)`, where `lse`
        is `log(exp(lse_a) + exp(lse_b))`. A row whose lse is -inf saw no key and takes no part, whatever it holds;
        where both are, the result is zeros and -inf. Forward only.

    The keys of the two calls must not overlap, and sinks count in one of them alone.

    Example:
        >>> import numpy as np
        >>> import qflash
        >>> q, k, v = np.random.default_rng(0).standard_normal((3, 1, 128, 8, 64), np.float32)
        >>> parts = [qflash.attention(q, k[:, keys], v[:, keys], return_lse=True) for keys in np.s_[:50, 50:]]
        >>> out, lse = qflash.merge(*parts[0], *parts[1])
        >>> bool(np.allclose(out, qflash.attention(q, k, v), atol=1e-6))
        True
    """
    out, lse = run(MERGE, (out_a, lse_a, out_b, lse_b), (kernel,))
    return out, lse


def _plan(out_a: Array, lse_a: Array | None, out_b: Array | None, lse_b: Array | None, kernel: Any) -> Plan:
    for name, x in (("lse_a", lse_a), ("out_b", out_b), ("lse_b", lse_b)):
        if x is None:
            raise TypeError(f"{name} is None; allowed: an array")
    assert lse_a is not None and out_b is not None and lse_b is not None
    rank = len(out_a.shape)
    if rank not in (3, 4):
        form = "[batch, length, heads, head_dim], or packed [total, heads, head_dim]"
        raise ValueError(f"out_a has shape {list(out_a.shape)}; allowed: {form}")
    check_float("out_a", out_a)
    check_float("out_b", out_b)
    check_shape("out_b", out_b, tuple(out_a.shape))
    *batch, length, heads, head_dim = out_a.shape
    if any(isinstance(extent, int) and extent > INT32_MAX for extent in out_a.shape):
        raise ValueError(f"out_a has shape {list(out_a.shape)}; allowed: every extent below 2^31")
    if head_dim < 1:
        raise ValueError(f"out_a has head_dim {head_dim}; allowed: 1 or more")
    lse_shape = (*batch, heads, length)
    for name, lse in (("lse_a", lse_a), ("lse_b", lse_b)):
        check_dtype(name, lse, "float32")
        check_shape(name, lse, lse_shape)
    for name, x in (("lse_a", lse_a), ("out_b", out_b), ("lse_b", lse_b)):
        check_device(name, x, "out_a", out_a.device)
    operands, fields = [], []
    for name, field, x in (("out_a", "a", out_a), ("out_b", "b", out_b)):
        copied = takes_a_copy(x)
        operands.append(Operand(name, f"{field}.data", contiguous=copied))
        fields += _strides(field, x, None if copied else x.strides)
    for name, field, lse in (("lse_a", "a", lse_a), ("lse_b", "b", lse_b)):
        copied = lse.strides is None or 0 in lse.shape or min(lse.strides) < 0
        operands.append(Operand(name, f"{field}_lse", contiguous=copied))
        fields += _lse_strides(field, out_a, None if copied else lse.strides)
    sizes = (("length", rank - 3), ("heads", rank - 2), ("head_dim", rank - 1))
    return Plan(
        for_spec=spec_of("merge", out_a.device, out_a.dtype),
        device=out_a.device,
        kernel=check_kernel(kernel),
        struct="QfMergeParams",
        fields=(
            ("dtype", dtype_code(out_a.dtype)),
            ("b_dtype", dtype_code(out_b.dtype)),
            ("batch", _size(out_a, 0) if batch else 1),
            *((name, _size(out_a, dim)) for name, dim in sizes),
            *fields,
            *_strides("out", out_a, None),
        ),
        operands=tuple(operands),
        results=(Result("out.data", tuple(out_a.shape), out_a.dtype), Result("lse", lse_shape, "float32")),
    )


def _size(out_a: Array, *dims: int) -> int | Extents:
    """The product of some extents, or where it comes from while one of them is symbolic."""
    product = 1
    for dim in dims:
        product *= out_a.shape[dim]
    return product if isinstance(product, int) else Extents(tuple(("out_a", dim) for dim in dims))


def _strides(field: str, x: Array, steps: tuple[int, ...] | None) -> list[tuple[str, int | Extents]]:
    """Those of a QfTensor, shaped as out_a is; steps: x's own, or None where it has no gaps."""
    rank = len(x.shape)
    strides: list[int | Extents]
    if steps is not None and 0 not in x.shape:
        strides = list(steps[:-1])
    else:
        strides = [_size(x, *range(dim + 1, rank)) for dim in range(rank - 1)]
    names = ("stride_b", "stride_t", "stride_h")[4 - rank :]
    return [(f"{field}.{name}", stride) for name, stride in zip(names, strides, strict=True)]


def _lse_strides(field: str, out_a: Array, steps: tuple[int, ...] | None) -> list[tuple[str, int | Extents]]:
    """Those of an lse; steps as in `_strides`."""
    rank = len(out_a.shape)
    strides: list[int | Extents] = [_size(out_a, rank - 2, rank - 3), _size(out_a, rank - 3), 1][4 - rank :]
    if steps is not None:
        strides = list(steps)
    names = ("stride_b", "stride_h", "stride_t")[4 - rank :]
    return [(f"{field}_lse_{name}", stride) for name, stride in zip(names, strides, strict=True)]


def _folds(mapped: Collection[str], ranks: dict[str, int], words: dict[str, Any]) -> bool:
    """Packed rows with one dimension more are those of a batch."""
    return len(mapped) == 4 and ranks["out_a"] == 3


MERGE = Op("merge", ("out_a", "lse_a", "out_b", "lse_b"), ("kernel",), _plan, results=("out", "lse"), folds=_folds)
