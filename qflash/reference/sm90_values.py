"""The values that `sm90_quantize` writes for precision "int8_fp8", bit for bit: E4M3 codes, exponents and means."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from qflash.reference.float32 import fma
from qflash.reference.sm90_sample import mean_and_agreement, sample_of

BLOCK = 16  # keys whose codes are in KEY_ORDER
VALUE_TILE = 128  # keys whose values share an exponent
E4M3 = ml_dtypes.float8_e4m3fn
E4M3_NAN = 0x7F
MOST_MEAN = np.float32(2.0**119)  # of V: subtracting less than this keeps finite 16-bit numbers finite
# Chains: pairs of keys in a tile that compensate each other's rounding errors, in order; two words of KEY_ORDER,
# 64 keys apart
CHAINS = [np.array([[word // 4 * 16 + word % 4 * 2 + pair + key for key in (0, 1)] for word in range(16)])
          for pair in (0, 8, 64, 72)]  # fmt: skip
# Positions 4 t + (0, 1, 2, 3) of sixteen hold keys 2 t + (0, 1, 8, 9), the order of MMA accumulators in a warp
KEY_ORDER = np.array([2 * t + key for t in range(4) for key in (0, 1, 8, 9)])


def quantize_v(v: np.ndarray, length: int) -> tuple[np.ndarray, ...]:
    """(E4M3 codes `[H, D, padded]`, scale `[H]`, exponents `[H, tiles]`, nonfinite `[H]`, mean `[H, D]`).

    Of one sequence: v contains the values that exist; `length` counts those that have room.
    """
    exists, heads, dim = v.shape
    v = np.asarray(v).astype(np.float32)
    with np.errstate(invalid="ignore", over="ignore"):
        mean = value_mean(v)
        v = v - mean
    tiles = -(-length // VALUE_TILE)
    scale_exponent = value_exponent(v)
    finite = np.isfinite(v)
    padded = np.zeros((tiles * VALUE_TILE, heads, dim), np.float64)
    padded[:exists] = np.where(finite, v, np.float32(0))
    by_tile = padded.reshape(tiles, VALUE_TILE, heads, dim)
    scaled = np.ldexp(np.abs(by_tile).max((1, 3), initial=0), -scale_exponent)  # [tiles, H]; exact in float64
    mantissa, power = np.frexp(scaled / 448)  # at most 2^exponents: mantissa 2^power, mantissa in [1/2, 1)
    exponents = np.maximum(0, power - (mantissa == 0.5))
    scaled = np.ldexp(by_tile, -(scale_exponent + exponents)[:, None, :, None]).astype(np.float32)
    codes = np.zeros(scaled.shape, np.uint8)
    for tile in range(tiles):
        codes[tile] = _codes(scaled[tile])
    codes = codes.reshape(padded.shape)
    codes[:exists][~finite] = E4M3_NAN
    codes = codes.reshape(len(codes) // BLOCK, BLOCK, heads, dim)[:, KEY_ORDER].reshape(padded.shape)
    nonfinite = (~finite).sum((0, 2)).astype(np.int32)
    scale = np.ldexp(np.float32(1), scale_exponent).astype(np.float32)
    return np.ascontiguousarray(codes.transpose(1, 2, 0)), scale, exponents.T.astype(np.float32), nonfinite, mean


def _codes(x: np.ndarray) -> np.ndarray:
    """E4M3 codes of a tile `[128, H, D]`: numbers are moved against the summed errors of those before in their chain.

    Each is moved by a quarter of that sum, and by at most a quarter of its own last place.
    """
    codes = np.zeros(x.shape, np.uint8)
    error = np.zeros((len(CHAINS[0]), *x.shape[1:]), np.float32)
    for pairs in CHAINS:
        most, sign = np.float32(8) * np.abs(error), np.copysign(np.float32(1 / 32), error)
        for keys in pairs.T:
            power = (x[keys].view(np.uint32) & np.uint32(0x7F800000)).view(np.float32)
            moved = x[keys] if pairs is CHAINS[0] else fma(np.minimum(most, power), sign, x[keys])
            rounded = moved.astype(E4M3)
            codes[keys] = rounded.view(np.uint8)
            error = error + (x[keys] - rounded.astype(np.float32))
    return codes


def values_back(codes: np.ndarray, scale: np.ndarray, exponents: np.ndarray) -> np.ndarray:
    """float32 `[padded, H, D]` of one sequence's E4M3 codes, in the order of keys: values minus their mean."""
    heads, dim, padded = codes.shape
    ordered = codes.reshape(heads, dim, -1, BLOCK)[..., np.argsort(KEY_ORDER)].reshape(codes.shape)
    per_tile = scale[:, None] * np.exp2(exponents)  # [H, tiles]
    x = ordered.view(E4M3).astype(np.float32).transpose(2, 0, 1)
    return x * np.repeat(per_tile, VALUE_TILE, axis=1).T[:padded, :, None].astype(np.float32)


def value_mean(v: np.ndarray) -> np.ndarray:
    """float32 `[H, D]`, subtracted from values and added back to rows of the output; 0 if the sample is ambiguous."""
    mean, told = mean_and_agreement(v)
    return np.where(told & (np.abs(mean) < MOST_MEAN), mean, np.float32(0))


def value_exponent(v: np.ndarray) -> np.ndarray:
    """Integers `[H]`, the exponents of v_scale: the largest finite number of a sample of v is 16 to 32 scales.

    v: minus its mean.
    """
    sample = sample_of(v)
    largest = np.where(np.isfinite(sample), np.abs(sample), np.float32(0)).max((0, 2), initial=0)
    mantissa, exponent = np.frexp(np.where(largest == 0, np.float32(1), largest))  # largest = mantissa 2^exponent
    exponent = exponent - (mantissa == 0.5)
    return np.clip(exponent - 5, -126, 126)


def packed_start(first: int, b: int) -> int:
    """The start of the values of sequence b, whose first key is `first`."""
    return (first // VALUE_TILE + b) * VALUE_TILE


def packed_padded(total: int, batch: int) -> int:
    """The number of places for the values of packed sequences."""
    return (total // VALUE_TILE + batch + 1) * VALUE_TILE
