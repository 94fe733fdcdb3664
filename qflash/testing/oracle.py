"""The expected result of a Case: the float64 result, and the figures that error bounds are computed from. Cached."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from qflash import _native, reference
from qflash.reference import fa_int8, sm90_quantize, sm90_sample
from qflash.rotary import Rope
from qflash.testing.case import Case, Inputs

# Kernels that have a replay, and its arguments beyond attention's.
_REPLAYS = {
    "cpu_int8": (reference.attention_int8, {}),
    "fa_int8": (reference.attention_fa_int8, {}),
    "triton_int8": (reference.attention_fa_int8, {}),
    "sm90_int8": (reference.attention_sm90_int8, {"precision": "int8"}),
    "sm90_int8_fp8": (reference.attention_sm90_int8, {"precision": "int8_fp8"}),
    "sm90_int8_kv": (reference.attention_sm90_int8, {"precision": "int8"}),
    "sm90_decode_kv": (reference.attention_sm90_int8, {"precision": "int8"}),
    "decode_kv": (reference.attention_sm90_int8, {"precision": "int8"}),
}


@dataclass(frozen=True)
class Integers:
    """How a kernel converts q and k to integers, as far as errors depend on it."""

    key_group: int = 1  # neighbouring keys that share a scale
    block: int = 1  # channels that a Hadamard matrix mixes first
    sampled: int | None = None  # maximum number of keys for the mean that smoothing subtracts; None: all
    smooths: bool = True  # subtracts each sequence's own mean; False: the mean is not that of these keys


_SM90 = Integers(sm90_quantize.KEY_GROUP, sm90_quantize.BLOCK, sm90_sample.SAMPLED)
_ON_SM90 = ("sm90_int8", "sm90_int8_fp8", "sm90_int8_kv", "sm90_decode_kv", "decode_kv")
_INTEGERS = dict.fromkeys(("fa_int8", "triton_int8"), Integers(fa_int8.KEY_GROUP)) | dict.fromkeys(_ON_SM90, _SM90)
_INT8_PAGES = Integers(block=sm90_quantize.BLOCK, smooths=False)  # k_mean is one for all sequences of a cache
PLAIN_INTEGERS = Integers()
# Standard deviation of rounding to integers with 127 steps, in units of the amplitude: uniform over one step.
_STEP_DEVIATION = 1 / (127 * np.sqrt(12))


@dataclass(frozen=True)
class Expected:
    """The oracle's result for a Case, all float64.

    out, lse: the result. weight: per row, the 2-norm of sum_j p_j |v_j|, the reference for rounding errors in PV.
    strength: per row, the largest scale * sum_d |q_d k_d| among visible keys, the reference for rounding errors in a
    score; quantized, the largest scale * (max|q| sum|k| + max|k| sum|q|) with k minus its mean, the reference for
    rounding to integers.
    distance: strength, plus a sink above 0: weights are exponentials of distances from lse, and a score may be that far
    below its sink. A sink below 0 is no farther from the scores than 0, or is negligible next to them.
    rounded: out after the unavoidable roundings in the case's dtype (see `rounding_model`); out in float32.
    """

    out: np.ndarray
    lse: np.ndarray
    weight: np.ndarray
    strength: np.ndarray
    distance: np.ndarray
    rounded: np.ndarray


@lru_cache(maxsize=256)
def expected(case: Case, precision: str = "native") -> Expected:
    """The oracle's result for a Case. Integers have no Inf, and neither has E4M3: in q and k, or in v, it counts as NaN
    there. In INT8 pages all of a nonfinite token of v is NaN."""
    inputs = case.make_inputs()
    quantized = precision != "native"
    if quantized:
        inputs = _without_inf(inputs, precision)
    out, lse = _attention(case, inputs, inputs.q, inputs.k, inputs.v, inputs.rope)
    with np.errstate(invalid="ignore", over="ignore"):
        size, _ = _attention(case, inputs, inputs.q, inputs.k, np.abs(inputs.v.astype(np.float64)), inputs.rope)
        weight = np.sqrt((size * size).sum(-1))
    weight = weight.T if case.packed else weight.swapaxes(-1, -2)
    rounded = out if case.dtype == "float32" else rounding_model(case, inputs)
    strength = _strength(case, inputs, PLAIN_INTEGERS if quantized else None)
    sinks = np.zeros(case.q_heads) if inputs.sinks is None else np.where(np.isfinite(inputs.sinks), inputs.sinks, 0.0)
    return Expected(out, lse, weight, strength, strength + np.maximum(sinks, 0.0)[:, None], rounded)


def weights_dtype(case: Case, kernel: str) -> str:
    """What a quantized kernel rounds its weights to before they are multiplied by V."""
    if kernel == "cpu_int8":
        return "bfloat16" if _native.cpu_isa() == "amx" else "float32"
    if kernel.endswith("_pages_int8"):
        return "float16"
    return "float8_e4m3fn" if kernel == "sm90_int8_fp8" else case.dtype


def integers_of(kernel: str) -> Integers:
    """How a quantized kernel converts to integers."""
    return _INT8_PAGES if kernel.endswith("_pages_int8") else _INTEGERS.get(kernel, PLAIN_INTEGERS)


@lru_cache(maxsize=64)
def quantized_strength(case: Case, integers: Integers) -> np.ndarray:
    """Expected.strength of a quantized kernel whose keys share scales: max|k| is that of the group, visible or not."""
    return _strength(case, _without_inf(case.make_inputs()), integers)


@lru_cache(maxsize=64)
def score_noise(case: Case, integers: Integers) -> np.ndarray:
    """Per row of lse, the largest standard deviation of a score's error from rounding q and k to integers.

    Every channel of q has an independent error within a step max|q| / 127, which is multiplied by k_d in the score, and
    vice versa: the squares add up to max|q|^2 sum k^2 + max|k|^2 sum q^2.
    """
    return _STEP_DEVIATION * np.sqrt(_strength(case, _without_inf(case.make_inputs()), integers, power=2))


@lru_cache(maxsize=64)
def replayed(case: Case, kernel: str) -> tuple[np.ndarray, np.ndarray] | None:
    """(out, lse) of the replay of a quantized kernel, float64; None for a kernel without a replay."""
    if kernel not in _REPLAYS:
        return None
    inputs = case.make_inputs()
    replay, more = _REPLAYS[kernel]
    if kernel == "cpu_int8":
        more = {"pv": weights_dtype(case, kernel)}
    return replay(inputs.q, inputs.k, inputs.v, **_words(case, inputs, inputs.rope), **more)


@lru_cache(maxsize=64)
def expected_gradients(case: Case) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(dq, dk, dv) in float64 for the case's dout and dlse."""
    inputs = case.make_inputs()
    dout, dlse = case.make_gradients()
    words = _words(case, inputs, inputs.rope)
    return reference.attention_backward(inputs.q, inputs.k, inputs.v, dout, dlse, **words)


def rounding_model(case: Case, inputs: Inputs) -> np.ndarray:
    """`out` of an ideal implementation that stores in the case's dtype: rotated q and k are rounded, then out is.

    This is PyTorch's math path, which computes float16 and bfloat16 attention in float32; tests/unit/test_testing.py
    compares the two.
    """
    q, k = inputs.q, inputs.k
    rope = inputs.rope
    if rope is not None:
        q, k = (rotated.astype(q.dtype) for rotated in _rotated(case, inputs))
    out, _ = _attention(case, inputs, q, k, inputs.v, None)
    with np.errstate(invalid="ignore", over="ignore"):
        return out.astype(case.dtype).astype(np.float64)


def _attention(case: Case, inputs: Inputs, q, k, v, rope: Rope | None):
    return reference.attention(q, k, v, **_words(case, inputs, rope))


def _words(case: Case, inputs: Inputs, rope: Rope | None):
    """The arguments of a case for the oracle and the replays."""
    cu_seqlens = (inputs.cu_seqlens_q, inputs.cu_seqlens_k) if case.packed else None
    return {**case.options(), "kv_lens": inputs.kv_lens, "rope": rope, "sinks": inputs.sinks, "cu_seqlens": cu_seqlens}


def _without_inf(inputs: Inputs, precision: str = "int8") -> Inputs:
    v = _inf_to_nan(inputs.v) if precision == "int8_fp8" else inputs.v
    if precision == "int8_pages":
        v = np.where(np.isfinite(v).all(-1, keepdims=True), v, np.array(np.nan, v.dtype))
    return replace(inputs, q=_inf_to_nan(inputs.q), k=_inf_to_nan(inputs.k), v=v)


def _inf_to_nan(x: np.ndarray) -> np.ndarray:
    return np.where(np.isinf(x), np.array(np.nan, x.dtype), x)


def sequences(case: Case, inputs: Inputs):
    """(index of q's rows, index of k's rows, existing keys, positions_q, positions_k) per sequence."""
    lens_k = case.k_lens if case.packed else (case.k_len,) * case.batch
    for b, longest in enumerate(lens_k):
        length = longest if case.kv_lens is None else case.kv_lens[b]
        if case.packed:
            rows = slice(int(inputs.cu_seqlens_q[b]), int(inputs.cu_seqlens_q[b + 1]))
            start = int(inputs.cu_seqlens_k[b])
            yield b, rows, slice(start, start + length), length
        else:
            yield b, b, (b, slice(0, length)), length


def _rotated(case: Case, inputs: Inputs) -> tuple[np.ndarray, np.ndarray]:
    """q and k rotated by rope, float64."""
    q, k = inputs.q.astype(np.float64), inputs.k.astype(np.float64)
    rope = inputs.rope
    if rope is None:
        return q, k
    for b, rows, keys, length in sequences(case, inputs):
        if length == 0:
            continue
        given_q, given_k = rope.positions_q, rope.positions_k
        if given_q is None:
            positions_q = np.arange(len(q[rows])) + length - len(q[rows])
        else:
            positions_q = given_q[rows] if case.packed else given_q[b] if given_q.ndim == 2 else given_q
        if given_k is None:
            positions_k = np.arange(length)
        else:
            positions_k = given_k[keys] if case.packed else (given_k[b] if given_k.ndim == 2 else given_k)[:length]
        q[rows] = reference.apply_rope(q[rows], positions_q, rope)
        k[keys] = reference.apply_rope(k[keys], positions_k, rope)
    return q, k


def _strength(case: Case, inputs: Inputs, integers: Integers | None, power: int = 1) -> np.ndarray:
    """Per row of lse: Expected.strength; 0 where nothing is visible or finite.

    integers: None if nothing is quantized. power: of every factor before it is summed.
    """
    q, k = _rotated(case, inputs)
    if integers and integers.smooths:
        for _, _, keys, length in sequences(case, inputs):
            if length:
                sample = k[keys][:: -(-length // (integers.sampled or length))]
                finite = np.isfinite(sample).all(-1, keepdims=True)
                k[keys] = k[keys] - np.where(finite, sample, 0.0).sum(0) / np.maximum(finite.sum(0), 1)
    if integers:
        q, k = _mixed(q, integers.block), _mixed(k, integers.block)
    q, k = np.abs(q) ** power, np.abs(k) ** power
    if integers:  # [max, sum] . [sum, max] of the channels
        q, k = np.stack([q.max(-1), q.sum(-1)], -1), np.stack([k.sum(-1), k.max(-1)], -1)
        for _, _, keys, length in sequences(case, inputs):
            if length:
                k[keys][..., 1] = _largest_of_group(k[keys][..., 1], integers.key_group)
    scale = (abs(case.scale) if case.scale is not None else case.head_dim**-0.5) ** power
    left, right = case.window or (-1, -1)
    right = 0 if case.causal else right
    result = np.zeros(q.shape[1::-1] if case.packed else (q.shape[0], q.shape[2], q.shape[1]))
    group = case.q_heads // case.kv_heads
    for b, rows, keys, length in sequences(case, inputs):
        len_q = len(q[rows])
        if length == 0 or len_q == 0:
            continue
        step = max(1, (1 << 22) // length)
        for head in range(case.q_heads):
            for start in range(0, len_q, step):
                block = np.arange(start, min(start + step, len_q))
                seen = reference.visible(block, len_q, length, left, right)
                with np.errstate(invalid="ignore", over="ignore"):
                    s = scale * (q[rows][block, head] @ k[keys][:, head // group].T)
                best = np.where(seen & np.isfinite(s), s, 0.0).max(-1)
                where = (head, np.arange(rows.start, rows.stop)[block]) if case.packed else (b, head, block)
                result[where] = best
    return result


def _mixed(x: np.ndarray, block: int) -> np.ndarray:
    """x `[..., D]`, with every `block` channels (zeros beyond D) times the orthogonal Hadamard matrix of that size."""
    matrix = np.ones((1, 1))
    while len(matrix) < block:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]]) / np.sqrt(2)
    blocks = -(-x.shape[-1] // block)
    padded = np.zeros((*x.shape[:-1], blocks * block))
    padded[..., : x.shape[-1]] = x
    with np.errstate(invalid="ignore"):
        return (padded.reshape(*x.shape[:-1], blocks, block) @ matrix).reshape(padded.shape)


def _largest_of_group(size: np.ndarray, group: int) -> np.ndarray:
    """`[keys, heads]`: the largest of the finite keys that share a scale with each."""
    starts = np.arange(0, len(size), group)
    largest = np.maximum.reduceat(np.where(np.isfinite(size), size, 0.0), starts)
    return np.repeat(largest, group, axis=0)[: len(size)]
