"""The plan cache: prepared calls by everything they depend on. All front ends and operations share one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from qflash.call.prepare import Prepared

LIMIT = 4096

_plans: dict[tuple[Any, ...] | None, Any] = {}


def words_key(words: Sequence[Any]) -> tuple[Any, ...]:
    """Words in a key. Includes their types, because True, 1 and 1.0 are equal as dict keys, but not to a plan."""
    inside = (type(edge) for word in words if type(word) is tuple for edge in word)
    return (*words, *map(type, words), *inside)


def find(key: tuple[Any, ...] | None) -> Any:
    """The value stored under `key`; None if there is none, or if something in the key is not hashable."""
    try:
        return _plans.get(key)
    except TypeError:
        return None


def keep(key: tuple[Any, ...] | None, prepared: Prepared | Any) -> None:
    """Store a prepared call. A full cache is cleared: shapes that vary so much do not repeat."""
    if key is None:
        return
    if len(_plans) >= LIMIT:
        _plans.clear()
    try:
        _plans[key] = prepared
    except TypeError:  # something in it is not hashable
        return
