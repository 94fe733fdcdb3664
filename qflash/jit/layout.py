"""Where things lie in a cache's root, and which of them are the cache's own.

    <root>/kernels-1/<key>/               an entry; the key is <kernel>-<sm_80, compute_80 or emulated>-<24 hex digits>
                                          or, of the CUDA runtime that kernels share, cudart13-runtime-<24 hex digits>
    <root>/kernels-1/<key>.lock           held by whoever builds or removes the entry
    <root>/kernels-1/building-<key>-<x>/  an entry on its way in or out; a process that dies may leave one

People point QFLASH_CACHE_DIR at folders that hold other things. So entries have a folder of their own, and nothing is
counted or removed there that is not named, and made, as above.
"""

from __future__ import annotations

import re
import stat
from dataclasses import dataclass
from pathlib import Path

FOLDER = "kernels-1"  # the number is the layout's: entries of another layout are neither read nor removed
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
    """What of the cache `path` is; None for anything else, and for links."""
    for kind, pattern in _NAMES.items():
        if (match := pattern.fullmatch(path.name)) and _IS_KIND[kind](path.lstat().st_mode):
            return Own(path, match["key"], kind, match["runtime"] is not None)
    return None


def building_prefix(key: str) -> str:
    """How the names of directories begin in which an entry is built, or on its way out."""
    return f"building-{key}-"


def lock_path(folder: Path, key: str) -> Path:
    return folder / f"{key}.lock"
