"""`quantize`'s CUDA kernels run on the CPU, thread by thread (qflash/csrc/emulate): the replay's bits."""

from __future__ import annotations

from itertools import pairwise

import ml_dtypes
import numpy as np
import pytest

from qflash.call.spec import DTYPES
from qflash.reference import quantize as replay
from qflash.rotary import Rope, rope_tables

UNTOUCHED = 77


def dtype_of(x: np.ndarray) -> str:
    return np.dtype(x.dtype).name


def strides(name: str, x: np.ndarray) -> dict[str, int]:
    """Of [B, T, H, D], or packed [T, H, D]."""
    steps = [step // x.itemsize for step in x.strides[:-1]]
    return dict(zip((f"{name}.stride_{axis}" for axis in "bth"), [0] * (3 - len(steps)) + steps, strict=True))


def run(library, x, *, group=None, symmetric=True, smooth=False, seed=None, lens=None, rope=None, order=1, cu=None,
        longest=0, **more):  # fmt: skip
    """What the emulated kernels write: a replay.Integers."""
    batch, length = (len(cu) - 1, longest) if cu is not None else x.shape[:2]
    heads, dim = x.shape[-2:]
    groups = -(-length // (group or 1))
    values = np.full(x.shape, UNTOUCHED, np.int8)
    scale = np.full(1 if group is None else (batch, heads, groups), UNTOUCHED, np.float32)
    zero_point = None if symmetric else np.full(1, UNTOUCHED, np.int32)
    mean = np.full((batch, heads, dim), UNTOUCHED, np.float32) if smooth else None
    sums = np.full((batch, heads, length), UNTOUCHED, np.int32)
    fields = {
        "batch": batch, "length": length, "heads": heads, "head_dim": dim, "dtype": DTYPES.index(dtype_of(x)),
        "granularity": int(group is not None), "group": group or 1, "symmetric": int(symmetric),
        "smooth": int(smooth), "rounding": int(seed is not None), "seed": seed,
        "x.data": x, **strides("x", x), "values.data": values, **strides("values", values), "scale": scale,
        "zero_point": zero_point, "sums": sums, "mean": mean, "lens": lens, "cu_seqlens": cu,
        "total": 0 if cu is None else len(x), **more,
    }  # fmt: skip
    if rope is not None:
        tables = [np.ascontiguousarray(table, np.float32) for table in (rope.cos, rope.sin)]
        fields |= {"rope.cos": tables[0], "rope.sin": tables[1], "rope.rows": len(tables[0])}
        fields |= {"rope.rotary_dim": 2 * tables[0].shape[1], "rope.interleaved": int(rope.interleaved)}
        for axis in "qk":
            positions = getattr(rope, f"positions_{axis}")
            if positions is not None:
                fields[f"rope.positions_{axis}"] = positions
                fields[f"rope.stride_positions_{axis}_b"] = length if positions.ndim == 2 else 0
    library("quantize", dtype_of(x)).launch_struct("QfQuantizeParams", fields, order)
    return replay.Integers(values, scale, zero_point, mean, sums)


def check_same(got, want) -> None:
    for name in ("values", "scale", "zero_point", "mean", "sums"):
        a, b = getattr(got, name), getattr(want, name)
        assert (a is None) == (b is None), name
        if a is not None:
            np.testing.assert_array_equal(a, b, err_msg=name)


def normal(shape, dtype="float32", seed=0, spread=1.0) -> np.ndarray:
    x = np.random.default_rng(seed).standard_normal(shape, np.float32) * np.float32(spread)
    return x.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)


# shape, dtype, words
CASES = {
    "token": ((2, 37, 3, 64), "float32", {"group": 1}),
    "group": ((2, 37, 3, 64), "bfloat16", {"group": 16}),
    "group of 3": ((1, 20, 2, 24), "float16", {"group": 3}),
    "group over two warps": ((1, 40, 2, 128), "bfloat16", {"group": 32}),
    "group over a block": ((1, 80, 1, 128), "float32", {"group": 64}),
    "group past a block": ((1, 150, 2, 128), "float16", {"group": 70}),
    "tensor": ((2, 19, 3, 40), "float32", {}),
    "asymmetric": ((2, 19, 3, 40), "bfloat16", {"symmetric": False}),
    "odd head_dim": ((1, 21, 2, 37), "float16", {"group": 4}),
    "one channel": ((1, 9, 2, 1), "float32", {"group": 1}),
    "rows of two warps": ((1, 5, 1, 400), "float32", {"group": 1}),
    "groups of rows of two warps": ((1, 11, 1, 500), "bfloat16", {"group": 4}),
    "wide": ((1, 3, 1, 2056), "bfloat16", {"group": 1}),
    "wide, walked": ((1, 2, 1, 9001), "float32", {"group": 1, "seed": 3}),
    "wide groups": ((1, 5, 1, 2100), "float16", {"group": 2}),
    "wide tensor": ((1, 2, 2, 8200), "float32", {"symmetric": False}),
    "wide, smoothed": ((1, 66, 1, 2056), "bfloat16", {"group": 1, "smooth": True}),
    "stochastic": ((1, 21, 2, 64), "bfloat16", {"group": 16, "seed": 7}),
    "stochastic, odd": ((2, 7, 3, 13), "float32", {"group": 1, "seed": 2**62 + 5}),
    "stochastic, asymmetric": ((1, 21, 2, 64), "float32", {"symmetric": False, "seed": 1}),
    "smooth": ((2, 150, 2, 64), "bfloat16", {"group": 16, "smooth": True}),
    "smooth, odd": ((1, 70, 3, 11), "float32", {"group": 5, "smooth": True}),
    "smooth tensor": ((1, 70, 3, 16), "float16", {"smooth": True}),
    "smooth, asymmetric": ((1, 70, 3, 16), "float16", {"smooth": True, "symmetric": False}),
}


@pytest.mark.parametrize("name", CASES)
def test_same_bits_as_the_replay(library, name):
    shape, dtype, words = CASES[name]
    x = normal(shape, dtype) + normal((1, 1, *shape[2:]), dtype, seed=1, spread=3)
    first = run(library, x, **words, order=1)
    check_same(first, replay.quantize(x, **{"group": None, **words}))
    check_same(first, run(library, x, **words, order=2))


ROPES = {
    "half": (32, False),
    "half, partial": (16, False),
    "half, singly": (12, False),
    "interleaved": (32, True),
    "interleaved, partial": (8, True),
    "interleaved, singly": (6, True),
}


@pytest.mark.parametrize("smooth", [False, True])
@pytest.mark.parametrize("name", ROPES)
def test_rope(library, name, smooth):
    """Every way a token may be rotated, backwards too, in tokens, groups and tensors."""
    rotary_dim, interleaved = ROPES[name]
    x = normal((2, 40, 2, 32), "bfloat16", seed=4)
    positions = np.random.default_rng(5).integers(-49, 50, (2, 40)).astype(np.int32)
    for group, where in ((1, None), (16, positions), (None, positions[0])):
        rope = Rope(*rope_tables(50, rotary_dim), interleaved, positions_k=where)
        got = run(library, x, group=group, smooth=smooth, rope=rope)
        check_same(got, replay.quantize(x, group=group, smooth=smooth, rope=rope))


def test_rope_on_rows_that_no_vector_fits(library):
    x = np.ascontiguousarray(normal((1, 20, 2, 33), seed=6)[..., 1:])[..., :31]
    rope = Rope(*rope_tables(20, 30))
    for group in (1, 4):
        words = {"group": group, "smooth": True, "rope": rope}
        check_same(run(library, x, **words), replay.quantize(x, **words))


@pytest.mark.parametrize("bad", [50, -50, 2**31 - 1, -(2**31)])
def test_a_position_outside_the_tables_spoils_its_token_alone(library, bad):
    x = normal((1, 20, 1, 32))
    positions = np.arange(20, dtype=np.int32)
    positions[7] = bad
    rope = Rope(*rope_tables(50, 16), positions_k=positions)
    for words in ({"group": 1}, {"group": 4, "smooth": True}):
        got = run(library, x, rope=rope, **words)
        check_same(got, replay.quantize(x, rope=rope, **words))
        assert np.flatnonzero((got.values == -128).all((0, 2, 3))).tolist() == [7]


NONFINITE = {"nan": np.nan, "inf": np.inf, "-inf": -np.inf}


@pytest.mark.parametrize("kind", NONFINITE)
@pytest.mark.parametrize("words", [{"group": 1}, {"group": 4}, {"group": 40}, {}, {"symmetric": False}], ids=str)
@pytest.mark.parametrize("dim", [64, 300])
def test_not_finite(library, kind, words, dim):
    """Tokens with one nonfinite number, a group of nothing else, and all of a tensor."""
    x = normal((1, 13, 2, dim))
    x[0, 3, 0, dim - 1] = NONFINITE[kind]
    x[0, 8:12, 1, 5] = NONFINITE[kind]
    for smooth in (False, True):
        got = run(library, x, smooth=smooth, **words)
        check_same(got, replay.quantize(x, smooth=smooth, **{"group": None, **words}))
    x[..., 0] = NONFINITE[kind]
    check_same(run(library, x, smooth=True, **words), replay.quantize(x, smooth=True, **{"group": None, **words}))


@pytest.mark.parametrize("words", [{"group": 1}, {"group": 2}, {"symmetric": False}], ids=str)
def test_not_finite_in_wide_tokens(library, words):
    x = normal((1, 4, 1, 2100))
    x[0, 1, 0, 2099] = np.nan
    check_same(run(library, x, smooth=True, **words), replay.quantize(x, smooth=True, **{"group": None, **words}))


VALUES = {
    "zero": 0.0,
    "minus zero": -0.0,
    "constant": 0.3,
    "negative constant": -7.0,
    "subnormal": 1e-40,
    "below the least amplitude": 2.0**-101,
    "the least amplitude": 2.0**-100,
    "largest float16": 65504.0,
    "largest float32": 3.4028234663852886e38,
}


@pytest.mark.parametrize("name", VALUES)
@pytest.mark.parametrize("words", [{"group": 1}, {"group": 8}, {}, {"symmetric": False}], ids=str)
def test_constant_tensors(library, name, words):
    x = np.full((1, 10, 2, 24), VALUES[name], np.float32)
    x[:, :, 1] *= np.float32(-0.5) if "largest" in name else np.float32(1)
    for smooth in (False, True):
        got = run(library, x, smooth=smooth, **words)
        check_same(got, replay.quantize(x, smooth=smooth, **{"group": None, **words}))


@pytest.mark.parametrize("words", [{"group": 1}, {"group": 16, "smooth": True}, {}, {"symmetric": False}], ids=str)
def test_tokens_that_do_not_exist(library, words):
    """They are zeros whatever they hold, and not one bit of them is read."""
    x = normal((4, 37, 2, 40), "bfloat16")
    lens = np.array([37, 0, 20, 1], np.int32)
    want = replay.quantize(x, lens=lens, **{"group": None, **words})
    for b, length in enumerate(lens):
        x[b, length:] = np.nan
    check_same(run(library, x, lens=lens, **words), want)


@pytest.mark.parametrize("bad", [-1, 38, 2**31 - 1, -(2**31)])
def test_a_length_out_of_range_spoils_its_sequence_alone(library, bad):
    x = normal((2, 37, 2, 40))
    lens = np.array([bad, 9], np.int32)
    got = run(library, x, group=16, smooth=True, lens=lens)
    assert (got.values[0] == -128).all() and np.isnan(got.scale[0]).all() and (got.mean[0] == 0).all()
    lens[0] = 37
    want = run(library, x, group=16, smooth=True, lens=lens)
    assert np.array_equal(got.values[1], want.values[1]) and np.array_equal(got.scale[1], want.scale[1])
    lens[0] = bad
    assert np.isnan(run(library, x, symmetric=False, lens=lens).scale).all()


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3), (2, 1, 0, 3)])
def test_strides(library, order):
    """Any strides with a contiguous last dimension, with NaN in the gaps."""
    wide = np.full((3, 40, 5, 40), np.nan, np.float32).transpose(order)[:, :, :, :33]
    x = wide[1:, ::2, 1:]
    x[...] = normal(x.shape)
    for words in ({"group": 1}, {"group": 4, "smooth": True, "seed": 3}):
        check_same(run(library, x, **words), replay.quantize(x, **words))


PACKED = [0, 17, 17, 40, 41]


def test_packed_sequences(library):
    """Groups, means and positions count from each sequence's start; a token's random numbers from the tensor's."""
    x = normal((41, 2, 32), "bfloat16")
    cu, lens = np.array(PACKED, np.int32), np.array([11, 0, 23, 1], np.int32)
    rope = Rope(*rope_tables(30, 32), positions_k=np.arange(41, dtype=np.int32)[::-1] % 30)
    for words in ({"group": 1}, {"group": 16, "smooth": True}):
        got = run(library, x, cu=cu, longest=23, lens=lens, rope=rope, **words)
        for b, (begin, end) in enumerate(pairwise(PACKED)):
            one = x[None, begin:end]
            rotated = Rope(rope.cos, rope.sin, positions_k=rope.positions_k[begin:end])
            want = replay.quantize(one, lens=lens[b : b + 1], rope=rotated, **words)
            groups = want.scale.shape[2]
            np.testing.assert_array_equal(got.values[begin:end], want.values[0])
            np.testing.assert_array_equal(got.scale[b, :, :groups], want.scale[0])
            assert (got.scale[b, :, groups:] == 0).all()
            np.testing.assert_array_equal(got.sums[b, :, : end - begin], want.sums[0])
            if "smooth" in words:
                np.testing.assert_array_equal(got.mean[b], want.mean[0])


def test_packed_stochastic_rounding(library):
    x = normal((20, 3, 9))
    got = run(library, x, cu=np.array([0, 12, 20], np.int32), longest=12, group=1, seed=11)
    np.testing.assert_array_equal(got.values, replay.quantize(x[None], group=1, seed=11).values[0])


# cu_seqlens, longest, and which of 40 tokens are still quantized
BAD_PACKING = {
    "past the end": ([0, 10, 41], 31, range(10)),
    "far past the end": ([0, 10, 2**31 - 1], 30, range(10)),
    "falls": ([0, 30, 20], 30, range(30)),
    "negative": ([-5, 10, 40], 30, range(10, 40)),
    "longer than said": ([0, 10, 40], 29, range(10)),
}


@pytest.mark.parametrize("name", BAD_PACKING)
def test_bad_packing_touches_nothing_outside(library, name):
    cu, longest, good = BAD_PACKING[name]
    x = normal((40, 2, 32))
    got = run(library, x, cu=np.array(cu, np.int32), longest=longest, group=16, smooth=True)
    untouched = (got.values == UNTOUCHED).all((1, 2))
    assert np.array_equal(~untouched, np.isin(np.arange(40), list(good)))
    assert np.isnan(got.scale).all((1, 2)).sum() == 1


@pytest.mark.parametrize("packed", [False, True])
def test_queries_stand_at_the_end_of_their_keys(library, packed):
    """Position t + len_k - len_q, and q . k_mean: what smoothing the keys took off each score."""
    x = normal((2, 20, 4, 32), "bfloat16")
    key_lens = np.array([27, 5], np.int32)
    mean = normal((2, 2, 32), seed=2)
    taken_off = np.full((2, 4, 20), UNTOUCHED, np.float32)
    rope = Rope(*rope_tables(40, 32))
    shape = {"cu": np.array([0, 20, 40], np.int32), "longest": 20} if packed else {}
    more = {
        "queries": 1,
        "key_length": 33,
        "key_lens": key_lens,
        "kv_heads": 2,
        "k_mean": mean,
        "q_dot_mean": taken_off,
    }
    got = run(library, x.reshape(40, 4, 32) if packed else x, group=1, rope=rope, **shape, **more)
    positions = np.arange(20) + key_lens[:, None] - 20
    want = replay.quantize(x, group=1, rope=rope, positions=positions)
    np.testing.assert_array_equal(got.values.reshape(x.shape), want.values)
    np.testing.assert_array_equal(got.scale, want.scale)
    rows = [replay.rotate(x[b], positions[b], rope).astype(float) for b in range(2)]
    dots = np.einsum("bthd,bhd->bht", rows, np.repeat(mean, 2, axis=1).astype(float))
    np.testing.assert_allclose(taken_off, dots, atol=1e-5)


def test_queries_at_given_positions(library):
    x = normal((2, 6, 1, 16))
    positions = np.array([[3, 1, 0, -2, 9, 5]] * 2, np.int32)
    rope = Rope(*rope_tables(10, 16), positions_q=positions)
    got = run(library, x, group=1, rope=rope, queries=1, key_length=6)
    check_same(got, replay.quantize(x, group=1, rope=rope, positions=positions))


def run_back(library, values, scale, zero_point, mean, group, dtype) -> np.ndarray:
    batch, length, heads, dim = values.shape
    out = normal(values.shape, dtype)
    fields = {
        "batch": batch, "length": length, "heads": heads, "head_dim": dim, "dtype": DTYPES.index(dtype),
        "granularity": int(group is not None), "group": group or 1, "symmetric": int(zero_point is None),
        "values.data": values, **strides("values", values), "out.data": out, **strides("out", out),
        "scale": scale, "zero_point": zero_point, "mean": mean,
    }  # fmt: skip
    library("dequantize", dtype).launch_struct("QfDequantizeParams", fields, seed=1)
    return out


@pytest.mark.parametrize("name", CASES)
def test_the_way_back(library, name):
    shape, dtype, words = CASES[name]
    x = normal(shape, dtype)
    x[0, 1, 0, 0] = np.nan
    q = replay.quantize(x, **{"group": None, **words})
    parts = (q.values, q.scale, q.zero_point, q.mean)
    group = words.get("group")
    want = replay.dequantize(*parts, group=group, dtype=dtype).astype(np.float32)
    np.testing.assert_array_equal(run_back(library, *parts, group, dtype).astype(np.float32), want)
