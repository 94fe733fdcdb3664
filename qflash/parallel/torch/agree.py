"""Before any transfer, the ranks compare their calls: all must be the same, and valid on every rank.

If one rank raised alone, the others would wait for its tensors. So each sends the others a description of its
arguments, or its error, and all of them raise. The host has to wait for the answer: every call is compared if tensors
are on the CPU, but only the first of each kind in a group if they are on a GPU, which would run out of work meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary
from zlib import crc32

import torch

from qflash.parallel.torch.exchange import all_gather
from qflash.parallel.torch.groups import Ranks

_BYTES = 1024  # per rank's text
_BAD = "!"  # prefix of an error's text
_MOST_KNOWN = 1024  # lengths of packed sequences may be new in every step
_agreed: WeakKeyDictionary = WeakKeyDictionary()  # by group: the calls on GPUs that all of its ranks agreed on


def agree(ranks: Ranks, text: str, refusal: Exception | None, device: torch.device, what: str = "calls") -> None:
    """Return if all ranks have the same text and no error; otherwise raise on all of them."""
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
        known.clear()  # on all ranks at once, because all have the same set
    known.add(text)


def device_of(x: Any) -> torch.device:
    """The device of a call on x, which may not be a tensor on a rank that rejects it."""
    return x.device if isinstance(x, torch.Tensor) else torch.device("cpu")


def in_words(x: torch.Tensor) -> str:
    """A tensor's description in the texts that ranks compare."""
    return f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}"


def _exchange(ranks: Ranks, text: str, device: torch.device) -> list[str]:
    """The texts of all ranks."""
    own = text.encode()
    if len(own) > _BYTES:  # the checksum covers what is cut off
        own = own[: _BYTES - 16] + f" ...{crc32(own):08x}".encode()
    wire = torch.frombuffer(bytearray(own.ljust(_BYTES, b"\0")), dtype=torch.uint8)
    if ranks.backend("cpu") is None:  # also for a rank that was given something else
        wire = wire.to(device if device.type == "cuda" else "cuda")
    gathered = all_gather(ranks, wire, "the comparison of the ranks' calls").cpu()
    return [bytes(row.tolist()).rstrip(b"\0").decode(errors="replace") for row in gathered]


def _differences(said: Sequence[str]) -> str:
    """The descriptions of the ranks where they differ: facts that all share are left out."""
    facts = [text.split("; ") for text in said]
    shared = set(facts[0]).intersection(*facts[1:])
    groups: dict[str, list[int]] = {}
    for rank, own in enumerate(facts):
        groups.setdefault(", ".join(fact for fact in own if fact not in shared) or "nothing else", []).append(rank)
    return "; ".join(f"rank{'s' * (len(of) > 1)} {', '.join(map(str, of))} had {text}" for text, of in groups.items())
