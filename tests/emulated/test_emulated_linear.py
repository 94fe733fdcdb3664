"""The kernels of linear layers on the CPU, thread by thread (qflash/csrc/emulate): sums of small integers exact for
every tail, layout and alignment on the tile shapes of every architecture, in any order of warps; activations and
gradients within their bounds of float64."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from qflash.testing.emulated_linear import run_gradients, run_linear
from qflash.testing.emulator import MOST_MULTIPROCESSORS
from qflash.testing.linear_problems import KINDS, LinearProblem, check_near, gradients, linear, operands, upstream

# Of the emulated GPU. Wide tiles are for problems that have one for each: few of them make any problem large.
FEW, MANY = 1, MOST_MULTIPROCESSORS
LAYOUTS = [("k", "k"), ("k", "n"), ("m", "k"), ("m", "n")]
BOTH = pytest.mark.parametrize("layouts", LAYOUTS, ids="-".join)
EACH = pytest.mark.parametrize(
    "kernel, dtype", [("gemm_mma", "float16"), ("gemm_tiled", "float32"), ("gemm_tiled", "bfloat16")]
)


@pytest.fixture
def run(shared_cache):
    return partial(run_linear, shared_cache)


def whole(m: int, n: int, k: int, layouts: tuple[str, str], **words) -> LinearProblem:
    """Integers, and sums in float32."""
    x_layout, w_layout = layouts
    words = {"dtype": "float16", **words}
    return LinearProblem(m, n, k, out_dtype="float32", x_layout=x_layout, w_layout=w_layout, integers=True, **words)


def check_exact(run, kernel: str, case: LinearProblem, **how) -> None:
    arrays, results = run(kernel, case, **how)
    want, _ = linear(case, arrays)
    assert np.array_equal(results["out"], want["out"].astype(KINDS[case.out_dtype or case.dtype]))


# m, n, k: one element, single rows and columns, exact tiles, one more and one less than tiles and vectors.
SHAPES = [
    (1, 1, 1),
    (1, 17, 3),
    (33, 1, 65),
    (16, 8, 16),
    (128, 128, 64),
    (130, 129, 33),
    (127, 140, 72),
    (5, 264, 192),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@BOTH
@EACH
def test_sums_are_exact_whatever_the_shape(run, kernel, dtype, layouts, shape):
    """Packed rows at the end of readable memory: seldom aligned, and nothing may be read past the last byte."""
    check_exact(run, kernel, whole(*shape, layouts, dtype=dtype, at_end=True))


@pytest.mark.parametrize("gaps", [(0, 0), (8, 24), (3, 0), (0, 5)], ids=str)
@BOTH
@EACH
def test_rows_may_lie_anywhere(run, kernel, dtype, layouts, gaps):
    """Aligned at the start of readable memory, with gaps that keep (8) and break (3, 5) the alignment of rows."""
    check_exact(run, kernel, whole(40, 96, 104, layouts, dtype=dtype, gaps=gaps), pad=gaps[0])


@pytest.mark.parametrize("arch, dtype", [(75, "float16"), (80, "bfloat16"), (86, "float16")])
@pytest.mark.parametrize("aligned", [True, False])
@BOTH
def test_tile_shapes_of_other_architectures(run, arch, dtype, aligned, layouts):
    check_exact(run, "gemm_mma", whole(136, 144, 200 if aligned else 195, layouts, dtype=dtype), arch=arch)


@pytest.mark.parametrize("arch, dtype", [(80, "bfloat16"), (90, "float16")])
@pytest.mark.parametrize("shape", [(128, 256, 64), (72, 272, 360), (8, 8, 8)], ids=str)
@BOTH
def test_wide_tiles(run, arch, dtype, shape, layouts):
    check_exact(run, "gemm_mma", whole(*shape, layouts, dtype=dtype), arch=arch, multiprocessors=FEW)


@pytest.mark.parametrize("multiprocessors", [FEW, MANY])
@BOTH
def test_the_order_of_warps_does_not_matter(run, multiprocessors, layouts):
    for seed in (2, 3):
        case = whole(136, 256, 264, layouts)
        check_exact(run, "gemm_mma", case, seed=seed, multiprocessors=multiprocessors)
        check_exact(run, "gemm_tiled", replace(case, dtype="float32"), seed=seed)


@EACH
@pytest.mark.parametrize("layouts", [("k", "n"), ("m", "k")], ids="-".join)
def test_several_tiles_each_way(run, kernel, dtype, layouts):
    """Bands of tiles: more than one, the last one short."""
    check_exact(run, kernel, whole(128 * 16 + 5, 140, 8, layouts, dtype=dtype))


@EACH
@pytest.mark.parametrize("wide", [False, True])
def test_no_products_at_all(run, kernel, dtype, wide):
    """k = 0: sums are 0, so out is the bias."""
    out_dtype = "float32" if wide else dtype
    arrays, results = run(kernel, LinearProblem(3, 5, 0, dtype, out_dtype=out_dtype, bias=dtype))
    assert (results["out"] == arrays["bias"].astype(KINDS[out_dtype])).all()


# Each activation in one library of either kernel; between them every type of out and bias, and every way to load.
ENDINGS = [
    ("gemm_mma", "", 90, "float16"),
    ("gemm_mma", "gelu", 90, "float16"),
    ("gemm_mma", "gelu_tanh", 80, "bfloat16"),
    ("gemm_mma", "silu", 75, "float16"),
    ("gemm_mma", "swiglu", 90, "float16"),
    ("gemm_tiled", "", 90, "bfloat16"),
    ("gemm_tiled", "gelu", 90, "float32"),
    ("gemm_tiled", "gelu_tanh", 90, "float32"),
    ("gemm_tiled", "silu", 90, "float16"),
    ("gemm_tiled", "swiglu", 90, "float32"),
]


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("bias, residual", [("", False), ("float32", True), ("same", True)])
@pytest.mark.parametrize("kernel, activation, arch, dtype", ENDINGS)
def test_what_follows_the_sums(run, kernel, activation, arch, dtype, bias, residual, wide):
    """Bias, activation, residual and what the backward pass wants; vector stores and, with a gap, single ones."""
    bias, out_dtype = dtype if bias == "same" else bias, "float32" if wide else ""
    case = LinearProblem(37, 72, 80, dtype, activation, out_dtype, bias, residual)
    for pad in (0, 8, 1):
        arrays, results = run(kernel, case, arch=arch, pad=pad, keep_pre=True)
        check_near(results, *linear(case, arrays))


@pytest.mark.parametrize(
    "kernel, dtype, arch, multiprocessors",
    [
        ("gemm_mma", "float16", 75, MANY),
        ("gemm_mma", "float16", 90, MANY),
        ("gemm_mma", "float16", 90, FEW),
        ("gemm_tiled", "float32", 90, MANY),
        ("gemm_tiled", "float16", 90, MANY),
    ],
)
@pytest.mark.parametrize("aligned", [True, False])
@BOTH
def test_swiglu_in_every_layout(run, kernel, dtype, arch, multiprocessors, aligned, layouts):
    """Square and wide tiles, of which half of the columns are up's; tails on every side."""
    x_layout, w_layout = layouts
    n, k = (136, 72) if aligned else (139, 75)
    lies = {"x_layout": x_layout, "w_layout": w_layout, "at_end": not aligned}
    case = LinearProblem(40, n, k, dtype, "swiglu", bias="float32", **lies)
    arrays, results = run(kernel, case, arch=arch, multiprocessors=multiprocessors, keep_pre=True)
    check_near(results, *linear(case, arrays))


@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_a_row_that_is_not_finite_stays_one_row(run, activation):
    case = LinearProblem(20, 24, 40, activation=activation)
    arrays, plain = run("gemm_mma", case)
    x = arrays["x"].copy()
    x[3, 5] = np.nan
    _, results = run("gemm_mma", case, given=arrays | {"x": x})
    lost = np.isnan(results["out"].astype(float))
    assert lost[3].all() and not np.delete(lost, 3, axis=0).any()
    assert np.array_equal(np.delete(results["out"], 3, axis=0), np.delete(plain["out"], 3, axis=0))


# gelu_linear_wmma ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype, activation, arch", [("float16", "gelu", 75), ("bfloat16", "gelu_tanh", 80)])
@pytest.mark.parametrize("w_layout", ["k", "n"])
@pytest.mark.parametrize("shape", [(1, 1, 1), (37, 72, 80), (130, 139, 67), (128, 128, 32), (5, 9, 0)], ids=str)
def test_wmma(run, dtype, activation, arch, w_layout, shape):
    """Tails on every side, at the end of readable memory; both types of out."""
    for out_dtype in ("", "float32"):
        case = LinearProblem(*shape, dtype, activation, out_dtype, "float32", True, w_layout=w_layout, at_end=True)
        for seed in (1, 2):
            arrays, results = run("gelu_linear_wmma", case, arch=arch, seed=seed, keep_pre=True)
            check_near(results, *linear(case, arrays))


# Gradients -----------------------------------------------------------------------------------------------------------

# A library serves every activation; products on tensor cores and on CUDA cores.
LIBRARIES = [("float16", 90), ("bfloat16", 80), ("float16", 75), ("float32", 90), ("bfloat16", 75)]


def check_gradients(cache, case: LinearProblem, gap: int = 0, **how) -> None:
    arrays = operands(case)
    dout, saved = upstream(case, arrays, gap)
    want, bound = gradients(case, arrays, dout, saved)
    got = run_gradients(cache, case, arrays, dout, saved, **how)
    assert set(got) == set(want) if "wanted" not in how else set(got) == set(how["wanted"])
    check_near(got, want, bound)


@pytest.mark.parametrize("activation", ["", "gelu", "gelu_tanh", "silu", "swiglu"])
@pytest.mark.parametrize("w_layout", ["k", "n"])
@pytest.mark.parametrize("dtype, arch", LIBRARIES)
def test_gradients(shared_cache, dtype, arch, w_layout, activation):
    """Of everything, with every activation; a few columns more than whole vectors and steps."""
    case = LinearProblem(70, 72, 40, dtype, activation, bias=dtype, residual=True, w_layout=w_layout)
    check_gradients(shared_cache, case, arch=arch)


@pytest.mark.parametrize("activation", ["", "silu", "swiglu"])
@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 17, 5), (129, 9, 130), (65, 139, 67), (130, 64, 8)], ids=str)
@pytest.mark.parametrize("dtype, arch", [("float16", 90), ("float32", 90)])
def test_gradients_whatever_the_shape(shared_cache, dtype, arch, shape, activation):
    """Packed rows at the end of readable memory, seldom aligned; two chunks of rows."""
    case = LinearProblem(*shape, dtype, activation, bias="float32", residual=True, w_layout="n", at_end=True)
    check_gradients(shared_cache, case, arch=arch)


@pytest.mark.parametrize("w_layout", ["k", "n"])
@pytest.mark.parametrize("activation", ["", "swiglu"])
def test_gradients_by_wide_tiles(shared_cache, activation, w_layout):
    case = LinearProblem(136, 264, 264, activation=activation, w_layout=w_layout)
    check_gradients(shared_cache, case, multiprocessors=FEW)


@pytest.mark.parametrize("activation", ["", "gelu"])
def test_rows_of_dout_and_x_may_have_gaps(shared_cache, activation):
    for gap in (8, 3):
        case = LinearProblem(
            70, 40, 24, activation=activation, bias="float16", residual=True, gaps=(gap, 0), w_layout="n"
        )
        check_gradients(shared_cache, case, gap=gap)


@pytest.mark.parametrize("wanted", [("dx",), ("dw",), ("dbias",), ("dresidual",), ("dw", "dbias")], ids="-".join)
@pytest.mark.parametrize("activation", ["", "silu"])
def test_only_what_is_wanted(shared_cache, activation, wanted):
    case = LinearProblem(20, 24, 16, activation=activation, bias="float32", residual=True)
    check_gradients(shared_cache, case, wanted=wanted)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("shape", [(0, 5, 3), (5, 0, 3)], ids=str)
def test_gradients_of_nothing(shared_cache, dtype, shape):
    """Without rows dw and dbias are zeros, without columns dx is."""
    case = LinearProblem(*shape, dtype, "silu", bias="float32", residual=True, w_layout="n")
    check_gradients(shared_cache, case)


def test_gradients_are_the_same_in_every_order_of_warps(shared_cache):
    case = LinearProblem(300, 72, 40, activation="swiglu", bias="float32", residual=True)
    arrays = operands(case)
    dout, saved = upstream(case, arrays)
    runs = [run_gradients(shared_cache, case, arrays, dout, saved, seed=seed) for seed in (1, 2)]
    for name, x in runs[0].items():
        assert np.array_equal(x, runs[1][name]), name
