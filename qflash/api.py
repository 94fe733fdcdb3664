"""The public calls: words for the user, and the way to the right front end. Imports no framework."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypedDict, Unpack, overload

import numpy as np
from numpy.typing import NDArray

from qflash import dispatch
from qflash.frontends.choose import frontend_of
from qflash.ops.attention import attention_on_integers, spec_on_integers
from qflash.ops.kv import QuantizedKV
from qflash.ops.kv_attention import attention_on_kv, spec_on_kv
from qflash.ops.quantization import Quantized
from qflash.problem import CAUSAL, PLAIN, Options, require_flag
from qflash.rope import Rope
from qflash.spec import OpSpec, Spec
from qflash.typing import ArrayT, Flag, FrameworkArray, Integer, Lengths, Number, NumpyT, Precision, TensorT, Window


def _options(
    causal: Flag,
    window: Window | None,
    softcap: Number | None,
    scale: Number | None,
    precision: Precision | None,
    kernel: str | None,
) -> Options:
    """Options(...), without building one for the two commonest calls."""
    if window is None and softcap is None and scale is None and precision is None and kernel is None:
        if causal is True:
            return CAUSAL
        if causal is False:
            return PLAIN
    return Options(causal, window, softcap, scale, precision, kernel)


class _AttentionWords(TypedDict, total=False):
    """The keywords of attention and attention_varlen that leave the type of the result alone."""

    causal: Flag
    window: Window | None
    kv_lens: Lengths | None
    softcap: Number | None
    scale: Number | None
    rope: Rope | None
    precision: Precision | None
    kernel: str | None


# What may stand in the places of q, k and v: arrays; Quantized; an array and a QuantizedKV. The result is of the kind,
# and in NumPy of the dtype, of q, or of v where q is Quantized.
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
    k: QuantizedKV,
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
    q: ArrayT, k: QuantizedKV, v: None = None, *, return_lse: Literal[True], **words: Unpack[_AttentionWords]
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
    q: ArrayT, k: QuantizedKV, v: None = None, *, return_lse: Flag, **words: Unpack[_AttentionWords]
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
    return_lse: Flag = False,
    precision: Precision | None = None,
    kernel: str | None = None,
) -> Any:
    """softmax(scale · q kᵀ) v, for NumPy, PyTorch and JAX arrays on the CPU or a CUDA GPU.

    q: `[B, Tq, Hq, D]`; k, v: `[B, Tk, Hkv, D]`, Hq a multiple of Hkv; float32, float16 or bfloat16; any strides with
    a contiguous last dimension. Returns `[B, Tq, Hq, D]`, and with `return_lse` also the log-sum-exp of each row of
    scores, float32 `[B, Hq, Tq]`.

    causal: query i sees keys `j <= i + Tk - Tq`. window: `(left, right)` keys on each side of that diagonal, -1 open.
    kv_lens: int32 `[B]`, how many keys of each sequence exist; takes Tk's place in the diagonal. softcap: scores become
    `softcap · tanh(score / softcap)`. scale: default `1 / sqrt(D)`. rope: rotate q and k first, see `qflash.Rope`.
    precision: None computes in the arrays' own type, "int8" quantizes QKᵀ, "int8_fp8" also PV to E4M3 (on Hopper
    alone). kernel: the name of one kernel that must be used. A row that sees no key gives zeros and lse -inf.

    q and k, and v if one likes, may be `qflash.Quantized`, so that what is quantized once serves many calls. Of q and
    k both are symmetric or both have a zero point; k has one scale, or one for each group of a power of two, 16 or
    more, tokens; only k may be smoothed; rope belongs to `quantize`. The result has v's dtype, or that of the array v
    was made from. The CPU turns them back to float32 first; on CUDA scores are products of integers (kernel
    `fa_int8_quantized`), and results have 16 bits. Forward only.

    In k's place, without v, there may be a `qflash.QuantizedKV` (kv in errors), what `quantize_kv` returns. q is then
    an array, quantized on the way; rope turns q alone; kv_lens are by default those that kv was made with. On Hopper
    alone, and forward only.

    Bad arguments raise ValueError or TypeError. So do bad values inside kv_lens and rope positions on the CPU; a CUDA
    kernel cannot raise for those and gives NaN in the rows concerned.
    """
    options = _options(causal, window, softcap, scale, precision, kernel)
    require_flag("return_lse", return_lse)
    kinds = (type(q), type(k), type(v))
    if QuantizedKV in kinds:
        return attention_on_kv(q, k, v, options, kv_lens, rope, return_lse)
    if Quantized in kinds:
        return attention_on_integers(q, k, v, options, kv_lens, rope, return_lse)
    return frontend_of(type(q)).attention(q, k, v, options, kv_lens, rope, return_lse)


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
    **words: Unpack[_AttentionWords],
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
    **words: Unpack[_AttentionWords],
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
    **words: Unpack[_AttentionWords],
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
    **words: Unpack[_AttentionWords],
) -> ArrayT | tuple[ArrayT, ArrayT]: ...
def attention_varlen(
    q: Any,
    k: FrameworkArray,
    v: FrameworkArray,
    cu_seqlens_q: Lengths,
    cu_seqlens_k: Lengths,
    max_seqlen_q: Integer,
    max_seqlen_k: Integer,
    *,
    causal: Flag = False,
    window: Window | None = None,
    kv_lens: Lengths | None = None,
    softcap: Number | None = None,
    scale: Number | None = None,
    rope: Rope | None = None,
    return_lse: Flag = False,
    precision: Precision | None = None,
    kernel: str | None = None,
) -> Any:
    """`attention` over sequences of different lengths packed one after another.

    q: `[total_q, Hq, D]`; k, v: `[total_k, Hkv, D]`. Sequence b is rows `cu_seqlens_q[b]` to `cu_seqlens_q[b + 1]` of
    q and likewise of k and v; both are int32 `[B + 1]`, start at 0, never fall and end at the total. `max_seqlen_*`
    is the longest sequence. lse is `[Hq, total_q]`. Everything else is as in `attention`.
    """
    options = _options(causal, window, softcap, scale, precision, kernel)
    require_flag("return_lse", return_lse)
    for name, x in (("q", q), ("k", k), ("v", v)):
        if type(x) in (Quantized, QuantizedKV):
            kind = type(x).__name__
            raise TypeError(f"{name} is qflash.{kind}; allowed: an array, only attention takes {kind}")
    return frontend_of(type(q)).attention_varlen(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, options, kv_lens, rope, return_lse
    )


@dataclass(frozen=True)
class Explanation:
    """Which kernel would run and why each other one would not. `str()` is a table."""

    kernel: str | None
    spec: Spec | OpSpec  # OpSpec: q and k are Quantized, or k a QuantizedKV
    rows: list[tuple[str, str, str]]
    notes: tuple[str, ...] = ()  # what one should know about that choice

    def __str__(self) -> str:
        title = f"{self.kernel or 'no kernel'} serves {self.spec}"
        return "\n".join([title, dispatch.table(self.rows), *(f"note: {note}" for note in self.notes)])


@overload
def explain(
    q: FrameworkArray, k: FrameworkArray, v: FrameworkArray, **words: Unpack[_AttentionWords]
) -> Explanation: ...
@overload
def explain(
    q: Quantized, k: Quantized, v: FrameworkArray | Quantized, **words: Unpack[_AttentionWords]
) -> Explanation: ...
@overload
def explain(q: FrameworkArray, k: QuantizedKV, v: None = None, **words: Unpack[_AttentionWords]) -> Explanation: ...
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
    precision: Precision | None = None,
    kernel: str | None = None,
) -> Explanation:
    """Tell which kernel `attention` would run for these arguments, and why not the others. Runs nothing.

    For a quantized precision it also notes where the arrays' own type is usually faster.
    """
    options = Options(causal, window, softcap, scale, precision, kernel)
    kinds = (type(q), type(k), type(v))
    tokens = None  # queries or keys, whichever are fewer
    if QuantizedKV in kinds:
        spec = spec_on_kv(q, k, v, options, kv_lens, rope)
        tokens = min(q.shape[1], k.k.shape[1])
    elif Quantized in kinds:
        spec = spec_on_integers(q, k, v, options, kv_lens, rope)
    else:
        frontend = frontend_of(type(q))
        problem = frontend.problem_of(q, k, v, options, kv_lens, rope)
        spec = problem.spec(frontend.arch_of(q))
        tokens = min(problem.q_len, problem.k_len)
    if kernel is not None:
        dispatch.plan(spec, kernel)  # refuses a name that is unknown or cannot serve
    rows = dispatch.rows(spec, kernel)
    chosen = next((name for name, verdict, _ in rows if verdict == "runs"), None)
    notes = dispatch.notes(spec, chosen, tokens) if tokens is not None else []
    return Explanation(chosen, spec, rows, tuple(notes))
