"""qflash.int8_matmul: int32 sums equal NumPy's; scaled results are off by the float32 arithmetic of the epilogue and
the final rounding, and are the same bits on the CPU and on every GPU kernel."""

from __future__ import annotations

import os
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest

import qflash
from qflash import _native, dispatch

CPU = [row.name for row in dispatch.kernels_of("linear", "cpu") if "int8" in row.precisions]
CUDA = [row.name for row in dispatch.kernels_of("linear", "cuda") if "int8" in row.precisions]
DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
ON = [*CPU, *(pytest.param(name, marks=pytest.mark.gpu) for name in CUDA)]

# m, n, k: single elements, tails on either side of vectors and tiles, one step and many, nothing at all.
SHAPES = [
    (1, 1, 1), (1, 1000, 64), (17, 3, 5), (128, 128, 128), (129, 255, 257), (64, 96, 2049), (300, 40, 4100),
    (33, 513, 31), (2, 2, 20000), (0, 5, 3), (5, 0, 3), (5, 3, 0),
]  # fmt: skip


def integers(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return rng.integers(-128, 128, shape, np.int8)


def matrices(shape, layout: str, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """a [m, k] and b [k, n]. Layouts: b contiguous along k or n, rows with gaps, and offsets that break alignment."""
    m, n, k = shape
    rng = np.random.default_rng([seed, *shape])
    if layout == "k":
        return integers(rng, (m, k)), integers(rng, (n, k)).T
    if layout == "n":
        return integers(rng, (m, k)), integers(rng, (k, n))
    if layout == "k gaps":
        return integers(rng, (m, k + 16))[:, :k], integers(rng, (n, k + 32))[:, :k].T
    if layout == "k odd":
        return integers(rng, (m, k + 3))[:, 1 : k + 1], integers(rng, (n, k + 5))[:, 3 : k + 3].T
    if layout == "n odd":
        return integers(rng, (m, k + 3))[:, 2 : k + 2], integers(rng, (k, n + 7))[:, 1 : n + 1]
    raise AssertionError(layout)


LAYOUTS = ("k", "n", "k gaps", "k odd", "n odd")


ALONG_K_ALONE = ("sm90_gemm",)  # wgmma reads int8 along k


def is_served(kernel: str, shape: tuple[int, int, int], layout: str = "k") -> bool:
    """A matrix of a single row or column, or of none, counts as one along n."""
    m, n, k = shape
    return kernel not in ALONG_K_ALONE or (layout.startswith("k") and m > 0 and n > 1 and k > 1)


def skip_unserved(kernel: str, shape: tuple[int, int, int], layout: str) -> None:
    if not is_served(kernel, shape, layout):
        pytest.skip(f"{kernel} takes b along k")


def multiply(kernel: str, a, b, **words) -> np.ndarray:
    """qflash.int8_matmul by `kernel`, on the device it is for; arrays keep their strides on the way there, but for b
    where a kernel takes it along k alone."""
    if kernel in ALONG_K_ALONE and b.shape[0] > 1 and b.strides[0] != 1:
        b = np.ascontiguousarray(b.T).T
    if kernel in CPU:
        return qflash.int8_matmul(a, b, kernel=kernel, **words)
    import torch

    from qflash.testing.runner import to_torch

    def put(x):
        if not isinstance(x, np.ndarray):
            return x
        if x.base is None or x.size == 0:
            return to_torch(np.ascontiguousarray(x)).cuda()
        base = x.base if x.base.ndim == 2 else x
        there = to_torch(np.ascontiguousarray(base)).cuda()
        offset = (x.ctypes.data - base.ctypes.data) // x.itemsize
        return there.as_strided(x.shape, [step // x.itemsize for step in x.strides], offset)

    out = qflash.int8_matmul(put(a), put(b), kernel=kernel, **{name: put(value) for name, value in words.items()}).cpu()
    return out.view(torch.int16).numpy().view(ml_dtypes.bfloat16) if out.dtype == torch.bfloat16 else out.numpy()


def exact(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return a.astype(np.int64) @ b.astype(np.int64)


def epilogue(sums, a_scale=1.0, b_scale=1.0, bias=0.0) -> np.ndarray:
    """fma(float32(sum) * a_scale, b_scale, bias) in float32. The product is exact in float64, so only the sum rounds
    there first, to 53 bits: results agree with an fma's to the bit except where that lands on a tie."""
    scaled = sums.astype(np.float32) * np.asarray(a_scale, np.float32).reshape(-1, 1)
    return (scaled.astype(np.float64) * np.float32(b_scale) + np.float32(bias)).astype(np.float32)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kernel", ON)
def test_sums_are_exact(kernel, shape, layout):
    skip_unserved(kernel, shape, layout)
    a, b = matrices(shape, layout)
    got = multiply(kernel, a, b)
    assert got.dtype == np.int32 and np.array_equal(got, exact(a, b))


@pytest.mark.parametrize("kernel", ON)
def test_the_largest_sum_there_can_be(kernel):
    """k = 131071: (-128)² k = 2³¹ - 2¹⁴ fits; one more is refused."""
    a, b = np.full((2, 131071), -128, np.int8), np.full((131071, 3), -128, np.int8)
    assert (multiply(kernel, a, b) == 131071 << 14).all()
    assert (multiply(kernel, a, np.full_like(b, 127)) == -131071 * 128 * 127).all()
    with pytest.raises(ValueError, match="131072 columns; allowed: at most 131071"):
        multiply(kernel, np.zeros((1, 131072), np.int8), np.zeros((131072, 1), np.int8))


GIVEN = ("none", "numbers", "rows", "columns", "all", "one each", "bias")


def scales(m: int, n: int, given: str, seed: int = 0) -> dict:
    rng = np.random.default_rng([seed, m, n])
    row, column = rng.uniform(1e-3, 1e-1, m).astype(np.float32), rng.uniform(1e-3, 1e-1, n).astype(np.float32)
    bias = rng.standard_normal(n).astype(np.float32)
    return {
        "none": {},
        "numbers": {"a_scale": 0.013, "b_scale": -0.5},
        "rows": {"a_scale": row},
        "columns": {"b_scale": column},
        "all": {"a_scale": row, "b_scale": column, "bias": bias},
        "one each": {"a_scale": row[:1].copy(), "b_scale": column[:1].copy()},
        "bias": {"bias": bias},
    }[given]


@pytest.mark.parametrize("given", GIVEN)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kernel", ON)
def test_scales_bias_and_types(kernel, dtype, given):
    m, n, k = 70, 130, 200
    a, b = matrices((m, n, k), "k")
    words = scales(m, n, given)
    got = multiply(kernel, a, b, out_dtype=dtype, **words)
    assert got.dtype == DTYPES[dtype] and got.shape == (m, n)
    defaults = (("a_scale", 1.0), ("b_scale", 1.0), ("bias", 0.0))
    row, column, bias = (np.float64(np.float32(words.get(name, value))) for name, value in defaults)
    product = exact(a, b) * row.reshape(-1, 1) * column
    want = product + bias
    with np.errstate(all="ignore"):
        rounded = want.astype(DTYPES[dtype])
        finite = np.isfinite(rounded.astype(float))
        half_a_unit = 0.5 * np.spacing(np.abs(rounded)).astype(np.float64)
    # Two roundings of the product (conversion and a_scale), one of the fma, then one to the type of out.
    error = np.abs(got.astype(np.float64) - want)[finite]
    bound = (half_a_unit + 2.0**-24 * (2 * np.abs(product) + np.abs(want)) * 1.001)[finite]
    assert (error <= bound).all(), float((error - bound).max())
    with np.errstate(over="ignore"):
        assert np.array_equal(got, epilogue(exact(a, b), **words).astype(DTYPES[dtype]))


@pytest.mark.parametrize("kernel", ON)
def test_batches_of_rows(kernel):
    rng = np.random.default_rng(3)
    a, b = integers(rng, (2, 3, 5, 40)), integers(rng, (40, 24))
    a_scale = rng.uniform(0.5, 2, (2, 3, 5)).astype(np.float32)
    assert np.array_equal(multiply(kernel, a, b), exact(a, b))
    want = epilogue(exact(a, b).reshape(-1, 24), a_scale).reshape(2, 3, 5, 24)
    assert np.array_equal(multiply(kernel, a, b, a_scale=a_scale), want)


@pytest.mark.parametrize("kernel", ON)
def test_scales_that_are_not_finite_or_overflow(kernel):
    """They do what float32 arithmetic does, in their row or column alone."""
    a, b = np.full((3, 20), 100, np.int8), np.full((20, 3), 100, np.int8)
    a_scale = np.array([1, np.nan, np.inf], np.float32)
    got = multiply(kernel, a, b, a_scale=a_scale)
    assert (got[0] == 200000).all() and np.isnan(got[1]).all() and (got[2] == np.inf).all()
    assert np.isinf(multiply(kernel, a, b, out_dtype="float16")).all()  # 200000 > 65504


@pytest.mark.parametrize("kernel", ON)
def test_random_problems(kernel):
    """Shapes, layouts, scales and types at random; a failure prints the line that repeats it."""
    hypothesis = pytest.importorskip("hypothesis")
    st = hypothesis.strategies
    examples = os.environ.get("QFLASH_HYPOTHESIS_EXAMPLES")

    @hypothesis.settings(max_examples=int(examples or 60), derandomize=examples is None, database=None, deadline=None)
    @hypothesis.given(
        st.tuples(st.integers(0, 300), st.integers(0, 300), st.integers(0, 700)),
        st.sampled_from(LAYOUTS),
        st.sampled_from(GIVEN),
        st.sampled_from(list(DTYPES)),
    )
    def holds(shape, layout, given, dtype):
        hypothesis.assume(given != "one each" or (shape[0] and shape[1]))
        hypothesis.assume(is_served(kernel, shape))
        a, b = matrices(shape, layout)
        words = scales(*shape[:2], given)
        assert np.array_equal(multiply(kernel, a, b), exact(a, b))
        with np.errstate(over="ignore"):
            want = epilogue(exact(a, b), **words).astype(DTYPES[dtype])
        assert np.array_equal(multiply(kernel, a, b, out_dtype=dtype, **words), want)

    holds()


@pytest.mark.gpu
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kernel", CUDA)
def test_large_problems_on_a_gpu(kernel, layout):
    """More tiles than multiprocessors: the wide tiles of int8_gemm_tc, bands of tiles, tails on every side."""
    import torch

    for shape in ((2100, 4200, 1100), (4096, 2048, 1024)):
        skip_unserved(kernel, shape, layout)
        a, b = matrices(shape, layout)
        # Products of int8 in float64 BLAS are exact, and far faster than NumPy's integers.
        want = (torch.from_numpy(a.copy()).double() @ torch.from_numpy(b.copy()).double()).to(torch.int32).numpy()
        first = multiply(kernel, a, b)
        assert np.array_equal(first, want)
        for _ in range(5):
            assert np.array_equal(multiply(kernel, a, b), first)


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["k", "n"])
@pytest.mark.parametrize("kernel", CUDA)
def test_250_runs_the_same_bits(kernel, layout):
    shape = (2304, 2304, 640)
    skip_unserved(kernel, shape, layout)
    a, b = matrices(shape, layout)
    words = scales(2304, 2304, "all")
    first = multiply(kernel, a, b, out_dtype="float16", **words)
    for _ in range(250):
        assert np.array_equal(multiply(kernel, a, b, out_dtype="float16", **words), first)


ISAS = ("generic", "avx2", "avx512", "amx")


@pytest.mark.parametrize("isa", ISAS)
def test_every_instruction_set(isa):
    """The same sums and bits from each set that this machine has."""
    if ISAS.index(isa) >= ISAS.index(_native.cpu_isa()):
        pytest.skip(f"{isa} is what every other test runs, or this machine lacks it")
    chosen = "test_sums_are_exact or (test_scales_bias_and_types and all) or test_the_largest_sum_there_can_be"
    without = ["-p", "no:cacheprovider", "-p", "no:hypothesispytest"]  # which is slow to import
    command = [sys.executable, "-m", "pytest", "-q", *without, "-m", "not gpu", "-k", chosen, __file__]
    done = subprocess.run(command, env=os.environ | {"QFLASH_CPU_ISA": isa}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


def test_threads_do_not_change_a_bit():
    a, b = matrices((500, 600, 300), "n")
    words = scales(500, 600, "all")
    before = qflash.get_num_threads()
    try:
        results = []
        for threads in (1, 2, 5):
            qflash.set_num_threads(threads)
            results.append(qflash.int8_matmul(a, b, **words))
    finally:
        qflash.set_num_threads(before)
    assert all(np.array_equal(result, results[0]) for result in results)
