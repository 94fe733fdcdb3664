"""The arguments of a parallel call that are not arrays ("words"), and what each strategy can and cannot express.

Errors name the strategy that can.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from qflash.call.spec import SERVE_QUANTIZED
from qflash.call.words import check_flag, check_word
from qflash.ops.problem import Options, check_options
from qflash.parallel.pieces import CAUSAL, OPEN
from qflash.parallel.placement import check_placement

STRATEGIES = ("ring", "all_gather", "ulysses")


@dataclass(frozen=True, slots=True)
class Words:
    """The checked arguments of a call that are not arrays. They are the same on every rank."""

    strategy: str
    placement: str
    edges: tuple[int, int]  # number of keys visible on each side of a query's own; -1 is unlimited
    softcap: float
    scale: float
    precision: str | None
    return_lse: bool

    @property
    def open(self) -> bool:
        """Whether there is no mask."""
        return self.edges == OPEN

    @property
    def ends_at_the_diagonal(self) -> bool:
        """Whether no query sees a key after its own: causal, with or without a window to the left."""
        return self.edges[1] == 0


def check_words(
    strategy: Any,
    placement: Any,
    causal: Any,
    window: Any,
    softcap: Any,
    scale: Any,
    precision: Any,
    return_lse: Any,
    head_dim: int,
) -> Words:
    """Check a call's arguments. `head_dim`: of q, for the default of scale."""
    options = check_options(Options(causal, window, softcap, scale, precision), max(head_dim, 1))
    return Words(
        strategy=check_word("strategy", strategy, STRATEGIES),
        placement=check_placement(placement, causal),
        edges=(options["window_left"], options["window_right"]),
        softcap=options["softcap"],
        scale=options["scale"],
        precision=precision,
        return_lse=check_flag("return_lse", return_lse),
    )


def check_offsets(cu_seqlens: Any) -> None:
    """Reject offsets that are not a 1-D int32 array, by this call's argument name: q and k have the same offsets."""
    if len(cu_seqlens.shape) != 1 or cu_seqlens.shape[0] < 1:
        raise ValueError(f"cu_seqlens has shape {tuple(cu_seqlens.shape)}; allowed: [sequences + 1]")
    dtype = str(cu_seqlens.dtype).removeprefix("torch.")
    if dtype != "int32":
        raise TypeError(f"cu_seqlens has dtype {dtype}; allowed: int32")


def check_length_values(kv_lens: Sequence[int], length: int) -> None:
    """Reject lengths outside 0 to `length`, with the values that the user gave."""
    for index, given in enumerate(kv_lens):
        if not 0 <= given <= length:
            raise ValueError(f"kv_lens[{index}] is {given}; allowed: 0 to {length}, the tokens of all ranks")


def check_offset_values(cu_seqlens: Sequence[int], length: int, longest: int) -> None:
    """The same for offsets."""
    if cu_seqlens[0] != 0 or cu_seqlens[-1] != length:
        raise ValueError(
            f"cu_seqlens begins with {cu_seqlens[0]} and ends with {cu_seqlens[-1]}; allowed: from 0 to {length}, the "
            "tokens of all ranks"
        )
    for index, (start, end) in enumerate(pairwise(cu_seqlens)):
        if not 0 <= end - start <= longest:
            raise ValueError(
                f"cu_seqlens[{index + 1}] is {end} after {start}; allowed: {start} to {start + longest} (max_seqlen)"
            )


def check_gradients(words: Words, otherwise: str) -> None:
    """Reject the gradient of a quantized precision, as `qflash.attention` does. otherwise: a suggested alternative."""
    if words.precision is not None:
        raise NotImplementedError(
            f"precision {words.precision!r} has no backward pass; allowed: precision=None{SERVE_QUANTIZED}; or "
            f"{otherwise}"
        )


def check_strategy(words: Words, ranks: int, q_heads: int, kv_heads: int, kv_lens: bool, packed: bool) -> None:
    """Reject what the strategy cannot express exactly."""
    if words.strategy == "ulysses":
        _check_heads(ranks, q_heads, kv_heads)
        return
    others = "strategy='all_gather' or 'ulysses'" if words.ends_at_the_diagonal else "strategy='ulysses'"
    if packed and kv_lens:
        raise ValueError(
            f"kv_lens and cu_seqlens are given; allowed with strategy={words.strategy!r}: one of them; "
            "strategy='ulysses' takes both"
        )
    if words.strategy == "all_gather":
        if (kv_lens or packed) and not (words.open or words.ends_at_the_diagonal):
            raise ValueError(
                f"window is {words.edges} and {'kv_lens' if kv_lens else 'cu_seqlens'} is given; allowed with "
                "strategy='all_gather': no mask, or one that ends at the diagonal (causal=True, window=(left, 0)), "
                f"because sequences end in different places; {others} takes it"
            )
        return
    if kv_lens and not words.open:
        raise ValueError(
            f"kv_lens is given and {_mask(words)}; allowed with strategy='ring': kv_lens without a mask, because each "
            f"sequence has a diagonal of its own; {others} takes it"
        )
    if packed and words.edges not in (OPEN, CAUSAL):
        raise ValueError(
            f"cu_seqlens is given and {_mask(words)}; allowed with strategy='ring': no mask or causal=True, because "
            f"each sequence has its own place in a chunk; {others} takes it"
        )


def _mask(words: Words) -> str:
    return "causal is True" if words.edges == CAUSAL else f"window is {words.edges}"


def _check_heads(ranks: int, q_heads: int, kv_heads: int) -> None:
    """Every rank gets equally many heads of q, and complete heads of k: several, or one shared with other ranks."""
    for name, heads, fits in (
        ("q", q_heads, q_heads % ranks == 0),
        ("k", kv_heads, kv_heads % ranks == 0 or ranks % kv_heads == 0),
    ):
        if not fits:
            more = f"a multiple or, for k, a divisor of the {ranks} ranks" if name == "k" else f"a multiple of {ranks}"
            raise ValueError(
                f"{name} has {heads} heads; allowed with strategy='ulysses' on {ranks} ranks: {more}; "
                "strategy='ring' or 'all_gather' takes any number"
            )
