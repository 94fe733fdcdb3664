"""Processes that are ranks of a torch.distributed group on the CPU, started once and then given functions to call.

Every wait has a timeout: a rank that does not answer in time fails the call, and all ranks are killed with the process
that started them.
"""

from __future__ import annotations

import multiprocessing
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

TIMEOUT = 60.0  # seconds for a collective, and for a call


@dataclass(frozen=True)
class Answer:
    """The outcome of a call on one rank: a value, or an exception as its class name and text."""

    value: Any = None
    error: str = ""
    text: str = ""
    details: str = ""  # the traceback


class Processes:
    """`count` ranks of the default group, with gloo. They rendezvous in `store`, a file that does not exist yet."""

    def __init__(self, count: int, store: Path) -> None:
        # Ranks are forks of one process that has imported everything and started no thread: PyTorch is slow to import.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["qflash.testing.torch_ranks"])
        pairs = [context.Pipe() for _ in range(count)]
        self._pipes = [here for here, _ in pairs]
        self._processes = [
            context.Process(target=_serve, args=(rank, count, str(store), there), daemon=True)
            for rank, (_, there) in enumerate(pairs)
        ]
        for process in self._processes:
            process.start()
        for _, there in pairs:
            there.close()  # so that the end of a process is noticed

    def call(self, function: Callable[..., Any], *arguments: Any, seconds: float = TIMEOUT) -> list[Answer]:
        """Call function(rank, *arguments), defined in a module, on every rank. Returns an Answer for each live rank."""
        for pipe in self._pipes:
            pipe.send((function, arguments))
        deadline = time.monotonic() + seconds
        return [self._answer(rank, deadline) for rank in range(len(self._pipes))]

    def values(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """The values of a call that must not fail on any rank."""
        answers = self.call(function, *arguments)
        for rank, answer in enumerate(answers):
            assert not answer.error, f"rank {rank}: {answer.error}: {answer.text}\n{answer.details}"
        return [answer.value for answer in answers]

    def _answer(self, rank: int, deadline: float) -> Answer:
        try:
            if self._pipes[rank].poll(max(deadline - time.monotonic(), 0.0)):
                answer: Answer = self._pipes[rank].recv()
                return answer
        except (EOFError, ConnectionResetError):
            return Answer(error="Gone", text=f"rank {rank} has ended")
        return Answer(error="Silent", text=f"rank {rank} has not answered in time")

    def close(self) -> None:
        """End all ranks."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()


def _serve(rank: int, count: int, store: str, pipe: Any) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=count, timeout=timedelta(seconds=TIMEOUT)
    )
    while True:
        function, arguments = pipe.recv()
        try:
            answer = Answer(function(rank, *arguments))
        except Exception as error:
            answer = Answer(None, type(error).__name__, str(error), traceback.format_exc())
        pipe.send(answer)
