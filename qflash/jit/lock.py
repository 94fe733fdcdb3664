"""The lock of one entry: its holder may build, replace or remove the entry."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock

from qflash.errors import CacheError
from qflash.jit.layout import lock_path


@contextmanager
def locked(folder: Path, key: str, timeout: float = -1) -> Iterator[None]:
    """Hold the lock of `key`. Raises filelock.Timeout after `timeout` seconds; without a timeout, waits."""
    path = lock_path(folder, key)
    lock = FileLock(path, timeout=timeout)
    try:
        lock.acquire()
    except IsADirectoryError:
        raise CacheError(f"{path} is a directory; allowed in its place: a lock file. Remove it") from None
    except OSError as error:
        if not path.is_symlink():
            raise
        raise CacheError(f"{path} is a symbolic link ({error.strerror}); allowed in its place: a lock file") from None
    try:
        yield
    finally:
        lock.release()
