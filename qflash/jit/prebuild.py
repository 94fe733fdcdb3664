"""Fills the cache ahead of time, with several compilers in parallel."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from itertools import count
from pathlib import Path

from qflash.jit.cache import Cache
from qflash.jit.compiler import Unit, compile_unit, is_compiled


def prebuild(
    units: Sequence[Unit],
    cache: Cache | None = None,
    workers: int | None = None,
    progress: Callable[[Unit, int, int], None] | None = None,
) -> list[Path]:
    """Compile every unit; returns their cache entries in order.

    `progress(unit, done, total)` is called from this thread as units finish. The first failure is raised after the
    compilers that are already running have ended.
    """
    cache = cache or Cache()
    entries: dict[Unit, Path] = {}
    workers = workers or os.cpu_count() or 1
    missing = sum(not is_compiled(unit, cache) for unit in set(units))
    jobs = max(1, workers // max(1, missing))  # of each compiler: a few units share the machine
    begun = count(1)

    def which() -> str:
        return f"{min(next(begun), missing)} of {missing}, " if missing > 1 else ""

    with ThreadPoolExecutor(max_workers=workers) as pool:
        futures = {pool.submit(compile_unit, unit, cache, jobs, which): unit for unit in dict.fromkeys(units)}
        try:
            for done, future in enumerate(as_completed(futures), start=1):
                unit = futures[future]
                entries[unit] = future.result()
                if progress is not None:
                    progress(unit, done, len(futures))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return [entries[unit] for unit in units]
