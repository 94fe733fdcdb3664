"""rope: rotates every head of a token by the token's position. Its gradient is the same operation, inverted."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from qflash.call.array import Array, check_device, check_dtype, check_shape, dtype_code
from qflash.call.op import Extents, Gradient, Op, Operand, Plan, Result
from qflash.call.spec import spec_of
from qflash.call.words import check_flag, check_kernel, shown
from qflash.ops.quantization import check_tables, tables_of
from qflash.ops.run import run
from qflash.ops.token_arrays import Fields, check_tokens, sizes_of, strides_without_gaps, tokens_operand
from qflash.rotary import Rope
from qflash.typing import ArrayT, Lengths

_TABLES = ("rope.cos", "rope.sin")
# The arguments that positions may come from, which are also their fields, and the fields of their batch strides.
_POSITIONS = {"positions": "stride_positions_b", "rope.positions_k": "rope.stride_positions_k_b"}


def rope(x: ArrayT, rope: Rope, *, positions: Lengths | None = None, kernel: str | None = None) -> ArrayT:
    """Rotate every head of a token by the token's position, as `attention(..., rope=rope)` rotates q and k.

    Args:
        x: `[B, T, H, D]`, or packed `[total, H, D]`, treated as a batch of one. float32, float16 or bfloat16.
        rope: the tables, see `qflash.Rope`; `rotary_dim` is at most D, and the channels after it are unchanged.
        positions: int32 `[T]` or `[B, T]`, or `[total]` for packed x. None: `rope.positions_k` if given, otherwise
            token t is at position t, in packed x too. A negative position rotates backwards. `rope.positions_q` is
            never used: with a Rope that has it, pass `positions`, which specifies whether x is q or k.
        kernel: name of the kernel that must be used.

    Returns:
        An array like x, computed in float32 and rounded once. A position outside the tables raises ValueError on the
        CPU; a CUDA kernel cannot raise and gives NaN in the channels that it rotates. Differentiable in x, in PyTorch
        and JAX, any number of times.

    Example:
        >>> import numpy as np
        >>> import qflash
        >>> q, k, v = np.random.default_rng(0).standard_normal((3, 1, 128, 8, 64), np.float32)
        >>> rope = qflash.Rope(*qflash.rope_tables(128, 64))
        >>> rotated = qflash.attention(qflash.rope(q, rope), qflash.rope(k, rope), v)
        >>> bool(np.array_equal(rotated, qflash.attention(q, k, v, rope=rope)))
        True
    """
    if not isinstance(rope, Rope):
        raise TypeError(f"rope is {shown(rope)}; allowed: qflash.Rope")
    cos, sin, positions_q, positions_k, interleaved = tables_of(rope)
    if positions is not None:
        positions_k = None
    elif positions_q is not None:
        raise ValueError(
            "rope.positions_q is given and positions is None; allowed: positions=rope.positions_q where x is q, "
            "positions=rope.positions_k where it is k"
        )
    out: ArrayT
    (out,) = run(ROPE, (x, cos, sin, positions, positions_k), (interleaved, False, kernel))
    return out


def _plan(
    x: Array,
    cos: Array | None,
    sin: Array | None,
    positions: Array | None,
    positions_k: Array | None,
    interleaved: Any,
    inverse: Any,
    kernel: Any,
) -> Plan:
    check_tokens("x", x)
    for name, table in (("rope.cos", cos), ("rope.sin", sin)):
        if table is None:
            raise TypeError(f"{name} is None; allowed: an array, [positions, rotary_dim / 2]")
    assert cos is not None and sin is not None
    rows, half = check_tables(cos, sin, x.shape[-1], "x", x.device)
    operand, strides = tokens_operand("x", "x", x)
    operands = [operand, *(Operand(name, name, contiguous=True, dtype="float32") for name in _TABLES)]
    fields: list[tuple[str, int | Extents]] = [*sizes_of("x", x), *strides, *strides_without_gaps("out", "x", x)]
    least = x.shape[-3]
    given = {"positions": positions, "rope.positions_k": positions_k}
    for name, array in given.items():
        if array is not None:
            fields += _check_positions(name, array, x)
            operands.append(Operand(name, name, contiguous=True))
            least = 0 if 0 in array.shape else 1  # any position needs at least one row
    if rows < least:
        raise ValueError(f"rope.cos has {rows} rows; allowed: at least {least}, one for each position in use")
    return Plan(
        for_spec=spec_of("rope", x.device, x.dtype),
        device=x.device,
        kernel=check_kernel(kernel),
        struct="QfRopeParams",
        fields=(
            ("dtype", dtype_code(x.dtype)),
            *fields,
            ("rope.rows", rows),
            ("rope.rotary_dim", 2 * half),
            ("rope.interleaved", int(check_flag("interleaved", interleaved))),
            ("inverse", int(check_flag("inverse", inverse))),
        ),
        operands=tuple(operands),
        results=(Result("out.data", tuple(x.shape), x.dtype),),
    )


def _check_positions(name: str, positions: Array, x: Array) -> Fields:
    """The batch stride of positions; rejects any that are not positions of x's tokens."""
    check_dtype(name, positions, "int32")
    check_shape(name, positions, *((x.shape[dim:-2]) for dim in range(len(x.shape) - 3, -1, -1)))
    check_device(name, positions, "x", x.device)
    length = x.shape[-3]
    stride = 0 if len(positions.shape) == 1 else length if isinstance(length, int) else Extents(((name, 1),))
    return ((_POSITIONS[name], stride),)


def _folds(mapped: Collection[str], ranks: dict[str, int], words: dict[str, Any]) -> bool:
    """Packed tokens with one more dimension are those of a batch, with positions for all sequences or for each."""
    return ranks["x"] == 3 and "x" in mapped and not set(mapped) & set(_TABLES)


def _dims(ranks: Mapping[str, int]) -> Mapping[str, str]:
    """b batch, m length, H heads, d head_dim; p and c for the tables."""
    batch = "b" if ranks["x"] == 4 else ""
    tokens = dict.fromkeys(("x", "out"), f"{batch}mHd")
    return tokens | dict.fromkeys(_POSITIONS, f"{batch}m") | dict.fromkeys(_TABLES, "pc")


ROPE = Op(
    "rope",
    ("x", *_TABLES, *_POSITIONS),
    ("interleaved", "inverse", "kernel"),
    _plan,
    results=("out",),
    folds=_folds,
    dims=_dims,
    checked=tuple(_POSITIONS),
    indices=tuple(_POSITIONS),
    tables=_TABLES,
    gradient=Gradient(None, ("x",), refused=_TABLES, flips="inverse"),
)
