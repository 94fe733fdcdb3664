"""merge: combines attention to two sets of keys into attention to all of them."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from qflash.call.array import Array, check_device, check_dtype, check_float, check_shape, dtype_code
from qflash.call.op import Extents, Op, Operand, Plan, Result
from qflash.call.spec import spec_of
from qflash.call.words import check_kernel
from qflash.ops.run import run
from qflash.ops.token_arrays import check_tokens, size_of, sizes_of, strides_without_gaps, tokens_operand
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
    """Merge the results of `attention` on two sets of keys into the result on all of them, for the same queries.

    Args:
        out_a: `[B, T, H, D]`, or packed `[total, H, D]`: the result of `attention(..., return_lse=True)` on some keys,
            or of `merge`. float32, float16 or bfloat16.
        lse_a: its lse, float32 `[B, H, T]`, or packed `[H, total]`.
        out_b: the result on other keys, with out_a's shape. It may have another of these dtypes: to merge many parts,
            accumulate them in float32.
        lse_b: its lse.
        kernel: name of the kernel that must be used.

    Returns:
        out, in out_a's dtype, and lse. Each row is `out_a · exp(lse_a - lse) + out_b · exp(lse_b - lse)`, where `lse`
        is `log(exp(lse_a) + exp(lse_b))`. A row whose lse is -inf saw no key and is ignored, whatever its values are;
        if both are -inf, the result is zeros and -inf. Forward only.

    The two sets of keys must not overlap, and sinks must be passed to only one of the two calls.

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
    check_tokens("out_a", out_a)
    check_float("out_b", out_b)
    check_shape("out_b", out_b, tuple(out_a.shape))
    *batch, length, heads, _ = out_a.shape
    lse_shape = (*batch, heads, length)
    for name, lse in (("lse_a", lse_a), ("lse_b", lse_b)):
        check_dtype(name, lse, "float32")
        check_shape(name, lse, lse_shape)
    for name, x in (("lse_a", lse_a), ("out_b", out_b), ("lse_b", lse_b)):
        check_device(name, x, "out_a", out_a.device)
    (of_a, a_strides), (of_b, b_strides) = tokens_operand("out_a", "a", out_a), tokens_operand("out_b", "b", out_b)
    operands, fields = [of_a, of_b], [*a_strides, *b_strides]
    for name, field, lse in (("lse_a", "a", lse_a), ("lse_b", "b", lse_b)):
        copied = lse.strides is None or 0 in lse.shape or min(lse.strides) < 0
        operands.append(Operand(name, f"{field}_lse", contiguous=copied))
        fields += _lse_strides(field, out_a, None if copied else lse.strides)
    return Plan(
        for_spec=spec_of("merge", out_a.device, out_a.dtype),
        device=out_a.device,
        kernel=check_kernel(kernel),
        struct="QfMergeParams",
        fields=(
            ("dtype", dtype_code(out_a.dtype)),
            ("b_dtype", dtype_code(out_b.dtype)),
            *sizes_of("out_a", out_a),
            *fields,
            *strides_without_gaps("out", "out_a", out_a),
        ),
        operands=tuple(operands),
        results=(Result("out.data", tuple(out_a.shape), out_a.dtype), Result("lse", lse_shape, "float32")),
    )


def _lse_strides(field: str, out_a: Array, steps: tuple[int, ...] | None) -> list[tuple[str, int | Extents]]:
    """The strides of an lse; steps: its own, or None if it is contiguous."""
    rank = len(out_a.shape)
    strides: list[int | Extents] = [size_of("out_a", out_a, *dims) for dims in ((rank - 2, rank - 3), (rank - 3,), ())]
    strides = strides[4 - rank :] if steps is None else list(steps)
    names = ("stride_b", "stride_h", "stride_t")[4 - rank :]
    return [(f"{field}_lse_{name}", stride) for name, stride in zip(names, strides, strict=True)]


def _folds(mapped: Collection[str], ranks: dict[str, int], words: dict[str, Any]) -> bool:
    """Packed rows with one more dimension are those of a batch."""
    return len(mapped) == 4 and ranks["out_a"] == 3


MERGE = Op("merge", ("out_a", "lse_a", "out_b", "lse_b"), ("kernel",), _plan, results=("out", "lse"), folds=_folds)
