"""Every rank learns before anything else moves whether the call is the same on all of them, and good on each.

A rank that raised alone would leave the others waiting for its tensors. So each tells the others what it was given, or
what is wrong with it, and all of them raise. The host has to wait for the answer: with tensors on the CPU every call
asks, with tensors on a GPU, which would run out of work in the meantime, only the first of its kind in a group.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary
from zlib import crc32

import torch

from qflash.parallel.torch.exchange import all_gather
from qflash.parallel.torch.groups import Ranks

_BYTES = 1024  # of a rank's text
_BAD = "!"  # how the text of a refusal begins
_MOST_KNOWN = 1024  # lengths of packed sequences may be new in every step
_agreed: WeakKeyDictionary = WeakKeyDictionary()  # by group: the calls on GPUs that all of its ranks agreed on


def agree(ranks: Ranks, text: str, refusal: Exception | None, device: torch.device, what: str = "calls") -> None:
    """Return where all ranks came with the same text and without a refusal; else raise on all of them."""
    known = _agreed.setdefault(ranks.group, set()) if device.type == "cuda" else set()
    if refusal is None and text in known:
        return
    said = _exchange(ranks, text if refusal is None else f"{_BAD}{type(refusal).__name__}: {refusal}", device)
    if refusal is not None:
        raise refusal
    for rank, other in enumerate(said):
        if other.startswith(_BAD):
            raise ValueError(f"rank {rank} of {ranks.size} refused the call: {other[len(_BAD) :]}")
    if len(set(said)) > 1:
        raise ValueError(f"ranks have different {what}: {_differences(said)}; allowed: the same on all ranks")
    if len(known) == _MOST_KNOWN:
        known.clear()  # on all ranks at once, because all know the same
    known.add(text)


def device_of(x: Any) -> torch.device:
    """Which device a call on x is on. It may be no tensor, on a rank that refuses it."""
    return x.device if isinstance(x, torch.Tensor) else torch.device("cpu")


def in_words(x: torch.Tensor) -> str:
    """What ranks tell each other of a tensor."""
    return f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}"


def _exchange(ranks: Ranks, text: str, device: torch.device) -> list[str]:
    """The texts of all ranks."""
    own = text.encode()
    if len(own) > _BYTES:  # what is cut off still counts
        own = own[: _BYTES - 16] + f" ...{crc32(own):08x}".encode()
    wire = torch.frombuffer(bytearray(own.ljust(_BYTES, b"\0")), dtype=torch.uint8)
    if ranks.backend("cpu") is None:  # also for a rank that came with something else
        wire = wire.to(device if device.type == "cuda" else "cuda")
    gathered = all_gather(ranks, wire, "the comparison of the ranks' calls").cpu()
    return [bytes(row.tolist()).rstrip(b"\0").decode(errors="replace") for row in gathered]


def _differences(said: Sequence[str]) -> str:
    """What ranks have, where they differ: each fact that all share is left out."""
    facts = [text.split("; ") for text in said]
    shared = set(facts[0]).intersection(*facts[1:])
    groups: dict[str, list[int]] = {}
    for rank, own in enumerate(facts):
        groups.setdefault(", ".join(fact for fact in own if fact not in shared) or "nothing else", []).append(rank)
    return "; ".join(f"rank{'s' * (len(of) > 1)} {', '.join(map(str, of))} had {text}" for text, of in groups.items())
