"""Problem: a checked attention call described by shapes, strides and options, without arrays.

`check` and `check_packed` turn array descriptions and the user's arguments into a `Problem`, or raise an error that
names the argument, the value given and what is allowed. What depends on the data (values of kv_lens, cu_seqlens,
positions) is checked by the CPU engine at run time; a CUDA kernel, which must not synchronise to check it, writes NaN
to every row of a sequence whose description is out of range.
"""

from __future__ import annotations

import math
from ctypes import c_float
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any, NamedTuple

from qflash.call.array import Array, check_device, check_dtype
from qflash.call.spec import DTYPES, KV_KINDS, MOST_DECODE_ROWS, PRECISIONS, Spec
from qflash.call.words import INT32_MAX, check_flag, check_int, check_kernel, check_number, shown
from qflash.typing import Flag, Number, Precision, Window

MAX_HEAD_DIM = 256
WINDOW_FORM = "None or (left, right), two ints of -1 (open) or more"
_SINK_DTYPES = (*DTYPES, "float64")
TABLE_FORM = "[positions, rotary_dim / 2], with rotary_dim 2 or more"
FULL_TABLES = " (qflash.Rope.from_hf takes tables that have every angle twice)"
# scale and softcap stay away from the limits of float32. Kernels multiply them with each other, with log2(e) and with
# q, which must not overflow; and where denormals are flushed to zero, a product with scale / softcap that underflows
# moves a score by up to 2^-126 softcap, which must not be visible.
_MOST = 2.0**100
_LEAST_SOFTCAP = 2.0**-100
_LEAST_SCALE_BY_SOFTCAP = 2.0**-126


@dataclass(frozen=True, slots=True)
class RopeArrays:
    """A Rope with descriptions of its arrays."""

    cos: Array
    sin: Array
    interleaved: Flag
    positions_q: Array | None = None
    positions_k: Array | None = None


class Options(NamedTuple):
    """The user's arguments, unchecked."""

    causal: Flag = False
    window: Window | None = None
    softcap: Number | None = None
    scale: Number | None = None
    precision: Precision | None = None
    kernel: str | None = None
    batch_invariant: Flag = False


@dataclass(frozen=True, slots=True)
class Problem:
    """A checked attention problem. Packed problems have the maximum lengths and the totals."""

    batch: int
    q_len: int
    k_len: int
    q_heads: int
    kv_heads: int
    head_dim: int
    dtype: str
    device: str
    scale: float
    softcap: float
    window_left: int
    window_right: int
    precision: str
    kernel: str | None
    q_strides: tuple[int, int, int]  # batch, length, head
    k_strides: tuple[int, int, int]
    v_strides: tuple[int, int, int]
    kv_lens: bool
    rope_rows: int  # 0: no rope
    rotary_dim: int
    rope_interleaved: bool
    positions_q_stride: int | None  # batch stride; None: no explicit positions
    positions_k_stride: int | None
    packed: bool
    total_q: int
    total_k: int
    sinks: bool = False
    batch_invariant: bool = False

    def spec(self, arch: int, op: str = "attention", kv: str = KV_KINDS[0]) -> Spec:
        """The part of this problem that selects a kernel, for a device of compute capability `arch`/10."""
        rope = None if self.rope_rows == 0 else ("interleaved" if self.rope_interleaved else "half")
        return Spec(
            device=self.device.partition(":")[0],
            arch=arch,
            dtype=self.dtype,
            head_dim=int(self.head_dim),  # it selects the kernel, so traced programs are specialised for it
            precision=self.precision,
            window=self.window_left >= 0 or self.window_right >= 0,
            softcap=self.softcap != 0.0,
            plain_scores=self.softcap == 0.0 and c_float(self.scale).value > 0.0,  # in float32, as kernels have it
            rope=rope,
            packed=self.packed,
            kv_lens=self.kv_lens,
            op=op,
            kv=kv,
            sinks=self.sinks,
            batch_invariant=self.batch_invariant,
            few_rows=self.few_rows,
        )

    @property
    def few_rows(self) -> bool:
        """Whether this is decoding. A length that is not known yet may have any value."""
        sizes = (self.q_len, self.q_heads, self.kv_heads)
        if not all(isinstance(size, int) for size in sizes):
            return False
        return self.q_len * self.q_heads <= MOST_DECODE_ROWS * self.kv_heads


def check(
    q: Array,
    k: Array,
    v: Array,
    options: Options,
    kv_lens: Array | None = None,
    rope: RopeArrays | None = None,
    sinks: Array | None = None,
) -> Problem:
    """Check `attention`'s arguments, [B, T, H, D] arrays."""
    for name, array in (("q", q), ("k", k), ("v", v)):
        if len(array.shape) != 4:
            raise ValueError(f"{name} has shape {array.shape}; allowed: rank 4, [batch, length, heads, head_dim]")
    _check_alike(q, k, v)
    batch, q_len, q_heads, head_dim = q.shape
    for name, array in (("k", k), ("v", v)):
        if array.shape[0] != batch:
            raise ValueError(f"{name} has batch size {array.shape[0]}; allowed: q's, {batch}")
    _check_heads(q_heads, k.shape[2], head_dim)
    k_len = k.shape[1]
    if kv_lens is not None:
        _check_index("kv_lens", kv_lens, ((batch,),), q.device)
    problem = Problem(
        batch=batch,
        q_len=q_len,
        k_len=k_len,
        q_heads=q_heads,
        kv_heads=k.shape[2],
        head_dim=head_dim,
        dtype=q.dtype,
        device=q.device,
        **check_options(options, head_dim),
        q_strides=_strides("q", q),
        k_strides=_strides("k", k),
        v_strides=_strides("v", v),
        kv_lens=kv_lens is not None,
        **_no_rope(),
        packed=False,
        total_q=0,
        total_k=0,
        sinks=check_sinks(sinks, q_heads, q.device),
    )
    if rope is None:
        return problem
    return _with_rope(problem, rope, ((q_len,), (batch, q_len)), ((k_len,), (batch, k_len)))


def check_packed(
    q: Array,
    k: Array,
    v: Array,
    cu_seqlens_q: Array,
    cu_seqlens_k: Array,
    max_seqlen_q: int,
    max_seqlen_k: int,
    options: Options,
    kv_lens: Array | None = None,
    rope: RopeArrays | None = None,
    sinks: Array | None = None,
) -> Problem:
    """Check `attention_varlen`'s arguments, packed [total, H, D] arrays."""
    for name, array in (("q", q), ("k", k), ("v", v)):
        if len(array.shape) != 3:
            raise ValueError(f"{name} has shape {array.shape}; allowed: rank 3, [total, heads, head_dim]")
    _check_alike(q, k, v)
    total_q, q_heads, head_dim = q.shape
    _check_heads(q_heads, k.shape[1], head_dim)
    if len(cu_seqlens_q.shape) != 1 or cu_seqlens_q.shape[0] < 1:
        raise ValueError(f"cu_seqlens_q has shape {cu_seqlens_q.shape}; allowed: [batch + 1]")
    batch = cu_seqlens_q.shape[0] - 1
    _check_index("cu_seqlens_q", cu_seqlens_q, ((batch + 1,),), q.device)
    _check_index("cu_seqlens_k", cu_seqlens_k, ((batch + 1,),), q.device)
    if kv_lens is not None:
        _check_index("kv_lens", kv_lens, ((batch,),), q.device)
    q_len = _longest("max_seqlen_q", max_seqlen_q, total_q)
    k_len = _longest("max_seqlen_k", max_seqlen_k, k.shape[0])
    problem = Problem(
        batch=batch,
        q_len=q_len,
        k_len=k_len,
        q_heads=q_heads,
        kv_heads=k.shape[1],
        head_dim=head_dim,
        dtype=q.dtype,
        device=q.device,
        **check_options(options, head_dim),
        q_strides=_strides("q", q),
        k_strides=_strides("k", k),
        v_strides=_strides("v", v),
        kv_lens=kv_lens is not None,
        **_no_rope(),
        packed=True,
        total_q=total_q,
        total_k=k.shape[0],
        sinks=check_sinks(sinks, q_heads, q.device),
    )
    if rope is None:
        return problem
    return _with_rope(problem, rope, ((total_q,),), ((k.shape[0],),))


def check_paged(
    q: Array,
    keys: tuple[int, int, int],
    options: Options,
    cu_seqlens_q: Array | None,
    max_seqlen_q: Any,
    rope: RopeArrays | None,
) -> Problem:
    """Check the arguments of attention on pages, except the pages: q [B, T, H, D], or packed [total, H, D] with
    cu_seqlens_q. keys: the number of sequences, the most keys that one of them may have, and the number of heads."""
    batch, k_len, kv_heads = keys
    *lead, q_heads, head_dim = q.shape
    _check_heads(q_heads, kv_heads, head_dim)
    packed = cu_seqlens_q is not None
    q_shapes: tuple[tuple[int, ...], ...]
    if cu_seqlens_q is None:
        if lead[0] != batch:
            raise ValueError(f"kv.page_table has {batch} rows; allowed: q's batch size, {lead[0]}")
        q_len, total_q = lead[1], 0
        q_shapes = ((q_len,), (batch, q_len))
    else:
        _check_index("cu_seqlens_q", cu_seqlens_q, ((batch + 1,),), q.device)
        total_q = lead[0]
        q_len = _longest("max_seqlen_q", max_seqlen_q, total_q)
        q_shapes = ((total_q,),)
    problem = Problem(
        batch=batch,
        q_len=q_len,
        k_len=k_len,
        q_heads=q_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        dtype=q.dtype,
        device=q.device,
        **check_options(options, head_dim),
        q_strides=_strides("q", q),
        k_strides=(0, 0, 0),
        v_strides=(0, 0, 0),
        kv_lens=True,
        **_no_rope(),
        packed=packed,
        total_q=total_q,
        total_k=0,
    )
    if rope is None:
        return problem
    # Keys were rotated when they were written. The positions that queries reach are only known on the device, which
    # checks them. Any position needs at least one row of the tables.
    anywhere = Array((1,), None, "int32", q.device)
    rope = replace(rope, positions_q=rope.positions_q or anywhere, positions_k=anywhere)
    given = rope.positions_q is not anywhere
    rotated = _with_rope(problem, rope, q_shapes if given else ((1,),), ((1,),))
    return replace(rotated, positions_q_stride=rotated.positions_q_stride if given else None, positions_k_stride=None)


def _longest(name: str, bound: Any, total: int) -> int:
    """The longest possible sequence: `bound`, or the total length if that is less."""
    longest = check_int(name, bound, 0, INT32_MAX)
    return min(longest, total) if isinstance(total, int) else longest  # no guard on a symbolic total here


def _check_alike(q: Array, k: Array, v: Array) -> None:
    for name, array in (("q", q), ("k", k), ("v", v)):
        if array.dtype not in DTYPES:
            raise TypeError(f"{name} has dtype {array.dtype}; allowed: {', '.join(DTYPES)}")
    for name, array in (("k", k), ("v", v)):
        if array.dtype != q.dtype:
            raise TypeError(f"{name} has dtype {array.dtype}; allowed: q's, {q.dtype}")
        if array.device != q.device:
            raise ValueError(f"{name} is on {array.device}; allowed: q's device, {q.device}")
        if array.shape[-1] != q.shape[-1]:
            raise ValueError(f"{name} has head_dim {array.shape[-1]}; allowed: q's, {q.shape[-1]}")
    if v.shape != k.shape:
        raise ValueError(f"v has shape {v.shape}; allowed: k's, {k.shape}")
    for name, array in (("q", q), ("k", k), ("v", v)):
        # Only plain ints: a traced, symbolic extent is checked when it has a value, without a guard here.
        if any(isinstance(extent, int) and extent > INT32_MAX for extent in array.shape):
            raise ValueError(f"{name} has shape {array.shape}; allowed: every extent below 2^31")


def _check_heads(q_heads: int, kv_heads: int, head_dim: int) -> None:
    if not 1 <= head_dim <= MAX_HEAD_DIM:
        raise ValueError(f"q has head_dim {head_dim}; allowed: 1 to {MAX_HEAD_DIM}")
    if q_heads < 1:
        raise ValueError("q has 0 heads; allowed: 1 or more")
    if kv_heads < 1 or q_heads % kv_heads:
        raise ValueError(
            f"k has {kv_heads} heads; allowed: a divisor of q's {q_heads} heads "
            "(layout, 'bthd' or 'bhtd', says which dimension they are)"
        )


def _strides(name: str, array: Array) -> tuple[int, int, int]:
    """(batch, length, head) strides in elements; packed arrays get batch stride 0."""
    if array.strides is None or 0 in array.shape:  # strides of an empty array have no meaning
        step, from_last = 1, []
        for extent in reversed(array.shape):
            from_last.append(step)
            step *= extent
        strides = tuple(reversed(from_last))
    else:
        strides = array.strides
        if strides[-1] != 1 and array.shape[-1] > 1:
            raise ValueError(f"{name} has stride {strides[-1]} in its last dimension; allowed: 1 (contiguous head_dim)")
    batch, length, head = (0, *strides[:-1]) if len(strides) == 3 else strides[:-1]
    return batch, length, head


def _check_index(name: str, array: Array, shapes: tuple[tuple[int, ...], ...], device: str) -> None:
    allowed = " or ".join(str(list(shape)) for shape in shapes)
    if array.dtype != "int32":
        raise TypeError(f"{name} has dtype {array.dtype}; allowed: int32")
    if array.shape not in shapes:
        raise ValueError(f"{name} has shape {list(array.shape)}; allowed: {allowed}")
    if array.device != device:
        raise ValueError(f"{name} is on {array.device}; allowed: q's device, {device}")


def check_sinks(sinks: Array | None, q_heads: int, device: str) -> bool:
    """Whether there are sinks, one for each query head; kernels get them as float32."""
    if sinks is None:
        return False
    check_dtype("sinks", sinks, *_SINK_DTYPES)
    if tuple(sinks.shape) != (q_heads,):
        raise ValueError(f"sinks has shape {list(sinks.shape)}; allowed: [{q_heads}], one for each head of q")
    check_device("sinks", sinks, "q", device)
    return True


def check_options(options: Options, head_dim: int) -> dict[str, Any]:
    """The arguments of a call with defaults filled in, by the names of Problem's fields."""
    left, right = _check_window(options.window)
    if check_flag("causal", options.causal):
        right = 0
    named = isinstance(options.precision, str) and options.precision in PRECISIONS[1:]
    if options.precision is not None and not named:
        allowed = ", ".join(repr(p) for p in PRECISIONS[1:])
        wrong = ValueError if isinstance(options.precision, str) else TypeError
        raise wrong(f"precision is {shown(options.precision)}; allowed: None, {allowed}")
    scale, softcap = (
        default if value is None else check_number(name, value, "None or a number", _MOST)
        for name, value, default in (
            ("scale", options.scale, 1.0 / math.sqrt(head_dim)),
            ("softcap", options.softcap, 0.0),
        )
    )
    if softcap < 0:
        raise ValueError(f"softcap is {softcap}; allowed: None, or 0 or more (0 is off)")
    if 0 < softcap < _LEAST_SOFTCAP:
        raise ValueError(f"softcap is {softcap}; allowed: 0 (off), or 2^-100 to 2^100, for float32's sake")
    if softcap and scale and not _LEAST_SCALE_BY_SOFTCAP <= abs(scale) / softcap <= _MOST:
        raise ValueError(
            f"scale is {scale} and softcap is {softcap}; allowed: scale / softcap of 0, or 2^-126 to 2^100 either way"
        )
    return {
        "scale": scale,
        "softcap": softcap,
        "window_left": left,
        "window_right": right,
        "precision": options.precision or PRECISIONS[0],
        "kernel": check_kernel(options.kernel),
        "batch_invariant": check_flag("batch_invariant", options.batch_invariant),
    }


def _check_window(window: Any) -> tuple[int, int]:
    if window is None:
        return -1, -1
    if not isinstance(window, (tuple, list)) or not all(map(_is_int, window)):
        raise TypeError(f"window is {shown(window)}; allowed: {WINDOW_FORM}")
    if len(window) != 2 or any(edge < -1 for edge in window):
        raise ValueError(f"window is {shown(window)}; allowed: {WINDOW_FORM}")
    # An edge beyond every possible length is unlimited; this also keeps i + window within 32 bits in every kernel.
    left, right = (-1 if edge > INT32_MAX // 4 else int(edge) for edge in window)
    return left, right


def _is_int(edge: Any) -> bool:
    return isinstance(edge, Integral) and not isinstance(edge, bool)


def _no_rope() -> dict[str, Any]:
    return {
        "rope_rows": 0,
        "rotary_dim": 0,
        "rope_interleaved": False,
        "positions_q_stride": None,
        "positions_k_stride": None,
    }


def _with_rope(
    problem: Problem,
    rope: RopeArrays,
    q_shapes: tuple[tuple[int, ...], ...],
    k_shapes: tuple[tuple[int, ...], ...],
) -> Problem:
    array: Array | None
    for name, array in (("rope.cos", rope.cos), ("rope.sin", rope.sin)):
        if array.dtype not in DTYPES:
            raise TypeError(f"{name} has dtype {array.dtype}; allowed: {', '.join(DTYPES)}")
        if len(array.shape) != 2 or array.shape[1] < 1:
            raise ValueError(f"{name} has shape {array.shape}; allowed: {TABLE_FORM}{FULL_TABLES}")
        if array.device != problem.device:
            raise ValueError(f"{name} is on {array.device}; allowed: q's device, {problem.device}")
    if rope.sin.shape != rope.cos.shape:
        raise ValueError(f"rope.sin has shape {rope.sin.shape}; allowed: rope.cos's, {rope.cos.shape}")
    rows, half = rope.cos.shape
    if 2 * half > problem.head_dim:
        advice = FULL_TABLES if half == problem.head_dim else ""
        raise ValueError(
            f"rope.cos has {half} columns; allowed: at most head_dim / 2 = {problem.head_dim / 2:g}{advice}"
        )
    strides: list[int | None] = []
    lengths: list[int] = []
    for name, array, shapes, reach in (
        ("rope.positions_q", rope.positions_q, q_shapes, (problem.q_len, problem.k_len)),
        ("rope.positions_k", rope.positions_k, k_shapes, (problem.k_len,)),
    ):
        if array is None:
            strides.append(None)
            lengths += reach
        else:
            _check_index(name, array, shapes, problem.device)
            if 0 not in array.shape:
                lengths.append(1)  # any position needs at least one row
            strides.append(array.shape[1] if len(array.shape) == 2 else 0)
    # Each length separately: max() of symbolic lengths would fix their order in a traced program.
    if any(rows < length for length in lengths):
        raise ValueError(f"rope.cos has {rows} rows; allowed: at least {max(lengths)}, one for each position in use")
    return replace(
        problem,
        rope_rows=max(rows, 1),
        rotary_dim=2 * half,
        rope_interleaved=bool(rope.interleaved),
        positions_q_stride=strides[0],
        positions_k_stride=strides[1],
    )
