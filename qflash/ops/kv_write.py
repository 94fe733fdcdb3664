"""paged_write: writes new tokens of k and v to the pages of a cache, rotating and quantizing them on the way."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from qflash.call.array import Array, check_device, check_dtype, check_float, check_shape, dtype_code
from qflash.call.op import Op, Operand, Plan
from qflash.call.spec import spec_of
from qflash.call.words import check_flag, check_kernel, check_word
from qflash.ops.paged import KV_ARRAYS, PAGE_LAYOUTS, PagedKV, Pool, arrays_of, check_pool
from qflash.ops.problem import MAX_HEAD_DIM
from qflash.ops.quantization import Shape, check_rope, shape_of, tables_of
from qflash.ops.run import run_in_place
from qflash.rotary import Rope
from qflash.typing import ArrayT, FrameworkArray, Lengths

WRITTEN = ("kv.k_pages", "kv.v_pages", "kv.k_scale", "kv.v_scale")


def paged_write(
    kv: PagedKV[ArrayT],
    k: FrameworkArray,
    v: FrameworkArray,
    *,
    rope: Rope | None = None,
    cu_seqlens: Lengths | None = None,
    kernel: str | None = None,
) -> PagedKV[ArrayT]:
    """Store the new tokens of k and v in the pages of `kv`, in one launch, for `attention(q, kv)`.

    Args:
        kv: the pages. `kv.lens` already includes the new tokens: of n new tokens of a sequence, token t becomes token
            `lens - n + t`.
        k: `[B, T, Hkv, D]`, or packed `[total, Hkv, D]` with cu_seqlens.
        v: the same for values.
        rope: rotates k; the position of a token is its index in the sequence, or given by `rope.positions_k`.
        cu_seqlens: int32 `[B + 1]`, for sequences with different numbers of new tokens.
        kernel: name of the kernel that must be used.

    Returns:
        NumPy and PyTorch: `kv`, whose pages are written in place. JAX: a new PagedKV; in a program that has `kv` as a
        donated argument, it reuses the pages of the old one, without a copy.

    Pages have k's dtype or int8. For int8, `kv.k_mean` is subtracted from k, k is multiplied by a Hadamard matrix in
    every 16 channels, and each token and head gets a scale (docs/kernels/kv_write.md). Only the slots of new tokens are
    written. A token without a slot (past the table, or in a page that does not exist) raises ValueError on the CPU,
    where nothing is written then, and is skipped on a GPU. A row of `[B, T, Hkv, D]` whose length is 0 is padding, of
    which nothing is written. Forward only.

    Example:
        >>> import numpy as np
        >>> import qflash
        >>> pages = np.zeros((4, 2, 16, 64), np.float32)
        >>> kv = qflash.PagedKV(pages, pages.copy(), np.array([[3, 0]], np.int32), lens=np.array([20], np.int32))
        >>> k = np.ones((1, 5, 2, 64), np.float32)
        >>> kv = qflash.paged_write(kv, k, k)  # tokens 15 to 19: the last slot of page 3, then page 0
        >>> pages[3, 0, 15, 0], pages[0, 0, 3, 0], pages[0, 0, 4, 0]
        (np.float32(1.0), np.float32(1.0), np.float32(0.0))
    """
    if not isinstance(kv, PagedKV):
        raise TypeError(f"kv is {type(kv).__module__}.{type(kv).__qualname__}; allowed: qflash.PagedKV")
    if type(kv.layout) is not str:  # checked before a front end processes words
        check_word("kv.layout", kv.layout, PAGE_LAYOUTS)
    cos, sin, _, positions, interleaved = tables_of(rope)
    arrays = (k, v, *arrays_of(kv), cu_seqlens, cos, sin, positions)
    k_pages, v_pages, *scales = run_in_place(KV_WRITE, arrays, (kv.layout, interleaved, kernel))
    if k_pages is kv.k_pages:
        return kv
    k_scale, v_scale = scales or (None, None)
    return replace(kv, k_pages=k_pages, v_pages=v_pages, k_scale=k_scale, v_scale=v_scale)


def _plan(
    k: Array,
    v: Array | None,
    k_pages: Array | None,
    v_pages: Array | None,
    page_table: Array | None,
    lens: Array | None,
    k_scale: Array | None,
    v_scale: Array | None,
    k_mean: Array | None,
    cu_seqlens: Array | None,
    cos: Array | None,
    sin: Array | None,
    positions: Array | None,
    layout: Any,
    interleaved: Any,
    kernel: Any,
) -> Plan:
    check_float("k", k)
    packed = cu_seqlens is not None
    rank, form = (3, "[total, heads, head_dim]") if packed else (4, "[batch, length, heads, head_dim]")
    if len(k.shape) != rank:
        word = "with" if packed else "without"
        raise ValueError(f"k has shape {list(k.shape)}; allowed {word} cu_seqlens: rank {rank}, {form}")
    if v is None:
        raise TypeError("v is None; allowed: an array like k")
    check_dtype("v", v, k.dtype)
    check_shape("v", v, k.shape)
    check_device("v", v, "k", k.device)
    tokens = {"k": _as_one_sequence(k) if packed else k, "v": _as_one_sequence(v) if packed else v}
    shape = shape_of("k", tokens["k"])
    if shape.head_dim > MAX_HEAD_DIM:
        raise ValueError(f"k has head_dim {shape.head_dim}; allowed: 1 to {MAX_HEAD_DIM}")
    parts = (k_pages, v_pages, page_table, lens, k_scale, v_scale, k_mean)
    pages = dict(zip(KV_ARRAYS, parts, strict=True))
    pool = check_pool(pages, layout, k.dtype, k.device, "k")
    _check_fit(shape, pool, cu_seqlens, k.device)
    fields: list[tuple[str, Any]] = []
    operands = []
    for name, x in tokens.items():
        strides = shape.strides_of(name, x)
        fields += [one for one in strides or shape.strides(name) if not (packed and one[0].endswith("stride_b"))]
        operands.append(Operand(name, f"{name}.data", contiguous=strides is None))
    for name in pool.arrays:
        if name in WRITTEN:
            _check_apart(name, pages[name])
        contiguous = name in ("kv.lens", "kv.k_mean")
        operands.append(Operand(name, KV_ARRAYS[name], contiguous=contiguous, written=name in WRITTEN))
    if packed:
        operands.append(Operand("cu_seqlens", "cu_seqlens_k", contiguous=True))
        fields.append(("total_k", shape.length))
    # The positions of the tokens are only known on the device, which checks them. Any position needs at least one row.
    some = int(not _is_empty(k))
    rope_fields, rope_operands = check_rope(
        shape, k.device, cos, sin, positions, check_flag("interleaved", interleaved), "k", needed=some
    )
    rope = None if cos is None else "interleaved" if interleaved else "half"
    kind = "pages_int8" if pool.int8 else "pages"
    return Plan(
        for_spec=spec_of(
            "kv_write", k.device, k.dtype, head_dim=int(shape.head_dim), kv=kind, rope=rope, packed=packed, kv_lens=True
        ),
        device=k.device,
        kernel=check_kernel(kernel),
        struct="QfKvWriteParams",
        fields=(
            ("dtype", dtype_code(k.dtype)),
            ("batch", pool.batch),
            ("k_len", shape.length),
            ("kv_heads", shape.heads),
            ("head_dim", shape.head_dim),
            ("columns", pool.columns),
            *fields,
            *rope_fields,
            *pool.fields,
        ),
        operands=(*operands, *rope_operands),
        results=(),
        zeros=_is_empty(k),
    )


def _as_one_sequence(x: Array) -> Array:
    """Packed tokens, `[total, heads, head_dim]`, as a batch of one."""
    return Array((1, *x.shape), None if x.strides is None else (0, *x.strides), x.dtype, x.device)


def _is_empty(x: Array) -> bool:
    return any(isinstance(extent, int) and extent == 0 for extent in x.shape)


def _check_fit(shape: Shape, pool: Pool, cu_seqlens: Array | None, device: str) -> None:
    """Reject pages whose sequences, heads or head_dim do not match the tokens."""
    if pool.kv_heads != shape.heads:
        raise ValueError(f"kv.k_pages has {pool.kv_heads} heads; allowed: k's, {shape.heads} (kv.layout says where)")
    if pool.head_dim != shape.head_dim:
        raise ValueError(f"kv.k_pages has head_dim {pool.head_dim}; allowed: k's, {shape.head_dim}")
    if cu_seqlens is None:
        if pool.batch != shape.batch:
            raise ValueError(f"kv.page_table has {pool.batch} rows; allowed: k's batch size, {shape.batch}")
        return
    check_dtype("cu_seqlens", cu_seqlens, "int32")
    check_shape("cu_seqlens", cu_seqlens, (pool.batch + 1,))
    check_device("cu_seqlens", cu_seqlens, "k", device)


def _check_apart(name: str, x: Array | None) -> None:
    """Reject an array whose elements share memory: a write to one would change others."""
    if x is None or x.strides is None or 0 in x.shape:
        return
    if any(stride == 0 and extent > 1 for stride, extent in zip(x.strides, x.shape, strict=True)):
        raise ValueError(f"{name} has strides {list(x.strides)}; allowed: none of 0, because it is written")


KV_WRITE = Op(
    "kv_write",
    ("k", "v", *KV_ARRAYS, "cu_seqlens", "rope.cos", "rope.sin", "rope.positions_k"),
    ("layout", "interleaved", "kernel"),
    _plan,
    writes=WRITTEN,
    public="paged_write",
    checked=("kv.page_table", "kv.lens", "cu_seqlens", "rope.positions_k"),
    indices=("kv.lens", "cu_seqlens", "rope.positions_k"),
)
