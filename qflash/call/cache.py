"""The cache of plans: prepared calls by everything they depend on. There is one for every front end and operation."""

from __future__ import annotations

from typing import Any

from qflash.call.prepare import Prepared

LIMIT = 4096

_plans: dict[tuple[Any, ...], Any] = {}


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
