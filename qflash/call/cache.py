"""The cache of plans: prepared calls by everything they depend on. There is one for every front end and operation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from qflash.call.prepare import Prepared

LIMIT = 4096

_plans: dict[tuple[Any, ...], Any] = {}


def words_key(words: Sequence[Any]) -> tuple[Any, ...]:
    """Words in a key. With types, because to a dict True is 1 is 1.0, and to a plan they are not."""
    inside = (type(edge) for word in words if type(word) is tuple for edge in word)
    return (*words, *map(type, words), *inside)


# What was kept under a key; KeyError where nothing was, TypeError where something in it has no hash.
find = _plans.__getitem__


def keep(key: tuple[Any, ...], prepared: Prepared | Any) -> None:
    """Keep a prepared call. Where there are too many all are forgotten: shapes that vary so much do not repeat."""
    if len(_plans) >= LIMIT:
        _plans.clear()
    try:
        _plans[key] = prepared
    except TypeError:  # something in it has no hash
        return
