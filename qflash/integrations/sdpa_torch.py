"""PyTorch's scaled_dot_product_attention on qflash.attention: translates masks and layouts, counts calls, falls back to
PyTorch for the rest, and replaces PyTorch's function."""

from __future__ import annotations

import math
import operator
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.nn import functional
from torch.nn.attention.bias import CausalBias, CausalVariant

from qflash import NoKernelError, attention, explain
from qflash.integrations import sdpa_limits
from qflash.integrations.sdpa import Report, totals
from qflash.integrations.sdpa_limits import Obstacle, short

Tensor = torch.Tensor


def attend(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    fallback: bool,
) -> Tensor:
    """See qflash.scaled_dot_product_attention."""
    obstacle = sdpa_limits.in_tensors(query, key, value) or sdpa_limits.in_shapes(
        query.shape, key.shape, value.shape, enable_gqa
    )
    if obstacle is None and dropout_p != 0.0:
        obstacle = Obstacle(f"dropout_p is {dropout_p}", "0.0")
    if obstacle is None:
        mask = _mask_of(attn_mask, is_causal, query.shape[-2], key.shape[-2])
        if isinstance(mask, Obstacle):
            obstacle = mask
    if obstacle is not None:
        if not fallback:
            raise obstacle.error()
        reason = obstacle.came
    else:
        out, reason = _try(query, key, value, mask, scale, enable_gqa, fallback)
        if reason is None:
            _count(None)
            return out
    out = _torch_attention()(
        query,
        key,
        value,
        attn_mask=attn_mask,
        dropout_p=dropout_p,
        is_causal=is_causal,
        scale=scale,
        enable_gqa=enable_gqa,
    )
    _count(reason)
    return out


# Masks ----------------------------------------------------------------------------------------------------------------

_ALL, _TOP_LEFT, _BOTTOM_RIGHT = "all keys", "causal from the top left", "causal from the bottom right"


def _mask_of(attn_mask: Any, is_causal: bool, q_len: int, k_len: int) -> str | Obstacle:
    if attn_mask is None:
        return _TOP_LEFT if is_causal else _ALL
    if is_causal:
        return Obstacle("attn_mask is given with is_causal=True", "one of the two")
    if isinstance(attn_mask, CausalBias):
        if (attn_mask.seq_len_q, attn_mask.seq_len_kv) == (q_len, k_len):
            return _TOP_LEFT if attn_mask.variant == CausalVariant.UPPER_LEFT else _BOTTOM_RIGHT
        came = f"attn_mask is a CausalBias of ({attn_mask.seq_len_q}, {attn_mask.seq_len_kv})"
        return Obstacle(came, f"query's and key's lengths, ({int(q_len)}, {int(k_len)})", ValueError)
    if not isinstance(attn_mask, Tensor):
        return Obstacle(f"attn_mask is {type(attn_mask).__name__}", "None or torch.Tensor", TypeError)
    return Obstacle(
        f"attn_mask is a {short(attn_mask.dtype)} tensor",
        "None, is_causal=True or a torch.nn.attention.bias.CausalBias; qflash.attention with window=... or kv_lens=...",
    )


# The served call ------------------------------------------------------------------------------------------------------


def _try(
    query: Tensor, key: Tensor, value: Tensor, mask: str, scale: float | None, enable_gqa: bool, fallback: bool
) -> tuple[Tensor | None, str | None]:
    """The result, or None and the reason why attention rejected the call."""
    if fallback and torch.compiler.is_dynamo_compiling():
        wants_grad = torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad)
        reason = _refusal(query.device, query.dtype, operator.index(query.shape[-1]), mask != _ALL, wants_grad)
        if reason is not None:
            return None, reason
    try:
        return _served(query, key, value, mask, scale, enable_gqa), None
    except (NoKernelError, NotImplementedError) as error:
        if not fallback:
            raise _with_fallback_offered(error) from error
        return None, _first_words(error)


def _served(query: Tensor, key: Tensor, value: Tensor, mask: str, scale: float | None, enable_gqa: bool) -> Tensor:
    shape = query.shape
    if (
        len(shape) == len(key.shape) == 4
        and shape[0] == key.shape[0]
        and key.shape == value.shape
        and (enable_gqa or shape[1] == key.shape[1])
    ):
        return _attention(query, key, value, mask, scale)
    q, k, v, in_front = _with_four_dimensions(query, key, value, enable_gqa)
    return _attention(q, k, v, mask, scale).reshape(*in_front, *shape[-2:])  # always a view


def _with_four_dimensions(
    query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool
) -> tuple[Tensor, Tensor, Tensor, tuple[int, ...]]:
    """Return query, key and value as `[B, H, T, D]`, and the dimensions of the result that precede `[T, D]`.

    Broadcast dimensions are expanded, which copies nothing. The exception is a single head of key and value shared by
    all of query's: it stays as it is, and attention reads it once for all of them.
    """
    given = query, key, value
    has_heads = enable_gqa or max(x.dim() for x in given) > 3
    q, k, v = (x.unsqueeze(-3) if x.dim() < 3 or not has_heads else x for x in given)
    q_heads, kv_heads = q.shape[-3], k.shape[-3]
    if not enable_gqa:
        (kv_heads,) = torch.broadcast_shapes(k.shape[-3:-2], v.shape[-3:-2])
        (q_heads,) = torch.broadcast_shapes((q_heads,), (kv_heads,))
    batch = torch.broadcast_shapes(*(x.shape[:-3] for x in (q, k, v)))
    size = math.prod(batch)
    q, k, v = (
        x.expand(*batch, heads, *x.shape[-2:]).reshape(size, heads, *x.shape[-2:])
        for x, heads in ((q, q_heads), (k, kv_heads), (v, kv_heads))
    )
    return q, k, v, (*batch, q_heads) if has_heads else batch


def _length_first(x: Tensor) -> Tensor:
    return (x if x.stride(-1) == 1 else x.contiguous()).transpose(1, 2)


def _attention(query: Tensor, key: Tensor, value: Tensor, mask: str, scale: float | None) -> Tensor:
    """Call attention on `[B, H, T, D]` tensors."""
    q, k, v = _length_first(query), _length_first(key), _length_first(value)
    q_len, k_len = q.shape[1], k.shape[1]
    if mask is _ALL:
        out = attention(q, k, v, scale=scale)
    elif mask is _BOTTOM_RIGHT or q_len == k_len:
        out = attention(q, k, v, causal=True, scale=scale)
    elif q_len < k_len:  # attention aligns its diagonal to the last key, so keys after the diagonal are dropped
        out = attention(q, k[:, :q_len], v[:, :q_len], causal=True, scale=scale)
    else:
        out = attention(q, k, v, window=(-1, q_len - k_len), scale=scale)
    return out.transpose(1, 2)


@torch.compiler.assume_constant_result
def _refusal(device: torch.device, dtype: torch.dtype, head_dim: int, masked: bool, wants_grad: bool) -> str | None:
    """Why attention would reject such a problem, tested with one token while a program is traced.

    Dynamo cannot catch what an operator raises during tracing, and the choice of a kernel does not depend on lengths.
    """
    if device.type == "meta" or (device.type == "cuda" and not torch.cuda.is_available()):  # unknown here
        return None
    x = torch.zeros(1, 1, 1, head_dim, device=device, dtype=dtype, requires_grad=wants_grad)
    if explain(x, x, x, causal=masked).kernel is None:
        return "no kernel serves this problem"
    if wants_grad:  # only a call shows whether the kernel has a backward pass
        try:
            with torch.enable_grad():
                attention(x, x, x, causal=masked)
        except (NoKernelError, NotImplementedError) as error:
            return _first_words(error)
    return None


def _first_words(error: Exception) -> str:
    """The value given, without the allowed values and the table of kernels."""
    return str(error).partition("\n")[0].partition("; allowed:")[0]


def _with_fallback_offered(error: Exception) -> Exception:
    kind = NoKernelError if isinstance(error, NoKernelError) else NotImplementedError
    words = str(error)
    return kind(f"{words}, or fallback=True" if "; allowed:" in words else f"{words}\nallowed: fallback=True")


# Counting and replacement --------------------------------------------------------------------------------------------


class _Replacement(NamedTuple):
    report: Report
    function: Callable[..., Tensor]


_lock = threading.Lock()
_replacements: list[_Replacement] = []  # the last one is active
_original: Callable[..., Tensor] | None = None  # PyTorch's function while it is replaced
_original_fastpath = True


@torch.compiler.assume_constant_result  # so a traced program neither runs it nor depends on the counts
def _count(reason: str | None) -> None:
    with _lock:
        report = _replacements[-1].report if _replacements else totals
        if reason is None:
            report.served += 1
        else:
            report.fallbacks[reason] += 1


def _torch_attention() -> Callable[..., Tensor]:
    original = _original  # read once: another thread may exit its context meanwhile
    return functional.scaled_dot_product_attention if original is None else original


# These two functions are the same for all contexts: a compiled program has a guard on the function it was traced with.


def _strict(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    return attend(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, False)


def _lenient(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    return attend(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, True)


def install(report: Report, fallback: bool) -> None:
    """Replace PyTorch's function with qflash's, and count in `report`."""
    global _original, _original_fastpath
    with _lock:
        if not _replacements:
            _original = functional.scaled_dot_product_attention
            _original_fastpath = torch.backends.mha.get_fastpath_enabled()
            torch.backends.mha.set_fastpath_enabled(False)
        _replacements.append(_Replacement(report, _lenient if fallback else _strict))
        functional.scaled_dot_product_attention = _replacements[-1].function


def remove(report: Report) -> None:
    """Remove the replacement that counts in `report`, wherever other threads have left it in the stack."""
    global _original
    with _lock:
        _replacements[:] = [entry for entry in _replacements if entry.report is not report]
        if _replacements:
            functional.scaled_dot_product_attention = _replacements[-1].function
        else:
            functional.scaled_dot_product_attention, _original = _original, None
            torch.backends.mha.set_fastpath_enabled(_original_fastpath)
