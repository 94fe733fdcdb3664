"""Whose files may be opened. Opening a library runs its author's code, so its owner must be this user or root.

Root is trusted because it could equally replace Python or the driver, so an administrator can fill a cache that others
only read. Group and others must not have write permission: an ACL that grants it shows in the same bits.

Files are checked by their open descriptor, and opened by name within a directory that was opened and checked before, so
what is read is what was checked, whatever happens to the path in between.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from qflash.errors import CacheError

_ROOT_USER = 0
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_OWN_FOLDER = "set QFLASH_CACHE_DIR to a folder of your own that nobody else may write"


@contextmanager
def directory(path: Path, within: int | None = None) -> Iterator[int]:
    """The descriptor of a directory that only this user or root can change.

    `within` is the descriptor of its parent directory; a link is then rejected. Without it `path` may be a link, whose
    target directory is checked.
    """
    flags = os.O_RDONLY | os.O_DIRECTORY | (0 if within is None else os.O_NOFOLLOW)
    try:
        opened = os.open(path if within is None else path.name, flags, dir_fd=within)
    except OSError as error:
        if error.errno not in (errno.ENOTDIR, errno.ELOOP):
            raise
        links = "" if within is None else ", and no link to one"
        raise CacheError(f"{path} is no directory; allowed: a directory{links}. Remove it, or {_OWN_FOLDER}") from None
    try:
        _judge(opened, path)
        yield opened
    finally:
        os.close(opened)


@contextmanager
def file(path: Path, within: int) -> Iterator[int]:
    """The descriptor of a plain file, not a link, that only this user or root can change."""
    try:
        opened = os.open(path.name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=within)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise CacheError(f"{path} is a link; allowed: a plain file. Remove it, or {_OWN_FOLDER}") from None
    try:
        if not stat.S_ISREG(os.fstat(opened).st_mode):
            raise CacheError(f"{path} is no plain file; allowed: a plain file. Remove it, or {_OWN_FOLDER}")
        _judge(opened, path)
        yield opened
    finally:
        os.close(opened)


def _judge(opened: int, path: Path) -> None:
    found, user = os.fstat(opened), os.geteuid()
    if found.st_uid not in (user, _ROOT_USER):
        raise CacheError(
            f"{path} belongs to user {found.st_uid}, whose code would be run; "
            f"allowed: user {user}, who runs this process, and root. Remove it, or {_OWN_FOLDER}"
        )
    if found.st_mode & _OTHERS_WRITE:
        raise CacheError(
            f"{path} has mode {stat.S_IMODE(found.st_mode):04o}, so others may put code there that would be run; "
            f"allowed: modes without write permission for group and others. If you trust what is in it, run "
            f"`chmod go-w {path}`; else {_OWN_FOLDER}"
        )


def make_directory(path: Path) -> None:
    """Create `path` and its missing parents, accessible only to this user, whatever the umask is."""
    missing = []
    while not path.exists():
        missing.append(path)
        path = path.parent
    for each in reversed(missing):
        each.mkdir(mode=0o700, exist_ok=True)
