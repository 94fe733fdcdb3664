"""qflash.quantize and dequantize: the replay's integers, scales, zero points and means on every device, to the bit; and
what the replay itself promises: how far the way back ends from where it began, and that stochastic rounding is fair."""

from __future__ import annotations

import os
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest

import qflash
from qflash import _native, dispatch
from qflash.reference import quantize as replay_quantize
from qflash.rotary import Rope, rope_tables

CPU = [row.name for row in dispatch.kernels_of("quantize", "cpu")]
CUDA = [row.name for row in dispatch.kernels_of("quantize", "cuda")]
ON = [*CPU, *(pytest.param(name, marks=pytest.mark.gpu) for name in CUDA)]
BACK = {"cpu_quantize": "cpu_dequantize", "quantize": "dequantize"}
DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
WORDS = {
    "tensor": {},
    "asymmetric": {"symmetric": False},
    "token": {"granularity": "token"},
    "group": {"granularity": "group", "group": 16},
    "long group": {"granularity": "group", "group": 300},
}


def normal(shape, dtype="float32", seed=0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32).astype(DTYPES[dtype])


def shared(words: dict) -> int | None:
    """Tokens of a scale, as the replay has it."""
    return {"tensor": None, "token": 1, "group": words.get("group", 16)}[words.get("granularity", "tensor")]


def replay(x: np.ndarray, words: dict, lens=None, rope=None) -> replay_quantize.Integers:
    seed = words.get("seed", 0) if words.get("rounding") == "stochastic" else None
    symmetric, smooth = words.get("symmetric", True), words.get("smooth", False)
    four = x[None, :, None] if x.ndim == 2 else x
    return replay_quantize.quantize(
        four, group=shared(words), symmetric=symmetric, smooth=smooth, seed=seed, lens=lens, rope=rope
    )


def on_gpu(x: np.ndarray):
    """The array on the GPU, with the strides it has here."""
    from qflash.testing.runner import to_torch

    if x.flags.c_contiguous or x.size == 0:
        return to_torch(np.ascontiguousarray(x)).cuda()
    base = x
    while isinstance(base.base, np.ndarray):
        base = base.base
    flat = to_torch(base.reshape(-1)).cuda()
    offset = (x.ctypes.data - base.ctypes.data) // x.itemsize
    return flat.as_strided(x.shape, [step // x.itemsize for step in x.strides], offset)


def numpy_of(x) -> np.ndarray:
    if x is None or isinstance(x, np.ndarray):
        return x
    import torch

    x = x.cpu()
    return x.view(torch.int16).numpy().view(ml_dtypes.bfloat16) if x.dtype == torch.bfloat16 else x.numpy()


def quantize(kernel: str, x: np.ndarray, words: dict, lens=None, rope: Rope | None = None) -> qflash.Quantized:
    put = (lambda y: y) if kernel in CPU else (lambda y: None if y is None else on_gpu(np.asarray(y)))
    if rope is not None:
        rope = Rope(put(rope.cos), put(rope.sin), rope.interleaved, positions_k=put(rope.positions_k))
    return qflash.quantize(put(x), lens=put(lens), rope=rope, kernel=kernel, **words)


def check(kernel: str, x: np.ndarray, words: dict, lens=None, rope=None) -> tuple[qflash.Quantized, np.ndarray]:
    """The replay's bits, there and back."""
    got, want = quantize(kernel, x, words, lens, rope), replay(x, words, lens, rope)
    for name in ("values", "scale", "zero_point", "mean"):
        a, b = numpy_of(getattr(got, name)), getattr(want, name)
        assert (a is None) == (b is None), name
        if a is not None:
            np.testing.assert_array_equal(a, b.reshape(a.shape), err_msg=name)
    if got.sums is not None:
        sums = numpy_of(got.sums)
        np.testing.assert_array_equal(sums, want.sums.reshape(sums.shape))
    back = numpy_of(qflash.dequantize(got, kernel=BACK[kernel]))
    assert back.dtype == x.dtype
    parts = (want.values, want.scale, want.zero_point, want.mean)
    expected = replay_quantize.dequantize(*parts, group=shared(words), dtype=got.dtype)
    back = back.astype(np.float32)
    np.testing.assert_array_equal(back, expected.reshape(back.shape).astype(np.float32))
    return got, back


SHAPES = [(1, 1, 1, 1), (2, 37, 3, 64), (1, 130, 2, 128), (1, 5, 2, 37), (1, 300, 1, 256), (2, 9, 1, 7)]


@pytest.mark.parametrize("kernel", ON)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("words", WORDS.values(), ids=WORDS.keys())
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_same_bits_as_the_replay(kernel, dtype, words, shape):
    x = normal(shape, dtype) + normal((1, 1, *shape[2:]), dtype, seed=1)
    for more in ({}, {"smooth": True}, {"rounding": "stochastic", "seed": 9}):
        _, back = check(kernel, x, words | more)
        if more == {}:
            # Half a step, and what float32 and x's type round on the way.
            step = float(np.nanmax(np.abs(x.astype(np.float64)))) / 127
            error = np.abs(back - x.astype(np.float64)).max()
            assert error <= step * (0.5 + 1e-4) * (1 + 2.0**-8) + 2.0**-8 * np.abs(back).max() * (dtype != "float32")


@pytest.mark.parametrize("kernel", ON)
@pytest.mark.parametrize("words", WORDS.values(), ids=WORDS.keys())
@pytest.mark.parametrize("columns", [100, 2048, 5000, 16384, 20001])
def test_matrices(kernel, words, columns):
    x = normal((11, columns), "bfloat16")
    for more in ({}, {"smooth": True}, {"rounding": "stochastic"}):
        check(kernel, x, words | more)


@pytest.mark.parametrize("kernel", ON)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotary_dim", [6, 16, 48, 64])
@pytest.mark.parametrize("words", WORDS.values(), ids=WORDS.keys())
def test_rope(kernel, interleaved, rotary_dim, words):
    x = normal((2, 150, 2, 64), "float16")
    positions = np.random.default_rng(3).integers(-199, 200, (2, 150)).astype(np.int32)
    for where in (None, positions[0], positions):
        rope = Rope(*rope_tables(200, rotary_dim), interleaved, positions_k=where)
        check(kernel, x, words | {"smooth": True}, rope=rope, lens=np.array([150, 71], np.int32))


@pytest.mark.parametrize("kernel", ON)
@pytest.mark.parametrize("words", WORDS.values(), ids=WORDS.keys())
@pytest.mark.parametrize("smooth", [False, True])
def test_tokens_that_do_not_exist(kernel, words, smooth):
    x = normal((4, 40, 2, 32))
    lens = np.array([40, 0, 23, 1], np.int32)
    for b, length in enumerate(lens):
        x[b, length:] = np.nan
    got, _ = check(kernel, x, words | {"smooth": smooth}, lens=lens)
    for b, length in enumerate(lens):
        assert (numpy_of(got.values)[b, length:] == 0).all()


@pytest.mark.parametrize("kernel", ON)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("words", WORDS.values(), ids=WORDS.keys())
@pytest.mark.parametrize("smooth", [False, True])
def test_not_finite(kernel, bad, words, smooth):
    """A nonfinite token comes back as NaN and costs no other anything; asymmetric, everything is NaN."""
    x = normal((1, 40, 2, 33))
    x[0, 3, 0, 32] = x[0, 17, 1, 0] = bad
    _, back = check(kernel, x, words | {"smooth": smooth})
    wanted = np.zeros(x.shape, bool)
    wanted[0, 3, 0] = wanted[0, 17, 1] = True
    assert np.array_equal(np.isnan(back), wanted | ("symmetric" in words))
    assert np.isnan(check(kernel, np.full_like(x, bad), words | {"smooth": smooth})[1]).all()


CONSTANTS = [0.0, -0.0, 0.3, -7.0, 2.0**-101, 2.0**-100, 1e-40, 65504.0, 3.4028234663852886e38]


@pytest.mark.parametrize("kernel", ON)
@pytest.mark.parametrize("constant", CONSTANTS)
@pytest.mark.parametrize("words", WORDS.values(), ids=WORDS.keys())
def test_constant_tensors(kernel, constant, words):
    """They come back as they were, to float32's precision; what has no scale comes back as 0."""
    x = np.full((1, 20, 2, 16), constant, np.float32)
    got, back = check(kernel, x, words)
    if abs(constant) < (2.0**-100 if got.symmetric else 2.0**-99):
        assert (back == 0).all() and (numpy_of(got.scale) == 0).all()
    else:
        np.testing.assert_allclose(back, x, rtol=2e-7)
    _, back = check(kernel, x, words | {"smooth": True})
    np.testing.assert_allclose(back, x, rtol=2e-7, atol=2.0**-100)


@pytest.mark.parametrize("kernel", ON)
@pytest.mark.parametrize("words", WORDS.values(), ids=WORDS.keys())
def test_the_ends_of_the_range(kernel, words):
    """float32's largest numbers of both signs, whose range overflows; float16's; sums that overflow in the mean."""
    largest = np.finfo(np.float32).max
    x = normal((1, 70, 1, 8))
    x[0, 0, 0, :2] = largest, -largest
    got, back = check(kernel, x, words)
    np.testing.assert_allclose(back[0, 0, 0, :2], x[0, 0, 0, :2], rtol=2e-7 if got.symmetric else 0.5 / 127)
    x[...] = largest
    check(kernel, x, words | {"smooth": True})
    check(kernel, np.full((1, 70, 1, 8), 65504, np.float16), words | {"smooth": True})


@pytest.mark.parametrize("kernel", ON)
@pytest.mark.parametrize("words", WORDS.values(), ids=WORDS.keys())
def test_strides(kernel, words):
    """Any strides with a contiguous last dimension: heads first, gaps with NaN in them, odd offsets."""
    wide = np.full((2, 3, 50, 80), np.nan, np.float32)
    for x in (wide.transpose(0, 2, 1, 3)[:, :, 1:, :64], wide.transpose(0, 2, 1, 3)[:, ::2, :, 3:36], wide[..., :40]):
        x[...] = normal(x.shape)
        check(kernel, x, words | {"smooth": True})
        x[...] = np.nan


@pytest.mark.parametrize("kernel", ON)
@pytest.mark.parametrize("shape", [(0, 5, 2, 8), (2, 0, 2, 8)], ids=str)
@pytest.mark.parametrize("words", WORDS.values(), ids=WORDS.keys())
def test_empty(kernel, shape, words):
    for smooth in (False, True):
        got, _ = check(kernel, np.zeros(shape, np.float32), words | {"smooth": smooth})
        assert (numpy_of(got.scale) == 0).all()


@pytest.mark.parametrize("kernel", ON)
@pytest.mark.parametrize("symmetric", [True, False])
def test_stochastic_rounding_is_fair(kernel, symmetric):
    """The mean of many seeds is x, to 2^-15 of a step and five standard errors; integers never move."""
    seeds, step = 400, 2.0**-7
    x = np.random.default_rng(5).uniform(-0.99, 0.99, (1, 64, 1, 32)).astype(np.float32)
    x[0, 0, 0, :] = np.arange(-16, 16) * step  # integers, when the scale is `step`
    x[0, -1, 0, :2] = (127 * step, -127 * step) if symmetric else (127 * step, -128 * step)
    total, moved = np.zeros(x.shape), np.zeros(x.shape, bool)
    for seed in range(seeds):
        got = quantize(kernel, x, {"symmetric": symmetric, "rounding": "stochastic", "seed": seed * 2**40 + seed})
        assert numpy_of(got.scale) == np.float32(step)
        back = numpy_of(qflash.dequantize(got, kernel=BACK[kernel])).astype(np.float64)
        total += back
        moved |= back != x
        assert np.abs(back - x).max() < step
    error = np.abs(total / seeds - x)
    assert error.max() <= step * (2.0**-15 + 5 * 0.5 / np.sqrt(seeds))
    whole = (total / seeds - x).mean()  # and over all elements at once, where a bias would add up
    assert abs(whole) <= step * (2.0**-15 + 5 * 0.5 / np.sqrt(seeds * x.size))
    assert not moved[0, 0].any() and moved.mean() > 0.9


def test_seeds_differ_and_repeat():
    x = normal((1, 50, 2, 16))
    words = {"rounding": "stochastic"}
    one, again, other = (qflash.quantize(x, seed=seed, **words).values for seed in (1, 1, 2**63 - 1))
    assert np.array_equal(one, again) and (one != other).mean() > 0.2


def test_philox():
    """The known answers of Philox-4x32-10 that its authors publish."""
    ones = np.array([2**64 - 1], np.uint64)
    pi = np.array([0x85A308D3243F6A88], np.uint64)
    for counter, upper, key, words in (
        (np.zeros(1, np.uint64), (0, 0), 0, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        (ones, (2**32 - 1,) * 2, 2**64 - 1, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (pi, (0x13198A2E, 0x03707344), 0x299F31D0A4093822, "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ):
        assert " ".join(f"{int(word):08x}" for word in replay_quantize.philox(counter, key, upper)[0]) == words


def test_bad_values_are_named():
    x = normal((2, 8, 1, 16))
    for bad in (-1, 9):
        with pytest.raises(ValueError, match=rf"lens\[1\] is {bad}; allowed: 0 to 8"):
            qflash.quantize(x, lens=np.array([8, bad], np.int32))
    for bad in (8, -8, 2**31 - 1, -(2**31)):
        positions = np.arange(8, dtype=np.int32)
        positions[5] = bad
        with pytest.raises(ValueError, match=rf"rope.positions_k\[5\] is {bad}; allowed: -7 to 7"):
            qflash.quantize(x, rope=Rope(*rope_tables(8, 16), positions_k=positions))
        qflash.quantize(x, rope=Rope(*rope_tables(8, 16), positions_k=positions), lens=np.array([5, 5], np.int32))


@pytest.mark.gpu
def test_bad_values_on_a_gpu_spoil_what_they_describe():
    x = normal((2, 40, 2, 32))
    words = {"granularity": "group", "group": 16}
    for bad in (-1, 41, 2**31 - 1):
        got = quantize("quantize", x, words, lens=np.array([bad, 40], np.int32))
        back = numpy_of(qflash.dequantize(got))
        assert np.isnan(back[0]).all() and np.isfinite(back[1]).all()
    positions = np.arange(40, dtype=np.int32)
    positions[9] = 40
    rope = Rope(*rope_tables(40, 32), positions_k=positions)
    back = numpy_of(qflash.dequantize(quantize("quantize", x, words, rope=rope)))
    assert np.flatnonzero(np.isnan(back).any((0, 2, 3))).tolist() == [9]


@pytest.mark.parametrize("threads", [1, 2, 7])
def test_the_number_of_threads_changes_nothing(threads):
    x = normal((3, 700, 2, 24))
    before = qflash.get_num_threads()
    try:
        qflash.set_num_threads(threads)
        for words in WORDS.values():
            check("cpu_quantize", x, words | {"smooth": True})
    finally:
        qflash.set_num_threads(before)


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_of_all_words(dtype):
    """What every instruction set is asked for."""
    for words in WORDS.values():
        for dim in (37, 64):
            x = normal((1, 150, 2, dim), dtype)
            check("cpu_quantize", x, words | {"smooth": True}, rope=Rope(*rope_tables(150, 36)))
            check("cpu_quantize", x, words | {"rounding": "stochastic"})


@pytest.mark.parametrize("isa", ["generic", "avx2", "avx512"])
def test_every_instruction_set_gives_the_same_bits(isa):
    order = ("generic", "avx2", "avx512", "amx")
    if order.index(isa) >= order.index(_native.cpu_isa()):
        pytest.skip(f"{isa} is what every other test runs, or this machine lacks it")
    without = ["-p", "no:cacheprovider", "-p", "no:hypothesispytest"]  # which is slow to import
    environment = os.environ | {"QFLASH_CPU_ISA": isa}
    command = [sys.executable, "-m", "pytest", "-q", *without, "-k", test_bits_of_all_words.__name__, __file__]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


@pytest.mark.gpu
def test_runs_repeat_to_the_bit():
    import torch

    x = torch.randn(2, 1000, 8, 128, device="cuda", dtype=torch.bfloat16)
    for words in WORDS.values():
        first = qflash.quantize(x, smooth=True, rounding="stochastic", **words)
        for _ in range(50):
            again = qflash.quantize(x, smooth=True, rounding="stochastic", **words)
            assert torch.equal(first.values, again.values) and torch.equal(first.scale, again.scale)
