"""The allocator of a cache: free pages, reference counts, and the sequences. Independent of a framework's arrays.

A page belongs to every sequence that lists it. New tokens are added to the last page of a sequence while it has room,
so that page must be exclusive: if another sequence also lists it, the sequence gets a copy first. Full pages are never
written again, and are shared for as long as several sequences list them.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from itertools import islice

from qflash.call.words import INT32_MAX
from qflash.errors import OutOfPagesError


@dataclass(slots=True, eq=False)
class Sequence:
    """The tokens of one sequence. Token t is token t % page_size of pages[t // page_size]."""

    name: int
    length: int = 0
    pages: array[int] = field(default_factory=lambda: array("i"))  # replaced, never modified in place
    version: int = 0  # counts changes that make a step of this sequence stale: extend, truncate, close


@dataclass(frozen=True, slots=True)
class Copy:
    """The first `tokens` tokens of one page, to be copied to another before that one is written."""

    source: int
    target: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Reservation:
    """What an extend will change when it is committed. The caller's lock prevents others from taking the pages."""

    sequences: tuple[Sequence, ...]
    counts: tuple[int, ...]  # new tokens of each
    pages: tuple[array[int], ...]  # of each, with the new ones
    copies: tuple[Copy, ...]
    taken: int  # pages from the free list


class Pages:
    """Pages of one size, and the sequences that share them. The caller holds a lock."""

    def __init__(self, pages: int, page_size: int) -> None:
        self.total = pages
        self.page_size = page_size
        self.epoch = 0  # incremented with every version: while it is unchanged, no step becomes stale
        self._free = list(range(pages - 1, -1, -1))  # a stack: the page freed last is used first
        self._references = [0] * pages
        self._sequences: dict[int, Sequence] = {}
        self._opened = 0

    @property
    def free(self) -> int:
        """The number of pages that no sequence lists."""
        return len(self._free)

    @property
    def open_sequences(self) -> int:
        """The number of open sequences."""
        return len(self._sequences)

    def find(self, name: int) -> Sequence:
        """The open sequence of that name. Names are never reused, so that a closed one is recognised."""
        found = self._sequences.get(name)
        if found is None:
            why = "it is closed" if 0 <= name < self._opened else "the cache never opened it"
            raise ValueError(f"sequence {name} does not exist, {why}; allowed: what open() and fork() returned")
        return found

    def open(self) -> int:
        """A new sequence without tokens."""
        return self._add(Sequence(self._opened))

    def fork(self, name: int) -> int:
        """A new sequence with the tokens of another, in the same pages."""
        parent = self.find(name)
        for page in parent.pages:
            self._references[page] += 1
        return self._add(Sequence(self._opened, parent.length, parent.pages))

    def reserve(self, names: Many[int], counts: Many[int]) -> Reservation:
        """Find pages for `counts` new tokens, without taking them: until `commit`, nothing has changed."""
        sequences = tuple(map(self.find, names))
        missing = [self._missing(sequence, count) for sequence, count in zip(sequences, counts, strict=True)]
        shared = self._shared_tails(sequences, counts)
        needed = len(shared) + sum(missing)
        if needed > len(self._free):
            raise OutOfPagesError(needed, len(self._free), self.total)
        pages, copies = [sequence.pages for sequence in sequences], []
        fresh = reversed(self._free[len(self._free) - needed :])
        for row, sequence in enumerate(sequences if needed else ()):  # most steps of one token need no page
            if sequence.name in shared:
                copies.append(Copy(sequence.pages[-1], next(fresh), sequence.length % self.page_size))
                pages[row] = sequence.pages[:-1] + array("i", [copies[-1].target])
            if missing[row]:
                pages[row] = pages[row] + array("i", islice(fresh, missing[row]))
        return Reservation(sequences, tuple(counts), tuple(pages), tuple(copies), needed)

    def commit(self, reservation: Reservation) -> None:
        """Take the pages of a reservation and add its tokens."""
        del self._free[len(self._free) - reservation.taken :]
        for copy in reservation.copies:
            self._references[copy.source] -= 1  # at least one other sequence lists it
            self._references[copy.target] = 1
        for sequence, count, pages in zip(reservation.sequences, reservation.counts, reservation.pages, strict=True):
            if pages is not sequence.pages:
                for page in pages[len(sequence.pages) :]:
                    self._references[page] = 1
                sequence.pages = pages
            sequence.length += count
            self._changed(sequence)

    def truncate(self, name: int, length: int) -> None:
        """Drop the tokens from `length` on."""
        sequence = self.find(name)
        if not 0 <= length <= sequence.length:
            raise ValueError(f"n is {length}; allowed: 0 to the length of sequence {name}, {sequence.length}")
        kept = -(-length // self.page_size)
        self._release(sequence.pages[kept:])
        sequence.pages = sequence.pages[:kept]
        sequence.length = length
        self._changed(sequence)

    def close(self, name: int) -> None:
        """Remove a sequence, and free the pages that no other lists."""
        sequence = self.find(name)
        del self._sequences[name]
        self._release(sequence.pages)
        self._changed(sequence)

    def _missing(self, sequence: Sequence, count: int) -> int:
        """The number of additional pages that a sequence needs for `count` more tokens."""
        length = sequence.length + count
        if length > INT32_MAX:
            raise ValueError(f"n makes sequence {sequence.name} {length} tokens long; allowed: up to {INT32_MAX}")
        return -(-length // self.page_size) - len(sequence.pages)

    def _shared_tails(self, sequences: Many[Sequence], counts: Many[int]) -> set[int]:
        """The sequences that get a copy of their last page: those whose new tokens would go to a page that others list.

        If all sequences that list a page write to it, the last one keeps it.
        """
        copied: set[int] = set()
        left: dict[int, int] = {}  # per copied page: the number of sequences that still list it
        for sequence, count in zip(sequences, counts, strict=True):
            if count and sequence.length % self.page_size:
                page = sequence.pages[-1]
                users = left.get(page, self._references[page])
                if users > 1:
                    copied.add(sequence.name)
                    left[page] = users - 1
        return copied

    def _add(self, sequence: Sequence) -> int:
        self._sequences[sequence.name] = sequence
        self._opened += 1
        return sequence.name

    def _release(self, pages: Many[int]) -> None:
        for page in reversed(pages):
            self._references[page] -= 1
            if not self._references[page]:
                self._free.append(page)

    def _changed(self, sequence: Sequence) -> None:
        sequence.version += 1
        self.epoch += 1
