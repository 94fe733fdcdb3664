"""The compile cache: directories on disk, named by a digest of everything that went into them.

An entry appears complete or not at all: it is built in a directory of its own, sealed, and renamed into place under a
file lock. So a killed compiler leaves nothing that looks like an entry, and if two processes need the same one, it is
compiled once. An entry's files are never written again: a damaged entry is renamed and replaced, and a process that has
its library open keeps the old one.
"""

from __future__ import annotations

import os
import shutil
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from qflash.errors import CacheError
from qflash.jit import contents, entry, layout, trust
from qflash.jit.lock import locked

Build = Callable[[Path], Mapping[str, Any] | None]  # fills a directory; its result is added to facts.json


def default_root() -> Path:
    """$QFLASH_CACHE_DIR, else $XDG_CACHE_HOME/qflash, else ~/.cache/qflash."""
    if asked := os.environ.get("QFLASH_CACHE_DIR"):
        return Path(asked)
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base) / "qflash"
    try:
        return Path.home() / ".cache" / "qflash"
    except RuntimeError:
        raise CacheError("this user has no home directory to keep compiled kernels in; set QFLASH_CACHE_DIR") from None


@dataclass(frozen=True, slots=True)
class Entry:
    """A sound entry, and the descriptor of its parent directory, which only this user or root can change."""

    path: Path
    folder: int

    @property
    def held(self) -> str:
        """The entry's path through the descriptor: renaming a directory above cannot change what it refers to.

        The key is part of it, because dlopen identifies a library by its path if it has seen that path, and descriptor
        numbers are reused.
        """
        return f"/proc/self/fd/{self.folder}/{self.path.name}"


class Cache:
    """Entries under `root`, with a private temporary directory as fallback if `root` cannot be written."""

    def __init__(self, root: Path | None = None):
        self.root = default_root() if root is None else Path(root)

    @property
    def folder(self) -> Path:
        """The directory of the entries."""
        return self.root / layout.FOLDER

    @contextmanager
    def opened(self, key: str, build: Build) -> Iterator[Entry]:
        """The entry, freshly checked; `build(directory)` fills it if it does not exist or is damaged."""
        with ExitStack() as stack:
            found, _ = self._find(key, stack)
            yield found if found is not None else self._built(key, build, stack)

    def get(self, key: str, build: Build) -> Path:
        """The directory of the entry that `opened` returns.

        A key of another form than in layout.py works too, but `info` and `clear` ignore its entry.
        """
        with self.opened(key, build) as found:
            return found.path

    def remove(self, key: str) -> None:
        """Remove an entry, if it exists and may be removed."""
        for root in self._roots():
            folder = root / layout.FOLDER
            if (folder / key).is_dir():
                with suppress(OSError), locked(folder, key):
                    _discard(folder / key)

    def info(self) -> contents.Info:
        """Entries and their bytes."""
        return contents.info(self.root)

    def clear(self) -> int:
        """Remove every entry and nothing else; returns how many were removed."""
        return contents.clear(self.root)

    def require_writable(self) -> None:
        """Raise CacheError unless entries can be built under `root`, rather than only in the fallback directory."""
        try:
            _prepare(self.root)
        except OSError as error:
            raise CacheError(
                f"cannot write the compile cache {self.root} ({error.strerror}); "
                "set QFLASH_CACHE_DIR to a folder that this user may write"
            ) from None

    def _roots(self) -> list[Path]:
        behind = _private_root(create=False)
        return [self.root] if behind is None else [self.root, behind]

    def _find(self, key: str, stack: ExitStack) -> tuple[Entry | None, list[str]]:
        """(the first sound entry, kept open by `stack`; descriptions of damaged ones before it)."""
        damage: list[str] = []
        for root in self._roots():
            try:
                return _open_sound(root, key, stack), damage
            except (FileNotFoundError, PermissionError):
                continue  # it has none, or none that this user may read
            except entry.DamagedError as error:
                damage.append(f"{root / layout.FOLDER / key} is damaged ({error})")
        return None, damage

    def _built(self, key: str, build: Build, stack: ExitStack) -> Entry:
        folder = self._writable_folder()
        with locked(folder, key):
            found, damage = self._find(key, stack)
            if found is not None:
                return found  # another process built it while this one waited
            for text in damage:
                print(f"qflash: {text}; compiling it again", file=sys.stderr, flush=True)
            for stale in folder.glob(f"{layout.building_prefix(key)}*"):  # its process died: the lock was free
                shutil.rmtree(stale, ignore_errors=True)
            directory = Path(tempfile.mkdtemp(prefix=layout.building_prefix(key), dir=folder))
            try:
                entry.seal(directory, build(directory) or {})
                _discard(folder / key)
                directory.rename(folder / key)
            except BaseException:
                shutil.rmtree(directory, ignore_errors=True)
                raise
            found, damage = self._find(key, stack)
        if found is None:
            raise CacheError(f"{folder / key} cannot be read back: {'; '.join(damage) or 'it is gone'}")
        return found

    def _writable_folder(self) -> Path:
        try:
            return _prepare(self.root)
        except OSError as error:
            fallback = _private_root(create=True)
            assert fallback is not None  # with `create` it raises instead
            _warn_once(f"qflash: cannot write the compile cache {self.root} ({error.strerror}); using {fallback}")
            return _prepare(fallback)


def _open_sound(root: Path, key: str, stack: ExitStack) -> Entry:
    """The entry `key` of `root`, checked; `stack` keeps its parent directory open."""
    with ExitStack() as attempt:
        around = attempt.enter_context(trust.directory(root))
        folder = attempt.enter_context(trust.directory(root / layout.FOLDER, around))
        entry.check(root / layout.FOLDER / key, folder)
        stack.enter_context(attempt.pop_all())
    return Entry(root / layout.FOLDER / key, folder)


def _prepare(root: Path) -> Path:
    """The folder of entries under `root`, created if necessary. Raises OSError if it cannot be written."""
    folder = root / layout.FOLDER
    with suppress(FileExistsError, NotADirectoryError):  # something else is there: `directory` raises
        trust.make_directory(folder)
    with trust.directory(root) as around, trust.directory(folder, around), tempfile.TemporaryFile(dir=folder):
        return folder


def _discard(path: Path) -> None:
    """Remove an entry atomically, then its files: no process sees part of it. The caller holds its lock."""
    if path.is_dir():
        aside = tempfile.mkdtemp(prefix=layout.building_prefix(path.name), dir=path.parent)
        path.rename(aside)
        shutil.rmtree(aside, ignore_errors=True)


def _private_root(create: bool) -> Path | None:
    """A directory under the system's temporary one that only this user can have written.

    Anyone can create one of that name first. It is then not read, and raises an error if it is needed.
    """
    root = Path(tempfile.gettempdir()) / f"qflash-{os.geteuid()}"
    if create:
        with suppress(FileExistsError):
            root.mkdir(mode=0o700)
    try:
        found = root.lstat()
    except OSError:
        return None
    if stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o022:
        return root
    if create:
        raise CacheError(f"{root} belongs to someone else or may be written by others; set QFLASH_CACHE_DIR")
    return None


@lru_cache(maxsize=16)
def _warn_once(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
