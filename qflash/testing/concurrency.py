"""One test for every front end: concurrent calls from several threads give the results of a single thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import qflash


def check_threads_share_plans(arrays: Callable[..., Any], equal: Callable[[Any, Any], bool]) -> None:
    """Eight threads, each of which runs all problems repeatedly. `arrays(q_len=, k_len=, seed=)` makes q, k and v."""
    jobs = [(arrays(q_len=n, k_len=n + 3, seed=n), {"causal": bool(n % 2)}) for n in range(1, 9)]
    want = [qflash.attention(*args, **options) for args, options in jobs]
    wrong, done = [], []

    def work(offset: int) -> None:
        for step in range(40):
            i = (step + offset) % len(jobs)
            args, options = jobs[i]
            if not equal(qflash.attention(*args, **options), want[i]):
                wrong.append((offset, step))
        done.append(offset)

    threads = [threading.Thread(target=work, args=(offset,)) for offset in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert len(done) == len(threads)  # an exception in a thread ends only that thread
