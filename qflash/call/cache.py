"""The cache of plans: prepared calls by everything they depend on. There is one for every front end and operation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from qflash.call.prepare import Prepared

LIMIT = 4096

_plans: dict[tuple[Any, ...] | None, Any] = {}


def words_key(words: Sequence[Any]) -> tuple[Any, ...]:
    """Words in a key. With types, because to a dict True is 1 is 1.0, and to a plan they are not."""
    inside = (type(edge) for word in words if type(word) is tuple for edge in word)
    return (*words, *map(type, words), *inside)


def find(key: tuple[Any, ...] | None) -> Any:
    """What was kept under `key`; None where nothing was, or something in it has no hash."""
    try:
        return _plans.get(key)
    except TypeError:
        return None


def keep(key: tuple[Any, ...] | None, prepared: Prepared | Any) -> None:
    """Keep a prepared call. Where there are too many all are forgotten: shapes that vary so much do not repeat."""
    if key is None:
        return
    if len(_plans) >= LIMIT:
        _plans.clear()
    try:
        _plans[key] = prepared
    except TypeError:  # something in it has no hash
        return
