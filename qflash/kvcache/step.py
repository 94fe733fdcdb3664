"""A step: one batch of new tokens, for which the cache has reserved pages. It writes them layer by layer."""

from __future__ import annotations

from dataclasses import dataclass
from threading import RLock
from typing import Any

import numpy as np

from qflash.call.words import check_int
from qflash.kvcache.pages import Pages, Reservation, Sequence
from qflash.kvcache.sharing import pays
from qflash.kvcache.storage import Shape, Storage
from qflash.kvcache.tables import Tables
from qflash.ops.paged import PagedKV
from qflash.ops.quantization import quantize, tables_of
from qflash.rotary import Rope


@dataclass(frozen=True, slots=True)
class State:
    """What a cache and its steps share. The lock must be held to read or modify it."""

    shape: Shape
    pages: Pages
    storage: Storage
    lock: RLock
    has_mean: list[bool]  # per layer: whether its k_mean is final; always True for pages without one


class Step:
    """New tokens of some sequences: `write` stores them, and `attention` reads them with all earlier tokens.

    Returned by `KVCache.extend`. Tables are arrays of the cache's framework.

    Attributes:
        page_table: int32 `[B, columns]`.
        lens: int32 `[B]`, with the new tokens.
        cu_seqlens: int32 `[B + 1]`, the start of each sequence's new tokens in a packed array.
        sequences: the sequences.
        counts: the number of new tokens of each.
        max_new: the largest of counts.
        total: the sum of counts.

    B is the number of sequences that the step was made for. If it was renewed with fewer, the last rows are padding:
    they have no pages and length 0, nothing is written for them, and attention returns zeros for them.

    A step becomes stale when one of its sequences is extended, truncated or closed; writing and reading then raise.
    `KVCache.extend(..., into=step)` renews it.
    """

    sequences: tuple[int, ...]
    counts: tuple[int, ...]
    max_new: int
    total: int

    def __init__(self, state: State, rows: int, columns: int) -> None:
        self._state = state
        self._tables = Tables(state.storage, rows, columns)
        self._members: tuple[Sequence, ...] = ()
        self._versions: tuple[int, ...] | None = None  # of the members, as in the tables; None: tables are invalid
        self._epoch = -1  # the allocator's, when the versions were last compared
        self._kvs: dict[int, PagedKV] = {}  # by layer, if the arrays stay the same

    @property
    def page_table(self) -> Any:
        """int32 `[B, columns]`: the pages of each sequence, followed by -1."""
        return self._tables.page_table

    @property
    def lens(self) -> Any:
        """int32 `[B]`: the number of tokens of each sequence, including the new ones."""
        return self._tables.lens

    @property
    def cu_seqlens(self) -> Any:
        """int32 `[B + 1]`: the start of each sequence's new tokens in a packed array."""
        return self._tables.cu_seqlens

    @property
    def columns(self) -> int:
        """The number of pages per sequence that the page table has room for."""
        return self._tables.columns

    @property
    def shared_pages(self) -> int:
        """The number of leading pages that all sequences share since `fork`, without new tokens, for `share_prefix`.

        0 if reading them once would not pay off, according to the estimate of `kvcache/sharing.py`.
        """
        state = self._state
        with state.lock:
            self._check(0)
            full = min(s.length - n for s, n in zip(self._members, self.counts, strict=True)) // state.shape.page_size
            first, *others = (sequence.pages for sequence in self._members)
            same = next((i for i in range(full) if any(pages[i] != first[i] for pages in others)), full)
            saves = pays(len(self._members), same * state.shape.bytes_of_page, state.storage.device)
            return same if saves else 0

    def write(self, layer: int, k: Any, v: Any, *, rope: Rope | None = None) -> PagedKV:
        """Store the new keys and values of a layer in their pages, in one launch.

        Args:
            layer: index of the layer.
            k: `[B, T, Hkv, D]` if every sequence has T new tokens, or packed `[total, Hkv, D]`, in the order of the
                sequences. The contents of rows of padding are ignored.
            v: the same for values.
            rope: rotates k; the position of a token is its index in the sequence, or given by `rope.positions_k`. Pass
                the same Rope to `attention`, which rotates q with it.

        Returns:
            A `PagedKV` for `attention`.

        For int8 pages, the first write to a layer also fixes the mean that is subtracted from all its keys: that of
        these keys.
        """
        state = self._state
        with state.lock:
            self._check(layer)
            self._check_new(k, v)
            self._check_rope(rope)
            if not self.total:
                return self._kv(layer)
            if not state.has_mean[layer]:
                state.storage.set_mean(layer, lambda: self._mean(k, rope))
            kv = self._kv(layer)
            kv = state.storage.write(layer, kv, k, v, rope, self.cu_seqlens if len(k.shape) == 3 else None)
            state.has_mean[layer] = True  # only now: a rejected write must not fix the mean
            return kv

    def kv(self, layer: int) -> PagedKV:
        """The current keys and values of a layer, for `attention`; nothing is written."""
        with self._state.lock:
            self._check(layer)
            return self._kv(layer)

    def __repr__(self) -> str:
        return f"<qflash Step of sequences {list(self.sequences)}, new tokens {list(self.counts)}>"

    # Called by the cache, in this order, while it holds the lock.

    def _check_fits(self, reservation: Reservation) -> None:
        """Reject a batch that the tables have no room for."""
        rows, columns = self._tables.rows, self._tables.columns
        if len(reservation.sequences) > rows:
            raise ValueError(f"seqs has {len(reservation.sequences)} sequences; allowed: up to into's {rows} rows")
        for sequence, pages in zip(reservation.sequences, reservation.pages, strict=True):
            if len(pages) > columns:
                raise ValueError(
                    f"sequence {sequence.name} needs {len(pages)} pages, and the page table has {columns} columns; "
                    f"allowed: a step that was made with columns={len(pages)} or more"
                )

    def _show(self, reservation: Reservation) -> None:
        """Write a reservation to the tables. Until `_commit` the step is stale, whatever happens."""
        self._versions, self._epoch = None, -1
        self._tables.show(reservation)

    def _commit(self, reservation: Reservation) -> None:
        """Called when the reservation is committed: the step now represents it."""
        self._members = reservation.sequences
        self._versions = tuple([sequence.version for sequence in self._members])
        self.sequences = tuple([sequence.name for sequence in self._members])
        self.counts = reservation.counts
        self.max_new, self.total = max(self.counts), sum(self.counts)
        shape = self._state.shape
        packed = (self.total, shape.kv_heads, shape.head_dim)
        batch = (self._tables.rows, self.max_new, shape.kv_heads, shape.head_dim)
        is_even = min(self.counts) == self.max_new
        self._shapes = (batch, packed) if is_even else (packed,)
        self._longest = max((s.length for s, n in zip(self._members, self.counts, strict=True) if n), default=0)

    def _check(self, layer: Any) -> None:
        check_int("layer", layer, 0, self._state.shape.layers - 1)
        epoch = self._state.pages.epoch
        if epoch == self._epoch:
            return
        if self._versions is None:
            raise ValueError("the step is stale, an extend into it failed; allowed: extend(..., into=step) renews it")
        for sequence, version in zip(self._members, self._versions, strict=True):
            if sequence.version != version:
                raise ValueError(
                    f"the step is stale, sequence {sequence.name} was extended, truncated or closed since; "
                    "allowed: the newest step of each sequence, or extend(..., into=step) to renew this one"
                )
        self._epoch = epoch

    def _check_new(self, k: Any, v: Any) -> None:
        check_new = self._state.storage.check_new
        check_new("k", k, self._shapes)
        check_new("v", v, (tuple(k.shape),))

    def _check_rope(self, rope: Any) -> None:
        """Positions are known here, so tables that are too short are detected before anything is written."""
        cos, _, _, positions, _ = tables_of(rope)
        rows = getattr(cos, "shape", (self._longest,))[0]
        if positions is None and rows < self._longest:
            raise ValueError(f"rope.cos has {rows} rows; allowed: at least {self._longest}, the longest sequence's")

    def _mean(self, k: Any, rope: Rope | None) -> Any:
        """The mean of the new keys, rotated, over tokens and sequences, without padding: `[Hkv, D]`."""
        keys = k[: len(self.counts)] if len(k.shape) == 4 else k[None]
        if rope is not None:
            positions: Any = rope.positions_k
            if positions is None:
                places = self._tables.positions().reshape(keys.shape[:2])
                positions = self._state.storage.upload(None, places)
            elif np.ndim(positions) == 2:
                positions = positions[: keys.shape[0]]
            rope = Rope(rope.cos, rope.sin, rope.interleaved, positions_k=positions)
        mean: Any = quantize(keys, rope=rope, smooth=True).mean
        return mean.mean(0)  # all sequences of a batch have the same number of new tokens

    def _kv(self, layer: int) -> PagedKV:
        kept = self._kvs.get(layer)
        if kept is not None:
            return kept
        arrays, tables = self._state.storage.layers[layer], self._tables
        kv = PagedKV(
            arrays.k,
            arrays.v,
            tables.page_table,
            tables.lens,
            k_scale=arrays.k_scale,
            v_scale=arrays.v_scale,
            k_mean=arrays.k_mean,
        )
        if self._state.storage.in_place:
            self._kvs[layer] = kv
        return kv
