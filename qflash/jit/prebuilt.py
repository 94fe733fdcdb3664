"""Chooses the cache entry for a unit on a machine without a compiler, and so without a version to search for.

An entry's facts record what was compiled, and with which nvcc. Here they only determine a key: the cache still checks
whether the entry may be opened and is what was sealed.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from qflash.jit.cache import Cache
from qflash.jit.compiler import RUNTIME, UNIT, Unit, digest_of
from qflash.jit.entry import FACTS


@dataclass(frozen=True, slots=True)
class Prebuilt:
    """An entry, and (name, key) of the runtime that its library needs, if any."""

    key: str
    version: tuple[int, ...]  # of nvcc
    runtime: tuple[str, str] | None


def find(unit: Unit, cache: Cache) -> Prebuilt | None:
    """The entry that the newest compiler built from `unit`."""
    digest = digest_of(unit)
    found = []
    for path in cache.folder.glob(f"{unit.name}-{unit.code}-*/{FACTS}"):
        try:
            facts = json.loads(path.read_text())
            if facts[UNIT] == digest:
                found.append(_described(path.parent.name, facts))
        except (OSError, ValueError, KeyError, TypeError):
            continue  # from an earlier version, or damaged
    return max(found, key=lambda each: each.version, default=None)


def _described(key: str, facts: dict[str, Any]) -> Prebuilt:
    runtime = facts.get(RUNTIME)
    version = tuple(int(part) for part in facts["nvcc"].split("."))
    return Prebuilt(key, version, (runtime["name"], runtime["key"]) if runtime else None)
