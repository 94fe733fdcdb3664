"""The attention functions of "qf" and "qf_int8"."""

from __future__ import annotations

from typing import Any

import torch

import qflash
from qflash.integrations.transformers.mask import Mask
from qflash.integrations.transformers.pages import NewTokens

Tensor = torch.Tensor

# What models pass that changes scores in a way that no word of qflash says, if it is not None.
_NOT_SERVED = ("position_bias", "head_mask", "indices", "block_indices")


def qf_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Any,
    value: Any,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention in the arrays' own type. query: `[B, Hq, Tq, D]`; key, value: `[B, Hkv, Tk, D]`, or new tokens of pages.

    Returns `[B, Tq, Hq, D]`, and None in the place of weights, which no kernel has.
    """
    words = {"softcap": softcap or None, "sinks": s_aux, "scale": scaling}
    return _attend(module, query, key, value, attention_mask, dropout, is_causal, sliding_window, words, others)


def qf_int8_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Any,
    value: Any,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """The same with precision "int8" for more than one query of a sequence.

    A single query reads keys in their own type: quantizing all of them would take longer than reading them does.
    """
    words = {"softcap": softcap or None, "sinks": s_aux, "scale": scaling}
    if query.shape[2] > 1 and type(key) is not NewTokens:
        words["precision"] = "int8"
    return _attend(module, query, key, value, attention_mask, dropout, is_causal, sliding_window, words, others)


def _attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Any,
    value: Any,
    mask: Any,
    dropout: float,
    is_causal: bool | None,
    sliding_window: int | None,
    words: dict[str, Any],
    others: dict[str, Any],
) -> tuple[Tensor, None]:
    obstacle = _obstacle(mask, dropout, sliding_window, key, others)
    if obstacle is not None:
        raise NotImplementedError(f"{_place(module)}: {obstacle}")
    if mask is None:
        mask = _unmasked(module, query, key, is_causal)
    try:
        if type(key) is NewTokens:
            return key.attend(query, mask, words), None
        return _on_arrays(query, key, value, mask, words, others), None
    except (TypeError, ValueError, NotImplementedError, qflash.NoKernelError) as error:
        if not torch.compiler.is_compiling():
            error.add_note(f"in {_place(module)}")
        raise


def _obstacle(mask: Any, dropout: float, sliding_window: int | None, key: Any, others: dict[str, Any]) -> str | None:
    """Why a call is not served, or None."""
    if isinstance(mask, Mask):
        if mask.obstacle is not None:
            return f"the mask is {mask.obstacle}, which has no exact words; allowed: causal or bidirectional masks with " \
                   "sliding windows, padding and packed position_ids, or another attn_implementation"  # fmt: skip
    elif isinstance(mask, Tensor):
        return f"the mask is a dense tensor of shape {list(mask.shape)}; allowed: None, or a padding mask of rank 2 given " \
               "to a model that makes its masks by create_causal_mask and the like"  # fmt: skip
    elif mask is not None:
        return f"the mask is {type(mask).__module__}.{type(mask).__qualname__}; allowed: what 'qf' makes itself"
    elif sliding_window is not None and (type(key) is NewTokens or key.shape[2] > sliding_window):
        return f"sliding_window is {sliding_window} and the model made no mask; allowed: a mask, which says how it lies"
    if dropout:
        return f"dropout is {dropout}; allowed: 0, so set the config's attention dropout to 0 or call model.eval()"
    for name in _NOT_SERVED:
        if others.get(name) is not None:
            return f"{name} is given; allowed: None, or another attn_implementation"
    if others.get("output_attentions"):
        return "output_attentions is True; allowed: False, no kernel has the weights"
    return None


def _place(module: torch.nn.Module) -> str:
    """Model class and layer, for errors."""
    config = getattr(module, "config", None)
    model = getattr(config, "model_type", None) or "a model"
    layer = getattr(module, "layer_idx", None)
    return f"{type(module).__name__} of {model}" + ("" if layer is None else f", layer {layer}")


def _unmasked(module: torch.nn.Module, query: Tensor, key: Any, is_causal: bool | None) -> Mask:
    """What transformers means by no mask: causal from the first key on, where the module or the call is."""
    batch, _, q_length, _ = query.shape
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal) and q_length > 1
    if type(key) is NewTokens:
        return Mask(batch, q_length, key.keys, causal)
    keys = q_length if causal and key.shape[2] > q_length else key.shape[2]
    return Mask(batch, q_length, keys, causal)


def _on_arrays(
    query: Tensor, key: Tensor, value: Tensor, mask: Mask, words: dict[str, Any], others: dict[str, Any]
) -> Tensor:
    if words["scale"] is None:
        words["scale"] = query.shape[-1] ** -0.5
    q, k, v, width = _of_one_width(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2))
    if k.shape[1] != mask.keys:
        k, v = k[:, : mask.keys], v[:, : mask.keys]
    words |= {"causal": mask.causal, "window": mask.window}
    if mask.cu_seqlens is not None or mask.starts is not None or others.get("cu_seq_lens_q") is not None:
        out = _packed(q, k, v, mask, words, others)
    else:
        if mask.key_order is not None:
            k, v = _taken(k, mask.key_order), _taken(v, mask.key_order)
        if mask.query_order is not None:
            q = _taken(q, mask.query_order)
        out = qflash.attention(q, k, v, kv_lens=mask.kv_lens, **words)
        if mask.query_order is not None:
            out = _taken(out, torch.argsort(mask.query_order, dim=1))
    return out if out.shape[-1] == width else out[..., :width]


def _of_one_width(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor, int]:
    """q, k and v of the same head_dim, the narrower ones with zeros behind, and the head_dim of the result."""
    width, more = v.shape[-1], v.shape[-1] - q.shape[-1]
    if more > 0:
        q, k = torch.nn.functional.pad(q, (0, more)), torch.nn.functional.pad(k, (0, more))
    elif more < 0:
        v = torch.nn.functional.pad(v, (0, -more))
    return q, k, v, width


def _taken(x: Tensor, order: Tensor) -> Tensor:
    """Rows of `[B, T, H, D]` in the order that each sequence has."""
    return x.gather(1, order[:, :, None, None].expand(-1, -1, *x.shape[2:]))


def _packed(q: Tensor, k: Tensor, v: Tensor, mask: Mask, words: dict[str, Any], others: dict[str, Any]) -> Tensor:
    """Sequences packed in the rows of a batch."""
    starts, longest = mask.cu_seqlens, mask.longest
    if starts is None and others.get("cu_seq_lens_q") is not None:
        starts, longest = others["cu_seq_lens_q"].to(torch.int32), others["max_length_q"]
        if mask.kv_lens is not None or q.shape[1] != k.shape[1]:
            raise NotImplementedError("cu_seq_lens_q is given with padding or a cache; allowed: one of them")
    if starts is None:
        # A graph cannot have as many sequences as its input happens to hold.
        alone = ~mask.starts[:, 1:].any()
        torch._assert_async(alone, "packed position_ids in a graph; allowed: with cu_seq_lens_q and max_length_q beside")
        return qflash.attention(q, k, v, **words)
    q, k, v = (x.reshape(-1, *x.shape[2:]) for x in (q, k, v))
    out = qflash.attention_varlen(q, k, v, starts, starts, longest, longest, **words)
    return out.reshape(mask.batch, mask.q_length, *out.shape[1:])
