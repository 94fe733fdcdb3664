"""What a cache contains, and how it is cleared."""

from __future__ import annotations

import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from filelock import Timeout

from qflash.errors import CacheError
from qflash.jit import layout, trust
from qflash.jit.lock import locked


@dataclass(frozen=True)
class Info:
    """What a cache contains, for display. `strays` do not belong to it: it neither reads nor removes them."""

    root: Path
    folder: Path  # of the entries, in `root`
    entries: int
    bytes: int  # of entries, and of leftovers of processes that died
    strays: tuple[Path, ...]


def info(root: Path) -> Info:
    """Entries and their bytes, and other files in `root`. Raises CacheError if the cache is not trusted."""
    own, strays = _sort_out(root)
    size = sum(_size(each.path) for each in own)
    return Info(root, root / layout.FOLDER, sum(each.kind == "entry" for each in own), size, tuple(strays))


def clear(root: Path) -> int:
    """Remove every entry except those being built, with locks and leftovers; returns the number of removed entries.

    Runtimes are removed last, and only if no kernel remains: each kernel needs its own, if only for linking.
    """
    folder, (own, _) = root / layout.FOLDER, _sort_out(root)
    removed, stay = 0, False
    for runtime, key in sorted({(each.runtime, each.key) for each in own}):
        if runtime and stay:
            break
        try:
            with locked(folder, key, timeout=0):
                for each in (each for each in own if each.key == key and each.kind != "lock"):
                    shutil.rmtree(each.path, ignore_errors=True)
                    removed += each.kind == "entry" and not each.path.exists()
                layout.lock_path(folder, key).unlink(missing_ok=True)
        except (Timeout, CacheError, OSError):  # it is being built, or this user may not remove it
            stay = True
    return removed


def _size(path: Path) -> int:
    """Bytes of a file, or of the files in a directory; 0 if another process has just removed it."""
    with suppress(FileNotFoundError):
        return sum(map(_size, path.iterdir())) if path.is_dir() and not path.is_symlink() else path.lstat().st_size
    return 0


def _sort_out(root: Path) -> tuple[list[layout.Own], list[Path]]:
    """(the cache's own, everything else) in `root` and its folder of entries."""
    folder = root / layout.FOLDER
    own, strays = [], []
    try:
        with trust.directory(root) as opened:
            strays += [path for path in sorted(root.iterdir()) if path != folder]
            with trust.directory(folder, opened):
                for path in sorted(folder.iterdir()):
                    with suppress(FileNotFoundError):  # another process may have removed it since
                        found = layout.recognise(path)
                        own.append(found) if found else strays.append(path)
    except FileNotFoundError:
        pass  # nothing was ever compiled into it
    except PermissionError as error:
        raise CacheError(f"{error.filename} may not be read by this user") from None
    return own, strays
