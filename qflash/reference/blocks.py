"""One head and a block of query rows at a time: which keys they see, and the results of rows that see none."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from qflash.reference.sequences import Words

BLOCK_SCORES = 1 << 22  # scores in memory at once: bounds memory to a few times 32 MiB at any length


def visible(rows: np.ndarray, len_q: int, len_k: int, left: int = -1, right: int = -1) -> np.ndarray:
    """Which keys each query row sees: bool `[len(rows), len_k]`. The diagonal is `j = i + len_k - len_q`."""
    diagonal = rows[:, None] + (len_k - len_q)
    key = np.arange(len_k)[None, :]
    seen = np.ones((len(rows), len_k), bool)
    if left >= 0:
        seen &= key >= diagonal - left
    if right >= 0:
        seen &= key <= diagonal + right
    return seen


def blocks(q: np.ndarray, k: np.ndarray, words: Words) -> Iterator[tuple[int, int, slice, np.ndarray]]:
    """(query head, its key head, query rows, keys they see) covering a sequence q `[Tq, Hq, D]`, k `[Tk, Hkv, D]`."""
    len_q, heads = q.shape[:2]
    len_k, kv_heads = k.shape[:2]
    group = heads // kv_heads
    step = max(1, BLOCK_SCORES // max(1, len_k))
    for head in range(heads):
        for start in range(0, len_q, step):
            rows = slice(start, min(start + step, len_q))
            seen = visible(np.arange(rows.start, rows.stop), len_q, len_k, words.left, words.right)
            yield head, head // group, rows, seen


def add_nonfinite(product: np.ndarray, seen: np.ndarray, rest: np.ndarray) -> np.ndarray:
    """product `[n, D]`, plus the nonfinite values in the rows that see them.

    rest `[Tk, D]`: the nonfinite values, and 0 instead of the others.
    """
    for j in np.flatnonzero((rest != 0).any(-1)):
        product = product + np.where(seen[:, j, None], rest[j], 0)
    return product


def where_any(seen: np.ndarray, out: np.ndarray, lse: np.ndarray, sink: float) -> tuple[np.ndarray, np.ndarray]:
    """(out, lse) of rows that see a key; 0 and their sink, or -inf, for the others."""
    sees_any = np.asarray(seen.any(-1))
    return np.where(sees_any[:, None], out, 0), np.where(sees_any, lse, sink)


def with_sink(
    product: np.ndarray, lse: np.ndarray, sink: float, divided_by: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """(out, lse) of rows `[n, D]` after a sink (-inf: none) is added to their denominators.

    divided_by: the logarithm of the sums that the rows were divided by, if that is not lse.
    """
    if sink == -np.inf:
        return product, lse
    divided_by = lse if divided_by is None else divided_by
    with np.errstate(invalid="ignore", over="ignore"):
        return product * np.exp(divided_by - np.logaddexp(divided_by, sink))[:, None], np.logaddexp(lse, sink)
