"""Which tokens of a batch are padding: transformers counts them, and pages do not store them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

Flags = np.ndarray[Any, np.dtype[np.bool_]]


class TokenLog:
    """The tokens that a batch has seen, with an entry per forward pass: how many, and which of them are padding."""

    def __init__(self) -> None:
        self.length = 0
        """The number of tokens that each sequence has seen, including padding."""
        self._passes: list[tuple[int, Flags | None]] = []  # flags `[B, length]`: False is padding; None: no padding

    def add(self, length: int, flags: Flags | None) -> None:
        """Add a forward pass of `length` tokens per sequence."""
        if flags is None and self._passes and self._passes[-1][1] is None:
            length += self._passes.pop()[0]  # passes without padding are merged, however many tokens are generated
        self._passes.append((length, flags))
        self.length = sum(n for n, _ in self._passes)

    def crop(self, kept: int, batch: int) -> list[int]:
        """Remove all tokens but the first `kept`. Returns how many of those are not padding, per sequence."""
        left, passes = kept, []
        for length, flags in self._passes:
            taken = min(length, left)
            left -= taken
            if taken:
                passes.append((taken, None if flags is None else flags[:, :taken]))
        self._passes, self.length = passes, kept - left
        real = np.zeros(batch, np.int64)
        for length, flags in passes:
            real += length if flags is None else flags.sum(1)
        return [int(n) for n in real]

    @property
    def has_padding(self) -> bool:
        """Whether any token of any sequence is padding."""
        return any(flags is not None for _, flags in self._passes)

    def flags(self, batch: int) -> Flags:
        """Flags of all tokens, `[B, length]`: False is padding."""
        passes = [np.ones((batch, n), np.bool_) if flags is None else flags for n, flags in self._passes]
        return np.concatenate(passes, 1) if passes else np.ones((batch, 0), np.bool_)

    def select(self, indices: Sequence[int]) -> None:
        """Replace the sequences with those of `indices`."""
        rows = list(indices)
        self._passes = [(n, None if flags is None else flags[rows]) for n, flags in self._passes]
