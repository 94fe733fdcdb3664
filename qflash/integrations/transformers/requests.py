"""A request to a `Batcher`: a prompt, its options, and its results so far."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from typing import Any

import torch

from qflash.integrations.transformers.sampling import Sampling

Stream = Callable[[int], None]

_SEEDS = 1 << 63


class Request:
    """The result of `Batcher.submit`.

    Attributes:
        ids: the prompt.
        tokens: the tokens generated so far, including the end token.
        is_done: whether the request has ended.
        error: the exception that ended it, or None.
        seed: the seed for sampling, also if none was given.
        is_cancelled: whether `cancel` was called in time.
        preempted: how often its pages were given to older requests; what they held was recomputed.
    """

    def __init__(
        self,
        ids: Sequence[int],
        max_new_tokens: int,
        ends: tuple[int, ...],
        sampling: Sampling,
        seed: int | None,
        stream: Stream | None,
    ) -> None:
        self.ids = tuple(ids)
        self.max_new_tokens, self.ends, self.sampling, self.stream = max_new_tokens, ends, sampling, stream
        self.seed = secrets.randbelow(_SEEDS) if seed is None else seed
        self.is_done = self.is_cancelled = False
        self.error: Exception | None = None
        self.preempted = 0
        # The batcher's state of the request.
        self.known = list(self.ids)
        """The prompt and the tokens generated after it."""
        self.sequence: int | None = None
        """Its sequence in the pages, while it runs."""
        self.written = 0
        """The number of known tokens that are in pages. The sequence is longer while a pass writes more."""
        self._told = 0  # tokens passed to `stream`

    @property
    def tokens(self) -> list[int]:
        """The tokens generated so far."""
        return self.known[len(self.ids) :]

    @property
    def longest(self) -> int:
        """The maximum number of tokens in pages: all but the last one, which is never read."""
        return len(self.ids) + self.max_new_tokens - 1

    def cancel(self) -> None:
        """End the request with its current tokens. Callable from any thread; its pages are free after the next step."""
        if not (self.is_done or self.is_over):
            self.is_cancelled = True

    def tell(self) -> None:
        """Call `stream` with the tokens that it has not been given, and propagate its exceptions."""
        while self.stream is not None and self._told < len(self.known) - len(self.ids):
            self._told += 1  # before the call: a token whose call raises is not sent again
            self.stream(self.known[len(self.ids) + self._told - 1])

    @property
    def is_over(self) -> bool:
        """Whether the latest token is the last one."""
        generated = len(self.known) - len(self.ids)
        return generated >= self.max_new_tokens or (generated > 0 and self.known[-1] in self.ends)

    def __repr__(self) -> str:
        state = "done" if self.is_done else "waiting" if self.sequence is None else "running"
        return f"<qflash Request of {len(self.ids)} tokens and {len(self.tokens)} new ones, {state}>"


def check_ids(ids: Any, vocabulary: int) -> list[int]:
    """A prompt as a list of ints. An invalid token would fail in the model, among the tokens of other requests."""
    if isinstance(ids, torch.Tensor):
        if ids.ndim != 1:
            raise ValueError(f"ids has shape {list(ids.shape)}; allowed: [length], one prompt")
        if ids.dtype not in (torch.int64, torch.int32):
            raise TypeError(f"ids has dtype {ids.dtype}; allowed: int64, int32")
        ids = ids.tolist()
    if not isinstance(ids, list | tuple):
        raise TypeError(f"ids is {type(ids).__name__}; allowed: a tensor [length], or a list of ints")
    if not ids:
        raise ValueError("ids is empty; allowed: one token or more")
    wrong = next((at for at, token in enumerate(ids) if isinstance(token, bool) or not isinstance(token, int)), None)
    if wrong is not None:
        raise TypeError(f"ids[{wrong}] is {ids[wrong]!r}; allowed: ints")
    wrong = next((at for at, token in enumerate(ids) if not 0 <= token < vocabulary), None)
    if wrong is not None:
        raise ValueError(f"ids[{wrong}] is {ids[wrong]}; allowed: 0 to {vocabulary - 1}, the model's tokens")
    return list(ids)


def check_seed(seed: Any) -> None:
    """Reject an invalid seed."""
    if seed is None:
        return
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise TypeError(f"seed is {seed!r}; allowed: None, or an int")
    if not 0 <= seed < _SEEDS:
        raise ValueError(f"seed is {seed}; allowed: 0 to 2**63 - 1")
