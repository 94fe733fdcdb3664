"""The tables of a batch: built in NumPy on the host, and uploaded when they have changed."""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np

from qflash.kvcache.pages import Reservation
from qflash.kvcache.storage import Storage

UNUSED = -1  # in a page table; not the number of any page
NO_PAGES = array("i")  # for a row of padding: the same list in every batch


class Tables:
    """page_table int32 `[rows, columns]`, lens int32 `[rows]` and cu_seqlens int32 `[rows + 1]` of a batch.

    Their shapes are fixed. If a batch has fewer sequences than rows, the last rows are padding: no pages, length 0 and
    no new tokens. If arrays can be written in place, their addresses are also fixed, so that a CUDA graph that reads
    them sees what the last `show` wrote.
    """

    def __init__(self, storage: Storage, rows: int, columns: int) -> None:
        self._storage = storage
        self._host_table = np.full((rows, columns), UNUSED, np.int32)
        self._host_lens = np.zeros(rows, np.int32)
        self._host_starts = np.zeros(rows + 1, np.int32)
        self.page_table: Any = None
        self.lens: Any = None
        self.cu_seqlens: Any = None
        # The contents of the arrays. The allocator replaces lists of pages and never modifies one, so `is` suffices.
        self._pages: tuple[array[int] | None, ...] = (None,) * rows
        self._counts: tuple[int, ...] | None = None

    @property
    def rows(self) -> int:
        """The number of sequences that there are rows for."""
        return self._host_table.shape[0]

    @property
    def columns(self) -> int:
        """The number of pages per sequence that there is room for."""
        return self._host_table.shape[1]

    def show(self, reservation: Reservation) -> None:
        """Update the tables to include the reserved tokens."""
        upload = self._storage.upload
        padding = self.rows - len(reservation.sequences)
        pages = reservation.pages + (NO_PAGES,) * padding
        counts = reservation.counts + (0,) * padding
        table, is_new = self._host_table, self.page_table is None
        for row, (listed, shown) in enumerate(zip(pages, self._pages, strict=True)):
            if listed is not shown:
                table[row, : len(listed)] = listed
                table[row, len(listed) :] = UNUSED
                is_new = True
        if is_new:
            self._pages = (None,) * len(pages)  # if the upload fails, the next one is complete
            self.page_table = upload(self.page_table, table)
            self._pages = pages
        lengths = [s.length + n for s, n in zip(reservation.sequences, reservation.counts, strict=True)]
        self._host_lens[:] = lengths + [0] * padding
        self.lens = upload(self.lens, self._host_lens)
        if counts != self._counts:
            self._counts = None
            np.cumsum(counts, out=self._host_starts[1:])
            self.cu_seqlens = upload(self.cu_seqlens, self._host_starts)
            self._counts = counts

    def positions(self) -> np.ndarray[Any, np.dtype[np.int32]]:
        """The position of each new token, packed: int32 `[total]`."""
        counts = np.diff(self._host_starts)
        before = self._host_lens - counts - self._host_starts[:-1]
        return np.repeat(before, counts) + np.arange(self._host_starts[-1], dtype=np.int32)
