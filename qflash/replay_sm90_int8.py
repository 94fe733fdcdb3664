"""The replay of kernels `sm90_quantize` and `sm90_int8`: their pages in docs/kernels step by step in NumPy.

Integers, scales, means and E4M3 codes are the kernels' to the bit: float32 operations are rounded one by one, sums are
taken in the order written. Of attention, scores follow in float32, rounded where the kernel rounds; sums over keys,
softmax's and PV's, are taken in float64 here and in float32 there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import ml_dtypes
import numpy as np

from qflash import reference
from qflash.replay import LEVELS, LN2, LOG2E, NO_AMPLITUDE, by_packed_sequence, by_sequence, fma, positions_of
from qflash.replay_fa_int8 import _capped, _top
from qflash.replay_quantize import WILD, turned, uniforms
from qflash.rope import Rope

SAMPLED = 256  # keys at most that tell the means of K and V and the scale of V
SLOTS = 32  # sums of those, taken side by side
BLOCK = 16  # channels that a Hadamard matrix mixes; rows of integers are padded to whole blocks
KEY_GROUP = 64  # keys that share a scale; every query has its own
VALUE_TILE = 128  # keys whose values share an exponent
E4M3 = ml_dtypes.float8_e4m3fn
E4M3_MOST = np.float32(448)
E4M3_NAN = 0x7F
LEAST_AGREEMENT = np.float32(0.625)  # of the sample's slots, for a mean of V: the sum of sums beside their magnitudes'
MOST_MEAN = np.float32(2.0**119)  # of V: what is finite in 16 bits is finite less it
HEADROOM = 7  # weights for E4M3 reach 2^HEADROOM
LEAST_SLOPE = np.float32(1e-30)  # of scores: masked ones must not meet 0
QUERY_SEED = 0xFFFFFFFFFFFFFFFF  # flips the seed's bits: queries and keys are rounded by different random numbers
# Pairs of keys in a tile that take up each other's rounding errors, in order: two words of KEY_ORDER, 64 keys apart
CHAINS = [np.array([[word // 4 * 16 + word % 4 * 2 + pair + key for key in (0, 1)] for word in range(16)])
          for pair in (0, 8, 64, 72)]  # fmt: skip
# Positions 4 t + (0, 1, 2, 3) of sixteen hold keys 2 t + (0, 1, 8, 9), as a product's sums lie in a warp
KEY_ORDER = np.array([2 * t + key for t in range(4) for key in (0, 1, 8, 9)])


OF_KEYS = ("k", "k_scale", "k_mean", "k_wild")  # parts of KeysValues, in its order
OF_VALUES = ("v", "v_scale", "v_lift", "v_wild", "v_mean")


@dataclass(frozen=True, eq=False)
class Queries:
    values: np.ndarray  # int8 [T, H, width]: width is D rounded up to whole blocks
    scale: np.ndarray  # float32 [H, T]; NaN where the token is not finite
    lift: np.ndarray  # float32 [H, T]: rotated token . mean of its head's keys


@dataclass(frozen=True, eq=False)
class KeysValues:
    """One sequence. Batches and packed sequences are made of these: `quantize_kv`, `quantize_kv_varlen`."""

    k: np.ndarray  # int8 [T, H, width]
    k_scale: np.ndarray  # float32 [H, groups]
    k_mean: np.ndarray  # float32 [H, D]
    k_wild: np.ndarray  # int32 [H]
    v: np.ndarray | None = None  # uint8 [H, D, padded]: E4M3 codes, keys in KEY_ORDER
    v_scale: np.ndarray | None = None  # float32 [H]
    v_lift: np.ndarray | None = None  # float32 [H, tiles]
    v_wild: np.ndarray | None = None  # int32 [H]
    v_mean: np.ndarray | None = None  # float32 [H, D]


def quantize_kv(
    k: np.ndarray,
    v: np.ndarray | None,
    *,
    kv_lens: np.ndarray | None = None,
    rope: Rope | None = None,
    seed: int | None = None,
) -> KeysValues:
    """k, v `[B, T, H, D]`; v None leaves V out. Results have the batch in front. seed: stochastic rounding."""
    batch, length, heads, dim = k.shape
    random = _random(batch * length, heads, dim, seed)
    one = []
    for b in range(batch):
        exists = slice(0, reference._length(kv_lens, b, length))
        draws = None if random is None else random[b * length : (b + 1) * length]
        values = None if v is None else v[b, exists]
        one.append(_keys_values(k[b, exists], values, length, reference._rope_of(rope, b), draws))
    names = [*OF_KEYS, *(OF_VALUES if v is not None else ())]
    if not one:  # shapes and dtypes of a sequence, none of them
        values = None if v is None else np.zeros(v.shape[1:], v.dtype)
        none = _keys_values(np.zeros(k.shape[1:], k.dtype), values, length, None, None)
        return KeysValues(**{name: getattr(none, name)[None][:0] for name in names})
    return KeysValues(**{name: np.stack([getattr(x, name) for x in one]) for name in names})


def quantize_kv_varlen(
    k: np.ndarray,
    v: np.ndarray | None,
    cu_seqlens_k: np.ndarray,
    longest: int,
    *,
    kv_lens: np.ndarray | None = None,
    rope: Rope | None = None,
    seed: int | None = None,
) -> KeysValues:
    """k, v `[total, H, D]`. k and v of the result are packed too (v: `[1, H, D, padded]`), the others `[B, ...]`."""
    batch, (total, heads, dim) = len(cu_seqlens_k) - 1, k.shape
    random = _random(total, heads, dim, seed)
    groups, tiles = -(-longest // KEY_GROUP), -(-longest // VALUE_TILE)
    result = KeysValues(
        np.zeros((total, heads, _width(dim)), np.int8), np.zeros((batch, heads, groups), np.float32),
        np.zeros((batch, heads, dim), np.float32), np.zeros((batch, heads), np.int32),
        *(() if v is None else (
            np.zeros((1, heads, dim, packed_padded(total, batch)), np.uint8), np.zeros((batch, heads), np.float32),
            np.zeros((batch, heads, tiles), np.float32), np.zeros((batch, heads), np.int32),
            np.zeros((batch, heads, dim), np.float32))),
    )  # fmt: skip
    for b, (_, keys) in enumerate(reference._packed(cu_seqlens_k, cu_seqlens_k, total, total)):
        length = keys.stop - keys.start
        exists = slice(keys.start, keys.start + reference._length(kv_lens, b, length))
        draws = None if random is None else random[keys]
        values = None if v is None else v[exists]
        one = _keys_values(k[exists], values, length, reference._rope_of_packed(rope, keys, keys), draws)
        result.k[keys] = one.k
        result.k_scale[b, :, : one.k_scale.shape[1]] = one.k_scale
        result.k_mean[b], result.k_wild[b] = one.k_mean, one.k_wild
        if v is not None:
            start = packed_start(keys.start, b)
            result.v[0, :, :, start : start + one.v.shape[-1]] = one.v
            result.v_lift[b, :, : one.v_lift.shape[1]] = one.v_lift
            result.v_scale[b], result.v_wild[b], result.v_mean[b] = one.v_scale, one.v_wild, one.v_mean
    return result


def packed_start(first: int, b: int) -> int:
    """Where the values of sequence b, whose first key is `first`, begin."""
    return (first // VALUE_TILE + b) * VALUE_TILE


def packed_padded(total: int, batch: int) -> int:
    return (total // VALUE_TILE + batch + 1) * VALUE_TILE


def quantize_q(
    q: np.ndarray,
    k_mean: np.ndarray,
    positions: np.ndarray | None = None,
    rope: Rope | None = None,
    *,
    seed: int | None = None,
    first: int = 0,
) -> Queries:
    """q `[T, H, D]` of one sequence, at `positions` when there is a rope; k_mean `[Hkv, D]`.

    With a seed: `first` is the row of q's first token among all rows of the tensor.
    """
    length, heads, dim = q.shape
    x = np.asarray(q).astype(np.float32)
    with np.errstate(invalid="ignore", over="ignore"):
        if rope is not None:
            x = turned(x, positions, rope)
        lift = _lift(x, np.repeat(k_mean, heads // len(k_mean), axis=0))
        y = hadamard(x)
    finite = np.isfinite(y).all(-1)
    y = np.where(finite[..., None], y, np.float32(0))
    scale, inverse = _scales(np.abs(y).max(-1, initial=0))  # [T, H]
    draws = _random(first + length, heads, dim, None if seed is None else seed ^ QUERY_SEED)
    values = _integers(y, inverse[..., None], None if draws is None else draws[first:])
    values[~finite] = WILD
    return Queries(values, np.where(finite, scale, np.float32(np.nan)).T.copy(), lift.T.copy())


def hadamard(x: np.ndarray) -> np.ndarray:
    """x `[..., D]` padded to whole blocks, each times four times the orthogonal Hadamard matrix: butterflies alone."""
    dim = x.shape[-1]
    padded = np.zeros((*x.shape[:-1], _width(dim)), np.float32)
    padded[..., :dim] = x
    for stride in (1, 2, 4, 8):
        pairs = padded.reshape(*padded.shape[:-1], padded.shape[-1] // (2 * stride), 2, stride)
        a, b = pairs[..., 0, :].copy(), pairs[..., 1, :].copy()
        pairs[..., 0, :], pairs[..., 1, :] = a + b, a - b
    return padded


def sample_mean(x: np.ndarray) -> np.ndarray:
    """float32 `[H, D]`: the mean of a sample of tokens `[T, H, D]`, of those that are finite; 0 without any."""
    return _mean_and_agreement(x)[0]


def value_mean(v: np.ndarray) -> np.ndarray:
    """float32 `[H, D]`: what every value loses, and rows of the output get back; 0 where the sample hardly tells."""
    mean, told = _mean_and_agreement(v)
    return np.where(told & (np.abs(mean) < MOST_MEAN), mean, np.float32(0))


def value_exponent(v: np.ndarray) -> np.ndarray:
    """Integers `[H]`, v_scale is 2 to them: the largest finite number of a sample of v is 16 to 32 scales.

    v: less its mean.
    """
    sample = _sample(v)
    largest = np.where(np.isfinite(sample), np.abs(sample), np.float32(0)).max((0, 2), initial=0)
    mantissa, exponent = np.frexp(np.where(largest == 0, np.float32(1), largest))  # largest = mantissa 2^exponent
    exponent = exponent - (mantissa == 0.5)
    return np.clip(exponent - 5, -126, 126)


def _sample(x: np.ndarray) -> np.ndarray:
    return x[:: -(-len(x) // SAMPLED)] if len(x) else x


def _mean_and_agreement(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(float32 `[H, D]`: `sample_mean`, whether the sums of its slots agree that there is one)."""
    sample = _sample(x)
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


def _width(dim: int) -> int:
    return -(-dim // BLOCK) * BLOCK


def _random(rows: int, heads: int, dim: int, seed: int | None) -> np.ndarray | None:
    """A number in [0, 1) for every element of an int8 tensor `[rows, heads, width]`."""
    shape = (rows, heads, _width(dim))
    return None if seed is None else uniforms(int(np.prod(shape)), seed).reshape(shape)


def _scales(amplitude: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(scale, what butterflies are multiplied by) of butterflies up to `amplitude`: four times what the scale is of."""
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


def _lift(x: np.ndarray, mean: np.ndarray) -> np.ndarray:
    """x `[T, H, D]` . mean `[H, D]`: fmas one after another in a block, blocks in pairs, in fours, ..."""
    dim = x.shape[-1]
    blocks = 1 << (max(1, _width(dim) // BLOCK) - 1).bit_length()
    parts = np.zeros((*x.shape[:-1], blocks), np.float32)
    for d in range(dim):
        parts[..., d // BLOCK] = fma(x[..., d], mean[..., d], parts[..., d // BLOCK])
    while parts.shape[-1] > 1:
        parts = parts[..., 0::2] + parts[..., 1::2]
    return parts[..., 0]


def _keys_values(k, v, length, rope, draws) -> KeysValues:
    """Of one sequence: k and v hold the keys that exist, `length` counts those that have a place."""
    exists, heads = k.shape[:2]
    x = np.asarray(k).astype(np.float32)
    groups = -(-length // KEY_GROUP)
    with np.errstate(invalid="ignore", over="ignore"):
        if rope is not None:
            x = turned(x, positions_of(rope, 0, exists)[1], rope)
        mean = sample_mean(x)
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
    values[:exists][~finite] = WILD
    keys = (values, scale.T.copy(), mean, (~finite).sum(0).astype(np.int32))
    return KeysValues(*keys) if v is None else KeysValues(*keys, *_values(v, length))


def _values(v, length):
    """(E4M3 codes `[H, D, padded]`, scale `[H]`, lift `[H, tiles]`, wild `[H]`, mean `[H, D]`) of one sequence."""
    exists, heads, dim = v.shape
    v = np.asarray(v).astype(np.float32)
    with np.errstate(invalid="ignore", over="ignore"):
        mean = value_mean(v)
        v = v - mean
    tiles = -(-length // VALUE_TILE)
    exponent = value_exponent(v)
    finite = np.isfinite(v)
    padded = np.zeros((tiles * VALUE_TILE, heads, dim), np.float64)
    padded[:exists] = np.where(finite, v, np.float32(0))
    by_tile = padded.reshape(tiles, VALUE_TILE, heads, dim)
    scaled = np.ldexp(np.abs(by_tile).max((1, 3), initial=0), -exponent)  # [tiles, H]; exact in float64
    mantissa, power = np.frexp(scaled / 448)  # at most 2^lift: mantissa 2^power, mantissa in [1/2, 1)
    lift = np.maximum(0, power - (mantissa == 0.5))
    scaled = np.ldexp(by_tile, -(exponent + lift)[:, None, :, None]).astype(np.float32)
    codes = np.zeros(scaled.shape, np.uint8)
    for tile in range(tiles):
        codes[tile] = _codes(scaled[tile])
    codes = codes.reshape(padded.shape)
    codes[:exists][~finite] = E4M3_NAN
    codes = codes.reshape(len(codes) // BLOCK, BLOCK, heads, dim)[:, KEY_ORDER].reshape(padded.shape)
    wild = (~finite).sum((0, 2)).astype(np.int32)
    scale = np.ldexp(np.float32(1), exponent).astype(np.float32)
    return np.ascontiguousarray(codes.transpose(1, 2, 0)), scale, lift.T.astype(np.float32), wild, mean


def _codes(x: np.ndarray) -> np.ndarray:
    """E4M3 codes of a tile `[128, H, D]`: numbers are moved against the errors of those before them in their chain.

    By a quarter of the errors' sum, and by a quarter of their last place at most.
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


def values_back(codes: np.ndarray, scale: np.ndarray, lift: np.ndarray) -> np.ndarray:
    """float32 `[padded, H, D]` of one sequence's E4M3 codes, in the order of keys: values less their mean."""
    heads, dim, padded = codes.shape
    ordered = codes.reshape(heads, dim, -1, BLOCK)[..., np.argsort(KEY_ORDER)].reshape(codes.shape)
    per_tile = scale[:, None] * np.exp2(lift)  # [H, tiles]
    x = ordered.view(E4M3).astype(np.float32).transpose(2, 0, 1)
    return x * np.repeat(per_tile, VALUE_TILE, axis=1).T[:padded, :, None].astype(np.float32)


def attention_sm90_int8(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    *,
    precision: str = "int8",
    causal: bool = False,
    window: Sequence[int] | None = None,
    kv_lens: np.ndarray | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    rope: Rope | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """`qflash.attention(..., kernel="sm90_int8")`: (out `[B, Tq, Hq, D]`, lse `[B, Hq, Tq]`) before the last rounding.

    precision "int8": weights are rounded to the arrays' dtype. "int8_fp8": to E4M3, as 2^(t + lift - top + HEADROOM),
    where lift is that of the key's tile and top the row's largest t + lift over all keys, rounded up to an integer. The
    kernel's top is that of the first tile and moves when weights would pass 448, by whole numbers, which multiplies by
    powers of two: E4M3 is a floating format, so that rounds only its subnormals differently. Those count beside values
    of V a hundred times beyond the sample and more, which lift their tile above all others. Rows are divided by their
    weights as rounded to E4M3; lse is made of the weights before.
    """
    words = reference._Words.of(q.shape[-1], causal, window, softcap, scale)
    return by_sequence(partial(_replay, words=words, precision=precision), q, k, v, kv_lens, rope)


def attention_varlen_sm90_int8(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    cu_seqlens_q: np.ndarray,
    cu_seqlens_k: np.ndarray,
    *,
    precision: str = "int8",
    causal: bool = False,
    window: Sequence[int] | None = None,
    kv_lens: np.ndarray | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    rope: Rope | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """`qflash.attention_varlen(..., kernel="sm90_int8")`: (out `[total_q, Hq, D]`, lse `[Hq, total_q]`)."""
    words = reference._Words.of(q.shape[-1], causal, window, softcap, scale)
    one = partial(_replay, words=words, precision=precision)
    return by_packed_sequence(one, q, k, v, cu_seqlens_q, cu_seqlens_k, kv_lens, rope)


def _replay(q, k, v, *, words, rope, precision):
    """(out [Tq, Hq, D], lse [Hq, Tq]) of one sequence whose keys all exist."""
    len_q, len_k = len(q), len(k)
    in_fp8 = precision == "int8_fp8"
    keys = _keys_values(k, v if in_fp8 else None, len_k, rope, None)
    queries = quantize_q(q, keys.k_mean, None if rope is None else positions_of(rope, len_q, len_k)[0], rope)
    k_scales = np.repeat(keys.k_scale, KEY_GROUP, axis=1)[:, :len_k]  # [Hkv, Tk]
    q_scales = queries.scale * (np.float32(abs(words.scale)) * LOG2E)  # [Hq, Tq]
    v32 = v.astype(np.float32)
    finite = np.isfinite(v32)
    v_rest = np.where(finite, np.float32(0), np.float32(np.nan) if in_fp8 else v32)
    if in_fp8:  # codes alone: weights carry lift, the result scale and mean
        v32 = values_back(keys.v, np.ones_like(keys.v_scale), np.zeros_like(keys.v_lift))[:len_k]
        lifts = np.repeat(keys.v_lift, VALUE_TILE, axis=1)[:, :len_k]
    v_finite = np.where(finite, v32, np.float32(0))
    out = np.zeros(q.shape)
    lse = np.full((q.shape[1], len_q), -np.inf)
    group = q.shape[1] // k.shape[1]
    step = max(1, reference._BLOCK_SCORES // len_k)
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        for head in range(q.shape[1]):
            kv_head = head // group
            spoiled = keys.k[:, kv_head, 0] == WILD
            for start in range(0, len_q, step):
                rows = slice(start, min(start + step, len_q))
                seen = reference.visible(np.arange(rows.start, rows.stop), len_q, len_k, words.left, words.right)
                integers = queries.values[rows, head].astype(np.float32)
                dots = integers @ keys.k[:, kv_head].astype(np.float32).T  # exact: below 2^24
                dots[:, spoiled] = np.nan
                scales = (q_scales[head, rows], k_scales[kv_head], queries.lift[head, rows])
                weights, top, lift = _weights(dots, *scales, seen, words)
                total = weights.sum(-1, dtype=np.float64)
                if in_fp8:
                    product = _average_e4m3(weights, lifts[kv_head], v_finite[:, kv_head], keys.v_scale[kv_head])
                    product += keys.v_mean[kv_head]
                else:
                    product = weights.astype(q.dtype).astype(np.float64) @ v_finite[:, kv_head] / total[:, None]
                for j in np.flatnonzero(~finite[:, kv_head].all(-1)):
                    product += np.where(seen[:, j, None], v_rest[j, kv_head], 0)
                if q.dtype == np.float16:  # averages of what it holds, which rounding may have put past its largest
                    product = np.where(np.isfinite(product), np.clip(product, -65504, 65504), product)
                sees_any = seen.any(-1)
                out[rows, head] = np.where(sees_any[:, None], product, 0)
                lse[head, rows] = np.where(sees_any, LN2 * (top + np.log2(total)) + lift, -np.inf)
    return out, lse


def _weights(dots, q_scales, k_scales, lift, seen, words):
    """Weights 2^(t - top) of base-2 scores t, top, and what the scores are without for lse.

    Slopes have 20 bits, so that the kernel can take whole numbers off a score before it is rounded. top is the row's
    largest score rounded up to an integer; the kernel's may be another, which rounds nothing differently.
    """
    slope = (q_scales[:, None] * k_scales + LEAST_SLOPE).view(np.uint32) & np.uint32(0xFFFFFFF0)
    slope = slope.view(np.float32)
    if words.softcap == 0 and words.scale > 0:
        top = _top(dots * slope, seen)
        t = fma(dots, slope, -top[:, None])
        lift = np.float32(words.scale) * lift
    else:
        t, top = _capped(dots, slope, lift, seen, words)
        lift = np.zeros_like(lift)
    return np.where(seen, np.exp2(t), np.float32(0)), top, lift


def _average_e4m3(weights, lifts, codes, scale):
    """Weights times values, divided by the weights as they were multiplied, which are lifted and 2^HEADROOM at most.

    Rows that see a lifted tile are divided by the weights before they were rounded.
    """
    lifted = np.ldexp(weights.astype(np.float64), lifts.astype(np.int64))
    most = np.fmax.reduce(lifted, axis=-1)
    down = np.ceil(np.log2(np.where(most > 0, most, 1))).astype(np.int64) - HEADROOM
    rounded = np.ldexp(lifted, -down[:, None]).astype(np.float32).astype(E4M3).astype(np.float64)
    totals = np.ldexp(rounded, -lifts.astype(np.int64)).sum(-1)
    beside = (weights * (lifts > 0)).sum(-1) > 0  # a value far beyond the sample, where other weights may round to 0
    totals = np.where(beside, np.ldexp(weights.sum(-1, dtype=np.float64), -down), totals)
    return rounded @ codes * scale / totals[:, None]
