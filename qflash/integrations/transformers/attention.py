"""The attention functions of "qf", "qf_int8" and "qf_int8_fp8"."""

from __future__ import annotations

from typing import Any

import torch

import qflash
from qflash.integrations.transformers.mask import Mask
from qflash.integrations.transformers.pages import NewTokens

Tensor = torch.Tensor


def qf_attention(
    module: torch.nn.Module, query: Tensor, key: Any, value: Any, attention_mask: Any, **words: Any
) -> tuple[Tensor, None]:
    """Attention in the dtype of the arrays.

    query: `[B, Hq, Tq, D]`. key, value: `[B, Hkv, Tk, D]`, or the same `NewTokens`. attention_mask: the result of
    `qf_mask`, or None. Returns `[B, Tq, Hq, D]`, and None instead of attention weights, which no kernel stores.
    """
    return _attend(module, query, key, value, attention_mask, None, **words), None


def qf_int8_attention(
    module: torch.nn.Module, query: Tensor, key: Any, value: Any, attention_mask: Any, **words: Any
) -> tuple[Tensor, None]:
    """The same with precision "int8", if a sequence has more than one query and its keys are not in pages.

    A single query reads keys in their own dtype: quantizing all of them would take longer than reading them.
    """
    return _attend(module, query, key, value, attention_mask, _quantized("int8", query, key), **words), None


def qf_int8_fp8_attention(
    module: torch.nn.Module, query: Tensor, key: Any, value: Any, attention_mask: Any, **words: Any
) -> tuple[Tensor, None]:
    """The same with precision "int8_fp8"."""
    return _attend(module, query, key, value, attention_mask, _quantized("int8_fp8", query, key), **words), None


def _quantized(precision: str, query: Tensor, key: Any) -> str | None:
    return None if query.shape[2] == 1 or type(key) is NewTokens else precision


def _attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Any,
    value: Any,
    mask: Any,
    precision: str | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    sliding_window: int | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    max_length_q: int | None = None,
    max_length_k: int | None = None,
    **others: Any,
) -> Tensor:
    obstacle = _in_mask(mask, query, key, sliding_window) or _in_words(module, dropout, others)
    if obstacle is not None:
        raise NotImplementedError(f"{_place(module)}: {obstacle}")
    if mask is None:
        mask = _unmasked(module, query, key, is_causal)
        if mask.causal and mask.q_length > mask.kv_length:
            sizes = f"{mask.q_length} queries and {mask.kv_length} keys"
            raise NotImplementedError(f"{_place(module)}: there are {sizes} and no mask; allowed: a key for each query")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    words = {"causal": mask.causal, "window": mask.window, "softcap": softcap, "scale": scale, "sinks": s_aux}
    try:
        if type(key) is NewTokens:
            if value is not key:
                raise NotImplementedError("keys are in pages and values are not; allowed: both as the cache gave them")
            if cu_seq_lens_q is not None:
                raise NotImplementedError(_PACKED_BESIDE)
            return key.attend(query, mask, words)
        if mask.cu_seqlens is not None:
            packing = (mask.cu_seqlens, mask.cu_seqlens, mask.longest, mask.longest)
        else:
            packing = _packing(cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k)
        return _on_arrays(query, key, value, mask, packing, words | {"precision": precision})
    except (TypeError, ValueError, NotImplementedError, qflash.NoKernelError) as error:
        if not torch.compiler.is_compiling():
            error.add_note(f"in {_place(module)}")
        raise


# What is not served ---------------------------------------------------------------------------------------------------

# Arguments of models that change scores in a way that no argument of qflash expresses, unless they are None.
_NOT_SERVED = ("position_bias", "sinks", "head_mask", "indices", "block_indices")


def _in_mask(mask: Any, query: Tensor, key: Any, sliding_window: int | None) -> str | None:
    if isinstance(mask, Mask):
        if mask.obstacle is None:
            return _in_sizes(mask, query, key)
        return (
            f"the mask is {mask.obstacle}, for which there are no exact words; allowed: causal and bidirectional "
            "masks, sliding windows, padding, packed position_ids, or another attn_implementation"
        )
    if isinstance(mask, Tensor):
        return (
            f"the mask is a dense tensor of shape {list(mask.shape)}; allowed: None, or a padding mask [batch, length] "
            "for a model that makes its masks by create_causal_mask and the like, or another attn_implementation"
        )
    if mask is not None:
        return (
            f"the mask is {type(mask).__module__}.{type(mask).__qualname__}; allowed: None, or what 'qf' makes itself"
        )
    if sliding_window is not None and (type(key) is NewTokens or key.shape[2] > sliding_window):
        return f"sliding_window is {sliding_window} and the model made no mask; allowed: a mask that says how it lies"
    return None


def _in_sizes(mask: Mask, query: Tensor, key: Any) -> str | None:
    """Check that the mask was made for these numbers of queries and keys."""
    lengths = (query.shape[2], key.keys if type(key) is NewTokens else key.shape[2])
    if lengths == (mask.q_length, mask.kv_length):
        return None
    made_for = f"{mask.q_length} queries and {mask.kv_length} keys"
    return f"there are {lengths[0]} queries and {lengths[1]} keys; allowed: as the mask was made for, {made_for}"


def _in_words(module: torch.nn.Module, dropout: float, others: dict[str, Any]) -> str | None:
    if dropout:
        return f"dropout is {dropout}; allowed: 0, by the config's attention dropout or model.eval()"
    for name in _NOT_SERVED:
        if others.get(name) is not None:
            return f"{name} is given; allowed: None, or another attn_implementation"
    if others.get("output_attentions") or getattr(getattr(module, "config", None), "output_attentions", False):
        return "output_attentions is True; allowed: False, no kernel has the weights"
    return None


def _place(module: torch.nn.Module) -> str:
    """Model class and layer, for error messages."""
    model = getattr(getattr(module, "config", None), "model_type", None)
    layer = getattr(module, "layer_idx", None)
    return type(module).__name__ + (f" of {model}" if model else "") + ("" if layer is None else f", layer {layer}")


# The served call ------------------------------------------------------------------------------------------------------


def _unmasked(module: torch.nn.Module, query: Tensor, key: Any, is_causal: bool | None) -> Mask:
    """What a missing mask means in transformers: causal from the first key on, if the module or the call is causal."""
    batch, _, q_length, _ = query.shape
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal) and q_length > 1
    if type(key) is NewTokens:
        return Mask(batch, q_length, key.keys, key.keys, causal)
    kv_length = key.shape[2]
    return Mask(batch, q_length, kv_length, min(kv_length, q_length) if causal else kv_length, causal)


_Packing = tuple[Tensor, Tensor, int | None, int | None]  # offsets of queries and keys, longest sequence of each

_PACKED_BESIDE = "cu_seq_lens_q is given with padding, a cache or cross attention; allowed: without"


def _packing(starts_q: Any, starts_k: Any, longest_q: int | None, longest_k: int | None) -> _Packing | None:
    """Packing passed alongside position_ids, as by DataCollatorWithFlattening. By default keys are packed like
    queries."""
    if starts_q is None:
        return None
    if starts_k is None:
        starts_k, longest_k = starts_q, longest_q
    for name, starts in (("cu_seq_lens_q", starts_q), ("cu_seq_lens_k", starts_k)):
        if not isinstance(starts, Tensor) or starts.dtype not in (torch.int32, torch.int64):
            came = starts.dtype if isinstance(starts, Tensor) else type(starts).__name__
            raise TypeError(f"{name} is {came}; allowed: None, or a tensor of int32 or int64")
    return starts_q.to(torch.int32), starts_k.to(torch.int32), longest_q, longest_k


def _on_arrays(
    query: Tensor, key: Tensor, value: Tensor, mask: Mask, packing: _Packing | None, words: dict[str, Any]
) -> Tensor:
    q, k, v = _of_one_width(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2))
    if k.shape[1] != mask.keys:
        k, v = k[:, : mask.keys], v[:, : mask.keys]
    if packing is not None:
        out = _packed(q, k, v, mask, packing, words)
    else:
        if mask.starts is not None:
            # The number of sequences in a graph cannot depend on its input.
            allowed = "allowed: cu_seq_lens_q and max_length_q beside them"
            torch._assert_async(~mask.starts[:, 1:].any(), f"position_ids are packed, in a graph; {allowed}")
        if mask.key_order is not None:
            k, v = _taken(k, mask.key_order), _taken(v, mask.key_order)
        if mask.query_order is not None:
            q = _taken(q, mask.query_order)
        out = qflash.attention(q, k, v, kv_lens=mask.kv_lens, **words)
        if mask.query_order is not None:
            out = _taken(out, torch.argsort(mask.query_order, dim=1))
    width = value.shape[-1]
    return out if out.shape[-1] == width else out[..., :width]


def _packed(q: Tensor, k: Tensor, v: Tensor, mask: Mask, packing: _Packing, words: dict[str, Any]) -> Tensor:
    """Attention on sequences packed in the rows of a batch, which are concatenated."""
    if mask.kv_lens is not None or q.shape[1] != k.shape[1]:
        raise NotImplementedError(_PACKED_BESIDE)
    q, k, v = (x.reshape(-1, *x.shape[2:]) for x in (q, k, v))
    out = qflash.attention_varlen(q, k, v, *packing, **words)
    return out.reshape(mask.batch, mask.q_length, *out.shape[1:])


def _of_one_width(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Pad q, k and v to the same head_dim: trailing zeros change neither scores nor the channels that are returned."""
    more = v.shape[-1] - q.shape[-1]
    if more > 0:
        q, k = torch.nn.functional.pad(q, (0, more)), torch.nn.functional.pad(k, (0, more))
    elif more < 0:
        v = torch.nn.functional.pad(v, (0, -more))
    return q, k, v


def _taken(x: Tensor, order: Tensor) -> Tensor:
    """Permute the rows of `[B, T, H, D]` by the order of each sequence."""
    return x.gather(1, order[:, :, None, None].expand(-1, -1, *x.shape[2:]))
