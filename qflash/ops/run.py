"""Passes a public call to the front end of its arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from qflash.call.op import Op
from qflash.frontends.choose import frontend_of


def run_in_place(op: Op, arrays: Sequence[Any], words: Sequence[Any]) -> Sequence[Any]:
    """Runs `op` and returns the arrays that it writes, those that are given, in the order of `Op.writes`: the same
    arrays or, in JAX, new ones."""
    written: Sequence[Any] = frontend_of(type(arrays[0]), op.arrays[0]).run_in_place(op, arrays, words)
    return written


def run(op: Op, arrays: Sequence[Any], words: Sequence[Any]) -> Sequence[Any]:
    """The results of `op`, in the order of its plan. The class of the first array determines the framework."""
    results: Sequence[Any] = frontend_of(type(arrays[0]), op.arrays[0]).run(op, arrays, words)
    return results
