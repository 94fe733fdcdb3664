"""PagedKV, keys and values in the pages of a cache, and attention on it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Generic

from qflash.call.array import Array, check_device, check_dtype, check_float, check_shape, dtype_code, takes_a_copy
from qflash.call.op import Extents, Op, Operand, Plan, Result
from qflash.call.spec import KV_KINDS
from qflash.call.words import INT32_MAX, check_flag, check_word
from qflash.ops.attention import STRUCT, fields_of, lse_shape
from qflash.ops.problem import Options, RopeArrays, check_paged, check_sinks
from qflash.ops.quantization import Quantized, tables_of
from qflash.typing import ArrayT_co, Flag, PageLayout

PAGE_LAYOUTS = ("phtd", "pthd")
PAGE_UNIT = 16  # tokens: the page size is a multiple of it, so that bulk copies stay within a page
WHOLE = 16  # bytes: bulk loads start at multiples of this
BYTES = {"int8": 1, "float32": 4}  # per element; 2 for any other
HADAMARD = 16  # channels of the Hadamard matrix that K of int8 pages is multiplied by
_PLANES = ("kv.k_scale", "kv.v_scale")


@dataclass(frozen=True, slots=True, eq=False)
class PagedKV(Generic[ArrayT_co]):
    """Keys and values in pages. Returned by `KVCache` and `paged_write`; pass it as `attention(q, kv)`.

    Args:
        k_pages: `[pages, Hkv, page_size, D]`, or with layout "pthd" `[pages, page_size, Hkv, D]`, in q's dtype or int8;
            any strides with a contiguous last dimension, so a cache allocated elsewhere can be used without a copy.
        v_pages: the same for values.
        page_table: int32 `[B, columns]`; token j of sequence b is in page `page_table[b, j // page_size]`. Entries that
            no token needs may have any value.
        lens: int32 `[B]`, the number of tokens of each sequence.
        k_scale: for int8, float32 `[pages, Hkv, page_size]`, a scale for each token and head.
        v_scale: the same for values.
        k_mean: for int8, float32 `[Hkv, D]`, the mean that was subtracted from all keys, or None.
        layout: "phtd" or "pthd".

    In int8 pages, K was rotated and multiplied by a Hadamard matrix in every 16 channels before it was rounded
    (docs/kernels/kv_write.md).

    Example:
        >>> import numpy as np
        >>> import qflash
        >>> kv = qflash.PagedKV(  # two sequences of 20 and 5 tokens in three of four pages
        ...     np.zeros((4, 2, 16, 64), np.float32),
        ...     np.zeros((4, 2, 16, 64), np.float32),
        ...     page_table=np.array([[3, 0], [1, -1]], np.int32),
        ...     lens=np.array([20, 5], np.int32),
        ... )
        >>> kv.pages, kv.kv_heads, kv.page_size, kv.head_dim
        (4, 2, 16, 64)
    """

    k_pages: ArrayT_co
    v_pages: ArrayT_co
    page_table: ArrayT_co
    lens: ArrayT_co
    k_scale: ArrayT_co | None = None
    v_scale: ArrayT_co | None = None
    k_mean: ArrayT_co | None = None
    layout: PageLayout = "phtd"

    def __post_init__(self) -> None:
        # JAX must have this class registered before jit sees an instance, possibly before the first call.
        if type(self.k_pages).__module__.partition(".")[0] in ("jax", "jaxlib"):
            import qflash.frontends.jax  # noqa: F401

    @property
    def pages(self) -> int:
        """Number of pages of the pool."""
        return int(self.k_pages.shape[0])

    @property
    def kv_heads(self) -> int:
        """Hkv, the number of KV heads."""
        return int(self.k_pages.shape[1 if self.layout == "phtd" else 2])

    @property
    def page_size(self) -> int:
        """Tokens per page."""
        return int(self.k_pages.shape[2 if self.layout == "phtd" else 1])

    @property
    def head_dim(self) -> int:
        """D, channels per head."""
        return int(self.k_pages.shape[3])

    @property
    def is_int8(self) -> bool:
        """Whether pages are int8 with scales."""
        return self.k_scale is not None


# The names of a PagedKV's arrays in calls, and their fields in a struct that has a QfKv and kv_lens.
KV_ARRAYS = {
    "kv.k_pages": "kv.k.data", "kv.v_pages": "kv.v.data", "kv.page_table": "kv.page_table", "kv.lens": "kv_lens",
    "kv.k_scale": "kv.k_scales.scale", "kv.v_scale": "kv.v_scales.scale", "kv.k_mean": "kv.k_mean",
}  # fmt: skip


def arrays_of(kv: PagedKV) -> tuple[Any, ...]:
    """The arrays of a PagedKV in the order of KV_ARRAYS."""
    return kv.k_pages, kv.v_pages, kv.page_table, kv.lens, kv.k_scale, kv.v_scale, kv.k_mean


@dataclass(frozen=True, slots=True)
class Pool:
    """The result of checking a PagedKV."""

    batch: int
    columns: int
    kv_heads: int
    page_size: int
    head_dim: int
    int8: bool
    fields: tuple[tuple[str, int | float | Extents], ...]  # of a QfKv, as kv.<field>
    arrays: tuple[str, ...]  # names in KV_ARRAYS of the given ones
    odd_pages: bool  # see Spec
    odd_scales: bool


def check_pool(kv: Mapping[str, Array | None], layout: Any, dtype: str, device: str, first: str) -> Pool:
    """Check the arrays of a PagedKV, named as in KV_ARRAYS. dtype, device: those of the argument `first`."""
    check_word("kv.layout", layout, PAGE_LAYOUTS)
    for name in ("kv.k_pages", "kv.v_pages", "kv.page_table", "kv.lens"):
        if kv[name] is None:
            raise TypeError(f"{name} is None; allowed: an array")
    given = {name: array for name, array in kv.items() if array is not None}
    k, v, table, lens = (given[name] for name in ("kv.k_pages", "kv.v_pages", "kv.page_table", "kv.lens"))
    form = "[pages, heads, page_size, head_dim]" if layout == "phtd" else "[pages, page_size, heads, head_dim]"
    if len(k.shape) != 4:
        raise ValueError(f"kv.k_pages has shape {list(k.shape)}; allowed: rank 4, {form}")
    int8 = k.dtype == "int8"
    if not int8 and k.dtype != dtype:
        raise TypeError(f"kv.k_pages has dtype {k.dtype}; allowed: {first}'s, {dtype}, or int8")
    check_dtype("kv.v_pages", v, k.dtype)
    check_shape("kv.v_pages", v, k.shape)
    pages, heads, page_size, head_dim = (
        k.shape if layout == "phtd" else (k.shape[0], k.shape[2], k.shape[1], k.shape[3])
    )
    if heads < 1 or page_size < 1 or page_size % PAGE_UNIT:
        allowed = f"{form} with a head at least and a page_size that is a multiple of {PAGE_UNIT}"
        raise ValueError(f"kv.k_pages has shape {list(k.shape)}; allowed: {allowed}")
    for name, array in given.items():
        if isinstance(array.shape[0], int) and any(extent > INT32_MAX for extent in array.shape):
            raise ValueError(f"{name} has shape {list(array.shape)}; allowed: every extent below 2^31")
        check_device(name, array, first, device)
    check_dtype("kv.page_table", table, "int32")
    check_dtype("kv.lens", lens, "int32")
    if len(table.shape) != 2:
        raise ValueError(f"kv.page_table has shape {list(table.shape)}; allowed: rank 2, [batch, columns]")
    batch, columns = table.shape
    if isinstance(columns, int) and columns * page_size > INT32_MAX:
        raise ValueError(f"kv.page_table has {columns} columns; allowed: fewer than 2^31 tokens, {page_size} a column")
    check_shape("kv.lens", lens, (batch,))
    fields: list[tuple[str, int | float | Extents]] = [
        ("kv.kind", KV_KINDS.index("pages_int8" if int8 else "pages")),
        ("kv.k_dtype", dtype_code(k.dtype)),
        ("kv.v_dtype", dtype_code(k.dtype)),
        ("kv.page_size", page_size),
        ("kv.pages", pages),
        ("kv.page_table_stride", _size(_steps(table)[0], ("kv.page_table", 1))),
    ]
    for name, array in (("k", k), ("v", v)):
        if takes_a_copy(array):
            came = list(array.strides or ())
            raise ValueError(f"kv.{name}_pages has strides {came}; allowed: 1 in the last dimension, none negative")
        page, one, other, _ = _steps(array)
        head, token = (one, other) if layout == "phtd" else (other, one)
        fields += [(f"kv.{name}.stride_b", page), (f"kv.{name}.stride_t", token), (f"kv.{name}.stride_h", head)]
    if _steps(table)[1] != 1 and isinstance(columns, int) and columns > 1:
        raise ValueError(f"kv.page_table has stride {_steps(table)[1]} in its last dimension; allowed: 1")
    _check_scales(given, int8, (pages, heads, page_size), (heads, head_dim), fields)
    return Pool(
        batch,
        columns,
        heads,
        page_size,
        head_dim,
        int8,
        tuple(fields),
        tuple(given),
        odd_pages=any(_is_odd(step, k.dtype) for x in (k, v) for step in _steps_taken(x)),
        odd_scales=any(_is_odd(step, "float32") for name in _PLANES if int8 for step in _steps(given[name])[:-1]),
    )


def _check_scales(
    given: Mapping[str, Array],
    int8: bool,
    planes: tuple[int, ...],
    mean: tuple[int, ...],
    fields: list[tuple[str, int | float | Extents]],
) -> None:
    for name in _PLANES:
        array = given.get(name)
        if (array is not None) != int8:
            came, allowed = ("None", "an array") if int8 else ("given", "None")
            raise TypeError(f"{name} is {came} and kv.k_pages {'int8' if int8 else 'not int8'}; allowed: {allowed}")
        if array is not None:
            check_dtype(name, array, "float32")
            check_shape(name, array, planes)
            page, head, token = _steps(array)
            if token != 1 and planes[2] != 1:
                raise ValueError(f"{name} has stride {token} in its last dimension; allowed: 1")
            part = name.removeprefix("kv.").removesuffix("_scale")
            fields += [(f"kv.{part}_scales.stride_b", page), (f"kv.{part}_scales.stride_h", head)]
            fields.append((f"kv.{part}_scales.group", 1))
    if "kv.k_mean" in given:
        if not int8:
            raise TypeError("kv.k_mean is given and kv.k_pages not int8; allowed: None")
        check_dtype("kv.k_mean", given["kv.k_mean"], "float32")
        check_shape("kv.k_mean", given["kv.k_mean"], mean)
    if int8 and mean[1] % HADAMARD:
        raise ValueError(f"kv.k_pages is int8 and has head_dim {mean[1]}; allowed: a multiple of {HADAMARD}")


def _steps(array: Array) -> tuple[int, ...]:
    """Strides in elements; those of a contiguous array if it has none."""
    if array.strides is not None and 0 not in array.shape:
        return array.strides
    steps = [1]
    for extent in reversed(array.shape[1:]):
        steps.append(steps[-1] * extent)
    return tuple(reversed(steps))


def _steps_taken(array: Array) -> list[Any]:
    """The strides between rows that matter: dimensions of size 1 are left out."""
    return [step for step, size in zip(_steps(array)[:-1], array.shape, strict=False) if size != 1]


def _is_odd(step: Any, dtype: str) -> bool:
    """Whether a stride is not a multiple of 16 bytes. Strides not yet known belong to arrays without gaps."""
    return isinstance(step, int) and step * BYTES.get(dtype, 2) % WHOLE != 0


def _size(value: Any, *of: tuple[str, int]) -> Any:
    return value if isinstance(value, int) else Extents(of)


# attention ------------------------------------------------------------------------------------------------------------


def paged_call(
    q: Any, kv: Any, v: Any, options: Options, kv_lens: Any, rope: Any, return_lse: Flag, sinks: Any = None,
    cu_seqlens_q: Any = None, max_seqlen_q: Any = 0,
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:  # fmt: skip
    """The arrays and words of ATTENTION_PAGED, from the arguments of `attention` or `attention_varlen`."""
    if type(q) is PagedKV or type(v) is PagedKV:
        name = "q" if type(q) is PagedKV else "v"
        raise TypeError(f"{name} is qflash.PagedKV; allowed: in the place of k, without v")
    if type(q) is Quantized:
        raise TypeError("q is qflash.Quantized and k qflash.PagedKV; allowed: an array")
    if v is not None:
        raise TypeError(f"v is {type(v).__module__}.{type(v).__qualname__} and k qflash.PagedKV, which has v in it; "
                        "allowed: None")  # fmt: skip
    if kv_lens is not None:
        raise TypeError("kv_lens is given and k is qflash.PagedKV; allowed: None, its lens say how long sequences are")
    if type(kv.layout) is not str:  # checked before a front end processes words
        check_word("kv.layout", kv.layout, PAGE_LAYOUTS)
    cos, sin, positions, _, interleaved = tables_of(rope)
    arrays = (q, *arrays_of(kv), cu_seqlens_q, sinks, cos, sin, positions)
    return arrays, (kv.layout, *options, return_lse, interleaved, max_seqlen_q)


def _plan(
    q: Array,
    k_pages: Array | None,
    v_pages: Array | None,
    page_table: Array | None,
    lens: Array | None,
    k_scale: Array | None,
    v_scale: Array | None,
    k_mean: Array | None,
    cu_seqlens_q: Array | None,
    sinks: Array | None,
    cos: Array | None,
    sin: Array | None,
    positions: Array | None,
    layout: Any,
    causal: Any,
    window: Any,
    softcap: Any,
    scale: Any,
    precision: Any,
    kernel: Any,
    batch_invariant: Any,
    return_lse: Any,
    interleaved: Any,
    max_seqlen_q: Any,
) -> Plan:
    check_flag("return_lse", return_lse)
    check_float("q", q)
    rank, form = (4, "[batch, length, heads, head_dim]") if cu_seqlens_q is None else (3, "[total, heads, head_dim]")
    if len(q.shape) != rank:
        raise ValueError(f"q has shape {list(q.shape)}; allowed: rank {rank}, {form}")
    parts = (k_pages, v_pages, page_table, lens, k_scale, v_scale, k_mean)
    pool = check_pool(dict(zip(KV_ARRAYS, parts, strict=True)), layout, q.dtype, q.device, "q")
    if pool.head_dim != q.shape[-1]:
        raise ValueError(f"kv.k_pages has head_dim {pool.head_dim}; allowed: q's, {q.shape[-1]}")
    if precision not in (None, "int8") or (precision == "int8" and not pool.int8):
        raise ValueError(f"precision is {precision!r}; allowed with this kv: None{' or int8' * pool.int8}")
    copied = takes_a_copy(q)
    rope = None if cos is None or sin is None else RopeArrays(cos, sin, interleaved, positions)
    problem = check_paged(
        Array(q.shape, None if copied else q.strides, q.dtype, q.device),
        (pool.batch, pool.columns * pool.page_size, pool.kv_heads),
        Options(causal, window, softcap, scale, None, kernel, batch_invariant),
        cu_seqlens_q,
        max_seqlen_q,
        rope,
    )
    problem = replace(problem, sinks=check_sinks(sinks, problem.q_heads, q.device))
    operands = [Operand("q", "q.data", contiguous=copied)]
    operands += [Operand(name, KV_ARRAYS[name], contiguous=name in ("kv.lens", "kv.k_mean")) for name in pool.arrays]
    if cu_seqlens_q is not None:
        operands.append(Operand("cu_seqlens_q", "cu_seqlens_q", contiguous=True))
    if sinks is not None:
        operands.append(Operand("sinks", "sinks", contiguous=True, dtype="float32"))
    if rope is not None:
        operands += [Operand(name, name, contiguous=True, dtype="float32") for name in ("rope.cos", "rope.sin")]
        if positions is not None:
            operands.append(Operand("rope.positions_q", "rope.positions_q", contiguous=True))
    heads, token = (1, 2) if layout == "phtd" else (2, 1)
    sizes = {
        "k_len": _size(problem.k_len, ("kv.page_table", 1), ("kv.k_pages", token)),
        "kv_heads": _size(problem.kv_heads, ("kv.k_pages", heads)),
    }
    fields = [(name, sizes.get(name, value)) for name, value in fields_of(problem, strided=("q",))]
    results = [Result("out.data", tuple(q.shape), q.dtype)]
    if return_lse:
        results.append(Result("lse", lse_shape(problem), "float32"))
    return Plan(
        for_spec=replace(
            problem.spec(0, kv="pages_int8" if pool.int8 else "pages"),
            odd_pages=pool.odd_pages,
            odd_scales=pool.odd_scales,
        ),
        device=q.device,
        kernel=problem.kernel,
        struct=STRUCT,
        fields=(*fields, *pool.fields),
        operands=tuple(operands),
        results=tuple(results),
    )


def _flops(arrays: dict[str, Any], words: dict[str, Any], _: Any) -> int:
    """FLOPs of Q Kᵀ and P V, for as many keys as the table has room for."""
    *_, heads, head_dim = arrays["q"].shape
    table, k_pages = arrays["kv.page_table"], arrays["kv.k_pages"]
    keys = table.shape[1] * k_pages.shape[2 if words["layout"] == "phtd" else 1]
    rows = arrays["q"].shape[0] * (1 if "cu_seqlens_q" in arrays else arrays["q"].shape[1])
    return 4 * int(rows * heads * keys * head_dim)


ATTENTION_PAGED = Op(
    "attention_paged",
    ("q", *KV_ARRAYS, "cu_seqlens_q", "sinks", "rope.cos", "rope.sin", "rope.positions_q"),
    (
        *("layout", "causal", "window", "softcap", "scale", "precision", "kernel", "batch_invariant"),
        *("return_lse", "interleaved", "max_seqlen_q"),
    ),
    _plan,
    public="attention on a PagedKV",
    checked=("kv.page_table", "kv.lens", "cu_seqlens_q", "rope.positions_q"),
    indices=("kv.lens", "cu_seqlens_q", "rope.positions_q"),
    flops=_flops,
)
