"""`sm90_quantize`'s CUDA kernels run on the CPU, thread by thread (qflash/csrc/emulate): the replay's bits."""

from __future__ import annotations

import ctypes
from itertools import pairwise

import ml_dtypes
import numpy as np
import pytest

from qflash.call.spec import DTYPES, PRECISIONS
from qflash.errors import NoKernelError
from qflash.ops.kv import KV_FIELDS, kept_fields
from qflash.reference import sm90_quantize as replay
from qflash.reference import sm90_values
from qflash.rotary import Rope, rope_tables
from qflash.testing.emulator import Library
from qflash.testing.emulator import packed as packed_struct

UNTOUCHED = 77
BUCKETS = (64, 128, 256)


@pytest.fixture(scope="session")
def library(library, emulated_source):
    """library(dtype, head_dim, together): `sm90_quantize`, or its pass over q, k and v as attention runs it."""

    def get(dtype: str, dim: int, together: bool) -> Library:
        if not together:
            return library("sm90_quantize", dtype, dim)
        bucket = next(bucket for bucket in BUCKETS if dim <= bucket)
        return emulated_source("sm90_quantize_all.cu", QF_DTYPE=DTYPES.index(dtype), QF_HEAD_DIM=bucket)

    return get


def normal(shape, dtype="bfloat16", seed=0, spread=1.0) -> np.ndarray:
    x = np.random.default_rng(seed).standard_normal(shape, np.float32) * np.float32(spread)
    return x.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)


def poison(shape, dtype) -> np.ndarray:
    return np.full(shape, UNTOUCHED, dtype)


def strides(name: str, x: np.ndarray) -> dict[str, int]:
    """Of [B, T, H, D], or packed [T, H, D]."""
    steps = [step // x.itemsize for step in x.strides[:-1]]
    return dict(zip((f"{name}.stride_{axis}" for axis in "bth"), [0] * (3 - len(steps)) + steps, strict=True))


def run(library, k, v=None, q=None, *, with_dot=True, kv_lens=None, rope=None, seed=None, cu_q=None, cu_k=None,
        longest=(0, 0), order=1, many_blocks=4096):  # fmt: skip
    """What the emulated kernels write: (Queries as arrays of all sequences or None, KeysValues). many_blocks: how many
    let a block take several heads."""
    packed = cu_k is not None
    batch, length = (len(cu_k) - 1, longest[1]) if packed else k.shape[:2]
    heads, dim = k.shape[-2:]
    width, groups, tiles = -(-dim // 16) * 16, -(-length // 64), -(-length // 128)
    rows = (len(k),) if packed else (batch, length)
    kv = {
        "k": poison((*rows, heads, width), np.int8), "k_scale": poison((batch, heads, groups), np.float32),
        "k_mean": poison((batch, heads, dim), np.float32), "k_nonfinite": poison((batch, heads), np.int32),
    }  # fmt: skip
    if v is not None:
        padded = sm90_values.packed_padded(len(k), batch) if packed else tiles * 128
        kv |= {
            "v": poison((1 if packed else batch, heads, dim, padded), np.uint8),
            "v_scale": poison((batch, heads), np.float32), "v_exponents": poison((batch, heads, tiles), np.float32),
            "v_nonfinite": poison((batch, heads), np.int32), "v_mean": poison((batch, heads, dim), np.float32),
        }  # fmt: skip
    dtype = np.dtype(k.dtype).name
    precision = "int8" if v is None else "int8_fp8"
    common = {
        "rounding": int(seed is not None), "seed": seed, "dtype": DTYPES.index(dtype), "batch": batch, "k_len": length,
        "precision": PRECISIONS.index(precision), "kv_heads": heads, "head_dim": dim,
        "kv_lens": kv_lens, "cu_seqlens_k": cu_k, "total_k": len(k) if packed else 0,
    }  # fmt: skip
    arrays = {"k": k} if v is None else {"k": k, "v": v}
    came = {}  # k and v as quantize_kv takes them
    for name, x in arrays.items():
        came |= {f"{name}.data": x, **strides(name, x)}
    left = {KV_FIELDS[name]: x for name, x in kv.items()}
    left |= dict(kept_fields(batch, length, heads, dim, precision, dtype))
    if rope is not None:
        tables = [np.ascontiguousarray(table, np.float32) for table in (rope.cos, rope.sin)]
        common |= {"rope.cos": tables[0], "rope.sin": tables[1], "rope.rows": len(tables[0])}
        common |= {"rope.rotary_dim": 2 * tables[0].shape[1], "rope.interleaved": int(rope.interleaved)}
        for axis in "qk":
            positions = getattr(rope, f"positions_{axis}")
            if positions is not None:
                common[f"rope.positions_{axis}"] = positions
                common[f"rope.stride_positions_{axis}_b"] = positions.shape[1] if positions.ndim == 2 else 0
    queries = None
    if q is not None:
        q_len = longest[0] if packed else q.shape[1]
        q_heads = q.shape[-2]
        attn = {"q.data": q, **strides("q", q), "q_len": q_len, "q_heads": q_heads}
        attn |= {"cu_seqlens_q": cu_q, "total_q": len(q) if packed else 0}
        attn |= {f"kv.{name}": value for name, value in came.items()}
        values = poison((*q.shape[:-1], width), np.int8)
        queries = replay.Queries(values, *(poison((batch, q_heads, q_len), np.float32) for _ in range(2)))
    kv_fields = common | came | left
    if q is None:
        library(dtype, dim, False).launch_struct("QfQuantizeKvParams", kv_fields, order)
    else:
        all_three = library(dtype, dim, True)
        all_three.schedule(order)
        counter = poison(1, np.int32)
        written = (queries.values, queries.scale, queries.q_dot_mean if with_dot else None, counter)
        pointers = [ctypes.c_void_p(None if x is None else x.ctypes.data) for x in written]
        structs = packed_struct("QfAttnParams", common | attn), packed_struct("QfQuantizeKvParams", kv_fields)
        status = all_three.handle.quantize_all(*structs, *pointers, ctypes.c_int64(many_blocks))
        assert status == 0 and counter[0] == 0, (status, all_three.complaint)
    return queries, replay.KeysValues(**kv)


def check_kv(got, want) -> None:
    for name in ("k_mean", "k_nonfinite", "k_scale", "k", "v_mean", "v_scale", "v_nonfinite", "v_exponents", "v"):
        a, b = getattr(got, name), getattr(want, name)
        assert (a is None) == (b is None), name
        if a is not None:
            np.testing.assert_array_equal(a, b, err_msg=name)


def check_q(got, q, mean, *, with_dot=True, rope=None, len_k=None, seed=None) -> None:
    """Of a batch that is not packed."""
    for b in range(len(q)):
        positions = None
        if rope is not None:
            first = (q.shape[1] if len_k is None else len_k[b]) - q.shape[1]
            positions = first + np.arange(q.shape[1]) if rope.positions_q is None else rope.positions_q[b]
        want = replay.quantize_q(q[b], mean[b], positions, rope, seed=seed, first=b * q.shape[1])
        np.testing.assert_array_equal(got.values[b], want.values)
        np.testing.assert_array_equal(got.scale[b], want.scale)
        if with_dot:
            np.testing.assert_array_equal(got.q_dot_mean[b], want.q_dot_mean)


# batch, q_len, k_len, q_heads, kv_heads, head_dim, dtype, fp8
CASES = {
    "one tile": (1, 64, 64, 1, 1, 128, "bfloat16", True),
    "odd lengths": (2, 37, 149, 2, 1, 128, "bfloat16", True),
    "sampled": (1, 5, 700, 1, 1, 64, "float16", True),
    "head_dim 64": (1, 130, 200, 3, 3, 64, "bfloat16", True),
    "head_dim 72": (1, 33, 70, 4, 2, 72, "bfloat16", True),
    "head_dim 8": (2, 9, 10, 1, 1, 8, "bfloat16", True),
    "head_dim 256": (1, 70, 131, 2, 1, 256, "bfloat16", True),
    "head_dim 200": (1, 3, 65, 1, 1, 200, "bfloat16", False),
    "no keys": (2, 3, 0, 2, 1, 64, "float16", True),
}


@pytest.mark.parametrize("name", CASES)
def test_same_bits_as_the_replay(library, name):
    batch, q_len, k_len, q_heads, kv_heads, dim, dtype, fp8 = CASES[name]
    q = normal((batch, q_len, q_heads, dim), dtype)
    k = normal((batch, k_len, kv_heads, dim), dtype, 1) + normal((1, 1, kv_heads, dim), dtype, 2, 3)
    v = normal((batch, k_len, kv_heads, dim), dtype, 3) + normal((1, 1, kv_heads, dim), dtype, 4, 2) if fp8 else None
    queries, kv = run(library, k, v, q)
    check_kv(kv, replay.quantize_kv(k, v))
    check_q(queries, q, kv.k_mean)
    again, kv_again = run(library, k, v, q, order=2, many_blocks=1)  # several heads to a block
    check_kv(kv_again, kv)
    np.testing.assert_array_equal(again.values, queries.values)


def test_keys_alone(library):
    """As quantize_kv runs it, with V and without."""
    k, v = normal((1, 100, 2, 64)), normal((1, 100, 2, 64), seed=1)
    check_kv(run(library, k, v)[1], replay.quantize_kv(k, v))
    check_kv(run(library, k)[1], replay.quantize_kv(k, None))


def test_queries_without_q_dot_mean(library):
    q, k = normal((1, 70, 2, 64)), normal((1, 3, 2, 64), seed=1)
    queries, kv = run(library, k, None, q, with_dot=False)
    check_q(queries, q, kv.k_mean, with_dot=False)
    assert (queries.q_dot_mean == UNTOUCHED).all()


ROPES = {
    "half": (64, False),
    "half, partial": (48, False),
    "half, singly": (12, False),
    "interleaved": (64, True),
    "interleaved, partial": (8, True),
    "interleaved, singly": (6, True),
}


@pytest.mark.parametrize("name", ROPES)
def test_rope(library, name):
    """Every way a token may be rotated, backwards too, over more heads than a block takes."""
    rotary_dim, interleaved = ROPES[name]
    q, k = normal((2, 33, 6, 64)), normal((2, 70, 3, 64), seed=1)
    tables = rope_tables(75, rotary_dim)
    positions = np.random.default_rng(5).integers(-74, 75, (2, 70)).astype(np.int32)
    for order, where in enumerate((None, positions), start=1):
        here = None if where is None else np.ascontiguousarray(where[:, :33])
        rope = Rope(*tables, interleaved, positions_q=here, positions_k=where)
        queries, kv = run(library, k, None, q, rope=rope, order=order, many_blocks=1 if order == 2 else 4096)
        check_kv(kv, replay.quantize_kv(k, None, rope=rope))
        check_q(queries, q, kv.k_mean, rope=rope, len_k=[70, 70])


@pytest.mark.parametrize("interleaved", [False, True])
def test_a_position_outside_the_tables_spoils_its_token_alone(library, interleaved):
    k = normal((1, 20, 1, 64))
    for bad in (50, -50, 2**31 - 1, -(2**31)):
        positions = np.arange(20, dtype=np.int32)[None].copy()
        positions[0, 7] = bad
        rope = Rope(*rope_tables(50, 32), interleaved, positions_k=positions)
        _, kv = run(library, k, rope=rope)
        check_kv(kv, replay.quantize_kv(k, None, rope=rope))
        assert np.flatnonzero((kv.k == -128).all((0, 2, 3))).tolist() == [7] and kv.k_nonfinite[0, 0] == 1


@pytest.mark.parametrize("dim", [64, 128])
def test_not_finite(library, dim):
    """One number, a group of nothing else, a whole head; sampled tokens and others, in q, k and v."""
    q, k, v = (normal((1, 300, 2, dim), seed=i) for i in range(3))
    for x in (q, k, v):
        x[0, 3, 0, dim - 1] = np.nan
        x[0, 5, 0, 0] = -np.inf
        x[0, 64:128, 0, 5] = np.inf
        x[..., 1, 17] = np.nan
    v[0, 64, 0, 7] = 50  # sampled; not in the mean, for 64 is not finite, but in the scale
    queries, kv = run(library, k, v, q, order=2, many_blocks=1)
    check_kv(kv, replay.quantize_kv(k, v))
    check_q(queries, q, kv.k_mean)
    assert kv.k_nonfinite.tolist() == [[66, 300]] and kv.v_nonfinite.tolist() == [[66, 300]]
    assert kv.v_scale[0, 0] == 2 and abs(kv.v_mean[0, 0]).max() < 1 and (kv.v_mean[0, 1] == 0).all()
    assert np.isfinite(kv.k_scale).all() and kv.k_scale[0, 0, 1] == 0 and kv.k_scale[0, 0, 0] > 0


VALUES = {
    "zero": ("float16", 0.0),
    "constant": ("bfloat16", 0.3),
    "largest float16": ("float16", 65504.0),
    "least float16": ("float16", 6e-8),
    "largest bfloat16": ("bfloat16", 3.38e38),
    "below the least amplitude": ("bfloat16", 2.0**-101),
    "least bfloat16": ("bfloat16", 1e-40),
}


@pytest.mark.parametrize("name", VALUES)
def test_constant_tensors(library, name):
    """Constant K and V are their means and leave zeros; what overflows in a butterfly is not finite."""
    dtype, value = VALUES[name]
    x = normal((1, 70, 2, 64), dtype)
    x[:, :, 0] = value
    x[:, :, 1] = np.sign(x[:, :, 1].astype(np.float32)) * value
    queries, kv = run(library, x, x, x)
    check_kv(kv, replay.quantize_kv(x, x))
    check_q(queries, x, kv.k_mean)
    if value < 1e38:
        assert (kv.k[:, :, 0] == 0).all() and (kv.k_scale[0, 0] == 0).all() and (kv.k_nonfinite == 0).all()
        assert (kv.v[:, 0] == 0).all() and (kv.v_mean[0, 0] == x[0, 0, 0].astype(np.float32)).all()
    if value == 0:
        assert (queries.values == 0).all() and (queries.scale == 0).all() and (kv.v_scale == 2.0**-5).all()


def test_values_far_above_the_sample(library):
    """Tiles raise their exponents to hold what the sample did not see, up to all that bfloat16 has."""
    v = normal((1, 520, 1, 64), spread=2.0**-120)
    for token, value in ((131, 447.0), (133, -449.0), (263, 5e30), (395, 3e38), (517, np.inf)):
        v[0, token, 0, 3] = value
    _, kv = run(library, normal(v.shape), v)
    check_kv(kv, replay.quantize_kv(normal(v.shape), v))
    assert (
        (np.diff(kv.v_exponents[0, 0, :4]) > 0).all() and kv.v_exponents[0, 0, 3] > 200 and kv.v_exponents[0, 0, 4] == 0
    )


# What is finite in bfloat16 must be so less its mean, which from 2^119 on is none.
HUGE = {
    "mostly negative": (-1e38, 3.38e38),
    "mostly positive": (3.38e38, -3.38e38),
    "a mean that is just taken off": (2.0**118, -3.38e38),
    "a mean that just is not": (-(2.0**119), 3.38e38),
}


@pytest.mark.parametrize("name", HUGE)
@pytest.mark.parametrize("dim", [64, 256])
def test_huge_values_stay_finite(library, name, dim):
    most, one = HUGE[name]
    v = np.full((1, 300, 1, dim), most, ml_dtypes.bfloat16)
    v[0, 131, 0, dim - 5] = one  # not sampled
    _, kv = run(library, normal(v.shape), v)
    check_kv(kv, replay.quantize_kv(normal(v.shape), v))
    assert (kv.v_nonfinite == 0).all() and not (kv.v & 0x7F == 0x7F).any()
    assert (kv.v_mean == (most if abs(most) < 2.0**119 else 0)).all()
    codes = sm90_values.values_back(kv.v[0], np.ones(1, np.float32), kv.v_exponents[0] * 0)[:300].astype(np.float64)
    scales = np.repeat(kv.v_scale[0, 0] * 2.0 ** kv.v_exponents[0, 0].astype(np.float64), 128)[:300, None, None]
    np.testing.assert_allclose(codes * scales + kv.v_mean[0], v[0].astype(np.float64), rtol=0.1)


@pytest.mark.parametrize("dim", [64, 256])
def test_a_mean_that_may_be_chance_stays(library, dim):
    """Values without a mean are better left so: a sample's is off by a sixteenth of the spread."""
    k, v = normal((1, 3000, 1, dim)), normal((1, 3000, 1, dim), seed=1).astype(np.float32)
    v[..., ::2] += np.float32(0.5)
    v = v.astype(k.dtype)
    _, kv = run(library, k, v)
    check_kv(kv, replay.quantize_kv(k, v))
    assert np.mean(kv.v_mean[..., 1::2] == 0) > 0.95 and (kv.v_mean[..., ::2] > 0.25).all()


@pytest.mark.parametrize("length", [1, 3, 127, 129, 255])
def test_tokens_past_the_end_do_not_take_part(library, length):
    """Less a mean they would be far from zero: codes are, and neither scale nor exponent knows of them."""
    k = normal((1, length, 1, 64))
    v = (normal(k.shape, spread=2.0**-6).astype(np.float32) + 100).astype(k.dtype)
    _, kv = run(library, k, v)
    check_kv(kv, replay.quantize_kv(k, v))
    assert (kv.v_exponents == 0).all() and kv.v_scale[0, 0] < 1
    ordered = kv.v.reshape(1, 1, 64, -1, 16)[..., np.argsort(sm90_values.KEY_ORDER)].reshape(kv.v.shape)
    assert (ordered[..., length:] == 0).all()


def test_keys_that_do_not_exist(library):
    """They are zeros whatever they hold, and not one bit of them is read."""
    q, k, v = (normal((4, 150, 1, 64), seed=i) for i in range(3))
    lens = np.array([150, 0, 90, 1], np.int32)
    rope = Rope(*rope_tables(151, 64))
    want = replay.quantize_kv(k, v, kv_lens=lens, rope=rope)
    for b, length in enumerate(lens):
        k[b, length:] = np.nan
        v[b, length:] = np.nan
    queries, kv = run(library, k, v, q, kv_lens=lens, rope=rope)
    check_kv(kv, want)
    check_q(queries, q, kv.k_mean, rope=rope, len_k=lens)


@pytest.mark.parametrize("bad", [-1, 71, 2**31 - 1, -(2**31)])
def test_a_length_out_of_range_is_no_keys(library, bad):
    k, v = normal((2, 70, 1, 64)), normal((2, 70, 1, 64), seed=1)
    lens = np.array([bad, 9], np.int32)
    _, kv = run(library, k, v, kv_lens=lens)
    check_kv(kv, replay.quantize_kv(k, v, kv_lens=np.array([0, 9])))


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3), (2, 1, 0, 3)])
@pytest.mark.parametrize("offset", [0, 8, 1])
def test_strides(library, order, offset):
    """Any strides with a contiguous last dimension and any address, with NaN in the gaps."""
    arrays = []
    for seed in range(3):
        wide = np.full((3, 40, 5, 88), np.nan, ml_dtypes.bfloat16).transpose(order)[..., offset : offset + 72]
        x = wide[1:, ::2, 1:]
        x[...] = normal(x.shape, seed=seed)
        arrays.append(x)
    q, k, v = arrays
    queries, kv = run(library, k, v, q)
    check_kv(kv, replay.quantize_kv(k, v))
    check_q(queries, q, kv.k_mean)


@pytest.mark.parametrize("seed", [7, 2**63 + 5])
def test_stochastic_rounding(library, seed):
    q, k = normal((2, 20, 2, 72)), normal((2, 70, 1, 72), seed=1)
    queries, kv = run(library, k, None, q, seed=seed)
    check_kv(kv, replay.quantize_kv(k, None, seed=seed))
    check_q(queries, q, kv.k_mean, seed=seed)
    assert (kv.k != replay.quantize_kv(k, None).k).any()


PACKED_Q, PACKED_K = [0, 5, 5, 70, 71], [0, 130, 259, 259, 300]


def test_packed_sequences(library):
    """Groups, tiles, means and positions count from each sequence's start; between sequences V is zeros."""
    q, k, v = normal((71, 2, 64)), normal((300, 1, 64), seed=1), normal((300, 1, 64), seed=2)
    cu_q, cu_k = np.array(PACKED_Q, np.int32), np.array(PACKED_K, np.int32)
    lens = np.array([130, 100, 0, 41], np.int32)
    rope = Rope(*rope_tables(131, 64))
    words = {"rope": rope, "seed": 3}
    queries, kv = run(library, k, v, q, cu_q=cu_q, cu_k=cu_k, longest=(65, 130), kv_lens=lens, **words)
    check_kv(kv, replay.quantize_kv(k, v, cu_seqlens_k=cu_k, longest=130, kv_lens=lens, **words))
    for b, (begin, end) in enumerate(pairwise(PACKED_Q)):
        positions = np.arange(end - begin) + int(lens[b]) - (end - begin)
        want = replay.quantize_q(q[begin:end], kv.k_mean[b], positions, rope, seed=3, first=begin)
        np.testing.assert_array_equal(queries.values[begin:end], want.values)
        np.testing.assert_array_equal(queries.scale[b, :, : end - begin], want.scale)
        np.testing.assert_array_equal(queries.q_dot_mean[b, :, : end - begin], want.q_dot_mean)
        assert (queries.scale[b, :, end - begin :] == UNTOUCHED).all()


# cu_seqlens_q, cu_seqlens_k, and which sequences' keys are as they should be
BAD = {
    "q falls": ([0, 9, 5, 20], [0, 10, 20, 30], [0, 1, 2]),
    "k falls": ([0, 5, 9, 20], [0, 20, 10, 30], [0, 2]),
    "k past the end": ([0, 5, 9, 20], [0, 10, 20, 31], [0, 1]),
    "k before the start": ([0, 5, 9, 20], [-3, 10, 20, 30], [1, 2]),
    "k longer than the longest": ([0, 5, 9, 20], [0, 25, 25, 30], [1, 2]),
    "nonsense": ([0, 2**31 - 1, -(2**31), 20], [2**31 - 1, -(2**31), 0, -1], []),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_description_is_not_read(library, name):
    """Memory around the tensors is not touched: a fault would show, and what is good comes out right."""
    cu_q, cu_k, good = BAD[name]
    q, k, v = normal((20, 1, 64)), normal((30, 1, 64), seed=1), normal((30, 1, 64), seed=2)
    _, kv = run(library, k, v, q, cu_q=np.array(cu_q, np.int32), cu_k=np.array(cu_k, np.int32), longest=(20, 20))
    for b in range(3):
        begin, end = (cu_k[b], cu_k[b + 1]) if b in good else (0, 0)
        want = replay.quantize_kv(k[None, begin:end], v[None, begin:end])
        np.testing.assert_array_equal(kv.k_mean[b], want.k_mean[0])
        assert (kv.k_nonfinite[b] == 0).all()
        if b in good:
            np.testing.assert_array_equal(kv.k_scale[b, :, :1][:, : want.k_scale.shape[2]], want.k_scale[0])


def test_what_cannot_be_served_is_refused(library):
    with pytest.raises(NoKernelError):
        run(library, normal((1, 4, 1, 60)))


def passes(words: list[int], lanes_at_once: int) -> int:
    """Clocks an access takes: 32 banks serve one word each, and so many lanes go together."""
    total = 0
    for first in range(0, len(words), lanes_at_once):
        banks = [word % 32 for word in set(words[first : first + lanes_at_once])]
        total += max(map(banks.count, banks))
    return total


@pytest.mark.parametrize("dim", BUCKETS)
@pytest.mark.parametrize("twisted", [True, False])
def test_banks_of_the_values_tile(dim, twisted):
    """values.cuh: every warp writes a word and reads 16 bytes per lane without conflicts; untwisted, writing would."""

    def place(channel: int, word: int) -> int:
        twist = 4 * (channel // 8 % 8) + channel // 64 * (256 // dim % 4)
        return 32 * channel + (word ^ twist if twisted else word)

    chunks, threads = dim // 8, 256 if dim > 128 else 128
    for warp in range(threads // 32):
        for e in range(8):
            lanes = range(32 * warp, 32 * warp + 32)
            written = [place(8 * (t % chunks) + e, t // chunks) for t in lanes]
            assert passes(written, 32) == (1 if twisted else chunks)
        for quarter in range(4):  # eight lanes read what is one channel's
            channel = 4 * warp + quarter
            starts = [min(place(channel, 4 * vector + i) for i in range(4)) for vector in range(8)]
            assert all(start % 4 == 0 for start in starts)
            assert passes([start + i for start in starts for i in range(4)], 32) == 1
