"""The next token from logits, on their device and in fixed shapes, so a CUDA graph can hold it."""

from __future__ import annotations

import math
from numbers import Real
from typing import Any, NamedTuple

import torch

from qflash.integrations.transformers.prompts import check_flag, check_int

Tensor = torch.Tensor

# Temperatures beyond these sample as these do, and float32 can represent logits divided by the lowest.
_LEAST, _MOST = 1e-30, 1e30
_LEAST_TOP_P = 1e-30  # keeps only the best token; not zero in float32, which would keep none


class Sampling(NamedTuple):
    """How the next token is chosen. The names are those of transformers' GenerationConfig."""

    do_sample: bool = False
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None

    def check(self) -> None:
        """Reject values out of range."""
        check_flag("do_sample", self.do_sample)
        if not _is_number(self.temperature):
            raise TypeError(f"temperature is {self.temperature!r}; allowed: a number, more than 0")
        if not 0 < self.temperature < math.inf:
            raise ValueError(f"temperature is {self.temperature}; allowed: more than 0 and finite, or do_sample=False")
        if self.top_k is not None:
            check_int("top_k", self.top_k, "None, or an int, 1 and more")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k is {self.top_k}; allowed: None, or 1 and more")
        if self.top_p is not None and not _is_number(self.top_p):
            raise TypeError(f"top_p is {self.top_p!r}; allowed: None, or a number, more than 0 and up to 1")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}; allowed: None, or more than 0 and up to 1")

    @property
    def divisor(self) -> float:
        """The temperature, clamped to the range of float32."""
        return float(min(max(self.temperature, _LEAST), _MOST))

    @property
    def share(self) -> float | None:
        """top_p, clamped to the range of float32."""
        return None if self.top_p is None else max(float(self.top_p), _LEAST_TOP_P)

    def choose(self, logits: Tensor, generator: torch.Generator | None) -> Tensor:
        """The next tokens, int64 `[B]`, from logits `[B, vocabulary]`."""
        if not self.do_sample:
            return logits.argmax(-1)
        weights = self.filtered(logits.float()).softmax(-1)
        # The argmax of weights over exponential noise samples from the weights, without a search in a cumulative sum.
        noise = torch.empty_like(weights).exponential_(generator=generator)
        return (weights / noise).argmax(-1)

    def filtered(self, logits: Tensor) -> Tensor:
        """Logits at this temperature, with -inf for tokens that top_k and top_p exclude."""
        logits = logits / self.divisor
        if self.top_k is not None:
            least = logits.topk(min(self.top_k, logits.shape[-1])).values[:, -1:]
            logits = logits.masked_fill(logits < least, -torch.inf)
        if self.share is not None:
            ordered, places = logits.sort(descending=True)
            weights = ordered.softmax(-1)
            is_left_out = weights.cumsum(-1) - weights >= self.share  # better tokens reach the sum already
            logits = logits.masked_fill(is_left_out.scatter(-1, places, is_left_out), -torch.inf)
        return logits


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)
