"""What `sm90_quantize` computes from a sample of keys and values, bit for bit."""

from __future__ import annotations

import numpy as np

SAMPLED = 256  # maximum number of keys that determine the means of K and V and the scale of V
SLOTS = 32  # partial sums of those, computed in parallel
LEAST_AGREEMENT = np.float32(0.625)  # of the sample's slots, for a mean of V: |sum of slots| / sum of their magnitudes


def sample_of(x: np.ndarray) -> np.ndarray:
    """Tokens of x `[T, ...]` at equal distances, at most SAMPLED."""
    return x[:: -(-len(x) // SAMPLED)] if len(x) else x


def mean_and_agreement(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(the mean of a sample of tokens `[T, H, D]`, whether its slots agree that there is one), `[H, D]`.

    The mean is float32, over finite tokens; it is 0 if there are none.
    """
    sample = sample_of(x)
    finite = np.isfinite(sample).all(-1)
    sample = np.where(finite[..., None], sample, np.float32(0))
    total, sizes = np.zeros((2, *x.shape[1:]), np.float32)
    for slot in range(SLOTS):
        part = np.zeros(x.shape[1:], np.float32)
        for row in sample[slot::SLOTS]:
            part = part + row
        total, sizes = total + part, sizes + np.abs(part)
    count = finite.sum(0).astype(np.float32)[:, None]
    mean = np.where(count > 0, total / np.maximum(count, np.float32(1)), np.float32(0))
    return np.where(np.isfinite(mean), mean, np.float32(0)), np.abs(total) >= LEAST_AGREEMENT * sizes
