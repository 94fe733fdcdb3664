"""What a mask function of transformers means: causal, a window, packed sequences, or something without an equivalent.

transformers describes a mask by a function of (batch, head, query, key), composed by `and_masks` from a few parts. In
eager mode the parts are read from its closure. Under torch.compile closures cannot be read; there the function itself
is compared, and the arguments passed alongside it determine the rest. A part that is not recognized becomes an
obstacle, a text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from types import CodeType
from typing import Any

import torch
from transformers import masking_utils as masking

Tensor = torch.Tensor


@dataclass(frozen=True)
class Pattern:
    """A mask without padding. causal, window: as in `qflash.attention`, with window None if it is unlimited.

    starts: bool `[B, T]` if sequences are packed, or may be: whether a token begins one. chunk: queries see only keys
    of their own chunk. obstacle: what no argument of qflash expresses.
    """

    causal: bool = False
    window: tuple[int, int] | None = None
    starts: Tensor | None = None
    chunk: int | None = None
    obstacle: str | None = None

    @property
    def is_aligned(self) -> bool:
        """Whether the mask depends on the position of queries among the keys."""
        return self.causal or self.window is not None


def _code(function: Callable[..., Any]) -> CodeType:
    return function.__code__


# All closures made by the same line of transformers share one code object.
_AND = _code(masking.and_masks(masking.causal_mask_function))
_OR = _code(masking.or_masks(masking.causal_mask_function))
_SLIDING = _code(masking.sliding_window_overlay(1))
_SLIDING_BOTH_WAYS = _code(masking.sliding_window_bidirectional_overlay(1))
_PACKED = _code(masking.packed_sequence_mask_function(None))
_CHUNKED = _code(masking.chunked_overlay(1, None))
# From 5.23 on, the other parts of a mask for packed sequences are given positions instead of indices.
_remap = getattr(masking, "remap_positions_for_packed_sequence", None)
_REMAPPED = object() if _remap is None else _code(_remap(None, None))


def pattern_of(mask_function: Callable[..., Any]) -> Pattern:
    """Read a mask function from its closure; not possible while torch.compile traces."""
    pattern = Pattern()
    for part in _parts(mask_function):
        pattern = _with_part(pattern, part)
    return pattern


def _parts(function: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    """The functions whose conjunction is the mask."""
    if getattr(function, "__code__", None) is _AND:
        for part in _variables(function)["mask_functions"]:
            yield from _parts(part)
    else:
        yield function


def _with_part(pattern: Pattern, part: Callable[..., Any]) -> Pattern:
    if part is masking.causal_mask_function:
        return replace(pattern, causal=True)
    if part is masking.bidirectional_mask_function:
        return pattern
    code = getattr(part, "__code__", None)
    if code is _SLIDING:
        return replace(pattern, window=(_variables(part)["sliding_window"] - 1, -1))
    if code is _SLIDING_BOTH_WAYS:
        return replace(pattern, window=(_variables(part)["sliding_window"],) * 2)
    if code is _PACKED:
        segments = _variables(part)["packed_sequence_mask"]
        return replace(pattern, starts=_first_of_row(segments[:, 1:] != segments[:, :-1]))
    if code is _CHUNKED:
        return replace(pattern, chunk=_variables(part)["chunk_size"])
    if code is _REMAPPED:
        return _with_remapped(pattern, _variables(part)["mask_function"])
    kind = "a union of masks" if code is _OR else f"the mask function {getattr(part, '__qualname__', part)}"
    return replace(pattern, obstacle=kind)


def _with_remapped(pattern: Pattern, function: Callable[..., Any]) -> Pattern:
    """A mask function of positions. Within a packed sequence these rise by one, as indices do, so a function of their
    difference is the same for both."""
    for part in _parts(function):
        pattern = _with_part(pattern, part)
    return replace(pattern, obstacle="chunks of packed sequences") if pattern.chunk is not None else pattern


def _variables(function: Callable[..., Any]) -> dict[str, Any]:
    """The variables that a closure captured, by name."""
    cells = function.__closure__ or ()
    return {name: cell.cell_contents for name, cell in zip(function.__code__.co_freevars, cells, strict=True)}


def traced_pattern_of(
    mask_function: Callable[..., Any],
    batch_size: int,
    q_length: int,
    *,
    local_size: int | None,
    both_ways: bool,
    is_plain: bool,
    config: Any,
    device: Any,
) -> Pattern:
    """The same while torch.compile traces, from what transformers passes alongside the function.

    local_size: of a window or a chunk. both_ways: a bidirectional mask was requested. is_plain: nothing was added to
    what these arguments describe, such as packed sequences.
    """
    if mask_function is masking.causal_mask_function:
        return Pattern(causal=True)
    if mask_function is masking.bidirectional_mask_function:
        return Pattern()
    if mask_function.__code__ is not _AND:
        return Pattern(obstacle=f"the mask function {mask_function.__qualname__} in torch.compile")
    if both_ways:
        return Pattern(window=(local_size, local_size)) if local_size else Pattern(obstacle="a mask of several parts")
    if local_size is not None and getattr(config, "attention_chunk_size", None) == local_size:
        pattern = Pattern(causal=True, chunk=local_size)
    else:
        pattern = Pattern(causal=True, window=None if local_size is None else (local_size - 1, -1))
    if is_plain:
        return pattern
    if local_size is not None and local_size < 2:
        return Pattern(obstacle="a window of one token in torch.compile")
    # Possibly packed: a token that does not see the previous one begins a sequence.
    rows = torch.arange(batch_size, device=device)[:, None]
    queries = torch.arange(1, q_length, device=device)[None, :]
    zero = torch.zeros((), dtype=torch.int64, device=device)
    joined = mask_function(rows, zero, queries, queries - 1).expand(batch_size, q_length - 1)
    return replace(pattern, starts=_first_of_row(~joined))


def _first_of_row(others: Tensor) -> Tensor:
    """Where sequences begin, given where they begin after the first token of a row."""
    return torch.nn.functional.pad(others, (1, 0), value=True)
