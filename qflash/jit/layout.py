"""The layout of a cache's root, and which of its files are the cache's own.

    <root>/kernels-1/<key>/               an entry; the key is <kernel>-<sm_80, compute_80 or emulated>-<24 hex digits>
                                          or, of the CUDA runtime that kernels share, cudart13-runtime-<24 hex digits>
    <root>/kernels-1/<key>.lock           held by the process that builds or removes the entry
    <root>/kernels-1/building-<key>-<x>/  an entry being built or removed; a process that dies may leave one

People set QFLASH_CACHE_DIR to folders that contain other things. So entries have a folder of their own, and nothing in
it is counted or removed unless it has a name and a type listed above.
"""

from __future__ import annotations

import re
import stat
from dataclasses import dataclass
from pathlib import Path

FOLDER = "kernels-1"  # the layout's number: entries of another layout are neither read nor removed
_KEY = r"(?P<key>[A-Za-z0-9_]+-(?:(?:sm|compute)_[0-9]+[a-z]?|emulated|(?P<runtime>runtime))-[0-9a-f]{24})"
_NAMES = {
    "entry": re.compile(_KEY),
    "lock": re.compile(rf"{_KEY}\.lock"),
    "leftover": re.compile(rf"building-{_KEY}-[A-Za-z0-9_]+"),
}
_IS_KIND = {"entry": stat.S_ISDIR, "lock": stat.S_ISREG, "leftover": stat.S_ISDIR}


@dataclass(frozen=True, slots=True)
class Own:
    """One of the cache's own files or directories."""

    path: Path
    key: str
    kind: str  # "entry", "lock" or "leftover"
    runtime: bool = False  # of a runtime, which the other entries need


def recognise(path: Path) -> Own | None:
    """The cache's own file at `path`; None for anything else, and for links."""
    for kind, pattern in _NAMES.items():
        if (match := pattern.fullmatch(path.name)) and _IS_KIND[kind](path.lstat().st_mode):
            return Own(path, match["key"], kind, match["runtime"] is not None)
    return None


def building_prefix(key: str) -> str:
    """The prefix of the names of directories in which an entry is being built or removed."""
    return f"building-{key}-"


def lock_path(folder: Path, key: str) -> Path:
    return folder / f"{key}.lock"
