"""The training text: the sources of Python's standard library, as bytes."""

import os
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np

MOST_BYTES = 1 << 22
# Tests are not installed everywhere, third-party packages are not the standard library, and tables are not prose.
LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "dist-packages", "encodings", "pydoc_data"}
ONE_IN = 20  # of this many files, one is held out


def sources() -> np.ndarray:
    """uint8: the modules of the standard library's top folder, concatenated, by name."""
    files = sorted(Path(os.__file__).parent.glob("*.py"))
    return np.frombuffer(b"\n".join(path.read_bytes() for path in files)[:MOST_BYTES], np.uint8)


def is_held_out(name: str) -> bool:
    """Whether a file is only for validation. Its name decides, so that every release of Python has the same split."""
    return zlib.crc32(name.encode()) % ONE_IN == 0


def all_sources(held_out: bool) -> np.ndarray:
    """uint8: every module of the standard library that is held out, or every one that is not, by name."""
    root = Path(os.__file__).parent
    files = {path.relative_to(root).as_posix(): path for path in root.rglob("*.py")}
    chosen = [name for name in sorted(files) if not LEFT_OUT & set(Path(name).parts) and is_held_out(name) == held_out]
    return np.frombuffer(b"\n".join(files[name].read_bytes() for name in chosen), np.uint8)


def batches(batch: int, length: int, steps: int, seed: int, text: np.ndarray | None = None) -> Iterator[np.ndarray]:
    """int32 [batch, length + 1]: inputs are all but the last column, targets all but the first."""
    text, rng = sources() if text is None else text, np.random.default_rng(seed)
    for _ in range(steps):
        starts = rng.integers(0, len(text) - length - 1, batch)
        yield np.stack([text[start : start + length + 1] for start in starts]).astype(np.int32)


def windows(text: np.ndarray, length: int, count: int) -> np.ndarray:
    """int32 [count, length + 1]: windows at equal distances, as far from each other as the text allows."""
    if len(text) < length + 1:
        raise ValueError(f"length is {length}; allowed: less than the text has bytes, {len(text)}")
    starts = np.linspace(0, len(text) - length - 1, count).astype(int)
    return np.stack([text[start : start + length + 1] for start in starts]).astype(np.int32)
