"""The two kinds of forward passes of a `Batcher`: packed prompts, and one token of every request.

The second kind has fixed shapes: a number of rows, whichever requests are in them, and tables of a fixed number of
pages. One CUDA graph serves all requests of these shapes. Graphs are few, as rows and pages are powers of two.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from threading import get_ident
from typing import Any

import torch

from qflash.integrations.transformers.capture import Pool, captured, obstacle
from qflash.integrations.transformers.causal_model import CausalModel
from qflash.integrations.transformers.mask import UNPADDED
from qflash.integrations.transformers.requests import Request
from qflash.integrations.transformers.rows import Rows
from qflash.integrations.transformers.step_cache import StepCache

Tensor = torch.Tensor

_FIRST = 4  # tokens of the pass that only inspects the model: enough that rotations differ


class Passes:
    """A model over the pages of a StepCache."""

    def __init__(self, causal: CausalModel, cache: StepCache, device: torch.device, capture: bool) -> None:
        self.causal, self.cache, self.device = causal, cache, device
        self.reason = obstacle(device, capture)
        self.pool = Pool()
        self._as_captured = causal.as_captured
        self._decode_passes: dict[tuple[int, int], DecodePass] = {}
        positions = torch.arange(_FIRST, device=device)[None]
        causal.logits(torch.zeros_like(positions), positions, UNPADDED, cache)  # allocates the pages
        cache.check_layers()

    @property
    def is_captured(self) -> bool:
        """Whether a CUDA graph has run a pass."""
        return any(decode.graphs for decode in self._decode_passes.values())

    def renew(self) -> None:
        """Between requests, drop graphs that read weights at old addresses."""
        as_captured = self.causal.as_captured
        if as_captured != self._as_captured:
            self._as_captured = as_captured
            for decode in self._decode_passes.values():
                decode.forget()

    def prefill(self, step: Any, requests: Sequence[Request], counts: Sequence[int]) -> list[int | None]:
        """Write the next known tokens of requests, `counts` of each. Returns the next token where none are left."""
        ids, positions, last, ready = [], [], [], []
        for row, (request, count) in enumerate(zip(requests, counts, strict=True)):
            end = request.written + count
            ids += request.known[request.written : end]
            positions += range(request.written, end)
            if end == len(request.known):
                last.append(len(ids) - 1)
                ready.append(row)
        self.cache.step = step
        sent = (torch.tensor(x, device=self.device) for x in (ids, positions, last or [len(ids) - 1]))
        ids, positions, last = sent
        logits = self.causal.logits(ids[None], positions[None], UNPADDED, self.cache, last)
        tokens: list[int | None] = [None] * len(requests)
        if ready:
            rows = Rows(len(ready), self.device)
            rows.show([requests[row] for row in ready])
            for row, token in zip(ready, rows.choose(logits[0]).tolist(), strict=True):
                tokens[row] = token
        return tokens

    def decode_pass(self, requests: int, pages: int, most: int) -> DecodePass:
        """The pass for this many requests, rounded up to at most `most`, of up to this many pages."""
        rows = min(_power_of_two(requests), most)
        key = (rows, _power_of_two(pages))
        if key not in self._decode_passes:
            self._decode_passes[key] = DecodePass(self, *key)
        return self._decode_passes[key]


class DecodePass:
    """One token of each row: tensors at fixed addresses, and the graphs that read and write them."""

    def __init__(self, passes: Passes, rows: int, columns: int) -> None:
        self._passes = weakref.proxy(passes)  # so that pages and graphs are freed with them
        self.rows = Rows(rows, passes.device)
        with torch.inference_mode(False):
            self.chosen = torch.zeros(rows, dtype=torch.int64, device=passes.device)
        self.graphs: dict[bool, Any] = {}  # by whether tokens are sampled
        self._warm: set[tuple[bool, int]] = set()  # kinds and threads that have run eagerly
        kv = passes.cache.kv
        nobody = [kv.open() for _ in range(rows)]
        self.step = kv.extend(nobody, 0, columns=columns)
        """The tables; `KVCache.extend(..., into=step)` fills them."""
        for sequence in nobody:
            kv.close(sequence)

    def forget(self) -> None:
        """Drop all graphs and start over."""
        self.graphs.clear()
        self._warm.clear()

    def run(self, requests: Sequence[Request]) -> list[int]:
        """The next token of each request; the requests are the sequences of the step."""
        self.rows.show(requests)
        self._passes.cache.step = self.step
        self._advance()
        return self.chosen[: len(requests)].tolist()

    def _advance(self) -> None:
        """Run a thread's first pass eagerly, which warms everything up, and later ones with a graph."""
        kind = self.rows.is_drawn
        warm = kind, get_ident()
        if kind not in self.graphs and warm in self._warm and not self._passes.reason:
            graph, self._passes.reason = captured(self._pass, self._passes.device, self._passes.pool)
            if graph is not None:
                self.graphs[kind] = graph
        if kind in self.graphs:
            self.graphs[kind].replay()
        else:
            self._pass()
            self._warm.add(warm)

    def _pass(self) -> None:
        rows = self.rows
        logits = self._passes.causal.logits(rows.ids, rows.positions, UNPADDED, self._passes.cache)
        self.chosen.copy_(rows.choose(logits[:, -1]))


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()
