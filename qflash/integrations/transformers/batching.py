"""Batcher: continuous batching of requests over one model and one pool of pages.

A round is at most two forward passes. The first computes prompts, packed in sequence, up to a limit of tokens; the
second computes one token of every request whose prompt is in pages. Before each pass the host reserves pages. This file
decides which request gets them: first come, first served, and when pages run out, the latest request is preempted.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from threading import Lock
from typing import Any, Literal

import torch

import qflash
from qflash.integrations.transformers.causal_model import CausalModel
from qflash.integrations.transformers.passes import Passes
from qflash.integrations.transformers.prefixes import Prefixes
from qflash.integrations.transformers.prompts import check_cache_precision, check_count, check_flag
from qflash.integrations.transformers.requests import Request, Stream, check_ids, check_seed
from qflash.integrations.transformers.sampling import Sampling
from qflash.integrations.transformers.step_cache import StepCache

logger = logging.getLogger(__name__)


class Batcher:
    """Continuous batching: requests of any length, each with its own options, join and leave while one model runs.

    Args:
        model: a decoder-only model for causal language modelling. Its attn_implementation is "qf" during a round,
            unless it is "qf_int8" or "qf_int8_fp8", which on pages compute the same as "qf".
        pages: the number of pages for all requests.
        page_size, cache_precision, capture, fuse: as in `generate`.
        slots: the maximum number of requests that run concurrently.
        prefill_tokens: the maximum number of prompt tokens per round: a longer prompt takes several rounds, during
            which the other requests continue.
        share_prefixes: whether a prompt reuses pages that already hold its beginning, from a running or a finished
            request. Pages of finished requests are kept until another request needs them.

    Requests are admitted in order of arrival, as soon as a slot and pages for the prompt are free. If pages run out
    while requests run, the latest request is preempted: it loses its pages, waits, and what they held is recomputed. So
    the oldest request always makes progress. The tokens of a request do not depend on other requests, except for
    rounding.

    `submit` and `Request.cancel` may be called from any thread, and from `stream`; `step` and `run` from one thread at
    a time.

    Example:
        >>> import torch
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from qflash.integrations.transformers import Batcher
        >>> config = LlamaConfig(vocab_size=99, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        ...                      num_attention_heads=4)
        >>> batcher = Batcher(LlamaForCausalLM(config).eval(), pages=8, page_size=16)
        >>> short = batcher.submit([5, 6, 7], max_new_tokens=2, eos_token_id=())
        >>> long = batcher.submit(torch.arange(30), max_new_tokens=9, eos_token_id=())
        >>> batcher.run()
        >>> len(short.tokens), len(long.tokens), long.error, batcher.reason
        (2, 9, None, 'the model is on cpu')
    """

    def __init__(
        self,
        model: Any,
        *,
        pages: int,
        page_size: int = 256,
        slots: int = 32,
        prefill_tokens: int = 2048,
        cache_precision: Literal["int8"] | None = None,
        share_prefixes: bool = True,
        capture: bool = True,
        fuse: bool = True,
    ) -> None:
        check_count("slots", slots)
        check_count("prefill_tokens", prefill_tokens)
        check_cache_precision(cache_precision)
        for name, flag in (("share_prefixes", share_prefixes), ("capture", capture), ("fuse", fuse)):
            check_flag(name, flag)
        self._causal = CausalModel(model, fuse)
        cache = StepCache(model.config, pages=pages, page_size=page_size, precision=cache_precision)
        self._positions = _positions(model.config)
        with self._causal.at_work():
            self._passes = Passes(self._causal, cache, model.get_input_embeddings().weight.device, capture)
        self.kv: qflash.KVCache = cache.kv
        """The pages of all requests."""
        self._prefixes = Prefixes(self.kv) if share_prefixes else None
        self._slots, self._prefill_tokens = slots, prefill_tokens
        self._waiting: deque[Request] = deque()
        self._lock = Lock()  # guards self._waiting
        self._is_at_work = Lock()
        self._running: list[Request] = []  # in order of arrival
        self._is_cut_off = False  # an interrupt left an update half done

    # For the user.

    def submit(
        self,
        ids: torch.Tensor | Sequence[int],
        *,
        max_new_tokens: int,
        eos_token_id: int | Sequence[int] | None = None,
        do_sample: bool = False,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int | None = None,
        stream: Stream | None = None,
    ) -> Request:
        """Queue a prompt. Nothing is computed before the next `step`.

        Args:
            ids: the prompt, int64 or int32 `[T]`, or a list of ints.
            max_new_tokens, eos_token_id, do_sample, temperature, top_k, top_p: as in `generate`.
            seed: the seed of this request's samples, which do not depend on what else is computed. None: a random one.
            stream: called with each new token. An exception that it raises ends this request, as its `error`.

        Returns:
            A `Request`.

        Raises:
            ValueError: the request could never fit the pages or the model's positions.
        """
        sampling = Sampling(do_sample, temperature, top_k, top_p)
        sampling.check()
        check_count("max_new_tokens", max_new_tokens)
        check_seed(seed)
        if stream is not None and not callable(stream):
            raise TypeError(f"stream is {stream!r}; allowed: None, or a function of a token")
        ends = self._causal.ends(eos_token_id)
        request = Request(check_ids(ids, self._causal.vocabulary), max_new_tokens, ends, sampling, seed, stream)
        self._check_fits(request)
        with self._lock:
            self._waiting.append(request)
        return request

    def step(self) -> bool:
        """Compute one round: prompts, then one token of each running request. Returns whether any request is left."""
        with self._alone():
            return self._round()

    def run(self) -> None:
        """Compute rounds until no request is left."""
        with self._alone():
            while self._round():
                pass

    def forget_prefixes(self) -> None:
        """Free the pages kept of finished requests."""
        with self._alone():
            if self._prefixes is not None:
                self._prefixes.forget()

    @property
    def is_captured(self) -> bool:
        """Whether a CUDA graph has computed tokens of a round."""
        return self._passes.is_captured

    @property
    def reason(self) -> str:
        """Why no CUDA graph is captured, or ""."""
        return self._passes.reason

    @property
    def fused(self) -> dict[str, tuple[str, ...]]:
        """The names of modules that run with fewer launches, by kind of fusion."""
        return self._causal.fused

    def __repr__(self) -> str:
        return f"<qflash Batcher, {len(self._running)} requests run and {len(self._waiting)} wait, {self.kv}>"

    # A round.

    @contextmanager
    def _alone(self) -> Iterator[None]:
        if not self._is_at_work.acquire(blocking=False):
            raise RuntimeError(
                "a round is computed already, in another thread or around this call; allowed: one at a time"
            )
        try:
            with self._causal.at_work():
                if self._is_cut_off:
                    self._recover()
                self._is_cut_off = True
                yield
                self._is_cut_off = False
        finally:
            self._is_at_work.release()

    def _round(self) -> bool:
        if self._waiting and not self._running:
            self._passes.renew()
        self._drop_cancelled()
        self._admit()
        self._prefill()
        self._decode()
        return bool(self._running or self._waiting)

    def _prefill(self) -> None:
        left = self._prefill_tokens
        requests, counts = [], []
        for request in self._running:
            count = min(_unwritten(request), left)
            if _unwritten(request) > 1 and count:
                requests.append(request)
                counts.append(count)
                left -= count
        step, requests, counts = self._reserve(requests, counts)
        if requests:
            self._compute(requests, counts, lambda: self._passes.prefill(step, requests, counts))

    def _decode(self) -> None:
        requests = [request for request in self._running if _unwritten(request) == 1]
        if not requests:
            return
        pages = max(self._pages_of(request.longest) for request in requests)
        decode = self._passes.decode_pass(len(requests), pages, self._slots)
        _, requests, counts = self._reserve(requests, [1] * len(requests), decode.step)
        if requests:
            self._compute(requests, counts, lambda: decode.run(requests))

    def _compute(self, requests: list[Request], counts: list[int], run: Callable[[], Sequence[int | None]]) -> None:
        """Run a pass for which pages are reserved. If it fails, its requests fail."""
        try:
            tokens = run()
        except Exception as error:
            for request in requests:
                self._fail(request, error)
            return
        for request, count, token in zip(requests, counts, tokens, strict=True):
            if token is not None:
                request.known.append(token)
            request.written += count
        self._settle(requests)

    def _recover(self) -> None:
        """Recover from an interrupt, which may have come anywhere: free all pages and queue the running requests again.

        A request is added to its new list before it leaves the old one, and leaves the last list after it is done, so
        none is lost. Requests keep their tokens.
        """
        with self._lock:
            requests = [*self._running, *self._waiting]
        for request in requests:
            if request.sequence is not None:
                with suppress(ValueError):  # it is closed already
                    self.kv.close(request.sequence)
                request.sequence, request.written = None, 0
        if self._prefixes is not None:
            self._prefixes.forget()
        self._settle(self._running)
        with self._lock:
            self._waiting = deque(dict.fromkeys([*self._running, *self._waiting]))
            self._running.clear()

    # Requests.

    def _settle(self, requests: Sequence[Request]) -> None:
        """Send requests their new tokens, and end those that are finished."""
        for request in list(requests):
            try:
                request.tell()
            except Exception as error:
                self._fail(request, error)
            else:
                if request.is_over or request.error is not None:
                    self._end(request, is_kept=True)

    def _fail(self, request: Request, error: Exception) -> None:
        logger.warning("a request failed: %s: %s", type(error).__name__, error)
        request.error = error
        self._end(request)

    def _drop_cancelled(self) -> None:
        for request in [request for request in self._running if request.is_cancelled]:
            self._end(request, is_kept=True)
        with self._lock:
            cancelled = [request for request in self._waiting if request.is_cancelled]
            for request in cancelled:
                request.is_done = True
                self._waiting.remove(request)

    def _end(self, request: Request, is_kept: bool = False) -> None:
        self._give_back(request, is_kept)
        request.is_done = True
        self._running.remove(request)

    def _give_back(self, request: Request, is_kept: bool = False) -> None:
        """Free a request's pages. is_kept: keep them as a prefix for other requests."""
        if request.sequence is not None:
            if is_kept and self._prefixes is not None:
                self._prefixes.keep(request)
            else:
                self.kv.close(request.sequence)
        request.sequence, request.written = None, 0

    # Slots and pages.

    def _admit(self) -> None:
        """Admit requests in order of arrival, while there are slots and pages for their prompts."""
        while self._waiting and len(self._running) < self._slots:
            request = self._waiting[0]  # only this thread removes from that end
            if self._prefixes is None:
                request.sequence = self.kv.open()
            else:
                found = self._prefixes.find(request.known, self._running)
                if found.is_growing:  # more pages to share will be written soon
                    return
                self._prefixes.share(found, request)
            promised = sum(map(self._promised, self._running)) + self._promised(request)
            while promised > self.kv.free_pages and self._evict():
                pass
            if self._running and promised > self.kv.free_pages:
                self._give_back(request)
                return
            self._running.append(request)
            with self._lock:
                self._waiting.popleft()

    def _promised(self, request: Request) -> int:
        """The number of pages needed for the known tokens, plus one, so that the request does not run out soon."""
        wanted = min(self._pages_of(len(request.known)) + 1, self._pages_of(request.longest))
        return wanted - self._pages_of(request.written)

    def _reserve(
        self, requests: list[Request], counts: list[int], into: Any = None
    ) -> tuple[Any, list[Request], list[int]]:
        """Reserve pages for new tokens of requests. Returns the step, and the requests still running, with counts."""
        while requests:
            try:
                return self.kv.extend([request.sequence for request in requests], counts, into=into), requests, counts
            except qflash.OutOfPagesError as error:
                if self._evict():
                    continue
                if len(self._running) > 1:
                    self._preempt(self._running[-1])
                else:  # pages were taken by other users of the cache
                    self._fail(self._running[0], error)
            left = [
                (request, count)
                for request, count in zip(requests, counts, strict=True)
                if request.sequence is not None
            ]
            requests, counts = [request for request, _ in left], [count for _, count in left]
        return None, requests, counts

    def _preempt(self, request: Request) -> None:
        """Preempt a request: it loses its pages and is first in the queue."""
        self._give_back(request)
        request.preempted += 1
        with self._lock:
            self._waiting.appendleft(request)
        self._running.remove(request)

    def _evict(self) -> bool:
        return self._prefixes is not None and self._prefixes.evict()

    def _pages_of(self, tokens: int) -> int:
        return -(-tokens // self.kv.page_size)

    def _check_fits(self, request: Request) -> None:
        asked = f"ids has {len(request.ids)} tokens and max_new_tokens is {request.max_new_tokens}"
        needed = self._pages_of(request.longest)
        if needed > self.kv.pages:
            raise ValueError(
                f"{asked}, which needs {needed} pages of {self.kv.page_size} tokens; "
                f"allowed: what the batcher's {self.kv.pages} pages hold"
            )
        if self._positions is not None and request.longest > self._positions:
            raise ValueError(
                f"{asked}, which needs {request.longest} positions; allowed: up to {self._positions}, the model's"
            )


def _unwritten(request: Request) -> int:
    """The number of known tokens that are not in pages: one while decoding, more before that."""
    return len(request.known) - request.written


def _positions(config: Any) -> int | None:
    """The largest length of a sequence for which the model has positions, and does not change the rotation of all
    sequences because one is long (longrope)."""
    text = config.get_text_config(decoder=True)
    rope = getattr(text, "rope_parameters", None) or {}
    kinds = [rope, *(kind for kind in rope.values() if isinstance(kind, dict))]
    limits = [kind.get("original_max_position_embeddings") for kind in kinds if kind.get("rope_type") == "longrope"]
    return min(filter(None, [getattr(text, "max_position_embeddings", None), *limits]), default=None)
