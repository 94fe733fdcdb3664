"""The replay of kernel `sm90_int8`, both precisions: docs/kernels/sm90_int8.md step by step in NumPy.

Integers, scales, means and E4M3 codes are those of `sm90_quantize`, bit for bit. Scores are computed in float32 and
rounded where the kernel rounds; sums over keys, of softmax and PV, are in float64 here and in float32 in the kernel.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from qflash.reference.blocks import add_nonfinite, blocks, where_any, with_sink
from qflash.reference.fa_int8 import capped, dots_of, top_of
from qflash.reference.float32 import LN2, LOG2E, fma
from qflash.reference.rotary import positions_of
from qflash.reference.sequences import by_sequence
from qflash.reference.sm90_quantize import KEY_GROUP, quantize_q, quantize_sequence
from qflash.reference.sm90_values import E4M3, VALUE_TILE, values_back

HEADROOM = 7  # weights for E4M3 reach 2^HEADROOM
LEAST_SLOPE = np.float32(1e-30)  # of scores: a masked one must not be multiplied by 0


def attention_sm90_int8(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, *, precision: str = "int8", **words: Any
) -> tuple[np.ndarray, np.ndarray]:
    """`qflash.attention(..., kernel="sm90_int8")`: (out, lse) before the last rounding.

    The other keyword arguments and the shapes are those of `qflash.reference.attention`.

    precision "int8": weights are rounded to the arrays' dtype. "int8_fp8": to E4M3, as
    2^(t + exponent - top + HEADROOM), where exponent is that of the values in the key's tile and top the row's largest
    t + exponent over all keys, rounded up to an integer. The kernel's top is that of the first tile and moves by
    integers when weights would exceed 448, which multiplies by powers of two: E4M3 is a floating-point format, so only
    its subnormals are rounded differently. They matter only next to values of V at least a hundred times larger than in
    the sample, whose tile has a larger exponent than all others. Rows are divided by the sums of their weights as
    rounded to E4M3; lse is computed from the weights before rounding.
    """
    return by_sequence(partial(_replay, in_fp8=precision == "int8_fp8"), q, k, v, **words)


def _replay(q, k, v, *, words, rope, in_fp8):
    """(out [Tq, Hq, D], lse [Hq, Tq]) of one sequence whose keys all exist."""
    len_q, len_k = len(q), len(k)
    keys = quantize_sequence(k, v if in_fp8 else None, len_k, rope, None)
    queries = quantize_q(q, keys.k_mean, None if rope is None else positions_of(rope, len_q, len_k)[0], rope)
    k_scales = np.repeat(keys.k_scale, KEY_GROUP, axis=1)[:, :len_k]  # [Hkv, Tk]
    q_scales = queries.scale * (np.float32(abs(words.scale)) * LOG2E)  # [Hq, Tq]
    v = v.astype(np.float32)
    finite = np.isfinite(v)
    v_rest = np.where(finite, np.float32(0), np.float32(np.nan) if in_fp8 else v)
    if in_fp8:  # only codes: exponents go into the weights, scale and mean into the result
        v = values_back(keys.v, np.ones_like(keys.v_scale), np.zeros_like(keys.v_exponents))[:len_k]
        exponents = np.repeat(keys.v_exponents, VALUE_TILE, axis=1)[:, :len_k]
    v_finite = np.where(finite, v, np.float32(0))
    out, lse = np.zeros(q.shape), np.full((q.shape[1], len_q), -np.inf)
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        for head, kv_head, rows, seen in blocks(q, k, words):
            dots = dots_of(queries.values[rows, head], keys.k[:, kv_head])
            scales = (q_scales[head, rows], k_scales[kv_head], queries.q_dot_mean[head, rows])
            weights, top, bias = _weights(dots, *scales, seen, words)
            total = divisor = weights.sum(-1, dtype=np.float64)
            if in_fp8:
                product, divisor = _average_e4m3(
                    weights, exponents[kv_head], v_finite[:, kv_head], keys.v_scale[kv_head]
                )
                product += keys.v_mean[kv_head]
            else:
                product = weights.astype(q.dtype).astype(np.float64) @ v_finite[:, kv_head] / total[:, None]
            sink = words.empty_lse(head)
            joined, divided_by = (LN2 * (top + np.log2(x)) + bias for x in (total, divisor))
            product, joined = with_sink(product, joined, sink, divided_by)
            product = add_nonfinite(product, seen, v_rest[:, kv_head])
            if q.dtype == np.float16:  # averages of float16 numbers, which rounding may have moved past the largest one
                product = np.where(np.isfinite(product), np.clip(product, -65504, 65504), product)
            out[rows, head], lse[head, rows] = where_any(seen, product, joined, sink)
    return out, lse


def _weights(dots, q_scales, k_scales, q_dot_mean, seen, words):
    """Weights 2^(t - top) of base-2 scores t; top; and the row bias, which the scores omit and lse needs.

    Slopes have 20 bits, so that the kernel can subtract integers from a score before it is rounded. top is the row's
    largest score rounded up to an integer; the kernel's may be another, which does not change any rounding.
    """
    slope = (q_scales[:, None] * k_scales + LEAST_SLOPE).view(np.uint32) & np.uint32(0xFFFFFFF0)
    slope = slope.view(np.float32)
    if words.softcap == 0 and words.scale > 0:
        top = top_of(dots * slope, seen)
        t = fma(dots, slope, -top[:, None])
        bias = np.float32(words.scale) * q_dot_mean
    else:
        t, top = capped(dots, slope, q_dot_mean, seen, words)
        bias = np.zeros_like(q_dot_mean)
    return np.where(seen, np.exp2(t), np.float32(0)), top, bias


def _average_e4m3(weights, exponents, codes, scale):
    """Weights times values, divided by the sums of the weights as multiplied, times 2^exponent and at most 2^HEADROOM;
    and the sums of those weights.

    Rows that see a tile with an exponent above 0 are divided by the weights before rounding.
    """
    raised = np.ldexp(weights.astype(np.float64), exponents.astype(np.int64))
    most = np.fmax.reduce(raised, axis=-1)
    down = np.ceil(np.log2(np.where(most > 0, most, 1))).astype(np.int64) - HEADROOM
    rounded = np.ldexp(raised, -down[:, None]).astype(np.float32).astype(E4M3).astype(np.float64)
    totals = np.ldexp(rounded, -exponents.astype(np.int64)).sum(-1)
    beside = (weights * (exponents > 0)).sum(
        -1
    ) > 0  # a value far beyond the sample, next to which other weights may round to 0
    totals = np.where(beside, np.ldexp(weights.sum(-1, dtype=np.float64), -down), totals)
    return rounded @ codes * scale / totals[:, None], np.ldexp(totals, down)
