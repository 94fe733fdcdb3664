"""generate: a decode loop over a paged cache; its step has fixed shapes and is captured as a CUDA graph if possible.

Each token takes one forward pass of the unmodified model. Before it, the host reserves a slot in the pages and uploads
lengths (`PagedCache.advance`). The pass itself and the choice of the next token read and write tensors at fixed
addresses, so a CUDA graph of one pass serves all tokens.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch

import qflash
from qflash.integrations.transformers.capture import Pool, captured, obstacle
from qflash.integrations.transformers.causal_model import CausalModel
from qflash.integrations.transformers.mask import UNPADDED
from qflash.integrations.transformers.pages import PagedCache
from qflash.integrations.transformers.prompts import (
    check_cache_precision,
    check_count,
    check_device,
    check_flag,
    check_in_vocabulary,
    check_int,
    check_prompts,
    check_seed,
    check_stream,
    left_padded,
)
from qflash.integrations.transformers.sampling import Sampling

Tensor = torch.Tensor
Stream = Callable[[list[int | None]], None]

MOST_STEPS = 32  # kept by a Decoder, with their graphs: bounds a server whose callers choose their own options
TOO_FEW = "a step is captured with the third token, and there were fewer"
LOOK_EVERY = 16  # tokens on a GPU: how often the host waits to check whether all sequences have ended


@dataclass(frozen=True, eq=False)
class Generated:
    """The result of `generate`.

    Attributes:
        sequences: int64 `[B, T + n]`, the prompts as given and the generated tokens, with padding after an end.
        new_tokens: the generated part, `[B, n]`.
        lengths: the number of new tokens of each sequence, including its end token.
        is_captured: whether a CUDA graph ran the steps.
        reason: why no graph did, or "".
        fused: the names of modules that ran with fewer launches, by kind of fusion: "rope", "rms_norm", "gelu".
    """

    sequences: Tensor
    new_tokens: Tensor
    lengths: list[int]
    is_captured: bool
    reason: str
    fused: dict[str, tuple[str, ...]]


def generate(
    model: Any,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    *,
    max_new_tokens: int,
    eos_token_id: int | Sequence[int] | None = None,
    pad_token_id: int | None = None,
    do_sample: bool = False,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int | None = None,
    cache_precision: Literal["int8"] | None = None,
    page_size: int = 256,
    stream: Stream | None = None,
    capture: bool = True,
    fuse: bool = True,
) -> Generated:
    """Generate text with a decoder-only model of transformers, with its keys and values in pages.

    Args:
        model: a model for causal language modelling. Its attn_implementation is "qf" during the call, unless it is
            "qf_int8" or "qf_int8_fp8", which on pages compute the same as "qf".
        input_ids: int64 or int32 `[B, T]`.
        attention_mask: `[B, T]`, 0 for padding at any position, with at least one token in each row. None: no padding.
        max_new_tokens: the maximum number of tokens to generate.
        eos_token_id: the token that ends a sequence, or several. None: those of model.generation_config. (): none.
        pad_token_id: the token after the end of a sequence. None: that of model.generation_config, or its first end
            token, or 0.
        do_sample, temperature, top_k, top_p: how the next token is chosen. Default: greedily.
        seed: the seed for sampling. None: a random one.
        cache_precision: None, or "int8" for pages of half the size.
        page_size: tokens per page: 16, 32, 64, 128 or 256.
        stream: called in each step with a list of new tokens, None for sequences that have ended. The host then waits
            for every token. It may run the model, but may not call the same Decoder.
        capture: whether steps may be captured as a CUDA graph.
        fuse: whether modules that are recognized run with fewer launches: rotary embedding in the write of keys and in
            attention, RMS norms and GeLU with tanh in one launch each. Results are the same within rounding; `fused` of
            the result lists the modules. False runs every module unchanged.

    Returns:
        A `Generated`. Its `reason` says why no CUDA graph was used, if none was.

    For several calls on one model, use a `Decoder`, which keeps pages and graphs. Threads may share a model, each with
    its own `Decoder` or its own calls.

    Example:
        >>> import torch
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from qflash.integrations.transformers import generate
        >>> config = LlamaConfig(vocab_size=99, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        ...                      num_attention_heads=4)
        >>> model, ids = LlamaForCausalLM(config).eval(), torch.arange(5, 12)[None]
        >>> result = generate(model, ids, max_new_tokens=4, eos_token_id=())
        >>> result.sequences.shape, result.lengths, result.reason
        (torch.Size([1, 11]), [4], 'the model is on cpu')
    """
    check_prompts(input_ids, attention_mask)
    check_count("max_new_tokens", max_new_tokens)
    check_int("page_size", page_size)
    # The cache rejects other page sizes, including 0.
    pages = input_ids.shape[0] * -(-(input_ids.shape[1] + max_new_tokens) // max(page_size, 1))
    decoder = Decoder(
        model, pages=pages, page_size=page_size, cache_precision=cache_precision, capture=capture,
        fuse=fuse,
    )  # fmt: skip
    return decoder.generate(
        input_ids, attention_mask, max_new_tokens=max_new_tokens, eos_token_id=eos_token_id, pad_token_id=pad_token_id,
        do_sample=do_sample, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed, stream=stream,
    )  # fmt: skip


class Decoder:
    """A model with its own pages, and a CUDA graph of the decode step for each batch size that it has served.

    Args:
        model: as in `generate`.
        pages: the number of pages for all sequences of a batch.
        page_size, cache_precision, capture, fuse: as in `generate`.

    A batch that does not fit raises `qflash.OutOfPagesError`; for the next one all pages are free. A Decoder runs one
    call at a time; threads need one each.
    """

    def __init__(
        self,
        model: Any,
        *,
        pages: int,
        page_size: int = 256,
        cache_precision: Literal["int8"] | None = None,
        capture: bool = True,
        fuse: bool = True,
    ) -> None:
        check_flag("capture", capture)
        check_flag("fuse", fuse)
        check_cache_precision(cache_precision)
        self._causal = CausalModel(model, fuse)
        self.model = model
        self._steps: dict[Any, _DecodeStep] = {}
        self.cache: PagedCache = _DecoderCache(
            self._steps, model.config, pages=pages, page_size=page_size, precision=cache_precision
        )
        self._capture, self._page_size = capture, page_size
        self._is_free = threading.Lock()
        self._pool = Pool()
        self._as_captured: Any = None  # of the model, when the steps were made

    def generate(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        *,
        max_new_tokens: int,
        eos_token_id: int | Sequence[int] | None = None,
        pad_token_id: int | None = None,
        do_sample: bool = False,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int | None = None,
        stream: Stream | None = None,
    ) -> Generated:
        """See `qflash.integrations.transformers.generate`."""
        sampling = Sampling(do_sample, temperature, top_k, top_p)
        sampling.check()
        check_prompts(input_ids, attention_mask)
        check_count("max_new_tokens", max_new_tokens)
        check_seed(seed)
        check_stream(stream)
        check_device(input_ids, attention_mask, self._causal.device)
        check_in_vocabulary(input_ids, self._causal.vocabulary)
        ends = self._causal.ends(eos_token_id)
        padding = self._causal.padding(pad_token_id, ends)
        self._check_positions(input_ids, attention_mask, max_new_tokens)
        tokens = input_ids.shape[1] + max_new_tokens
        columns = 1 << (-(-tokens // self._page_size) - 1).bit_length()  # a power of two, so few graphs serve all
        key = (input_ids.shape[0], columns, input_ids.device, sampling, ends, padding)
        with self._alone(), self._causal.at_work():
            step = self._step_of(key)
            try:
                new = step.run(input_ids, attention_mask, max_new_tokens, seed, stream)
            finally:
                self.cache.reset()
        is_captured = step.graph is not None
        reason = step.reason or ("" if is_captured else TOO_FEW)
        return Generated(
            torch.cat([input_ids, new], 1), new, _lengths(new, ends), is_captured, reason, self.fused
        )  # fmt: skip

    @property
    def fused(self) -> dict[str, tuple[str, ...]]:
        """The names of modules that run with fewer launches, by kind of fusion."""
        return self._causal.fused

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Exclusive use of the pages: no other thread, and no `stream` that calls generate."""
        if not self._is_free.acquire(blocking=False):
            raise RuntimeError("the Decoder is generating already; allowed: one call at a time, or a Decoder for each")
        try:
            yield
        finally:
            self._is_free.release()

    def _step_of(self, key: Any) -> _DecodeStep:
        """The step for such calls, marked as the most recently used."""
        as_captured = self._causal.as_captured
        if as_captured != self._as_captured:  # graphs read weights at their old addresses
            self._steps.clear()
            self._as_captured = as_captured
        step = self._steps.pop(key, None) or _DecodeStep(self, *key)
        self._steps[key] = step
        if len(self._steps) > MOST_STEPS:
            del self._steps[next(iter(self._steps))]
        return step

    def _check_positions(self, ids: Tensor, mask: Tensor | None, count: int) -> None:
        """Reject more tokens than there are learned positions; the last token needs none."""
        most = self._causal.learned_positions
        if most is None:
            return
        given = ids.shape[1] if mask is None else int((mask != 0).sum(1).max())
        if given + count - 1 > most:
            raise ValueError(
                f"max_new_tokens is {count}, behind prompts of {given}; allowed: up to {max(most - given + 1, 0)}, "
                f"because {type(self.model).__name__} has learned {most} positions"
            )

    def forward(self, ids: Tensor, positions: Tensor, attention_mask: Any) -> Tensor:
        """The logits of the last token of each sequence."""
        return self._causal.logits(ids, positions, attention_mask, self.cache)[:, -1]


class _DecoderCache(PagedCache):
    """The pages of a Decoder, whose steps hold tables and graphs of them."""

    def __init__(self, steps: dict[Any, _DecodeStep], config: Any, **sizes: Any) -> None:
        super().__init__(config, **sizes)
        self._steps = steps

    def _make_pages(self, *of: Any) -> None:
        for step in self._steps.values():
            step.forget()
        super()._make_pages(*of)


class _DecodeStep:
    """Tensors at fixed addresses for one batch size and length, and the graph that reads and writes them."""

    def __init__(
        self,
        decoder: Decoder,
        batch: int,
        columns: int,
        device: torch.device,
        sampling: Sampling,
        ends: tuple[int, ...],
        padding: int,
    ) -> None:
        self._decoder = weakref.proxy(decoder)  # so that pages and graphs are freed with it
        self._columns, self._sampling, self._padding = columns, sampling, padding
        self._tokens = torch.zeros(batch, 1, dtype=torch.int64, device=device)
        self._positions = torch.zeros_like(self._tokens)
        self._has_ended = torch.zeros(batch, dtype=torch.bool, device=device)
        self._ends = torch.tensor(ends, dtype=torch.int64, device=device)
        self._generator = torch.Generator(device) if sampling.do_sample else None
        self._tables: Any = None  # of the cache; the graph reads them
        self.graph: Any = None
        self.reason = obstacle(device, decoder._capture)

    def forget(self) -> None:
        """Release the tables and the graph, which are of pages that will be replaced."""
        self._tables = self.graph = None

    def run(self, ids: Tensor, mask: Tensor | None, count: int, seed: int | None, stream: Stream | None) -> Tensor:
        """The new tokens, `[B, n]`."""
        cache = self._decoder.cache
        cache.tables, cache.columns = self._tables, self._columns
        self._start(ids, mask, seed)
        if cache.tables is not self._tables:
            self._tables, self.graph = cache.tables, None  # a graph reads the tables that it was captured with
        history = [self._tokens[:, 0].clone()]
        over = self._send(stream, [False] * len(ids))
        for index in range(1, count):
            if self._is_over(index, stream):
                break
            if not self._reserve():
                break
            self._advance(index)
            history.append(self._tokens[:, 0].clone())
            over = self._send(stream, over)
        new = torch.stack(history, 1)
        return new[:, : max(_lengths(new, self._ends.tolist()))]

    def _start(self, ids: Tensor, mask: Tensor | None, seed: int | None) -> None:
        """Run the prompts and choose their first tokens."""
        if self._generator is not None:
            self._generator.seed() if seed is None else self._generator.manual_seed(seed)
        ids, mask = left_padded(ids, mask)
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        logits = self._decoder.forward(ids, positions, mask)
        self._has_ended.zero_()
        self._positions.copy_(positions[:, -1:])
        self._take(logits)

    def _take(self, logits: Tensor) -> None:
        """Choose the next tokens and advance the positions."""
        tokens = self._sampling.choose(logits, self._generator)
        tokens = torch.where(self._has_ended, self._padding, tokens)
        self._has_ended |= (tokens[:, None] == self._ends).any(1)
        self._tokens.copy_(tokens[:, None])
        self._positions += 1

    def _step(self) -> None:
        self._take(self._decoder.forward(self._tokens, self._positions, UNPADDED))

    def _advance(self, index: int) -> None:
        """Run one step: the first one eagerly, which warms everything up, later ones with the graph."""
        if self.graph is None and not self.reason and index > 1:
            self._try_capture()
        if self.graph is not None:
            self.graph.replay()
        else:
            self._step()

    def _try_capture(self) -> None:
        self.graph, self.reason = captured(self._step, self._tokens.device, self._decoder._pool, self._generator)
        self._decoder.cache.repeat_pass()
        if self.graph is None and self._generator is not None:
            # After an interrupted capture the generator may work only in graphs: a new one continues its sequence.
            old, self._generator = self._generator, torch.Generator(self._tokens.device)
            self._generator.set_state(old.get_state())

    def _is_over(self, index: int, stream: Stream | None) -> bool:
        if not len(self._ends):
            return False
        waits = self._tokens.device.type == "cpu" or stream is not None or index % LOOK_EVERY == 0
        return waits and bool(self._has_ended.all())

    def _reserve(self) -> bool:
        """Reserve the next token of each sequence. False: there are no pages, and all sequences have ended."""
        try:
            self._decoder.cache.advance()
        except qflash.OutOfPagesError:
            if bool(self._has_ended.all()):
                return False
            raise
        return True

    def _send(self, stream: Stream | None, over: list[bool]) -> list[bool]:
        """Pass the new tokens of unfinished sequences to `stream`, and return which sequences have ended now."""
        if stream is None:
            return over
        tokens, ended = self._tokens[:, 0].tolist(), self._has_ended.tolist()
        stream([None if was else token for token, was in zip(tokens, over, strict=True)])
        return ended


def _lengths(new: Tensor, ends: Sequence[int]) -> list[int]:
    """The number of tokens of each sequence, including its end token."""
    is_end = torch.isin(new, torch.tensor(ends, dtype=new.dtype, device=new.device))
    first = torch.where(is_end.any(1), is_end.to(torch.int8).argmax(1) + 1, new.shape[1])
    return [int(length) for length in first.tolist()]
