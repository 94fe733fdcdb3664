"""PagedCache: a cache of transformers whose keys and values are in the pages of a qflash.KVCache."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, CacheLayerMixin

import qflash
from qflash.integrations.transformers.mask import Mask
from qflash.integrations.transformers.prompts import check_count
from qflash.integrations.transformers.rotations import take_rope
from qflash.integrations.transformers.tokens import Flags, TokenLog

Tensor = torch.Tensor


_ONLY_QFLASH_READS = (
    "and only qflash reads them; allowed: a PagedCache with a model whose attn_implementation is 'qf', 'qf_int8' or "
    "'qf_int8_fp8' and "
    "which hands keys and values to the attention function as they are"
)


class _InPages:
    """Keys and values that only qflash can read."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"keys and values in pages have no {name!r}, {_ONLY_QFLASH_READS}")

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(function, "__name__", function)
        raise NotImplementedError(f"keys and values in pages are not what {name} takes, {_ONLY_QFLASH_READS}")


class NewTokens(_InPages):
    """Returned by `PagedCache.update` in place of keys and values: tokens of a layer that are not in pages yet.

    Only the mask indicates which tokens are padding, and padding is not stored. So the attention function, which has
    both tokens and mask, writes them.
    """

    def __init__(self, cache: PagedCache, layer: int, k: Tensor, v: Tensor) -> None:
        self.cache, self.layer, self.k, self.v = cache, layer, k, v

    @property
    def keys(self) -> int:
        """The number of tokens including these, with padding."""
        return self.cache.get_seq_length(self.layer) + int(self.k.shape[2])

    @torch.compiler.disable(reason="pages are reserved on the host, for each pass")
    def attend(self, query: Tensor, mask: Mask, words: dict[str, Any]) -> Tensor:
        """Write the tokens, and attend to all tokens in the pages: `[B, Tq, Hq, D]`."""
        return self.cache._attend(self, query, mask, words)


class PagedLayer(CacheLayerMixin):
    """One layer of a PagedCache; the cache does the work."""

    is_sliding = False
    is_compileable = False
    is_croppable = True
    supports_early_init = False

    def __init__(self, cache: PagedCache, index: int) -> None:
        super().__init__()
        self._cache, self._index = weakref.proxy(cache), index  # so that pages are freed with the cache
        self.keys = self.values = _InPages()
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Does nothing: pages are allocated for all layers at once."""

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Any, Any]:
        return self._cache.update(key_states, value_states, self._index)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        return self._cache.get_seq_length(self._index)

    def get_max_length(self) -> int:
        return -1


class PagedCache(Cache):
    """A transformers cache that stores keys and values in pages of a `qflash.KVCache`, for attn_implementation "qf".

    Args:
        config: the model's config, which determines the number of layers.
        pages: the number of pages for all sequences of a batch.
        page_size: tokens per page: 16, 32, 64, 128 or 256.
        precision: None stores the model's dtype. "int8" stores one byte per value, and a scale per token and head.

    Pages are allocated with the first tokens, in their dtype, device and shape. Padding on the left takes no space in
    them. Beams share pages until their tokens differ. Layers with a sliding window keep all tokens.

    If pages run out, the forward pass raises `qflash.OutOfPagesError` before its first write, and the cache is
    unchanged. After any other exception in a forward pass call `crop` or `reset`.

    Example:
        >>> import torch
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from qflash.integrations.transformers import PagedCache, register
        >>> register()
        >>> config = LlamaConfig(
        ...     vocab_size=99, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        ...     pad_token_id=0, attn_implementation="qf",
        ... )
        >>> model = LlamaForCausalLM(config).eval()
        >>> cache = PagedCache(config, pages=4, page_size=16)
        >>> ids = torch.arange(10, 20)[None]
        >>> model.generate(ids, past_key_values=cache, max_new_tokens=3, min_new_tokens=3, do_sample=False).shape
        torch.Size([1, 13])
        >>> cache.get_seq_length(), cache.kv.free_pages
        (12, 3)
    """

    kv: qflash.KVCache | None
    """The pages, once there are tokens."""

    tables: Any
    """The step of `kv` that passes read. It is refilled as long as the batch size is the same and its sequences fit."""

    columns: int
    """The minimum number of pages per sequence in new tables."""

    def __init__(
        self, config: Any, *, pages: int, page_size: int = 256, precision: Literal["int8"] | None = None
    ) -> None:
        if not isinstance(config, PreTrainedConfig):
            raise TypeError(f"config is {type(config).__name__}; allowed: the config of a model of transformers")
        text = config.get_text_config(decoder=True)
        count = getattr(text, "decoder_layers", None) or text.num_hidden_layers
        others = set(getattr(text, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
        if others or getattr(text, "num_kv_shared_layers", None):
            came = ", ".join(sorted(others)) or "layers that share keys"
            raise NotImplementedError(f"config has {came}; allowed: layers of full_attention and sliding_attention")
        self._slides = _slides(text, count)
        super().__init__(layers=[PagedLayer(self, index) for index in range(count)])
        self.kv = None
        self._pages_of: tuple[torch.dtype, torch.device, int, int] | tuple[()] = ()  # dtype, device, heads and head_dim
        self._sizes = {"pages": pages, "page_size": page_size, "precision": precision}
        # Pages are allocated with the first tokens; invalid sizes raise an error now.
        qflash.KVCache(layers=1, kv_heads=1, head_dim=16, dtype=torch.float32, device="meta", **self._sizes)
        self.tables, self.columns = None, 1
        self._log = TokenLog()
        self._sequences: list[int] = []
        self._new = 0  # tokens of each sequence in the current or latest forward pass
        self._written: set[int] = set()  # layers that have written them
        self._rows: Tensor | None = None  # indices of the flattened new tokens that are not padding; None: all

    # Called by models and generate().

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[NewTokens, NewTokens]:
        """New tokens of a layer, `[B, Hkv, T, D]`, for the attention function to write: one object for both."""
        tokens = NewTokens(self, layer_idx, key_states, value_states)
        return tokens, tokens

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """The number of tokens that a layer has seen, including padding."""
        return self._log.length - (0 if layer_idx in self._written else self._new)

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """The number of keys after the pass, and the index of the first one, 0."""
        return self.get_seq_length(layer_idx) + query_length, 0

    @property
    def batch_size(self) -> int:
        """The number of sequences; -1 before the first tokens."""
        return len(self._sequences) or -1

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last `-tokens_to_remove` tokens of all sequences. A positive number is how many to keep."""
        try:
            length, tokens = self._log.length, operator.index(tokens_to_remove)
        except TypeError:
            raise TypeError(f"tokens_to_remove is {tokens_to_remove!r}; allowed: an int") from None
        kept = min(tokens, length) if tokens > 0 else max(length + tokens, 0)
        for sequence, left in zip(self._sequences, self._log.crop(kept, len(self._sequences)), strict=True):
            self.kv.truncate(sequence, left)
        self._end_pass()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Replace sequence i with sequence beam_idx[i]."""
        self._select(self._numbers("beam_idx", beam_idx))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the sequences selected by `indices`, numbers or flags."""
        self._select(self._numbers("indices", indices))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each sequence `repeats` times, copies adjacent."""
        check_count("repeats", repeats)
        self._select([index for index in range(len(self._sequences)) for _ in range(repeats)])

    def reset(self) -> None:
        """Remove all sequences; their pages become free, and stay allocated."""
        self._select([])
        self._log = TokenLog()

    def advance(self) -> None:
        """Reserve the next token of every sequence now instead of in the forward pass that writes it.

        That pass then does no work on the host, which a CUDA graph could not replay: call this before each replay.
        """
        if not self._sequences:
            raise ValueError("the cache has no sequences; allowed: after a forward pass with their first tokens")
        self._extend([1] * len(self._sequences))
        self._log.add(1, None)
        self._written.clear()
        self._new, self._rows = 1, None

    def repeat_pass(self) -> None:
        """Let the latest forward pass, run or captured, write its tokens again: they are the same."""
        self._written.clear()

    def __deepcopy__(self, memo: Any) -> PagedCache:
        raise NotImplementedError(
            "a PagedCache is not copied, because its pages would be; allowed: batch_repeat_interleave, or crop"
        )

    # Sequences.

    def _numbers(self, name: str, indices: Tensor) -> list[int]:
        """The sequences that a tensor of numbers or flags selects."""
        count = len(self._sequences)
        if not isinstance(indices, Tensor) or indices.ndim != 1:
            came = list(indices.shape) if isinstance(indices, Tensor) else type(indices).__name__
            raise TypeError(f"{name} is {came}; allowed: a tensor of one dimension")
        try:
            numbers: list[int] = torch.arange(count)[indices.cpu()].tolist()
        except IndexError:
            allowed = f"numbers below {count} or {count} flags, as many as there are sequences"
            raise IndexError(f"{name} is {indices.tolist()}; allowed: {allowed}") from None
        return numbers

    def _select(self, indices: Sequence[int]) -> None:
        """Set the sequences to those of `indices`. One that is selected again shares its pages with the first."""
        old, kept = self._sequences, set()
        self._sequences = []
        for index in indices:
            self._sequences.append(self.kv.fork(old[index]) if index in kept else old[index])
            kept.add(index)
        for index, sequence in enumerate(old):
            if index not in kept:
                self.kv.close(sequence)
        self._log.select(indices)
        self._end_pass()

    def _end_pass(self) -> None:
        self._new = 0
        self._written.clear()

    # A forward pass.

    def _attend(self, new: NewTokens, query: Tensor, mask: Mask, words: dict[str, Any]) -> Tensor:
        self._check_window(new.layer, words)
        rope = take_rope(query, new.k)
        k, v, q = under_autocast(new.k, new.v, query)
        if not self._new or new.layer in self._written:
            self._begin(k, v, mask)
        k, v, q = (x.transpose(1, 2) for x in (k, v, q))
        if self._rows is None:
            kv = self.tables.write(new.layer, k, v, rope=rope)
            self._written.add(new.layer)
            return qflash.attention(q, kv, rope=rope, **words)
        shape = q.shape
        q, k, v = (x.reshape(-1, *x.shape[2:]).index_select(0, self._rows) for x in (q, k, v))
        if rope is not None:
            positions = rope.positions_q.flatten().index_select(0, self._rows)
            rope = qflash.Rope(rope.cos, rope.sin, positions_q=positions, positions_k=positions)
        kv = self.tables.write(new.layer, k, v, rope=rope)
        self._written.add(new.layer)
        packed = (self.tables.cu_seqlens, None, self.tables.max_new, None)
        out = qflash.attention_varlen(q, kv, None, *packed, rope=rope, **words)
        return out.new_zeros(shape).flatten(0, 1).index_copy(0, self._rows, out).view(shape)

    def _check_window(self, layer: int, words: dict[str, Any]) -> None:
        if layer >= len(self._slides):
            raise ValueError(
                f"the model has a layer {layer}, and the cache was made for {len(self._slides)} layers; "
                "allowed: a cache of the model's own config"
            )
        if self._slides[layer] and words.get("window") is None:
            raise NotImplementedError(
                "config says that the layer has a sliding window, by which caches of transformers forget, and its "
                "mask has none; allowed: a mask with that window"
            )

    def _begin(self, k: Tensor, v: Tensor, mask: Mask) -> None:
        """Reserve pages for the tokens of a forward pass, in its first layer."""
        self._allocate(k, v)
        batch, _, length, _ = k.shape
        if self._sequences and len(self._sequences) != batch:
            raise ValueError(f"there are {batch} sequences; allowed: as many as the cache has, {len(self._sequences)}")
        visible = None if mask.visible is None else mask.visible.cpu().numpy()
        self._check_same(mask, visible, batch, length)
        flags, rows = None, None
        if visible is not None:
            flags = visible[:, -length:]
            rows = None if flags.all() else mask.visible[:, -length:].flatten().nonzero()[:, 0]
        counts = [length] * batch if flags is None else [int(n) for n in flags.sum(1)]
        is_first = not self._sequences
        if is_first:
            self._sequences = [self.kv.open() for _ in range(batch)]
        try:
            self._extend(counts)
        except BaseException:
            if is_first:
                self._select([])
            raise
        self._written.clear()
        self._new, self._rows = length, rows
        self._log.add(length, None if rows is None else flags)

    def _allocate(self, k: Tensor, v: Tensor) -> None:
        """Allocate the pages, unless they exist, with the dtype, device and shape of the first keys and values."""
        if v.shape != k.shape:
            raise NotImplementedError(f"values have shape {list(v.shape)}; allowed: that of keys, {list(k.shape)}")
        if k.device.type == "cuda" and k.dtype not in (torch.float16, torch.bfloat16):
            allowed = "allowed: float16 and bfloat16, which model.to(torch.bfloat16) makes"
            raise NotImplementedError(f"keys are {k.dtype} on a GPU, where no kernel reads pages of them; {allowed}")
        of = (k.dtype, k.device, k.shape[1], k.shape[3])
        if self.kv is None or (of != self._pages_of and self._may_change_pages()):
            self._make_pages(*of)
            self._pages_of = of
        if of[:2] != self._pages_of[:2]:
            held = f"what its pages hold, {self._pages_of[0]} on {self._pages_of[1]}"
            raise TypeError(f"keys are {k.dtype} on {k.device}; allowed: {held}, or another cache, Decoder or Batcher")

    def _make_pages(self, dtype: torch.dtype, device: torch.device, kv_heads: int, head_dim: int) -> None:
        self.kv = self.tables = None  # earlier pages are free before memory for these is requested
        sizes = {"layers": len(self.layers), "kv_heads": kv_heads, "head_dim": head_dim}
        with torch.inference_mode(False):  # later passes in other modes write to them, too
            self.kv = qflash.KVCache(**sizes, **self._sizes, dtype=dtype, device=device)

    def _may_change_pages(self) -> bool:
        """Whether no sequence has tokens in the pages, as after reset()."""
        return not self._sequences

    def _check_same(self, mask: Mask, visible: Flags | None, batch: int, new: int) -> None:
        """Reject a mask that hides tokens which are in pages, or shows padding, which is not."""
        if mask.is_as_cached or (visible is None and not self._log.has_padding):
            return
        held = self._log.flags(batch)
        shown = np.ones_like(held) if visible is None else visible[:, :-new]
        wrong = np.argwhere(held != shown)
        if len(wrong):
            sequence, token = wrong[0]
            was, now = ("a token", "padding") if held[sequence, token] else ("padding", "a token")
            raise ValueError(
                f"attention_mask[{sequence}, {token}] says {now}, which was {was} when it came; "
                "allowed: a mask that is for earlier tokens what it was"
            )

    def _extend(self, counts: list[int]) -> None:
        step = self.tables
        longest = max(self.kv.length(s) + n for s, n in zip(self._sequences, counts, strict=True))
        needed = -(-longest // self.kv.page_size)
        if step is not None and step.lens.shape[0] == len(self._sequences) and step.columns >= needed:
            self.kv.extend(self._sequences, counts, into=step)
        else:
            columns = self.columns if self.columns >= needed else 2 * needed
            with torch.inference_mode(False):
                self.tables = self.kv.extend(self._sequences, counts, columns=columns)


def _slides(config: Any, count: int) -> list[bool]:
    """Which layers have a sliding window; in a config without `layer_types` all or none have it."""
    types = getattr(config, "layer_types", None)
    if types is None:
        return [getattr(config, "sliding_window", None) is not None] * count
    return [kind == "sliding_attention" for kind in types]


def under_autocast(*arrays: Tensor) -> tuple[Tensor, ...]:
    """Convert keys, values and queries to the dtype of torch.autocast for attention. Otherwise rotated keys would be
    float32 and values would not, but pages hold one dtype."""
    device = arrays[0].device.type
    if not torch.is_autocast_enabled(device):
        return arrays
    return tuple(x.to(torch.get_autocast_dtype(device)) for x in arrays)
