"""The requests in the rows of a pass as tensors at fixed addresses, and each row's next token.

Rows differ in temperature, top_k and top_p, so these are tensors. A sample is a function of only the request's seed and
the number of the token: it does not depend on the other rows, and is the same after a request was recomputed. So the
noise is a hash of these, where a generator's would depend on earlier calls.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from qflash.integrations.transformers.requests import Request

Tensor = torch.Tensor

_LOW = 0xFFFFFFFF
_GOLDEN = 0x9E3779B9  # the golden ratio's bits, which have no pattern
_ALL = 1 << 31  # more tokens than any vocabulary has
_NO_TOP_P = 2.0  # sums of weights stay below it, even when rounded


class Rows:
    """`count` rows: those of requests first, then unused ones. ids, positions: int64 `[count, 1]`."""

    is_drawn: bool
    """Whether any row samples its token, which costs more than taking the largest logit."""

    def __init__(self, count: int, device: torch.device) -> None:
        with torch.inference_mode(False):  # its tensors could only be written in that mode
            self._ints = torch.zeros(6, count, 1, dtype=torch.int64, device=device)
            self._floats = torch.ones(2, count, 1, dtype=torch.float32, device=device)
        self.ids, self.positions, self._index, self._seed, self._top_k, self._draws = self._ints
        self._temperature, self._top_p = self._floats

    def show(self, requests: Sequence[Request]) -> None:
        """Load the current state of requests, with the last token of each. Unused rows are at position 0."""
        nobody = (0, 0, 0, 0, _ALL, 0), (1.0, _NO_TOP_P)
        rows = [_of(request) for request in requests] + [nobody] * (self._ints.shape[1] - len(requests))
        ints, floats = zip(*rows, strict=True)
        self.is_drawn = any(request.sampling.do_sample for request in requests)
        _upload(self._ints, torch.tensor(ints, dtype=torch.int64))
        if self.is_drawn:
            _upload(self._floats, torch.tensor(floats, dtype=torch.float32))

    def choose(self, logits: Tensor) -> Tensor:
        """The next tokens, int64 `[count]`, from logits `[count, vocabulary]`."""
        best = logits.argmax(-1)
        if not self.is_drawn:
            return best
        ordered, ids = (logits.float() / self._temperature).sort(descending=True)
        least = ordered.gather(-1, self._top_k.clamp(max=logits.shape[-1]) - 1)
        weights = ordered.masked_fill(ordered < least, -torch.inf).softmax(-1)
        # Better tokens have the sum already. The rest need not sum to 1: only ratios matter.
        weights = weights.masked_fill(weights.cumsum(-1) - weights >= self._top_p, 0)
        # The argmax of weights over exponential noise is a sample from the weights.
        place = (weights / self._noise(ids)).argmax(-1, keepdim=True)
        return torch.where(self._draws[:, 0] != 0, ids.gather(-1, place)[:, 0], best)

    def _noise(self, ids: Tensor) -> Tensor:
        """Exponential noise for each token of the vocabulary, from a row's seed and the number of its token."""
        low, high = self._seed & _LOW, self._seed >> 32
        # Two keys per row, so that no token and seed are the zero of both.
        first = _mixed(self._index ^ _mixed(low ^ _mixed(high)))
        second = _mixed(self._index ^ _mixed(high ^ _mixed(low + _GOLDEN)))
        uniform = _mixed(_mixed(ids ^ first) + second)
        # Small noise wins, so small numbers must have fine resolution; 1 itself has no logarithm.
        return -torch.log1p(-((uniform.float() + 0.5) * 2**-32).clamp(max=1 - 2**-24))


def _of(request: Request) -> tuple[tuple[int, ...], tuple[float, ...]]:
    sampling, known = request.sampling, request.known
    top_k = _ALL if sampling.top_k is None else min(sampling.top_k, _ALL)
    top_p = _NO_TOP_P if sampling.share is None else sampling.share
    ints = (known[-1], len(known) - 1, len(known) - len(request.ids), request.seed, top_k, int(sampling.do_sample))
    return ints, (sampling.divisor, top_p)


def _mixed(x: Tensor) -> Tensor:
    """A permutation of 32-bit numbers, in int64, that looks random: the final mixing steps of MurmurHash3."""
    x = x & _LOW
    x = ((x ^ (x >> 16)) * (0x85EBCA6B - 2**32)) & _LOW  # factors modulo 2³², so that no product overflows
    x = ((x ^ (x >> 13)) * (0xC2B2AE35 - 2**32)) & _LOW
    return x ^ (x >> 16)


def _upload(tensor: Tensor, rows: Tensor) -> None:
    """Copy `rows`, with a row per request, to the tensor, which has a row per property."""
    host = rows.T[:, :, None].contiguous()
    tensor.copy_(host.pin_memory() if tensor.is_cuda else host, non_blocking=True)
