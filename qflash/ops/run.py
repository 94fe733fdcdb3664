"""The way from a public call to the front end of its arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from qflash.call.op import Op
from qflash.frontends.choose import frontend_of


def run_in_place(op: Op, arrays: Sequence[Any], words: Sequence[Any]) -> Sequence[Any]:
    """The arrays that `op` writes, those that are there, in the order of `Op.writes`, once they are written: the same
    ones or, in JAX, others."""
    written: Sequence[Any] = frontend_of(type(arrays[0]), op.arrays[0]).run_in_place(op, arrays, words)
    return written


def run(op: Op, arrays: Sequence[Any], words: Sequence[Any]) -> Sequence[Any]:
    """The results of `op`, in the order of its plan. The class of the first array decides the framework."""
    results: Sequence[Any] = frontend_of(type(arrays[0]), op.arrays[0]).run(op, arrays, words)
    return results
