"""Pages shared by prompts: found among those of running requests, and among those kept from finished ones."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import qflash
from qflash.integrations.transformers.requests import Request

Tokens = Sequence[int]


@dataclass(frozen=True)
class Found:
    """A sequence that begins like a prompt. pages: the number of leading full pages that both share and that are
    written. is_growing: more pages of some request will be the same, once they are written."""

    sequence: int | None
    pages: int
    is_growing: bool


class Prefixes:
    """The first pages of finished requests; the least recently used ones are evicted first."""

    def __init__(self, kv: qflash.KVCache) -> None:
        self._kv = kv
        self._kept: dict[int, Tokens] = {}  # by sequence, in the order of use

    def find(self, tokens: Tokens, running: Iterable[Request]) -> Found:
        """The longest prefix of `tokens` in pages. At least one token is left out, because its logits are needed."""
        most = (len(tokens) - 1) // self._kv.page_size
        sequence, pages, coming = None, 0, 0
        others = [(request.sequence, request.known, request.written) for request in running]
        others += [(kept, known, len(known)) for kept, known in self._kept.items()]
        for other, known, written in others:
            common = self._common(tokens, known, most)
            there = min(common, written // self._kv.page_size)
            coming = max(coming, common)
            if there > pages:
                sequence, pages = other, there
        if sequence in self._kept:
            self._kept[sequence] = self._kept.pop(sequence)
        return Found(sequence, pages, coming > pages)

    def share(self, found: Found, request: Request) -> None:
        """Give a request a sequence that starts with the pages found."""
        if found.sequence is None:
            request.sequence = self._kv.open()
        else:
            request.sequence = self._kv.fork(found.sequence)
            self._kv.truncate(request.sequence, found.pages * self._kv.page_size)
        request.written = found.pages * self._kv.page_size

    def keep(self, request: Request) -> None:
        """Take over the sequence of a finished request and keep its full pages, unless they are already kept."""
        size = self._kv.page_size
        pages = request.written // size
        tokens = tuple(request.known[: pages * size])
        for other, known in list(self._kept.items()):
            common = self._common(tokens, known, pages)
            if common == pages:  # this one is a prefix of the other
                pages = 0
                break
            if common * size == len(known):  # the other is a prefix of this one
                self._close(other)
        if pages:
            self._kv.truncate(request.sequence, pages * size)
            self._kept[request.sequence] = tokens
        else:
            self._kv.close(request.sequence)

    def evict(self) -> bool:
        """Evict the least recently used sequence. Returns whether there was one."""
        if not self._kept:
            return False
        self._close(next(iter(self._kept)))
        return True

    def forget(self) -> None:
        """Evict all of them."""
        while self.evict():
            pass

    def _close(self, sequence: int) -> None:
        with suppress(ValueError):  # an interrupt came between the two statements
            self._kv.close(sequence)
        del self._kept[sequence]

    def _common(self, a: Tokens, b: Tokens, most: int) -> int:
        """The number of leading pages that are equal, up to `most`."""
        size = self._kv.page_size
        pages = min(len(a) // size, len(b) // size, most)
        for page in range(pages):
            place = slice(page * size, (page + 1) * size)
            if tuple(a[place]) != tuple(b[place]):
                return page
        return pages
