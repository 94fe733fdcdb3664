"""The compile cache: directories on disk named by what went into them.

An entry appears whole or not at all: it is built in a directory of its own and renamed into place under a file lock,
so a killed compiler leaves nothing that looks like an entry, and two processes that want the same one compile once.
"""

from __future__ import annotations

import os
import shutil
import stat
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from filelock import FileLock

_BUILDING = "building-"


def default_root() -> Path:
    """$QFLASH_CACHE_DIR, else $XDG_CACHE_HOME/qflash, else ~/.cache/qflash."""
    if asked := os.environ.get("QFLASH_CACHE_DIR"):
        return Path(asked)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "qflash"


@dataclass(frozen=True)
class Info:
    """What a cache holds, for people."""

    root: Path
    entries: int
    bytes: int


class Cache:
    """Entries under `root`, with a private temporary directory behind it for when `root` cannot be written."""

    def __init__(self, root: Path | None = None):
        self.root = default_root() if root is None else Path(root)

    def find(self, key: str) -> Path | None:
        """The entry's directory, or None."""
        for root in (self.root, _private_root(create=False)):
            if root is not None and (root / key).is_dir():
                return root / key
        return None

    def get(self, key: str, build: Callable[[Path], None]) -> Path:
        """The entry's directory; `build(directory)` fills it when nobody else has."""
        found = self.find(key)
        if found is not None:
            return found
        root = self._writable_root()
        entry = root / key
        with FileLock(root / f"{key}.lock"):
            if entry.is_dir():
                return entry
            for stale in root.glob(f"{_BUILDING}{key}-*"):  # left by a process that died: the lock was free
                shutil.rmtree(stale, ignore_errors=True)
            directory = Path(tempfile.mkdtemp(prefix=f"{_BUILDING}{key}-", dir=root))
            try:
                build(directory)
                directory.rename(entry)
            except BaseException:
                shutil.rmtree(directory, ignore_errors=True)
                raise
        return entry

    def remove(self, key: str) -> None:
        """Forget an entry, if it is there and may be removed."""
        found = self.find(key)
        if found is not None:
            shutil.rmtree(found, ignore_errors=True)

    def info(self) -> Info:
        """Entries and their bytes."""
        entries = [path for path in self._paths() if path.is_dir() and not path.name.startswith(_BUILDING)]
        size = sum(file.stat().st_size for entry in entries for file in entry.rglob("*") if file.is_file())
        return Info(self.root, len(entries), size)

    def clear(self) -> int:
        """Remove every entry; returns how many there were."""
        count = self.info().entries
        for path in self._paths():
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            elif path.suffix == ".lock":
                path.unlink(missing_ok=True)
        return count

    def _paths(self) -> list[Path]:
        return sorted(self.root.iterdir()) if self.root.is_dir() else []

    def _writable_root(self) -> Path:
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.root):
                return self.root
        except OSError as error:
            fallback = _private_root(create=True)
            assert fallback is not None  # with `create` it raises instead
            _warn_once(f"qflash: cannot write the compile cache {self.root} ({error.strerror}); using {fallback}")
            return fallback


def _private_root(create: bool) -> Path | None:
    """A directory under the system's temporary one that only this user can have written: compiled code is run."""
    root = Path(tempfile.gettempdir()) / f"qflash-{os.getuid()}"
    if create:
        root.mkdir(mode=0o700, exist_ok=True)
    try:
        found = root.lstat()
    except OSError:
        return None
    ours = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o022
    if ours:
        return root
    if create:
        raise PermissionError(f"{root} belongs to someone else or may be written by others; set QFLASH_CACHE_DIR")
    return None


@lru_cache(maxsize=16)
def _warn_once(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
