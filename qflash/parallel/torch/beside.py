"""The calls of a ring on two streams in turn, and what is done with their results on a third.

A call of attention seldom ends on all multiprocessors at once: 4096 tiles on 132 of them are 31 rounds and 4 tiles. On
one stream everybody waits for these, and then for the merge, which moves bytes while the tensor cores have nothing to
do. Here the next call, which depends on neither, begins where the one before has ended, and merges run between the two.
The order of merges is that of the calls, so that results have the same bits on one stream and on three.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

Tensor = torch.Tensor
Results = list[tuple[Tensor, Tensor]]


class InTurn:
    """Calls, each on the stream that the one before the last was on. It is the caller's stream where there is nothing
    to gain from others: without a GPU, for one call, in a graph of torch.compile and in a captured one."""

    def __init__(self, like: Tensor, calls: int) -> None:
        one = calls < 2 or not like.is_cuda or torch.compiler.is_compiling()
        self._sides = () if one or torch.cuda.is_current_stream_capturing() else _sides(like.device)
        self._main = torch.cuda.current_stream(like.device) if self._sides else None
        self._begun = 0

    @property
    def overlap(self) -> bool:
        """Whether the caller's stream may wait for something else while a call runs."""
        return self._main is not None

    def begin(self, call: Callable[[], Results], *operands: Tensor) -> Begun:
        """The call, under way. Nothing that it reads may be given back before its results are taken: `operands`, what
        the caller would not keep anyway."""
        if not self._sides:
            return Begun(call(), operands, None)
        side = self._sides[self._begun % len(self._sides)]
        self._begun += 1
        side.wait_stream(self._main)
        with torch.cuda.stream(side):
            return Begun(call(), operands, side.record_event())

    def take(self, begun: Begun) -> Results:
        """Results, for the caller's stream."""
        if self._main is not None and begun.done is not None:
            self._main.wait_event(begun.done)
        return begun.results

    def give_back(self, begun: Begun) -> None:
        """Everything that is done with the results is on the caller's stream. Their memory belongs to the stream of the
        call, and the next to get it waits until then."""
        begun.results.clear()
        if self._main is not None:
            read = self._main.record_event()
            for side in self._sides:
                side.wait_event(read)

    def keep(self, results: Results) -> None:
        """These results stay longer than give_back() says."""
        if self._main is not None:
            for x in (x for result in results for x in result):
                x.record_stream(self._main)


class Begun:
    """A call that is under way, with what it reads."""

    def __init__(self, results: Results, operands: tuple[Tensor, ...], done: Any) -> None:
        self.results, self.operands, self.done = results, operands, done


@cache
def _sides(device: torch.device) -> tuple[Any, ...]:
    """Two streams of a device, the same for all calls: memory that one of them has had is given to it again."""
    return torch.cuda.Stream(device), torch.cuda.Stream(device)
