"""The INT8 GEMM kernels' own source run on the CPU, thread by thread (qflash/csrc/emulate): sums equal NumPy's to
the last bit for every tail, layout and alignment, on the tile shapes of every architecture, in any order of warps."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from qflash.backends import cuda
from qflash.call.spec import ACTIVATIONS, OP_DTYPES
from qflash.dispatch import BY_NAME, VARIANTS
from qflash.testing.emulator import ARCH, MOST_MULTIPROCESSORS, load
from qflash.testing.guarded import guarded
from qflash.testing.linear_problems import KINDS, activated, check_near

KERNELS = ("int8_gemm_tiled", "int8_gemm_tc")
# Of the emulated GPU. Wide tiles are for problems that have one for each: few of them make any problem large.
FEW, MANY = 1, MOST_MULTIPROCESSORS


def operands(shape, layout="k", gaps=(0, 0), at_end=False, seed=0):
    """a [m, k] and b [k, n], contiguous along k or n, with gaps between rows."""
    m, n, k = shape
    rng = np.random.default_rng([seed, *shape])
    a, b = (rng.integers(-128, 128, size, np.int8) for size in ((m, k), (n, k) if layout == "k" else (k, n)))
    a, b = (guarded(x, x.shape[1] + gap, at_end) for x, gap in zip((a, b), gaps, strict=True))
    return a, b.T if layout == "k" else b


def exact(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return a.astype(np.int32) @ b.astype(np.int32)


def run(library, kernel, a, b, dtype="int32", arch=90, seed=1, multiprocessors=MANY, pad=0, **scales):
    """The product, through memory that is full of a value no kernel writes."""
    (m, k), n = a.shape, b.shape[1]
    stride_k, stride_n = b.strides if b.size else (n, 1)  # NumPy has none for no elements; front ends say it so
    kind = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    memory = np.full((m, n + pad), 113, kind)
    fields = {
        "dtype": OP_DTYPES.index("int8"), "out_dtype": OP_DTYPES.index(dtype), "m": m, "n": n, "k": k, "x": a, "w": b,
        "x_stride_m": a.strides[0], "x_stride_k": 1, "w_stride_k": stride_k, "w_stride_n": stride_n,
        "out": memory, "out_stride_m": n + pad, **scales,
    }  # fmt: skip
    fields |= {f"{name}_stride": int(scales[name].size > 1) for name in ("x_scale", "w_scale") if name in scales}
    library(kernel, dtype, arch=arch).launch_struct("QfLinearParams", fields, seed, multiprocessors)
    assert (memory[:, n:] == 113).all()
    return memory[:, :n]


# m, n, k: one element, single rows and columns, exact tiles, one more and one less than tiles and vectors.
SHAPES = [
    (1, 1, 1),
    (1, 17, 3),
    (33, 1, 129),
    (16, 8, 32),
    (128, 128, 128),
    (130, 129, 65),
    (127, 140, 144),
    (5, 264, 384),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("layout", ["k", "n"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_sums_are_exact_whatever_the_shape(library, kernel, layout, shape):
    """Packed rows at the end of readable memory: seldom aligned, and nothing may be read past the last byte."""
    a, b = operands(shape, layout, at_end=True)
    assert np.array_equal(run(library, kernel, a, b), exact(a, b))


@pytest.mark.parametrize("gaps", [(0, 0), (16, 48), (3, 0), (0, 5), (4, 4)], ids=str)
@pytest.mark.parametrize("layout", ["k", "n"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_rows_may_lie_anywhere(library, kernel, layout, gaps):
    """Aligned at the start of readable memory, with gaps that keep (16) and break (3, 4, 5) the alignment of rows."""
    a, b = operands((40, 96, 208), layout, gaps)
    assert np.array_equal(run(library, kernel, a, b, pad=gaps[0]), exact(a, b))


@pytest.mark.parametrize("arch", [75, 80, 86])
@pytest.mark.parametrize("layout", ["k", "n"])
@pytest.mark.parametrize("aligned", [True, False])
def test_tile_shapes_of_other_architectures(library, arch, layout, aligned):
    a, b = operands((136, 144, 400 if aligned else 389), layout)
    assert np.array_equal(run(library, "int8_gemm_tc", a, b, arch=arch), exact(a, b))


@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize("layout", ["k", "n"])
@pytest.mark.parametrize("shape", [(128, 256, 128), (70, 272, 720), (1, 16, 16)], ids=str)
def test_wide_tiles(library, arch, layout, shape):
    a, b = operands(shape, layout)
    assert np.array_equal(run(library, "int8_gemm_tc", a, b, arch=arch, multiprocessors=FEW), exact(a, b))


@pytest.mark.parametrize("multiprocessors", [FEW, MANY])
@pytest.mark.parametrize("layout", ["k", "n"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_the_order_of_warps_does_not_matter(library, kernel, layout, multiprocessors):
    a, b = operands((130, 256, 528), layout)
    for seed in (2, 3):
        assert np.array_equal(run(library, kernel, a, b, seed=seed, multiprocessors=multiprocessors), exact(a, b))


@pytest.mark.parametrize("layout", ["k", "n"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_several_tiles_each_way(library, kernel, layout):
    """Bands of tiles: more than one, the last one short."""
    a, b = operands((128 * 16 + 5, 140, 16), layout)
    assert np.array_equal(run(library, kernel, a, b), exact(a, b))


@pytest.mark.parametrize("kernel", KERNELS)
def test_extreme_values(library, kernel):
    for value in (-128, 127):
        a, b = np.full((2, 1000), -128, np.int8), np.full((1000, 3), value, np.int8)
        assert (run(library, kernel, a, b) == -128 * value * 1000).all()


@pytest.mark.parametrize("kernel", KERNELS)
def test_no_products_at_all(library, kernel):
    """k = 0: sums are 0, so out is the bias."""
    a, b = np.empty((3, 0), np.int8), np.empty((0, 5), np.int8)
    bias = np.arange(5, dtype=np.float32)
    assert (run(library, kernel, a, b) == 0).all()
    assert (run(library, kernel, a, b, "float32", bias=bias) == bias).all()


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("given", [(), ("a",), ("b",), ("a", "b", "bias"), ("one a", "one b", "bias")], ids="+".join)
@pytest.mark.parametrize("kernel", KERNELS)
def test_scales_and_bias(library, kernel, dtype, given):
    """fma(float32(sum) * x_scale, w_scale, bias), rounded to the type of out; vector stores and, with a gap, single."""
    a, b = operands((37, 72, 160))
    rng = np.random.default_rng(1)
    arrays = {}
    for word in given:
        one, name = word.startswith("one"), word.split()[-1]
        size = 1 if one else {"a": 37, "b": 72, "bias": 72}[name]
        scale = 1.0 if name == "bias" else 0.01
        arrays[{"a": "x_scale", "b": "w_scale"}.get(name, name)] = rng.standard_normal(size).astype(
            np.float32
        ) * np.float32(scale)
    scaled = exact(a, b).astype(np.float32) * arrays.get("x_scale", np.ones(1, np.float32))[:, None]
    # The product of two float32 is exact in float64, so this rounds twice where fma rounds once: to 2^-53 first.
    want = scaled.astype(float) * arrays.get("w_scale", 1.0) + arrays.get("bias", 0.0)
    kind = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    for pad in (0, 8, 1):
        got = run(library, kernel, a, b, dtype, pad=pad, **arrays)
        with np.errstate(over="ignore"):
            assert np.array_equal(got, want.astype(np.float32).astype(kind))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "layout, aligned, multiprocessors", [("k", True, FEW), ("k", False, MANY), ("n", True, FEW), ("n", False, MANY)]
)
@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_activations(shared_cache, kernel, activation, layout, aligned, multiprocessors, dtype):
    """h of scaled integers is exact to a rounding; then activation, residual, and what a backward pass would want."""
    m, n, k = (40, 144, 160) if aligned else (37, 139, 131)
    gated, rng = activation == "swiglu", np.random.default_rng(5)
    x, w = operands((m, n, k), layout, at_end=not aligned)
    _, up = operands((m, n, k), layout, at_end=not aligned, seed=1)
    given = {"x": x, "w": w, "bias": rng.standard_normal(n).astype(np.float32)}
    given |= {f"{name}_scale": rng.uniform(0.001, 0.01, size).astype(np.float32) for name, size in (("x", m), ("w", n))}
    if gated:
        given |= {"up": up, "up_scale": np.full(1, 0.004, np.float32), "up_bias": given["bias"][::-1].copy()}
    given["residual"] = rng.standard_normal((m, n)).astype(KINDS[dtype])
    out, pre, pre_up = (np.full((m, n), 113, KINDS[dtype]) for _ in range(3))
    fields = {
        "dtype": OP_DTYPES.index("int8"), "out_dtype": OP_DTYPES.index(dtype), "m": m, "n": n, "k": k,
        "activation": ACTIVATIONS.index(activation), "x_stride_m": x.strides[0], "x_stride_k": 1,
        "w_stride_k": w.strides[0], "w_stride_n": w.strides[1], "up_stride_k": up.strides[0],
        "up_stride_n": up.strides[1], "x_scale_stride": 1, "w_scale_stride": 1, "residual_stride_m": n,
        "out": out, "out_stride_m": n, "pre": pre, "pre_up": pre_up if gated else None, **given,
    }  # fmt: skip
    spec = replace(VARIANTS[kernel].spec(ARCH, dtype), activation=activation)
    library = load(cuda.unit(BY_NAME[kernel], spec), shared_cache)
    library.launch_struct("QfLinearParams", fields, 1, multiprocessors)

    def scaled(weight, scale, bias):
        sums = exact(x, weight).astype(np.float32) * given["x_scale"][:, None]
        return (sums.astype(float) * scale + bias).astype(np.float32)

    h = scaled(w, given["w_scale"], given["bias"])
    u = scaled(up, given["up_scale"], given["up_bias"]) if gated else None
    assert np.array_equal(pre, h.astype(KINDS[dtype]))
    if gated:
        assert np.array_equal(pre_up, u.astype(KINDS[dtype]))
    want = activated(activation, h.astype(float), u) + given["residual"].astype(float)
    reach = 1.0 + np.abs(h) * (1.0 if u is None else np.abs(u)) + np.abs(want)
    check_near({"out": out}, {"out": want}, {"out": float(ml_dtypes.finfo(KINDS[dtype]).eps) * 4 * reach})
