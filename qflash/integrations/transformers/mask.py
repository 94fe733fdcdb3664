"""Masks as arguments of qflash: the mask function returns them instead of a dense tensor, for the attention function.

A causal mask of qflash is aligned to the last key, and `kv_lens` is padding on the right. Padding on the left, or with
holes, is converted to that by moving the existing keys to the front and the existing queries to the end, each in their
order: query r of m is then at key n - m + r of n, as required.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

import torch

from qflash.integrations.transformers.patterns import Pattern, pattern_of, traced_pattern_of

Tensor = torch.Tensor


class _NoTensor:
    """Stands in for a tensor that does not exist; any computation with it raises an error that says so."""

    _name: ClassVar[str]  # what the model takes it for
    _reason: ClassVar[str]  # why it is none, and what is allowed

    def __getitem__(self, _: Any) -> Any:
        raise NotImplementedError(f"the model slices its {self._name}, {self._reason}")

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"the model asks for {name!r} of its {self._name}, {self._reason}")

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(function, "__name__", function)
        raise NotImplementedError(f"the model gives its {cls._name} to {name}, {cls._reason}")


@dataclass(frozen=True, eq=False)
class Mask(_NoTensor):
    """Which keys each query sees. One object serves all layers of a forward pass with the same kind of mask.

    kv_length: the number of rows of k and v. keys: how many of them are used; keys of a static cache after the last
    query are cut off.
    causal, window: as in `qflash.attention`.
    kv_lens: int32 `[B]`, or None if all keys of all sequences exist.
    key_order, query_order: int64 `[B, T]`, the order of keys and queries, or None if it is unchanged.
    cu_seqlens, longest: of packed sequences. starts: where they begin, if values could not be read during tracing.
    visible: bool `[B, keys]`, which keys exist, if not all do; determines how pages are filled.
    is_as_cached: the tokens are those that the cache holds, and no check is needed.
    obstacle: what could not be expressed; the attention function raises it, because it is given the layer.
    """

    batch: int
    q_length: int
    kv_length: int
    keys: int
    causal: bool
    window: tuple[int, int] | None = None
    kv_lens: Tensor | None = None
    key_order: Tensor | None = None
    query_order: Tensor | None = None
    cu_seqlens: Tensor | None = None
    longest: int = 0
    starts: Tensor | None = None
    visible: Tensor | None = None
    is_as_cached: bool = False
    obstacle: str | None = None

    _name = "attention mask"
    _reason = (
        "and attn_implementation 'qf' has none that is a tensor; "
        "allowed: models that hand the mask of create_causal_mask and the like to the attention function"
    )

    # What transformers reads from a mask before it reaches the layers.

    ndim = 4

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """The shape of the dense mask that this one represents."""
        return (self.batch, 1, self.q_length, self.kv_length)

    def contiguous(self) -> Mask:
        """generate() calls this for a static cache."""
        return self

    def to(self, device: Any, **_: Any) -> Mask:
        """Move to another device, if layers are distributed over several."""
        tensors = {f.name: getattr(self, f.name) for f in fields(self)}
        return replace(self, **{name: x.to(device) for name, x in tensors.items() if isinstance(x, Tensor)})


class Unpadded(_NoTensor):
    """Stands in for a padding mask: every new token exists, and the cache has the state of earlier ones."""

    _name = "padding mask"
    _reason = (
        "and there is none while qflash generates; allowed: models that leave padding to create_causal_mask and the "
        "like, and an attn_implementation that stays qflash's until all tokens are there"
    )

    ndim = 4
    shape = (0, 0, 0, 0)


UNPADDED = Unpadded()


def qf_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: int = 0,
    mask_function: Any = None,
    attention_mask: Any = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool | None = None,
    use_vmap: bool = False,
    config: Any = None,
    device: Any = "cpu",
    **_: Any,
) -> Mask:
    """The mask function of "qf" and "qf_int8"; its arguments are those of transformers' `sdpa_mask`."""
    if isinstance(attention_mask, Mask):
        return attention_mask  # generate() made it before the forward pass
    sizes = {"batch": batch_size, "q_length": q_length, "kv_length": kv_length, "keys": kv_length}
    may_be_packed = attention_mask is None and q_length == kv_length  # otherwise transformers does not detect packing
    if use_vmap:
        return Mask(**sizes, causal=False, obstacle="a mask function added by the model (or_mask or and_mask)")
    if torch.compiler.is_compiling():
        pattern = traced_pattern_of(
            mask_function,
            batch_size,
            q_length,
            local_size=local_size,
            both_ways=allow_is_bidirectional_skip is not None,
            is_plain=allow_is_causal_skip or not may_be_packed,
            config=config,
            device=device,
        )
    else:
        pattern = pattern_of(mask_function)
    # Positions of queries among the keys. Keys of a static cache after the last query do not exist yet.
    end = q_offset + q_length - kv_offset
    exist = end if pattern.causal else kv_length
    words = {"causal": pattern.causal, "window": pattern.window}
    obstacle = pattern.obstacle
    if obstacle is None:
        obstacle = _in_places(pattern, end, kv_length, kv_offset)
    if pattern.starts is not None and not may_be_packed:
        obstacle = "packed sequences with padding or a cache"
    if obstacle is not None:
        return Mask(**sizes, **words, obstacle=obstacle)
    if pattern.starts is not None:
        return Mask(**sizes, **words, **_packing(pattern.starts))
    if isinstance(exist, int):
        sizes["keys"] = exist
    if isinstance(attention_mask, Unpadded):
        return Mask(**sizes, **words, is_as_cached=True)
    if attention_mask is None:
        lens = None if isinstance(exist, int) else exist.to(torch.int32).repeat(batch_size)
        return Mask(**sizes, **words, kv_lens=lens)
    visible = _visible(attention_mask, sizes["keys"], exist, kv_offset)
    return Mask(**sizes, **words | _padding(pattern, visible, q_length, exist))


def _in_places(pattern: Pattern, end: Any, kv_length: int, kv_offset: int) -> str | None:
    """Why queries are at positions that no argument can express. end: the key of the last query, plus one."""
    if pattern.chunk is not None and not (isinstance(end, int) and end + kv_offset <= pattern.chunk):
        return f"attention in chunks of {pattern.chunk} tokens"
    if pattern.is_aligned and isinstance(end, int) and end > kv_length:
        return f"one of queries that stand up to key {end}, of {kv_length}"
    if pattern.is_aligned and not pattern.causal and end != kv_length:
        return f"a window to both sides of queries that stand up to key {end}, of {kv_length}"
    return None


def can_look(x: Tensor) -> bool:
    """Whether control flow may depend on values of a tensor: not while a graph is traced or captured."""
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        return False
    return not (x.is_cuda and torch.cuda.is_current_stream_capturing())


def _visible(attention_mask: Tensor, keys: int, exist: Any, kv_offset: int) -> Tensor:
    """Which of the keys that the cache returns exist: bool `[B, keys]`. Keys past the padding mask do not."""
    visible = attention_mask[:, kv_offset : kv_offset + keys].to(torch.bool)
    if visible.shape[1] < keys:
        visible = torch.nn.functional.pad(visible, (0, keys - visible.shape[1]))
    return visible if isinstance(exist, int) else visible & (torch.arange(keys, device=visible.device) < exist)


def _padding(pattern: Pattern, visible: Tensor, q_length: int, exist: Any) -> dict[str, Any]:
    """The fields of a mask in which some keys do not exist, or may not."""
    # Existing queries must come last, which single-token queries do.
    queries = None
    if pattern.is_aligned and q_length > 1:
        places = torch.arange(q_length, device=visible.device) + (exist - q_length)
        queries = visible.index_select(1, places)
    # Removing holes moves keys closer to queries; only a window that hides some of them is affected.
    is_bounded = pattern.window is not None and not (
        pattern.causal and isinstance(exist, int) and exist <= pattern.window[0] + 1
    )
    if not can_look(visible):
        if is_bounded:
            torch._assert_async(_has_no_holes(visible).all(), "a padding mask with holes under a sliding window")
        return _in_order(visible, queries)
    if bool(visible.all()):
        return {} if isinstance(exist, int) else _in_order(visible, None) | {"key_order": None}
    if is_bounded and not bool(_has_no_holes(visible).all()):
        return {"obstacle": "a padding mask with holes under a sliding window"}
    if pattern.causal and isinstance(exist, int) and _falls(visible):
        return {"visible": visible}  # padding on the right comes after every query that could see it
    if queries is None or _rises(queries):
        order = _in_order(visible, None)
        return order | {"key_order": None} if _falls(visible) else order
    return _in_order(visible, queries)


def _in_order(visible: Tensor, queries: Tensor | None) -> dict[str, Any]:
    return {
        "kv_lens": visible.sum(1, dtype=torch.int32),
        "key_order": torch.argsort((~visible).to(torch.int8), dim=1, stable=True),
        "query_order": None if queries is None else torch.argsort(queries.to(torch.int8), dim=1, stable=True),
        "visible": visible,
    }


def _rises(flags: Tensor) -> bool:
    """Whether in each row all true values come last."""
    return bool((flags[:, 1:] >= flags[:, :-1]).all())


def _falls(flags: Tensor) -> bool:
    """Whether in each row all true values come first."""
    return bool((flags[:, 1:] <= flags[:, :-1]).all())


def _has_no_holes(flags: Tensor) -> Tensor:
    """Whether the true values of each row are contiguous."""
    begins = (flags[:, 1:] & ~flags[:, :-1]).sum(1) + flags[:, 0]
    return begins <= 1


def _packing(starts: Tensor) -> dict[str, Any]:
    """The fields for packed sequences, with the rows of the batch concatenated."""
    if not can_look(starts):
        return {"starts": starts}
    if not bool(starts[:, 1:].any()):
        return {}
    total = torch.tensor([starts.numel()], device=starts.device)
    cu_seqlens = torch.cat([starts.flatten().nonzero()[:, 0], total]).to(torch.int32)
    return {"cu_seqlens": cu_seqlens, "longest": int(cu_seqlens.diff().max())}
