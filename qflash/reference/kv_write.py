"""The replay of `kv_write`, bit for bit: new tokens of k and v rotated, quantized and stored in the pages of a cache.

The kernels `cpu_kv_write` and `kv_write` must write exactly these bits (all NaNs count as equal), so nothing here may
be reordered or fused. Every float32 operation below is rounded once.

1. k and v become float32. With a rope, k is rotated: each product is rounded, then their sum. Channels that the rope
   does not rotate keep their bits.
2. Pages of k's dtype: k, rounded to it again (to nearest, ties to even), and v unchanged. Without a rope k is copied.
3. Pages of int8. k minus k_mean (one subtraction); then butterflies at distances 1, 2, 4, 8 in every 16 channels, in
   which (a, b) becomes (a + b, a - b); then times 0.25, which makes the Hadamard matrix orthogonal.
4. For each token and head, of k and of v: amplitude = the largest magnitude. A token that now contains NaN or an
   infinity has scale NaN and values 0. An amplitude below 2^-100 has scale 0 and values 0. Otherwise scale = amplitude
   / 127, inverse = 127 / amplitude, and value = the integer nearest to the rounded product x · inverse, ties to even.
   Its magnitude is at most 127.
"""

from __future__ import annotations

import numpy as np

from qflash.reference.float32 import LEVELS, inverse_of
from qflash.reference.rotary import rotate
from qflash.reference.sequences import ends_of, packed, packed_rope
from qflash.reference.sm90_quantize import BLOCK, hadamard
from qflash.rotary import Rope


def write_pages(
    k_pages: np.ndarray,
    v_pages: np.ndarray,
    page_table: np.ndarray,
    lens: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    *,
    k_scale: np.ndarray | None = None,
    v_scale: np.ndarray | None = None,
    k_mean: np.ndarray | None = None,
    rope: Rope | None = None,
    cu_seqlens: np.ndarray | None = None,
) -> None:
    """Store k and v, `[B, T, Hkv, D]` or with `cu_seqlens` `[total, Hkv, D]`, in pages `[pages, Hkv, page_size, D]`.

    The pages and the scales `[pages, Hkv, page_size]` are modified in place. A token without a slot (below 0, past the
    table, in a page that does not exist) is skipped, as on a GPU; the CPU rejects the call, except for padding, which
    is a row of `[B, T]` tokens whose length is 0.
    """
    if cu_seqlens is None:
        cu_seqlens, rope, k, v = ends_of(k), packed_rope(rope, None, k), packed(k), packed(v)
    pages, _, page_size, _ = k_pages.shape
    for b in range(len(lens)):
        for row in range(int(cu_seqlens[b]), int(cu_seqlens[b + 1])):
            place = int(lens[b]) - int(cu_seqlens[b + 1]) + row
            column, slot = divmod(place, page_size)
            if not 0 <= column < page_table.shape[1] or not 0 <= page_table[b, column] < pages:
                continue
            at = (int(page_table[b, column]), slice(None), slot)
            position = place if rope is None or rope.positions_k is None else int(np.asarray(rope.positions_k)[row])
            if k_scale is None or v_scale is None:
                k_pages[at] = k[row] if rope is None else _rotated(k[row], position, rope).astype(k_pages.dtype)
                v_pages[at] = v[row]
            else:
                k_pages[at], k_scale[at] = quantize_tokens(mixed_keys(_rotated(k[row], position, rope), k_mean))
                v_pages[at], v_scale[at] = quantize_tokens(v[row].astype(np.float32))


def mixed_keys(k: np.ndarray, k_mean: np.ndarray | None) -> np.ndarray:
    """Rotated keys `[..., H, D]` in float32, minus k_mean `[H, D]`, times the orthogonal Hadamard matrix: step 3."""
    with np.errstate(invalid="ignore", over="ignore"):
        return hadamard(k if k_mean is None else k - k_mean) * np.float32(0.25)


def quantize_tokens(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(int8 values `[..., D]`, float32 scale `[...]`) of float32 tokens `[..., D]`: step 4."""
    finite = np.isfinite(x).all(-1)
    x = np.where(finite[..., None], x, np.float32(0))
    amplitude = np.abs(x).max(-1, initial=0)
    usable, inverse = inverse_of(amplitude)
    scale = np.where(usable, amplitude / np.float32(LEVELS), np.float32(0))
    return np.rint(x * inverse[..., None]).astype(np.int8), np.where(finite, scale, np.float32(np.nan))


def dequantize_keys(values: np.ndarray, scale: np.ndarray, k_mean: np.ndarray | None) -> np.ndarray:
    """The rotated keys `[..., H, D]` represented by int8 values and scales `[..., H]`, in float64."""
    x = values.astype(np.float64) * scale[..., None]
    blocks = x.reshape(*x.shape[:-1], -1, BLOCK) @ (hadamard(np.eye(BLOCK, dtype=np.float32)) * 0.25)
    k = blocks.reshape(x.shape)
    return k if k_mean is None else k + k_mean


def _rotated(row: np.ndarray, position: int, rope: Rope | None) -> np.ndarray:
    """A token `[H, D]` in float32 at `position`."""
    x = row.astype(np.float32)
    if rope is None:
        return x
    with np.errstate(invalid="ignore", over="ignore"):
        return rotate(x[None], np.array([position]), rope)[0]
