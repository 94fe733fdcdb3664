"""The public calls: they choose the operation and pass the arguments to the front end. Imports no framework."""

from __future__ import annotations

from typing import Any, Literal, TypedDict, Unpack, overload

import numpy as np
from numpy.typing import NDArray

from qflash.call.op import Op
from qflash.call.words import check_flag, check_word
from qflash.explanation import Explanation, explanation_of
from qflash.frontends.choose import frontend_of
from qflash.ops.attention import ATTENTION
from qflash.ops.attention_kv import ATTENTION_KEPT, ATTENTION_QUANTIZED, kept_call, quantized_call
from qflash.ops.backward_memory import get_backward_memory
from qflash.ops.kv import QuantizedKV
from qflash.ops.paged import ATTENTION_PAGED, PagedKV, paged_call
from qflash.ops.prefix import SharedPrefixKV, attend_shared
from qflash.ops.problem import Options
from qflash.ops.quantization import Quantized, tables_of
from qflash.ops.run import run
from qflash.rotary import Rope
from qflash.typing import (
    ArrayT,
    Flag,
    FrameworkArray,
    Integer,
    Layout,
    Lengths,
    Number,
    NumpyT,
    Precision,
    TensorT,
    Window,
)

LAYOUTS = ("bthd", "bhtd")
_BTHD: Layout = "bthd"  # the same object as the default of `layout`, so it is compared by identity


class _SharedWords(TypedDict, total=False):
    """The keyword arguments of attention and attention_varlen that do not affect the type of the result."""

    causal: Flag
    window: Window | None
    kv_lens: Lengths | None
    softcap: Number | None
    scale: Number | None
    rope: Rope | None
    sinks: FrameworkArray | None
    precision: Precision | None
    kernel: str | None
    batch_invariant: Flag


class _AttentionWords(_SharedWords, total=False):
    layout: Layout


class _PackedWords(TypedDict, total=False):
    """The arguments that attention_varlen has in addition to attention's, for explain."""

    cu_seqlens_q: Lengths | None
    cu_seqlens_k: Lengths | None
    max_seqlen_q: Integer | None
    max_seqlen_k: Integer | None


class _ExplainWords(_AttentionWords, _PackedWords, total=False):
    pass


# q, k and v may be arrays, Quantized, or an array with a QuantizedKV or PagedKV. The result has the type, and in NumPy
# the dtype, of q, or of v if q is Quantized.
@overload
def attention(
    q: ArrayT,
    k: FrameworkArray,
    v: FrameworkArray,
    *,
    return_lse: Literal[False] = False,
    **words: Unpack[_AttentionWords],
) -> ArrayT: ...
@overload
def attention(
    q: Quantized,
    k: Quantized,
    v: ArrayT | Quantized[ArrayT],
    *,
    return_lse: Literal[False] = False,
    **words: Unpack[_AttentionWords],
) -> ArrayT: ...
@overload
def attention(
    q: ArrayT,
    k: QuantizedKV | PagedKV | SharedPrefixKV,
    v: None = None,
    *,
    return_lse: Literal[False] = False,
    **words: Unpack[_AttentionWords],
) -> ArrayT: ...
@overload
def attention(
    q: NumpyT, k: FrameworkArray, v: FrameworkArray, *, return_lse: Literal[True], **words: Unpack[_AttentionWords]
) -> tuple[NumpyT, NDArray[np.float32]]: ...
@overload
def attention(
    q: TensorT, k: FrameworkArray, v: FrameworkArray, *, return_lse: Literal[True], **words: Unpack[_AttentionWords]
) -> tuple[TensorT, TensorT]: ...
@overload
def attention(
    q: Quantized,
    k: Quantized,
    v: NumpyT | Quantized[NumpyT],
    *,
    return_lse: Literal[True],
    **words: Unpack[_AttentionWords],
) -> tuple[NumpyT, NDArray[np.float32]]: ...
@overload
def attention(
    q: Quantized,
    k: Quantized,
    v: TensorT | Quantized[TensorT],
    *,
    return_lse: Literal[True],
    **words: Unpack[_AttentionWords],
) -> tuple[TensorT, TensorT]: ...
@overload
def attention(
    q: ArrayT,
    k: QuantizedKV | PagedKV | SharedPrefixKV,
    v: None = None,
    *,
    return_lse: Literal[True],
    **words: Unpack[_AttentionWords],
) -> tuple[ArrayT, ArrayT]: ...
@overload
def attention(
    q: ArrayT, k: FrameworkArray, v: FrameworkArray, *, return_lse: Flag, **words: Unpack[_AttentionWords]
) -> ArrayT | tuple[ArrayT, ArrayT]: ...
@overload
def attention(
    q: Quantized, k: Quantized, v: ArrayT | Quantized[ArrayT], *, return_lse: Flag, **words: Unpack[_AttentionWords]
) -> ArrayT | tuple[ArrayT, ArrayT]: ...
@overload
def attention(
    q: ArrayT,
    k: QuantizedKV | PagedKV | SharedPrefixKV,
    v: None = None,
    *,
    return_lse: Flag,
    **words: Unpack[_AttentionWords],
) -> ArrayT | tuple[ArrayT, ArrayT]: ...
def attention(
    q: Any,
    k: Any,
    v: Any = None,
    *,
    causal: Flag = False,
    window: Window | None = None,
    kv_lens: Lengths | None = None,
    softcap: Number | None = None,
    scale: Number | None = None,
    rope: Rope | None = None,
    sinks: FrameworkArray | None = None,
    return_lse: Flag = False,
    precision: Precision | None = None,
    kernel: str | None = None,
    batch_invariant: Flag = False,
    layout: Layout = _BTHD,
) -> Any:
    """Scaled dot-product attention, softmax(scale · q kᵀ) v.

    For NumPy, PyTorch and JAX arrays on the CPU or a CUDA GPU. There is no dropout, dense mask or bias.
    docs/migrating.md translates the arguments of flash-attn, PyTorch and jax.nn.

    Args:
        q: queries, `[B, Tq, Hq, D]`, in float32, float16 or bfloat16; any strides with a contiguous last dimension. May
            be a `qflash.Quantized` if k is one too.
        k: keys, `[B, Tk, Hkv, D]`, where Hq is a multiple of Hkv; same dtype and device as q. May be a
            `qflash.Quantized` (if q is one), or a `qflash.QuantizedKV` or `qflash.PagedKV`, which contains both keys
            and values, or the result of `qflash.share_prefix` on a PagedKV.
        v: values, `[B, Tk, Hkv, D]`, or a `qflash.Quantized`. Omit it if k also contains the values.
        causal: query i attends to keys `j <= i + Tk - Tq`.
        window: `(left, right)`, the number of keys visible on each side of that diagonal; -1 means unlimited.
        kv_lens: int32 `[B]`, the number of valid keys of each sequence; it replaces Tk in the diagonal. A list, or
            integers of another type, is accepted if the values are on the host.
        softcap: replaces scores by `softcap · tanh(score / softcap)`, before masking.
        scale: factor applied to q · k. Default: `1 / sqrt(D)`.
        rope: rotates q and k first, see `qflash.Rope`.
        sinks: float `[Hq]`, one logit per query head, added to the softmax denominator of every row like an additional
            key with value 0: a row becomes `exp(s) v / (Σ exp(s) + exp(sink))`. Sinks are learned parameters and have a
            gradient.
        return_lse: also return the log-sum-exp of each row of scores.
        precision: None computes in the dtype of the arrays, "int8" quantizes QKᵀ, "int8_fp8" also quantizes PV to E4M3
            (Hopper only).
        kernel: name of the kernel that must be used, see `qflash doctor`.
        batch_invariant: if True, the rows of a sequence are bit-for-bit identical whatever else the batch contains,
            whatever its size, and wherever the sequence is in it. By default the same call always gives the same bits,
            but kernels may split the keys of a sequence differently when the rest of the batch changes.
        layout: "bthd", or "bhtd": q, k, v and the result are `[B, H, T, D]`, as in PyTorch's
            scaled_dot_product_attention.

    Returns:
        An array like q, `[B, Tq, Hq, D]`. With `return_lse`, a tuple of it and lse, float32 `[B, Hq, Tq]`, as natural
        logarithms. A row that sees no key is zeros, and its lse is -inf or its sink.

    Raises:
        TypeError, ValueError: an argument is invalid; the message names it. Invalid values inside kv_lens and rope
            positions are detected on the CPU; a CUDA kernel cannot raise for those and writes NaN to the affected
            rows.
        NoKernelError: no kernel, or not the requested one, supports these arguments; `explain` reports why.
        KernelError: a kernel failed at run time.

    Example:
        >>> import numpy as np
        >>> import qflash
        >>> q = np.random.default_rng(0).standard_normal((1, 128, 8, 64), np.float32)
        >>> k = v = q[:, :, :2]  # grouped-query attention: 8 heads of q share 2 of k and v
        >>> out, lse = qflash.attention(q, k, v, causal=True, return_lse=True)
        >>> out.shape, lse.shape
        ((1, 128, 8, 64), (1, 8, 128))
        >>> bool(np.allclose(out[:, 0, :4], v[:, 0, :1]))  # the first query sees one key
        True

    *Quantized arrays.* Arrays that are quantized once can be used in many calls. q and k must either both be symmetric
    or both have a zero point. k has a single scale, or one for each group of tokens, whose size is a power of two of at
    least 16. Only k may be smoothed. rope must be passed to `quantize`. The result has the dtype of v, or of the array
    that v was quantized from. The CPU converts the arrays back to float32 first; on CUDA, scores are integer products
    (kernel `fa_int8`), and results have 16 bits. Forward only.

    *A QuantizedKV* is named kv in error messages. q is then an array and is quantized in the call; rope rotates only q;
    kv_lens defaults to the lens that kv was made with. Hopper only, forward only.

    *A PagedKV* is named kv in error messages. Its lens are the lengths of the sequences. rope rotates only q, query i
    of a sequence at position `i + length - Tq`, because keys were rotated when they were written. Forward only.

    Under torch.autocast, q, k and v are cast like those of scaled_dot_product_attention.
    """
    kind = type(q)
    if kind is type(k) is type(v) and kind not in _VALUES and rope is None and layout is _BTHD:
        # The most common case: three arrays of one framework. The path below gives the same result, with more checks.
        options = (causal, window, softcap, scale, precision, kernel, batch_invariant)
        words = (*options, return_lse, False, 0, 0, get_backward_memory())
        results = frontend_of(kind, "q").run(ATTENTION, (q, k, v, kv_lens, *_NO_ARRAYS, sinks), words)
        if return_lse is False:
            return results[0]
        return (results[0], results[1]) if return_lse else results[0]
    options = (causal, window, softcap, scale, precision, kernel, batch_invariant)
    if check_word("layout", layout, LAYOUTS) != "bthd":
        q, k, v = _with_length_first(layout, q, k, v)
        result = _attend(q, k, v, options, kv_lens, rope, sinks, return_lse)
        return (result[0].swapaxes(1, 2), result[1]) if return_lse else result.swapaxes(1, 2)
    return _attend(q, k, v, options, kv_lens, rope, sinks, return_lse)


def _attend(
    q: Any, k: Any, v: Any, options: tuple[Any, ...], kv_lens: Any, rope: Any, sinks: Any, return_lse: Any
) -> Any:
    if type(k) is SharedPrefixKV:
        results: Any = attend_shared(q, k, v, Options(*options), kv_lens, rope, return_lse, sinks)
    else:
        results = run(*_call_of(q, k, v, options, kv_lens, rope, sinks, return_lse))
    if return_lse is False:
        return results[0]
    return (results[0], results[1]) if check_flag("return_lse", return_lse) else results[0]


def _call_of(
    q: Any, k: Any, v: Any, options: tuple[Any, ...], kv_lens: Any, rope: Any, sinks: Any, return_lse: Any
) -> tuple[Op, tuple[Any, ...], tuple[Any, ...]]:
    """The variant of the operation for these types of q, k and v, with its arrays and words."""
    kind = type(k)
    if kind is PagedKV or type(q) is PagedKV or type(v) is PagedKV:
        return ATTENTION_PAGED, *paged_call(q, k, v, Options(*options), kv_lens, rope, return_lse, sinks)
    if kind is QuantizedKV or type(q) is QuantizedKV or type(v) is QuantizedKV:
        return ATTENTION_KEPT, *kept_call(q, k, v, Options(*options), kv_lens, rope, sinks, return_lse)
    if kind is Quantized or type(q) is Quantized or type(v) is Quantized:
        return ATTENTION_QUANTIZED, *quantized_call(q, k, v, Options(*options), kv_lens, rope, sinks, return_lse)
    cos, sin, positions_q, positions_k, interleaved = tables_of(rope)
    arrays = (q, k, v, kv_lens, None, None, cos, sin, positions_q, positions_k, sinks)
    return ATTENTION, arrays, (*options, return_lse, interleaved, 0, 0, get_backward_memory())


_VALUES = (Quantized, QuantizedKV, PagedKV, SharedPrefixKV)
_NO_ARRAYS = (None,) * (len(ATTENTION.arrays) - 5)  # the optional arrays between kv_lens and sinks


def _with_length_first(layout: str, q: Any, k: Any, v: Any) -> tuple[Any, Any, Any]:
    """q, k and v of `layout`, which is not "bthd", as `[B, T, H, D]`: views, if the framework has them."""
    swapped = []
    for name, x in (("q", q), ("k", k), ("v", v)):
        if type(x) is Quantized:
            raise ValueError(f"layout is {layout!r} and {name} is qflash.Quantized; allowed: 'bthd'")
        rank = len(getattr(x, "shape", ()))
        if rank not in (0, 4):
            raise ValueError(f"{name} has shape {tuple(x.shape)}; allowed: rank 4, [batch, heads, length, head_dim]")
        swapped.append(x.swapaxes(1, 2) if rank == 4 else x)  # an argument that is no array is rejected later, by name
    return swapped[0], swapped[1], swapped[2]


@overload
def attention_varlen(
    q: ArrayT,
    k: FrameworkArray,
    v: FrameworkArray,
    cu_seqlens_q: Lengths,
    cu_seqlens_k: Lengths,
    max_seqlen_q: Integer,
    max_seqlen_k: Integer,
    *,
    return_lse: Literal[False] = False,
    **words: Unpack[_SharedWords],
) -> ArrayT: ...
@overload
def attention_varlen(
    q: NumpyT,
    k: FrameworkArray,
    v: FrameworkArray,
    cu_seqlens_q: Lengths,
    cu_seqlens_k: Lengths,
    max_seqlen_q: Integer,
    max_seqlen_k: Integer,
    *,
    return_lse: Literal[True],
    **words: Unpack[_SharedWords],
) -> tuple[NumpyT, NDArray[np.float32]]: ...
@overload
def attention_varlen(
    q: TensorT,
    k: FrameworkArray,
    v: FrameworkArray,
    cu_seqlens_q: Lengths,
    cu_seqlens_k: Lengths,
    max_seqlen_q: Integer,
    max_seqlen_k: Integer,
    *,
    return_lse: Literal[True],
    **words: Unpack[_SharedWords],
) -> tuple[TensorT, TensorT]: ...
@overload
def attention_varlen(
    q: ArrayT,
    k: FrameworkArray,
    v: FrameworkArray,
    cu_seqlens_q: Lengths,
    cu_seqlens_k: Lengths,
    max_seqlen_q: Integer,
    max_seqlen_k: Integer,
    *,
    return_lse: Flag,
    **words: Unpack[_SharedWords],
) -> ArrayT | tuple[ArrayT, ArrayT]: ...
@overload
def attention_varlen(
    q: ArrayT,
    k: PagedKV,
    v: None,
    cu_seqlens_q: Lengths,
    cu_seqlens_k: None,
    max_seqlen_q: Integer,
    max_seqlen_k: None,
    *,
    return_lse: Literal[False] = False,
    **words: Unpack[_SharedWords],
) -> ArrayT: ...
@overload
def attention_varlen(
    q: ArrayT,
    k: PagedKV,
    v: None,
    cu_seqlens_q: Lengths,
    cu_seqlens_k: None,
    max_seqlen_q: Integer,
    max_seqlen_k: None,
    *,
    return_lse: Flag,
    **words: Unpack[_SharedWords],
) -> ArrayT | tuple[ArrayT, ArrayT]: ...
def attention_varlen(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Lengths,
    cu_seqlens_k: Lengths | None,
    max_seqlen_q: Integer,
    max_seqlen_k: Integer | None,
    *,
    causal: Flag = False,
    window: Window | None = None,
    kv_lens: Lengths | None = None,
    softcap: Number | None = None,
    scale: Number | None = None,
    rope: Rope | None = None,
    sinks: FrameworkArray | None = None,
    return_lse: Flag = False,
    precision: Precision | None = None,
    kernel: str | None = None,
    batch_invariant: Flag = False,
) -> Any:
    """`attention` on sequences of different lengths, packed along the first dimension.

    Args:
        q: queries, `[total_q, Hq, D]`.
        k: keys, `[total_k, Hkv, D]`, or a `qflash.PagedKV`, with None for v, cu_seqlens_k and max_seqlen_k.
        v: values, `[total_k, Hkv, D]`.
        cu_seqlens_q: int32 `[B + 1]`, cumulative lengths: sequence b is rows `cu_seqlens_q[b]` to `cu_seqlens_q[b + 1]`
            of q. Must start at 0, be non-decreasing and end at total_q.
        cu_seqlens_k: int32 `[B + 1]`, the same for k and v.
        max_seqlen_q: upper bound on the length of a sequence of q.
        max_seqlen_k: upper bound on the length of a sequence of k.

    The other arguments and the exceptions are those of `attention`.

    Returns:
        `[total_q, Hq, D]`. With `return_lse`, a tuple of it and lse, float32 `[Hq, total_q]`.

    Example:
        >>> import numpy as np
        >>> import qflash
        >>> q = np.random.default_rng(0).standard_normal((30, 4, 64), np.float32)
        >>> starts = np.array([0, 10, 30], np.int32)  # two sequences, of 10 and 20 tokens
        >>> out = qflash.attention_varlen(q, q, q, starts, starts, 20, 20, causal=True)
        >>> alone = qflash.attention(q[None, 10:], q[None, 10:], q[None, 10:], causal=True)[0]
        >>> bool(np.allclose(out[10:], alone, atol=1e-6))
        True
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        if type(x) in (Quantized, QuantizedKV, SharedPrefixKV):
            kind = type(x).__name__
            raise TypeError(f"{name} is qflash.{kind}; allowed: an array, only attention takes {kind}")
    options = (causal, window, softcap, scale, precision, kernel, batch_invariant)
    packed = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    results = run(*_packed_call(q, k, v, options, packed, kv_lens, rope, sinks, return_lse))
    return (results[0], results[1]) if check_flag("return_lse", return_lse) else results[0]


def _packed_call(
    q: Any,
    k: Any,
    v: Any,
    options: tuple[Any, ...],
    packed: tuple[Any, ...],
    kv_lens: Any,
    rope: Any,
    sinks: Any,
    return_lse: Any,
) -> tuple[Op, tuple[Any, ...], tuple[Any, ...]]:
    """The variant of the operation for packed sequences, with its arrays and words."""
    cu_q, cu_k, longest_q, longest_k = packed
    if type(k) is PagedKV or type(q) is PagedKV or type(v) is PagedKV:
        for name, x in (("cu_seqlens_k", cu_k), ("max_seqlen_k", longest_k)):
            if x is not None:
                raise TypeError(f"{name} is given and k is qflash.PagedKV, whose lens say it; allowed: None")
        if cu_q is None:
            raise TypeError("cu_seqlens_q is None; allowed: int32 offsets, [batch + 1]")
        call = paged_call(q, k, v, Options(*options), kv_lens, rope, return_lse, sinks, cu_q, longest_q)
        return ATTENTION_PAGED, *call
    for name, x in (("cu_seqlens_q", cu_q), ("cu_seqlens_k", cu_k)):
        if x is None:
            raise TypeError(f"{name} is None; allowed: int32 offsets, [batch + 1]")
    cos, sin, positions_q, positions_k, interleaved = tables_of(rope)
    arrays = (q, k, v, kv_lens, cu_q, cu_k, cos, sin, positions_q, positions_k, sinks)
    return ATTENTION, arrays, (*options, return_lse, interleaved, longest_q, longest_k, get_backward_memory())


@overload
def explain(q: FrameworkArray, k: FrameworkArray, v: FrameworkArray, **words: Unpack[_ExplainWords]) -> Explanation: ...
@overload
def explain(
    q: Quantized, k: Quantized, v: FrameworkArray | Quantized, **words: Unpack[_AttentionWords]
) -> Explanation: ...
@overload
def explain(q: FrameworkArray, k: QuantizedKV, v: None = None, **words: Unpack[_AttentionWords]) -> Explanation: ...
@overload
def explain(q: FrameworkArray, k: PagedKV, v: None = None, **words: Unpack[_ExplainWords]) -> Explanation: ...
def explain(
    q: Any,
    k: Any,
    v: Any = None,
    *,
    causal: Flag = False,
    window: Window | None = None,
    kv_lens: Lengths | None = None,
    softcap: Number | None = None,
    scale: Number | None = None,
    rope: Rope | None = None,
    sinks: FrameworkArray | None = None,
    precision: Precision | None = None,
    kernel: str | None = None,
    batch_invariant: Flag = False,
    layout: Layout = _BTHD,
    cu_seqlens_q: Lengths | None = None,
    cu_seqlens_k: Lengths | None = None,
    max_seqlen_q: Integer | None = None,
    max_seqlen_k: Integer | None = None,
) -> Explanation:
    """Report which kernel `attention` would run for these arguments, and why the others would not. Runs nothing.

    If `cu_seqlens_q`, `cu_seqlens_k`, `max_seqlen_q` and `max_seqlen_k` are all given, it does the same for
    `attention_varlen`. With a shared prefix it reports the kernel for what follows the prefix. For a
    quantized precision it also notes where the dtype of the arrays is usually faster. Print the result; its `rows`
    contain the reasons of every kernel, including those that could not serve the call on any device.

    Example:
        >>> import numpy as np
        >>> import qflash
        >>> x = np.zeros((1, 16, 2, 64), np.float32)
        >>> qflash.explain(x, x, x, causal=True).kernel
        'cpu'
        >>> qflash.explain(x, x, x, precision="int8").kernel
        'cpu_int8'
    """
    options = (causal, window, softcap, scale, precision, kernel, batch_invariant)
    if type(k) is SharedPrefixKV:
        k = k.rest
    if type(k) is PagedKV and cu_seqlens_q is not None:
        packed: tuple[Any, ...] = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    else:
        packed = _packed_words(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    if check_word("layout", layout, LAYOUTS) != "bthd":
        if packed:
            raise ValueError(
                f"layout is {layout!r} and cu_seqlens_q is given; allowed: 'bthd', packed is [total, H, D]"
            )
        q, k, v = _with_length_first(layout, q, k, v)
    kinds = (type(q), type(k), type(v))
    if packed and (Quantized in kinds or QuantizedKV in kinds):
        raise TypeError("cu_seqlens_q is given and q, k or v is quantized; allowed: arrays, as in attention_varlen")
    if packed:
        op, arrays, words = _packed_call(q, k, v, options, packed, kv_lens, rope, sinks, False)
    else:
        op, arrays, words = _call_of(q, k, v, options, kv_lens, rope, sinks, False)
    frontend = frontend_of(type(arrays[0]), op.arrays[0])
    plan = frontend.plan_of(op, arrays, words)
    return explanation_of(plan, frontend.arch_of(arrays[0]), layout)


def _packed_words(*words: Any) -> tuple[Any, ...]:
    """The arguments that `attention_varlen` has in addition to `attention`'s: all of them, or none."""
    given = [word is not None for word in words]
    if not any(given):
        return ()
    names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
    if not all(given):
        missing = ", ".join(name for name, is_given in zip(names, given, strict=True) if not is_given)
        raise TypeError(f"{missing} missing; allowed: all of {', '.join(names)}, or none")
    return words
