"""A cache of transformers whose forward passes write a given step, whichever sequences are in it."""

from __future__ import annotations

from typing import Any

import torch

import qflash
from qflash.integrations.transformers.mask import Mask
from qflash.integrations.transformers.pages import NewTokens, PagedCache, under_autocast
from qflash.integrations.transformers.rotations import take_rope

Tensor = torch.Tensor


class StepCache(PagedCache):
    """A PagedCache without sequences of its own: a pass writes and reads those of `step`.

    A pass is one token of each row, `[rows, 1]`, or new tokens of several sequences, concatenated, `[1, total]`. The
    model sees it as its first pass, whatever the sequences hold: their lengths are in the step's tables, positions are
    passed alongside the ids, and a causal mask or a window means the same in each sequence.
    """

    step: Any = None
    """The step that the next pass writes. None: the pass only determines the shapes of keys and whether attention can
    be computed, in pages that are discarded."""

    def __init__(self, config: Any, *, pages: int, page_size: int = 256, precision: Any = None) -> None:
        super().__init__(config, pages=pages, page_size=page_size, precision=precision)
        self._looked_at: set[int] = set()  # layers

    def check_layers(self) -> None:
        """Reject a model with a layer that did not write: in a packed pass its tokens would see other sequences."""
        left = sorted(set(range(len(self.layers))) - self._looked_at)
        if left:
            raise NotImplementedError(
                f"layers {left} did not hand keys to the cache and the attention function; "
                "allowed: models whose layers all do"
            )

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """0, because a mask for more tokens would be that of one sequence."""
        return 0

    def _attend(self, new: NewTokens, query: Tensor, mask: Mask, words: dict[str, Any]) -> Tensor:
        self._check_window(new.layer, words)
        rope = take_rope(query, new.k)
        k, v, q = under_autocast(new.k, new.v, query)
        step, layer = (self._scratch(new.layer, k, v, mask), 0) if self.step is None else (self.step, new.layer)
        k, v, q = (x.transpose(1, 2) for x in (k, v, q))
        if q.shape[1] == 1:
            kv = step.write(layer, k, v, rope=rope)
            return qflash.attention(q, kv, rope=rope, **words)
        k, v, q = k[0], v[0], q[0]
        if rope is not None:
            positions = rope.positions_q.flatten()
            rope = qflash.Rope(rope.cos, rope.sin, positions_q=positions, positions_k=positions)
        kv = step.write(layer, k, v, rope=rope)
        packed = (step.cu_seqlens, None, step.max_new, None)
        return qflash.attention_varlen(q, kv, None, *packed, rope=rope, **words)[None]

    def _may_change_pages(self) -> bool:
        return False  # sequences belong to requests

    def _scratch(self, layer: int, k: Tensor, v: Tensor, mask: Mask) -> Any:
        """Allocate the pages, reject a layer that does not fit them, and give it a page of another cache to write."""
        self._allocate(k, v)
        if (k.shape[1], k.shape[3]) != (self.kv.kv_heads, self.kv.head_dim):
            raise NotImplementedError(
                f"a layer has {k.shape[1]} heads of {k.shape[3]} channels for keys; "
                f"allowed: as the first one has, {self.kv.kv_heads} of {self.kv.head_dim}"
            )
        if not mask.causal:
            raise NotImplementedError("the mask is not causal; allowed: models whose tokens see earlier ones alone")
        sizes = {"layers": 1, "kv_heads": k.shape[1], "head_dim": k.shape[3]} | self._sizes | {"pages": 1}
        self._looked_at.add(layer)
        scratch = qflash.KVCache(**sizes, dtype=k.dtype, device=k.device)
        return scratch.extend([scratch.open()], k.shape[2])
