"""Which keys rows see. The diagonal of query i is key i + len_k - len_q; a window extends `left` keys before it and
`right` keys after it, -1 is unlimited. Both edges move with the rows."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def key_range(row, len_q, len_k, left, right, WINDOW: tl.constexpr):
    """(begin, end): row sees keys begin .. end - 1. Edges are clamped to 0 .. len_k, which preserves their order."""
    diagonal = row.to(tl.int64) + (len_k - len_q)
    if WINDOW:
        begin = tl.where(left < 0, 0, diagonal - left)
        end = tl.where(right < 0, len_k, diagonal + right + 1)
    else:
        begin = diagonal * 0
        end = begin + len_k
    begin = tl.minimum(tl.maximum(begin, 0), len_k).to(tl.int32)
    end = tl.minimum(tl.maximum(end, 0), len_k).to(tl.int32)
    return begin, end


@triton.jit
def tiles_of_rows(
    first, last, len_q, len_k, left, right, from_key, to_key, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr
):  # fmt: skip
    """(begin, whole_begin, whole_end, end) of the rows first .. last, within the keys from_key .. to_key - 1: some row
    sees keys of the tiles from begin on, all rows see all keys of the tiles whole_begin .. whole_end - 1; the tiles
    after these, up to end, are seen in part. All but end are multiples of BLOCK_N, as from_key is."""
    begin_any, end_all = key_range(first, len_q, len_k, left, right, WINDOW)
    begin_all, end_any = key_range(last, len_q, len_k, left, right, WINDOW)
    end_any = tl.minimum(end_any, to_key)
    begin = tl.maximum(begin_any // BLOCK_N * BLOCK_N, from_key)
    whole_begin = tl.maximum(tl.cdiv(begin_all, BLOCK_N) * BLOCK_N, from_key)
    whole_end = tl.minimum(end_all, to_key) // BLOCK_N * BLOCK_N
    # If no tile is whole, all of them belong to the first part.
    none = whole_end <= whole_begin
    whole_begin = tl.where(none, tl.maximum(tl.cdiv(end_any, BLOCK_N) * BLOCK_N, begin), whole_begin)
    whole_end = tl.where(none, whole_begin, whole_end)
    return begin, whole_begin, whole_end, end_any


@triton.jit
def cut_keys(begin, whole_begin, whole_end, end):
    """The number of keys in tiles that are seen in part: those before the whole ones, and those after."""
    return (whole_begin - begin) + tl.maximum(end - whole_end, 0)


@triton.jit
def cut_tile(done, begin, whole_begin, whole_end):
    """The first key of a tile that is seen in part, after `done` keys of such tiles."""
    first = begin + done
    return first + tl.where(first >= whole_begin, whole_end - whole_begin, 0)


@triton.jit
def sees(key, begin, end):
    """[rows, keys]: whether each row, which sees begin .. end - 1, sees each key."""
    return (key[None, :] >= begin[:, None]) & (key[None, :] < end[:, None])
