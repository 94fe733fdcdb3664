"""One entry on disk: files, and facts.json, which records the size and sha256 of each file.

A truncated library kills the process that opens it (SIGBUS), or opens and misbehaves. So an entry is sealed before it
is renamed into place, and checked before anything in it is opened. The check reads the library once, at about a
millisecond per megabyte.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qflash.jit import trust

FACTS = "facts.json"


class DamagedError(Exception):
    """An entry is not what was sealed; the message says how it differs."""


def seal(directory: Path, facts: Mapping[str, Any]) -> None:
    """Write facts.json to `directory`, with the sizes and digests of the files in it, and fsync everything."""
    paths = sorted(path for path in directory.iterdir() if path.is_file() and not path.is_symlink())
    files = {}
    for path in paths:
        path.chmod(path.stat().st_mode & 0o755)  # compilers leave write permissions of their output to the umask
        with path.open("rb") as opened:
            files[path.name] = {
                "bytes": path.stat().st_size,
                "sha256": hashlib.file_digest(opened, "sha256").hexdigest(),
            }
    sealed = directory / FACTS
    sealed.write_text(json.dumps({**facts, "files": files}))
    sealed.chmod(0o644)
    # A rename may reach the disk before the file contents: after a power failure the entry would consist of zeros.
    for path in (*paths, sealed, directory):
        _bring_to_disk(path)


def _bring_to_disk(path: Path) -> None:
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def check(path: Path, within: int) -> None:
    """Raise unless the entry at `path`, in the open directory `within`, may be trusted and is as it was sealed.

    FileNotFoundError: there is none. PermissionError: it may not be read. CacheError: it must not be trusted.
    DamagedError: it must be rebuilt.
    """
    with trust.directory(path, within) as opened:
        for name, sealed in _sealed_files(path, opened).items():
            found = _measure(path / name, opened)
            if found["bytes"] != sealed.get("bytes"):
                raise DamagedError(f"{name} has {found['bytes']} bytes, not {sealed.get('bytes')}")
            if found["sha256"] != sealed.get("sha256"):
                raise DamagedError(f"{name} has other contents than it had when it was made")


def _sealed_files(path: Path, within: int) -> dict[str, dict[str, Any]]:
    """What facts.json records for every file."""
    try:
        with trust.file(path / FACTS, within) as opened, open(opened, "rb", closefd=False) as stream:
            files = json.load(stream)["files"]
    except FileNotFoundError:
        raise DamagedError(f"{FACTS} is missing") from None
    except (ValueError, KeyError, TypeError):
        raise DamagedError(f"{FACTS} is not what qflash writes") from None
    if not isinstance(files, dict) or not files or not all(isinstance(facts, dict) for facts in files.values()):
        raise DamagedError(f"{FACTS} is not what qflash writes")
    return files


def _measure(path: Path, within: int) -> dict[str, Any]:
    try:
        with trust.file(path, within) as opened, open(opened, "rb", closefd=False) as stream:
            digest = hashlib.file_digest(stream, "sha256")
            return {"bytes": os.fstat(opened).st_size, "sha256": digest.hexdigest()}
    except FileNotFoundError:
        raise DamagedError(f"{path.name} is missing") from None
