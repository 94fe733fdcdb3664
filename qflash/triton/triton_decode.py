"""triton_decode: few queries against many keys. Keys are split over programs, and a second pass merges the parts.

    attend   one program = up to 16 rows of a KV head (its query heads, and queries) and 256 keys
    merge    one program = one row; parts are added serially, in a fixed order

A part always has the same 256 keys, so a row's bits depend neither on the batch nor on the number of SMs. K and V are
arrays, or pages, whose rows are located through the page table one tile at a time.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import triton
import triton.language as tl

from qflash.call.spec import Spec
from qflash.triton import rope
from qflash.triton.launches import TYPES, Choice, Launches, Pass, Region, size, vectors
from qflash.triton.mask import cut_keys, cut_tile, key_range, sees, tiles_of_rows
from qflash.triton.rows import load_rows, padded
from qflash.triton.softmax import finish, scores_of, weigh
from qflash.triton.values import add_few, add_seen, add_weighted, finite_of

ROWS = 16  # of a tile: the minimum for tl.dot
PART = 256  # keys per program
# (keys of a tile, warps, stages) by the number of channels that heads are padded to
TILES = {16: (64, 4, 3), 32: (64, 4, 3), 64: (64, 4, 3), 128: (64, 4, 3), 256: (32, 4, 3)}
ODD_ROWS = {16: (32, 4, 1), 32: (32, 4, 1), 64: (32, 4, 1), 128: (16, 4, 1), 256: (16, 8, 1)}


@triton.jit
def token_rows(
    x, stride_b, stride_t, stride_h, b, head, key, len_k, page_table, page_table_stride, page_size, pages,
    PAGED: tl.constexpr,
):  # fmt: skip
    """(pointers to rows [n, 1] of keys or values, which of them may be read [n, 1]). For pages: those that exist, and
    whose entry of the table is in range; no other entry is dereferenced."""
    if PAGED:
        column = key // page_size
        exists = key < len_k
        page = tl.load(page_table + b * page_table_stride + column, mask=exists, other=-1)
        present = exists & (page >= 0) & (page < pages)
        at = tl.where(present, page, 0).to(tl.int64) * stride_b + (key - column * page_size) * stride_t
    else:
        present = key < len_k
        at = b * stride_b + key * stride_t
    return x + head * stride_h + at[:, None], present[:, None]


@triton.jit
def qf_triton_decode_kernel(
    q, q_stride_b, q_stride_t, q_stride_h, rotated_q,
    kv_k, kv_k_stride_b, kv_k_stride_t, kv_k_stride_h,
    kv_v, kv_v_stride_b, kv_v_stride_t, kv_v_stride_h,
    kv_page_table, kv_page_table_stride, kv_page_size, kv_pages,
    part_values, part_m, part_l, missing,
    batch, q_len, k_len, q_heads, kv_heads, kv_lens, window_left, window_right, scale, softcap,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, ROW: tl.constexpr, ROWS: tl.constexpr, PART: tl.constexpr,
    BLOCK_N: tl.constexpr, KV_LENS: tl.constexpr, PAGED: tl.constexpr, WINDOW: tl.constexpr, PLAIN: tl.constexpr,
    SOFTCAP: tl.constexpr, ROPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    parts = tl.cdiv(k_len, PART)
    group = q_heads // kv_heads
    tiles = tl.cdiv(q_len * group, ROWS)
    part = tl.program_id(0) % parts
    tile = tl.program_id(0) // parts % tiles
    kv_head = tl.program_id(0) // parts // tiles % kv_heads
    b = (tl.program_id(0) // parts // tiles // kv_heads).to(tl.int64)
    len_k = k_len
    if KV_LENS:
        len_k = tl.load(kv_lens + b)
    if (len_k < 0) | (len_k > k_len) | (part * PART >= len_k):
        return  # the merge reads only parts of existing keys, and also detects a length that is out of range

    row = tile * ROWS + tl.arange(0, ROWS)  # heads of a group are neighbours, then queries
    query = row // group
    head = kv_head * group + row % group
    row_present = (row < q_len * group)[:, None]
    if ROPE:
        q = rotated_q
        q_stride_h = tl.full([], ROW, tl.int64)
        q_stride_t = q_stride_h * q_heads
        q_stride_b = q_stride_t * q_len
    q_rows = q + b * q_stride_b + (query * q_stride_t + head * q_stride_h)[:, None]
    q_tile = load_rows(q_rows, row_present, HEAD_DIM, BLOCK_D, False)
    first = tile * ROWS // group
    last = (tl.minimum(tile * ROWS + ROWS, q_len * group) - 1) // group
    to_key = tl.minimum(part * PART + PART, len_k)
    begin, whole_begin, whole_end, end = tiles_of_rows(
        first, last, q_len, len_k, window_left, window_right, part * PART, to_key, BLOCK_N, WINDOW
    )
    row_begin, row_end = key_range(query, q_len, len_k, window_left, window_right, WINDOW)

    m = tl.full([ROWS], float("-inf"), tl.float32)
    l = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, BLOCK_D], tl.float32)
    factor = scores_of(l, scale, softcap, PLAIN, False)[1]
    lacking = tl.zeros([BLOCK_N], tl.int32)
    for first_key in range(whole_begin, whole_end, BLOCK_N):
        key = first_key + tl.arange(0, BLOCK_N)
        k_rows, present = token_rows(
            kv_k, kv_k_stride_b, kv_k_stride_t, kv_k_stride_h, b, kv_head, key, len_k,
            kv_page_table, kv_page_table_stride, kv_page_size, kv_pages, PAGED,
        )  # fmt: skip
        k_tile = load_rows(k_rows, present, HEAD_DIM, BLOCK_D, not PAGED)
        s = scores_of(tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION), scale, softcap, PLAIN, SOFTCAP)[0]
        weight, rescale, m, l = weigh(s, factor, m, l)
        v_rows, present = token_rows(
            kv_v, kv_v_stride_b, kv_v_stride_t, kv_v_stride_h, b, kv_head, key, len_k,
            kv_page_table, kv_page_table_stride, kv_page_size, kv_pages, PAGED,
        )  # fmt: skip
        v_tile = load_rows(v_rows, present, HEAD_DIM, BLOCK_D, not PAGED)
        acc = add_weighted(acc, rescale, weight, v_tile, PRECISION)
        if PAGED:
            lacking = tl.maximum(lacking, tl.max((present == 0).to(tl.int32), 1))

    nonfinite = tl.zeros([BLOCK_N], tl.int32)
    for done in tl.range(0, cut_keys(begin, whole_begin, whole_end, end), BLOCK_N, num_stages=1):
        key = cut_tile(done, begin, whole_begin, whole_end) + tl.arange(0, BLOCK_N)
        k_rows, present = token_rows(
            kv_k, kv_k_stride_b, kv_k_stride_t, kv_k_stride_h, b, kv_head, key, to_key,
            kv_page_table, kv_page_table_stride, kv_page_size, kv_pages, PAGED,
        )  # fmt: skip
        k_tile = load_rows(k_rows, present, HEAD_DIM, BLOCK_D, False)
        s = scores_of(tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION), scale, softcap, PLAIN, SOFTCAP)[0]
        visible = sees(key, row_begin, row_end) & (key < to_key)[None, :]
        weight, rescale, m, l = weigh(tl.where(visible, s, float("-inf")), factor, m, l)
        v_rows, present = token_rows(
            kv_v, kv_v_stride_b, kv_v_stride_t, kv_v_stride_h, b, kv_head, key, to_key,
            kv_page_table, kv_page_table_stride, kv_page_size, kv_pages, PAGED,
        )  # fmt: skip
        v_tile, found = finite_of(load_rows(v_rows, present, HEAD_DIM, BLOCK_D, False))
        nonfinite = tl.maximum(nonfinite, found)
        acc = add_few(acc * rescale[:, None], weight, v_tile, PRECISION)
        if PAGED:  # an entry is needed if some row of the sequence sees a key of its page
            seen = tl.max((visible & row_present).to(tl.int32), 0)
            lacking = tl.maximum(lacking, seen * tl.max((present == 0).to(tl.int32), 1))

    # Parts are [batch, kv_heads, rows, parts]: the values of a row's parts are contiguous.
    at = ((b * kv_heads + kv_head) * (q_len * group) + row) * parts + part
    channel = tl.arange(0, BLOCK_D)[None, :]
    values = part_values + at[:, None] * BLOCK_D
    tl.store(values + channel, acc, mask=row_present)
    tl.store(part_m + at, m * factor, mask=row < q_len * group)
    tl.store(part_l + at, l, mask=row < q_len * group)
    if PAGED:  # the same for all KV heads of a sequence
        tl.store(missing + (b * tiles + tile) * parts + part, tl.max(lacking, 0))
    if tl.max(nonfinite, 0) != 0:
        tl.debug_barrier()  # other threads than those that wrote values read them again
        for done in tl.range(0, cut_keys(begin, whole_begin, whole_end, end), BLOCK_N, num_stages=1):
            key = cut_tile(done, begin, whole_begin, whole_end) + tl.arange(0, BLOCK_N)
            v_rows, present = token_rows(
                kv_v, kv_v_stride_b, kv_v_stride_t, kv_v_stride_h, b, kv_head, key, to_key,
                kv_page_table, kv_page_table_stride, kv_page_size, kv_pages, PAGED,
            )  # fmt: skip
            visible = sees(key, row_begin, row_end) & (key < to_key)[None, :]
            add_seen(values, v_rows, row_present, present, visible, HEAD_DIM, PRECISION)


@triton.jit
def qf_triton_decode_merge_kernel(
    part_values, part_m, part_l, missing,
    out, out_stride_b, out_stride_t, out_stride_h, lse, has_lse, lse_stride_b, lse_stride_h,
    batch, q_len, k_len, q_heads, kv_heads, kv_lens, window_left, window_right, sinks,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, PART: tl.constexpr, KV_LENS: tl.constexpr,
    PAGED: tl.constexpr, WINDOW: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    parts = tl.cdiv(k_len, PART)
    group = q_heads // kv_heads
    rows = q_len * group
    row = tl.program_id(0) % rows
    kv_head = tl.program_id(0) // rows % kv_heads
    b = (tl.program_id(0) // rows // kv_heads).to(tl.int64)
    query = row // group
    head = kv_head * group + row % group
    len_k = k_len
    if KV_LENS:
        len_k = tl.load(kv_lens + b)
    good = (len_k >= 0) & (len_k <= k_len)
    existing = tl.where(good, tl.cdiv(len_k, PART), 0)
    channel = tl.arange(0, BLOCK_D)
    one = tl.arange(0, 1)
    m = tl.full([1], float("-inf"), tl.float32)
    l = tl.zeros([1], tl.float32)
    acc = tl.zeros([BLOCK_D], tl.float32)
    for part in range(0, existing):
        at = tl.program_id(0).to(tl.int64) * parts + part
        m_part = tl.load(part_m + at + one)
        m_new = tl.maximum(m, m_part)
        reference = tl.where(m_new == float("-inf"), 0.0, m_new)
        rescale = tl.exp2(m - reference)
        share = tl.exp2(m_part - reference)
        l = l * rescale + tl.load(part_l + at + one) * share
        acc = acc * rescale + tl.load(part_values + at * BLOCK_D + channel) * share
        m = m_new
    if PAGED:
        tiles = tl.cdiv(rows, ROWS)
        for tile in range(0, tiles):
            for first in range(0, existing, 128):
                at = first + tl.arange(0, 128)
                lacking = tl.load(missing + (b * tiles + tile) * parts + at, mask=at < existing, other=0)
                good = good & (tl.max(lacking, 0) == 0)
    begin, end = key_range(query + one, q_len, len_k, window_left, window_right, WINDOW)
    sink = tl.load(sinks + head) if SINKS else 0.0
    inverse, row_lse = finish(m, l, 0.0, begin < end, sink, SINKS)
    result = tl.where(begin < end, acc * inverse, 0.0)
    result = tl.where(good, result, float("nan")).to(out.dtype.element_ty)
    out_row = out + b * out_stride_b + query * out_stride_t + head * out_stride_h
    tl.store(out_row + channel, result, mask=channel < HEAD_DIM)
    row_lse = tl.where(good, row_lse, float("nan"))
    tl.store(lse + b * lse_stride_b + head * lse_stride_h + query + one, row_lse, mask=(one == 0) & (has_lse != 0))


def launches(spec: Spec) -> Launches:
    """What a call of `spec` launches."""
    paged = spec.kv == "pages"
    spec = replace(spec, kv_lens=spec.kv_lens or paged)
    block_d = padded(spec.head_dim)
    parts, rows = size("k_len").ceil_div(PART), size("q_heads") * size("q_len") * size("batch")
    tiles = (size("q_heads").ceil_div(size("kv_heads")) * size("q_len")).ceil_div(ROWS)
    both: dict[str, Any] = {"HEAD_DIM": spec.head_dim, "BLOCK_D": block_d, "ROWS": ROWS, "PART": PART}
    both |= {"KV_LENS": spec.kv_lens, "PAGED": paged, "WINDOW": spec.window}
    scores = {"PLAIN": spec.plain_scores, "SOFTCAP": spec.softcap, "PRECISION": "ieee"}
    rotates = {"ROPE": spec.rope is not None, "ROW": rope.row_of(spec)}
    rotate = rope.passes(spec, block_d, keys=False)
    merge = Pass(qf_triton_decode_merge_kernel, rows, {**both, "SINKS": spec.sinks}, 2)

    def choice(tile: tuple[int, int, int], multiples: dict[str, int]) -> Choice:
        block_n, num_warps, num_stages = tile
        constants = {**both, **scores, **rotates, "BLOCK_N": block_n}
        grid = parts * tiles * size("kv_heads") * size("batch")
        attend = Pass(qf_triton_decode_kernel, grid, constants, num_warps, num_stages)
        return Choice((*rotate, attend, merge), (), multiples)

    element = TYPES[spec.dtype]
    types = {"q": element, "kv_k": element, "kv_v": element, "out": element, "lse": "fp32", "sinks": "fp32"}
    types |= {"cu_seqlens_q": "i32", "cu_seqlens_k": "i32", "kv_lens": "i32", "kv_page_table": "i32"}
    types |= {"rope_cos": "fp32", "rope_sin": "fp32", "rope_positions_q": "i32"}
    regions = (
        *rope.regions(spec, keys=False),
        Region("part_values", "fp32", rows * parts * block_d),
        Region("part_m", "fp32", rows * parts),
        Region("part_l", "fp32", rows * parts),
        Region("missing", "i32", tiles * parts * size("batch")),
    )
    whole = vectors(spec.dtype, "q", "kv_k", "kv_v", "out")
    choices = (choice(TILES[block_d], whole), choice(ODD_ROWS[block_d], {}))
    return Launches("QfAttnParams", types, choices, regions)
