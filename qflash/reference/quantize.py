"""The replay of `quantize` and `dequantize`: docs/kernels/quantize.md step by step in NumPy, bit for bit.

CUDA kernels and the CPU engine must compute exactly these integers, scales, zero points and means, so nothing here may
be reordered or fused: every float32 operation is rounded individually, and sums are computed in the order written.
"""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np

from qflash.reference.float32 import LEVELS, NO_AMPLITUDE, inverse_of
from qflash.reference.rotary import rotate
from qflash.rotary import Rope

MEAN_CHUNK = 64  # keys that are summed in float32 before the sum is added to the float64 total
NONFINITE = -128  # every value of a nonfinite token, when symmetric


@dataclass(frozen=True, eq=False)
class Integers:
    """The result of `quantize`: x is about scale · (values - zero_point) + mean."""

    values: np.ndarray  # int8, shaped like x
    scale: np.ndarray  # float32: per tensor [1], else [B, H, ceil(T / group)]
    zero_point: np.ndarray | None  # int32 [1] when asymmetric
    mean: np.ndarray | None  # float32 [B, H, D] when smoothed
    sums: np.ndarray  # int32 [B, H, T]


def quantize(
    x: np.ndarray,
    *,
    group: int | None,
    symmetric: bool = True,
    smooth: bool = False,
    seed: int | None = None,
    lens: np.ndarray | None = None,
    rope: Rope | None = None,
    positions: np.ndarray | None = None,
) -> Integers:
    """x `[B, T, H, D]` to int8. group: tokens that share a scale, None for one per tensor. seed: stochastic rounding.

    Tokens are at `rope.positions_k` or at their index; `positions` (`[B, T]`) overrides both.
    """
    batch, length, heads, dim = x.shape
    exists = np.arange(length) < (np.full(batch, length) if lens is None else np.asarray(lens))[:, None]  # [B, T]
    y = np.array(x).astype(np.float32)
    y[~exists] = 0
    mean = np.zeros((batch, heads, dim), np.float32)
    with np.errstate(invalid="ignore", over="ignore"):
        if rope is not None:
            where = positions if positions is not None else rope.positions_k
            where = np.arange(length) if where is None else np.asarray(where)
            where = np.broadcast_to(where, (batch, length))
            for b in range(batch):
                y[b, exists[b]] = rotate(y[b, exists[b]], where[b, exists[b]], rope)
        if smooth:
            for b in range(batch):
                mean[b] = key_mean(y[b, exists[b]])
            y = y - mean[:, None]
    finite = np.isfinite(y).all(-1) & exists[..., None]  # [B, T, H]
    nonfinite = exists[..., None] & ~finite
    y = np.where(finite[..., None], y, np.float32(0))
    if symmetric:
        scale, inverse = symmetric_scales(y, finite, nonfinite, group)
        offset, lowest = np.float32(0), np.float32(-LEVELS)
    else:
        scale, inverse, offset = asymmetric_scale(y, nonfinite.any())
        lowest = np.float32(-128)
    integers = rounded(y * tokens_of(inverse, x.shape, group)[..., None], seed)
    values = np.clip(integers + offset, lowest, np.float32(127)).astype(np.int8)
    values[~exists] = 0
    values[nonfinite] = NONFINITE if symmetric else 0
    if not symmetric and nonfinite.any():
        values[...] = 0
    sums = values.sum(-1, dtype=np.int32).transpose(0, 2, 1)
    zero_point = None if symmetric else np.array([offset], np.int32)
    return Integers(values, scale, zero_point, mean if smooth else None, np.ascontiguousarray(sums))


def dequantize(
    values: np.ndarray,
    scale: np.ndarray,
    zero_point: np.ndarray | None,
    mean: np.ndarray | None,
    *,
    group: int | None,
    dtype: str = "float32",
) -> np.ndarray:
    """scale · (values - zero_point) + mean in float32, clamped to its largest number, then rounded to `dtype`.

    If symmetric, NONFINITE gives NaN.
    """
    largest = np.finfo(np.float32).max
    offset = np.float32(0) if zero_point is None else np.float32(zero_point[0])
    with np.errstate(invalid="ignore", over="ignore"):
        x = tokens_of(scale, values.shape, group)[..., None] * (values.astype(np.float32) - offset)
        if mean is not None:
            x = x + mean[:, None]
        x = np.clip(x, -largest, largest)
        if zero_point is None:
            x = np.where(values == NONFINITE, np.float32(np.nan), x)
        return x.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)


def key_mean(k: np.ndarray) -> np.ndarray:
    """Mean of rotated keys `[T, H, D]` over the finite ones, float32 `[H, D]`; 0 if there are none.

    Keys are added serially in float32 within chunks of MEAN_CHUNK, chunks serially in float64.
    """
    finite = np.isfinite(k).all(-1)
    k = np.where(finite[..., None], k, np.float32(0))
    total = np.zeros(k.shape[1:], np.float64)
    for start in range(0, k.shape[0], MEAN_CHUNK):
        chunk = np.zeros(k.shape[1:], np.float32)
        for row in k[start : start + MEAN_CHUNK]:
            chunk += row
        total += chunk
    mean = (total / np.maximum(finite.sum(0), 1)[:, None]).astype(np.float32)
    return np.where(np.isfinite(mean), mean, np.float32(0))


def tokens_of(per_group: np.ndarray, shape: tuple[int, ...], group: int | None) -> np.ndarray:
    """One number for every token and head `[B, T, H]`, from one per tensor or `[B, H, groups]`."""
    if group is None:
        return np.broadcast_to(per_group.reshape(1, 1, 1), shape[:3])
    return np.repeat(per_group, group, axis=2)[:, :, : shape[1]].transpose(0, 2, 1)


def symmetric_scales(y, finite, nonfinite, group):
    """(scale, inverse) per tensor `[1]` or per group `[B, H, groups]`; y is 0 where it is nonfinite."""
    amplitude = np.abs(y).max(-1, initial=0)  # [B, T, H]
    if group is None:
        amplitude, any_finite, any_nonfinite = (np.array([z.any() if z.dtype == bool else z.max(initial=0)])
                                           for z in (amplitude, finite, nonfinite))  # fmt: skip
    else:
        amplitude, any_finite, any_nonfinite = (
            grouped(z, group).max(-1, initial=0) for z in (amplitude, finite, nonfinite)
        )
    usable, inverse = inverse_of(amplitude)
    scale = np.where(usable, amplitude / np.float32(LEVELS), np.float32(0))
    scale = np.where(any_nonfinite & ~any_finite, np.float32(np.nan), scale)
    return np.ascontiguousarray(scale, np.float32), np.ascontiguousarray(inverse, np.float32)


def grouped(z: np.ndarray, group: int) -> np.ndarray:
    """`[B, T, H]` to `[B, H, groups, group]`, padded with zeros."""
    batch, length, heads = z.shape
    groups = -(-length // group)
    padded = np.zeros((batch, groups * group, heads), z.dtype)
    padded[:, :length] = z
    return padded.transpose(0, 2, 1).reshape(batch, heads, groups, group)


def asymmetric_scale(y, nonfinite):
    """(scale `[1]`, inverse `[1]`, zero point as float32) of the whole tensor, whose range always includes 0."""
    zero = np.zeros(1, np.float32)
    if nonfinite:
        return np.full(1, np.nan, np.float32), zero, np.float32(0)
    half = np.float32(0.5)
    above, below = np.float32(y.max(initial=0)), np.float32(-y.min(initial=0))
    half_range = half * above + half * below
    if half_range < NO_AMPLITUDE:
        return zero, zero, np.float32(0)
    levels = np.float32(127.5)
    inverse = levels / half_range
    offset = np.clip(np.rint(np.float32(-128) + below * inverse), np.float32(-128), np.float32(127))
    return np.array([half_range / levels], np.float32), np.array([inverse], np.float32), np.float32(offset)


def rounded(y: np.ndarray, seed: int | None) -> np.ndarray:
    """y rounded to integers, as float32: to nearest, ties to even; with a seed, to one of the two neighbours."""
    if seed is None:
        return np.rint(y)
    below = np.floor(y)
    fraction = y - below
    return np.where(uniforms(y.size, seed).reshape(y.shape) < fraction, below + np.float32(1), below)


def uniforms(count: int, seed: int) -> np.ndarray:
    """float32 in [0, 1), multiples of 2^-24: element i has the upper 24 bits of word i % 4 of block i // 4."""
    words = philox(np.arange(-(-count // 4), dtype=np.uint64), seed).reshape(-1)[:count]
    return (words >> np.uint64(8)).astype(np.float32) * np.float32(2.0**-24)


def philox(counters: np.ndarray, key: int, upper: tuple[int, int] = (0, 0)) -> np.ndarray:
    """Philox-4x32-10: words `[N, 4]` (as uint64) of 64-bit counters `[N]`, whose upper 64 bits are `upper`."""
    low = np.uint64(0xFFFFFFFF)
    shift = np.uint64(32)
    c = [counters & low, counters >> shift, *(np.full_like(counters, word) for word in upper)]
    k = [key & 0xFFFFFFFF, key >> 32 & 0xFFFFFFFF]
    for _ in range(10):
        a, b = np.uint64(0xD2511F53) * c[0], np.uint64(0xCD9E8D57) * c[2]
        c = [b >> shift ^ c[1] ^ np.uint64(k[0]), b & low, a >> shift ^ c[3] ^ np.uint64(k[1]), a & low]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return np.stack(c, -1)
