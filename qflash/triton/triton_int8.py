"""triton_int8: attention with q k^T in INT8, PV in 16 bits. Separate passes quantize q and k first (quantize.py).

    S = (q_int k_int^T) q_scale k_scale        exact sums in int32, one scale per query, one per 16 keys
    P = 2^(S - m), m an integer                so that the rounding of P to 16 bits does not depend on where tiles begin

Loops and tiles are those of triton_fwd. The steps, the integers bit for bit and the rounding of P are those of fa_int8,
whose replay (qflash/reference/fa_int8.py) holds for both kernels.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from qflash.call.spec import Spec
from qflash.triton import quantize
from qflash.triton.launches import TYPES, Choice, Launches, Pass, size, vectors
from qflash.triton.mask import cut_keys, cut_tile, key_range, sees, tiles_of_rows
from qflash.triton.numbers import LOG2E
from qflash.triton.rows import has_hopper_memory, load_rows, padded, store_rows
from qflash.triton.sequence import fill_unserved_rows, read_sequence
from qflash.triton.softmax import tanh, weigh
from qflash.triton.values import finite_of

# (rows of a tile, keys of a tile, warps, stages) by the number of channels that heads are padded to
HOPPER = {32: (128, 64, 4, 3), 64: (128, 64, 8, 3), 128: (128, 64, 8, 3), 256: (64, 32, 8, 3)}
AMPERE = {32: (128, 64, 4, 3), 64: (128, 64, 8, 3), 128: (128, 32, 8, 3), 256: (64, 32, 8, 2)}
ODD_ROWS = {32: (64, 32, 4, 1), 64: (64, 32, 8, 1), 128: (32, 32, 8, 1), 256: (32, 32, 8, 1)}


@triton.jit
def base2_scores(dots, q_scale, k_scale, offset, scale, softcap, PLAIN: tl.constexpr, SOFTCAP: tl.constexpr):
    """Scores from integer products. q_scale includes the magnitude of `scale` and log2 e; offset is the part that
    smoothing subtracted, which scores need if they are more than a product."""
    s = dots.to(tl.float32) * (q_scale[:, None] * k_scale[None, :])
    if not PLAIN:
        s = tl.where(scale < 0, -s, s) + offset[:, None]
        if SOFTCAP:
            most = softcap * LOG2E
            s = most * tanh(s / most)
    return s


@triton.jit
def qf_triton_int8_kernel(
    q_values, q_scales, q_dots, k_values, k_scales,
    kv_v, kv_v_stride_b, kv_v_stride_t, kv_v_stride_h,
    out, out_stride_b, out_stride_t, out_stride_h,
    lse, has_lse, lse_stride_b, lse_stride_h,
    batch, q_len, k_len, q_heads, kv_heads, total_q, total_k, cu_seqlens_q, cu_seqlens_k, kv_lens,
    window_left, window_right, scale, softcap, sinks,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    PACKED: tl.constexpr, KV_LENS: tl.constexpr, WINDOW: tl.constexpr, PLAIN: tl.constexpr, SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
):  # fmt: skip
    tiles = tl.maximum(tl.cdiv(q_len, BLOCK_M), 1)
    tile = tiles - 1 - tl.program_id(0) % tiles
    head = tl.program_id(0) // tiles % q_heads
    b = tl.program_id(0) // tiles // q_heads
    kv_head = head // (q_heads // kv_heads)
    b64 = b.to(tl.int64)
    out += b64 * out_stride_b + head * out_stride_h
    lse += b64 * lse_stride_b + head * lse_stride_h
    q0, k0, len_q, len_k, good = read_sequence(
        b, batch, q_len, k_len, total_q, total_k, cu_seqlens_q, cu_seqlens_k, kv_lens, PACKED, KV_LENS
    )
    if PACKED or KV_LENS:
        fill_unserved_rows(
            out, out_stride_t, lse, has_lse, q0, len_q, good, b, batch, total_q, cu_seqlens_q, tile, tiles,
            PACKED, HEAD_DIM, BLOCK_M, BLOCK_D,
        )  # fmt: skip
        if (good == 0) | (tile * BLOCK_M >= len_q):
            return

    # Integers are [tokens, heads, BLOCK_D], per-token numbers [heads, tokens].
    first_q = b64 * (0 if PACKED else q_len) + q0
    first_k = b64 * (0 if PACKED else k_len) + k0
    of_head_q = head * (total_q if PACKED else batch.to(tl.int64) * q_len) + first_q
    of_head_k = kv_head * (total_k if PACKED else batch.to(tl.int64) * k_len) + first_k
    k_stride = kv_heads.to(tl.int64) * BLOCK_D
    k_base = k_values + first_k * k_stride + kv_head * BLOCK_D
    k_scale_base = k_scales + of_head_k
    v_base = kv_v + b64 * kv_v_stride_b + kv_head * kv_v_stride_h + k0 * kv_v_stride_t

    row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    row_present = (row < len_q)[:, None]
    q_rows = q_values + ((first_q + row) * q_heads + head)[:, None] * BLOCK_D
    q_tile = load_rows(q_rows, row_present, BLOCK_D, BLOCK_D, False)
    q_scale = tl.load(q_scales + of_head_q + row, mask=row < len_q, other=0.0) * tl.abs(scale) * LOG2E
    q_dot = tl.load(q_dots + of_head_q + row, mask=row < len_q, other=0.0)
    offset = q_dot * scale * LOG2E
    bias = q_dot * scale if PLAIN else q_dot * 0.0
    last = tl.minimum(tile * BLOCK_M + BLOCK_M, len_q) - 1
    begin, whole_begin, whole_end, end = tiles_of_rows(
        tile * BLOCK_M, last, len_q, len_k, window_left, window_right, 0, len_k, BLOCK_N, WINDOW
    )
    row_begin, row_end = key_range(row, len_q, len_k, window_left, window_right, WINDOW)

    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for first in range(whole_begin, whole_end, BLOCK_N):
        key = first + tl.arange(0, BLOCK_N)
        k_tile = load_rows(k_base + key[:, None] * k_stride, None, BLOCK_D, BLOCK_D, True)
        k_scale = tl.load(k_scale_base + key)
        s = base2_scores(tl.dot(q_tile, tl.trans(k_tile)), q_scale, k_scale, offset, scale, softcap, PLAIN, SOFTCAP)
        weight, rescale, m, l = weigh(s, 1.0, m, l, True)
        v_tile = load_rows(v_base + key[:, None] * kv_v_stride_t, None, HEAD_DIM, BLOCK_D, True)
        acc = tl.dot(weight.to(v_tile.dtype), v_tile, acc * rescale[:, None])

    nonfinite = tl.zeros([BLOCK_N], tl.int32)
    for done in tl.range(0, cut_keys(begin, whole_begin, whole_end, end), BLOCK_N, num_stages=1):
        key = cut_tile(done, begin, whole_begin, whole_end) + tl.arange(0, BLOCK_N)
        key_present = (key < len_k)[:, None]
        k_tile = load_rows(k_base + key[:, None] * k_stride, key_present, BLOCK_D, BLOCK_D, False)
        k_scale = tl.load(k_scale_base + key, mask=key < len_k, other=0.0)
        s = base2_scores(tl.dot(q_tile, tl.trans(k_tile)), q_scale, k_scale, offset, scale, softcap, PLAIN, SOFTCAP)
        s = tl.where(sees(key, row_begin, row_end), s, float("-inf"))
        weight, rescale, m, l = weigh(s, 1.0, m, l, True)
        v_tile = load_rows(v_base + key[:, None] * kv_v_stride_t, key_present, HEAD_DIM, BLOCK_D, False)
        v_tile, found = finite_of(v_tile)
        nonfinite = tl.maximum(nonfinite, found)
        acc = tl.dot(weight.to(v_tile.dtype), v_tile, acc * rescale[:, None])

    sink = tl.load(sinks + head) if SINKS else 0.0
    store_rows(
        acc, m, l, bias, row, row_present, row_begin, row_end, sink,
        out + q0 * out_stride_t, out_stride_t, lse + q0, has_lse, v_base, kv_v_stride_t, len_k,
        nonfinite, begin, whole_begin, whole_end, end, HEAD_DIM, BLOCK_D, BLOCK_N, SINKS, "ieee",
    )  # fmt: skip


def attend(spec: Spec, tile: tuple[int, int, int, int]) -> Pass:
    """The pass of attention itself, with such tiles."""
    block_m, block_n, num_warps, num_stages = tile
    constants: dict[str, Any] = {
        "HEAD_DIM": spec.head_dim, "BLOCK_D": padded(spec.head_dim, 32), "BLOCK_M": block_m, "BLOCK_N": block_n,
        "PACKED": spec.packed, "KV_LENS": spec.kv_lens, "WINDOW": spec.window, "PLAIN": spec.plain_scores,
        "SOFTCAP": spec.softcap, "SINKS": spec.sinks,
    }  # fmt: skip
    grid = size("q_len").ceil_div(block_m).at_least(1) * size("q_heads") * size("batch")
    return Pass(qf_triton_int8_kernel, grid, constants, num_warps, num_stages)


def launches(spec: Spec) -> Launches:
    """What a call of `spec` launches."""
    table = HOPPER if has_hopper_memory(spec.arch) else AMPERE
    block_d = padded(spec.head_dim, 32)
    element = TYPES[spec.dtype]
    types = {"q": element, "kv_k": element, "kv_v": element, "out": element, "lse": "fp32", "sinks": "fp32"}
    types |= {"cu_seqlens_q": "i32", "cu_seqlens_k": "i32", "kv_lens": "i32", "rope_cos": "fp32", "rope_sin": "fp32"}
    types |= {"rope_positions_q": "i32", "rope_positions_k": "i32"}
    whole = vectors(spec.dtype, "q", "kv_k", "kv_v", "out")
    make_integers = quantize.passes(spec, block_d)
    choices = (
        Choice((*make_integers, attend(spec, table[block_d])), (), whole),
        Choice((*make_integers, attend(spec, ODD_ROWS[block_d]))),
    )
    return Launches("QfAttnParams", types, choices, quantize.regions(spec, block_d))
