"""The replay of kernel `sm90_quantize`: docs/kernels/sm90_quantize.md step by step in NumPy.

Integers, scales, means and E4M3 codes are those of the kernel bit for bit: every float32 operation is rounded
individually, and sums are computed in the order written.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from qflash.reference.float32 import LEVELS, NO_AMPLITUDE, fma
from qflash.reference.quantize import NONFINITE, uniforms
from qflash.reference.rotary import positions_of, rotate
from qflash.reference.sequences import ends_of, packed, packed_rope, parts
from qflash.reference.sm90_sample import mean_and_agreement
from qflash.reference.sm90_values import VALUE_TILE, packed_padded, packed_start, quantize_v
from qflash.rotary import Rope

BLOCK = 16  # channels of a Hadamard block; rows of integers are padded to full blocks
KEY_GROUP = 64  # keys that share a scale; every query has its own
QUERY_SEED = 0xFFFFFFFFFFFFFFFF  # flips the seed's bits: queries and keys use different random numbers
OF_KEYS = ("k", "k_scale", "k_mean", "k_nonfinite")  # parts of KeysValues, in its order
OF_VALUES = ("v", "v_scale", "v_exponents", "v_nonfinite", "v_mean")


@dataclass(frozen=True, eq=False)
class Queries:
    values: np.ndarray  # int8 [T, H, width]: width is D rounded up to full blocks
    scale: np.ndarray  # float32 [H, T]; NaN if the token is nonfinite
    q_dot_mean: np.ndarray  # float32 [H, T]: rotated token . mean of its head's keys


@dataclass(frozen=True, eq=False)
class KeysValues:
    """One sequence; `quantize_kv` gives those of a batch or of packed sequences."""

    k: np.ndarray  # int8 [T, H, width]
    k_scale: np.ndarray  # float32 [H, groups]
    k_mean: np.ndarray  # float32 [H, D]
    k_nonfinite: np.ndarray  # int32 [H]
    v: np.ndarray | None = None  # uint8 [H, D, padded]: E4M3 codes, keys in KEY_ORDER
    v_scale: np.ndarray | None = None  # float32 [H]
    v_exponents: np.ndarray | None = None  # float32 [H, tiles]
    v_nonfinite: np.ndarray | None = None  # int32 [H]
    v_mean: np.ndarray | None = None  # float32 [H, D]


def quantize_kv(
    k: np.ndarray,
    v: np.ndarray | None,
    *,
    kv_lens: np.ndarray | None = None,
    rope: Rope | None = None,
    seed: int | None = None,
    cu_seqlens_k: np.ndarray | None = None,
    longest: int = 0,
) -> KeysValues:
    """k, v `[B, T, H, D]`; v None omits V. Results have a leading batch dimension. seed: stochastic rounding.

    With `cu_seqlens_k`, k and v are packed, `[total, H, D]`, and so are k and v of the result (v: `[1, H, D, padded]`);
    the others are `[B, ...]`, with room for sequences of `longest` keys.
    """
    padded_shape = k.shape
    padded = cu_seqlens_k is None
    if padded:
        longest, cu_seqlens_k, rope = k.shape[1], ends_of(k), packed_rope(rope, None, k)
        k, v = packed(k), None if v is None else packed(v)
    batch, (total, heads, dim) = len(cu_seqlens_k) - 1, k.shape
    random = _random(total, heads, dim, seed)
    result = _room(batch, total, heads, dim, longest, padded, v is not None)
    for b, part in enumerate(parts((cu_seqlens_k, cu_seqlens_k), total, total, kv_lens, rope)):
        places, length = part.places, part.places.stop - part.places.start
        draws = None if random is None else random[places]
        values = None if v is None else v[part.keys]
        one = quantize_sequence(k[part.keys], values, length, part.rope, draws)
        result.k[places] = one.k
        result.k_scale[b, :, : one.k_scale.shape[1]] = one.k_scale
        result.k_mean[b], result.k_nonfinite[b] = one.k_mean, one.k_nonfinite
        if v is not None:
            at, start = (b, 0) if padded else (0, packed_start(places.start, b))
            result.v[at, :, :, start : start + one.v.shape[-1]] = one.v
            result.v_exponents[b, :, : one.v_exponents.shape[1]] = one.v_exponents
            result.v_scale[b], result.v_nonfinite[b], result.v_mean[b] = one.v_scale, one.v_nonfinite, one.v_mean
    return replace(result, k=result.k.reshape(*padded_shape[:3], _width(dim))) if padded else result


def _room(batch: int, total: int, heads: int, dim: int, longest: int, padded: bool, values: bool) -> KeysValues:
    """Zeros for the results of all sequences."""
    tiles = -(-longest // VALUE_TILE)
    of_keys = (
        np.zeros((total, heads, _width(dim)), np.int8),
        np.zeros((batch, heads, -(-longest // KEY_GROUP)), np.float32),
        np.zeros((batch, heads, dim), np.float32),
        np.zeros((batch, heads), np.int32),
    )
    if not values:
        return KeysValues(*of_keys)
    rows, places = (batch, tiles * VALUE_TILE) if padded else (1, packed_padded(total, batch))
    return KeysValues(
        *of_keys,
        np.zeros((rows, heads, dim, places), np.uint8),
        np.zeros((batch, heads), np.float32),
        np.zeros((batch, heads, tiles), np.float32),
        np.zeros((batch, heads), np.int32),
        np.zeros((batch, heads, dim), np.float32),
    )


def quantize_sequence(k, v, length: int, rope: Rope | None, draws: np.ndarray | None) -> KeysValues:
    """One sequence: k and v contain the keys that exist, `length` counts those that have room."""
    exists, heads = k.shape[:2]
    x = np.asarray(k).astype(np.float32)
    groups = -(-length // KEY_GROUP)
    with np.errstate(invalid="ignore", over="ignore"):
        if rope is not None:
            x = rotate(x, positions_of(rope, 0, exists)[1], rope)
        mean, _ = mean_and_agreement(x)
        y = hadamard(x - mean)
    finite = np.isfinite(y).all(-1)
    y = np.where(finite[..., None], y, np.float32(0))
    padded = np.zeros((groups * KEY_GROUP, heads, y.shape[-1]), np.float32)
    padded[:exists] = y
    by_group = np.abs(padded).reshape(groups, KEY_GROUP, *padded.shape[1:])
    scale, inverse = _scales(by_group.max((1, 3), initial=0))  # [groups, H]
    values = np.zeros((length, heads, y.shape[-1]), np.int8)
    by_key = np.repeat(inverse, KEY_GROUP, axis=0)[:exists, :, None]
    values[:exists] = _integers(y, by_key, None if draws is None else draws[:exists])
    values[:exists][~finite] = NONFINITE
    keys = (values, scale.T.copy(), mean, (~finite).sum(0).astype(np.int32))
    return KeysValues(*keys) if v is None else KeysValues(*keys, *quantize_v(v, length))


def quantize_q(
    q: np.ndarray,
    k_mean: np.ndarray,
    positions: np.ndarray | None = None,
    rope: Rope | None = None,
    *,
    seed: int | None = None,
    first: int = 0,
) -> Queries:
    """q `[T, H, D]` of one sequence, at `positions` if there is a rope; k_mean `[Hkv, D]`.

    With a seed: `first` is the row of q's first token among all rows of the tensor.
    """
    length, heads, dim = q.shape
    x = np.asarray(q).astype(np.float32)
    with np.errstate(invalid="ignore", over="ignore"):
        if rope is not None:
            x = rotate(x, positions, rope)
        dots = _q_dot_mean(x, np.repeat(k_mean, heads // len(k_mean), axis=0))
        y = hadamard(x)
    finite = np.isfinite(y).all(-1)
    y = np.where(finite[..., None], y, np.float32(0))
    scale, inverse = _scales(np.abs(y).max(-1, initial=0))  # [T, H]
    draws = _random(first + length, heads, dim, None if seed is None else seed ^ QUERY_SEED)
    values = _integers(y, inverse[..., None], None if draws is None else draws[first:])
    values[~finite] = NONFINITE
    return Queries(values, np.where(finite, scale, np.float32(np.nan)).T.copy(), dots.T.copy())


def hadamard(x: np.ndarray) -> np.ndarray:
    """x `[..., D]` padded to full blocks, each times four times the orthogonal Hadamard matrix: only butterflies."""
    dim = x.shape[-1]
    padded = np.zeros((*x.shape[:-1], _width(dim)), np.float32)
    padded[..., :dim] = x
    for stride in (1, 2, 4, 8):
        pairs = padded.reshape(*padded.shape[:-1], padded.shape[-1] // (2 * stride), 2, stride)
        a, b = pairs[..., 0, :].copy(), pairs[..., 1, :].copy()
        pairs[..., 0, :], pairs[..., 1, :] = a + b, a - b
    return padded


def _width(dim: int) -> int:
    return -(-dim // BLOCK) * BLOCK


def _random(rows: int, heads: int, dim: int, seed: int | None) -> np.ndarray | None:
    """A number in [0, 1) for every element of an int8 tensor `[rows, heads, width]`."""
    shape = (rows, heads, _width(dim))
    return None if seed is None else uniforms(int(np.prod(shape)), seed).reshape(shape)


def _scales(amplitude: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(scale, factor for butterflies) of butterflies up to `amplitude`, which are four times the scaled values."""
    quarter = amplitude * np.float32(0.25)
    usable = quarter >= NO_AMPLITUDE
    levels = np.float32(LEVELS)
    inverse = np.where(usable, levels / np.where(usable, amplitude, levels), np.float32(0))
    return np.where(usable, quarter / levels, np.float32(0)), inverse


def _integers(y: np.ndarray, inverse: np.ndarray, draws: np.ndarray | None) -> np.ndarray:
    """int8. The nearest integer is that of the exact product; the kernel's fma rounds once."""
    if draws is None:
        return np.rint(y.astype(np.float64) * inverse).astype(np.int8)
    product = y * inverse
    below = np.floor(product)
    above = draws < product - below
    return np.clip(below + above.astype(np.float32), -LEVELS, LEVELS).astype(np.int8)


def _q_dot_mean(x: np.ndarray, mean: np.ndarray) -> np.ndarray:
    """x `[T, H, D]` . mean `[H, D]`: serial fmas within a block, then blocks are added in pairs, in fours, ..."""
    dim = x.shape[-1]
    blocks = 1 << (max(1, _width(dim) // BLOCK) - 1).bit_length()
    parts = np.zeros((*x.shape[:-1], blocks), np.float32)
    for d in range(dim):
        parts[..., d // BLOCK] = fma(x[..., d], mean[..., d], parts[..., d // BLOCK])
    while parts.shape[-1] > 1:
        parts = parts[..., 0::2] + parts[..., 1::2]
    return parts[..., 0]
