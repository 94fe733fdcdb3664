"""The allocator of a cache: against a dictionary of token lists, all or nothing, and faults told by name."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest

from qflash.errors import OutOfPagesError
from qflash.kvcache.pages import Pages
from qflash.kvcache.tables import UNUSED, Tables

OPERATIONS = 4000  # of each of the three below
SIZES = ((80, 1), (40, 4), (60, 16))  # pages, page_size


class Uploads:
    """What Tables asks of a storage."""

    def upload(self, old, values):
        if old is None:
            return values.copy()
        old[:] = values
        return old


class Model:
    """Pages with their contents, token ids, beside a dictionary that holds each sequence as a list."""

    def __init__(self, pages: int, page_size: int) -> None:
        self.random = random.Random(page_size)
        self.page_size = page_size
        self.pages = Pages(pages, page_size)
        self.memory = np.full((self.pages.total, self.page_size), -1, np.int64)
        self.tokens: dict[int, list[int]] = {}
        self.written = 0
        self.refused = 0
        self.copied = 0

    def expected_need(self, names: list[int], counts: list[int]) -> int:
        """Pages that an extend takes: for tokens past the last page, and for copies of pages that are shared."""
        needed, writers = 0, Counter()
        users = Counter(page for name in self.tokens for page in self.pages.find(name).pages)
        for name, count in zip(names, counts, strict=True):
            length = len(self.tokens[name])
            needed += -(-(length + count) // self.page_size) - -(-length // self.page_size)
            if count and length % self.page_size:
                writers[self.pages.find(name).pages[-1]] += 1
        return needed + sum(min(writing, users[page] - 1) for page, writing in writers.items())

    def snapshot(self):
        return {name: (s.length, s.version, list(s.pages)) for name in self.tokens for s in [self.pages.find(name)]}

    def extend(self) -> None:
        names = self.random.sample(sorted(self.tokens), self.random.randint(1, min(4, len(self.tokens))))
        counts = [self.random.choice([0, 1, 1, 2, self.page_size, 3 * self.page_size + 1]) for _ in names]
        needed, before, free = self.expected_need(names, counts), self.snapshot(), self.pages.free
        if needed > free:
            self.refused += 1
            with pytest.raises(OutOfPagesError) as error:
                self.pages.reserve(names, counts)
            assert (error.value.needed, error.value.free) == (needed, free)
            assert (self.snapshot(), self.pages.free) == (before, free)
            return
        reservation = self.pages.reserve(names, counts)
        assert (self.snapshot(), self.pages.free) == (before, free)  # until it is committed
        for copy in reservation.copies:
            self.memory[copy.target] = -2  # what the page held before is nobody's
            self.memory[copy.target, : copy.tokens] = self.memory[copy.source, : copy.tokens]
            self.copied += 1
        tables = Tables(Uploads(), len(names), max(1, *map(len, reservation.pages)))
        tables.show(reservation)
        self.pages.commit(reservation)
        assert free - self.pages.free == needed
        self.write_through(tables, names, counts)

    def write_through(self, tables: Tables, names: list[int], counts: list[int]) -> None:
        """New ids into the slots that the tables name, as a kernel finds them; then all ids are read back that way."""
        positions, starts = tables.positions(), tables.cu_seqlens
        for row, (name, count) in enumerate(zip(names, counts, strict=True)):
            new = list(range(self.written, self.written + count))
            self.written += count
            for token, at in zip(new, positions[starts[row] : starts[row + 1]], strict=True):
                self.memory[tables.page_table[row, at // self.page_size], at % self.page_size] = token
            self.tokens[name] += new
            length = len(self.tokens[name])
            assert tables.lens[row] == length
            used = -(-length // self.page_size)
            assert (tables.page_table[row, used:] == UNUSED).all()
            assert self.memory[tables.page_table[row, :used]].ravel()[:length].tolist() == self.tokens[name]

    def operate(self) -> None:
        name = self.random.choice(sorted(self.tokens)) if self.tokens else None
        what = self.random.choices(["extend", "open", "fork", "truncate", "close"], [10, 2, 2, 2, 4])[0]
        if name is None or what == "open":
            self.tokens[self.pages.open()] = []
        elif what == "extend":
            self.extend()
        elif what == "fork":
            self.tokens[self.pages.fork(name)] = list(self.tokens[name])
        elif what == "truncate":
            length = self.random.randint(0, len(self.tokens[name]))
            self.pages.truncate(name, length)
            del self.tokens[name][length:]
        else:
            self.pages.close(name)
            del self.tokens[name]

    def check_pages(self) -> None:
        listed = {page for name in self.tokens for page in self.pages.find(name).pages}
        assert self.pages.free == self.pages.total - len(listed)
        assert self.pages.open_sequences == len(self.tokens)

    def check_tokens(self) -> None:
        for name, tokens in self.tokens.items():
            sequence = self.pages.find(name)
            assert (sequence.length, len(sequence.pages)) == (len(tokens), -(-len(tokens) // self.page_size))
            assert self.memory[list(sequence.pages)].ravel()[: len(tokens)].tolist() == tokens


@pytest.mark.parametrize(("pages", "page_size"), SIZES)
def test_the_allocator_agrees_with_a_dictionary(pages, page_size):
    model = Model(pages, page_size)
    for operation in range(OPERATIONS):
        model.operate()
        model.check_pages()
        if operation % 8 == 0:
            model.check_tokens()
    model.check_tokens()
    assert model.refused > 50 and model.written > 1000 and (model.copied > 50) == (page_size > 1)
    for name in list(model.tokens):
        model.pages.close(name)
    assert model.pages.free == model.pages.total


def test_the_last_of_those_that_write_to_a_page_keeps_it():
    pages = Pages(8, 4)
    a = pages.open()
    pages.commit(pages.reserve([a], [6]))
    family = [a, pages.fork(a), pages.fork(a)]
    reservation = pages.reserve(family, [1, 1, 1])
    assert [copy.tokens for copy in reservation.copies] == [2, 2]
    pages.commit(reservation)
    assert pages.free == 8 - 4  # one full page that all share, and a page of each
    assert len({pages.find(name).pages[0] for name in family}) == 1
    assert len({pages.find(name).pages[1] for name in family}) == 3
