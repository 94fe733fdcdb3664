"""The text to learn: the sources of Python's standard library, as bytes."""

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

MOST_BYTES = 1 << 22


def sources() -> np.ndarray:
    """uint8: the modules of the standard library's first folder, one after the other, by name."""
    files = sorted(Path(os.__file__).parent.glob("*.py"))
    return np.frombuffer(b"\n".join(path.read_bytes() for path in files)[:MOST_BYTES], np.uint8)


def batches(batch: int, length: int, steps: int, seed: int) -> Iterator[np.ndarray]:
    """int32 [batch, length + 1]: inputs are all but the last column, targets all but the first."""
    text, rng = sources(), np.random.default_rng(seed)
    for _ in range(steps):
        starts = rng.integers(0, len(text) - length - 1, batch)
        yield np.stack([text[start : start + length + 1] for start in starts]).astype(np.int32)
