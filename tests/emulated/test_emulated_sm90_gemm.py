"""`sm90_gemm` run on the CPU, thread by thread and cluster by cluster: every tile, layout, edge and epilogue against
float64, integers to the bit, in any order that warps, copies and products may run in."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import qflash
from qflash import NoKernelError, dispatch
from qflash.backends import cuda
from qflash.call.spec import ACTIVATIONS, Spec
from qflash.testing import emulator
from qflash.testing.emulator import packed, poisoned
from qflash.testing.gemm_case import GemmCase, check_same_bits, run

KERNEL = dispatch.BY_NAME["sm90_gemm"]
# Of the emulated GPU (gemm/policy.h): with two the large tile serves, with many the small one, and splits of k.
PAIR, MANY = 2, 64
THREE_PAIRS, FOUR_PAIRS = 6, 8  # with more than a wave of tiles: the last one is cut along k


@pytest.fixture
def library(shared_cache):
    """library(case): the library that serves it."""

    def get(case: GemmCase) -> emulator.Library:
        dtype = case.out_dtype if case.dtype == "int8" else case.dtype
        spec = Spec("cuda", 90, dtype, precision=case.precision, op="linear", activation=case.activation)
        return emulator.load(cuda.unit(KERNEL, spec), shared_cache)

    return get


@pytest.fixture
def check(library):
    """check(case): under two schedules, with the same bits."""

    def run_twice(case: GemmCase, seeds: tuple[int, ...] = (0, 1)) -> dict:
        first = None
        for seed in seeds:
            arrays = run(library(case), case, seed)
            case.check(arrays)
            check_same_bits(case, first or arrays, arrays)
            first = first or arrays
        return first

    return run_twice


# One element, single rows and columns, whole tiles, one more and one less of everything; k around a step.
SHAPES = [
    (1, 1, 1), (1, 17, 3), (33, 1, 129), (64, 128, 64), (65, 129, 65), (128, 256, 128), (129, 257, 127),
    (256, 512, 256), (257, 130, 300), (385, 40, 640),
]  # fmt: skip


@pytest.mark.parametrize("multiprocessors", [PAIR, MANY])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("dtype", "w_along"), [("float16", "k"), ("bfloat16", "n"), ("int8", "k")])
def test_every_shape(check, dtype, w_along, shape, multiprocessors):
    """Rows that the copy engine cannot walk among them: odd n and k."""
    check(GemmCase(*shape, dtype, w_along=w_along, multiprocessors=multiprocessors))


# (tile, splits of k) of sm90_gemm_shapes.cu: the large one of clusters of one, of two, of two without a lag; the
# small one.
TILES = [(0, 1), (0, 3), (1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (3, 1), (3, 2), (3, 5)]


def steps(splits: int) -> int:
    """Steps along k that no number of splits but one divides. The workspace has room for splits of four and more."""
    return max(11, 4 * splits + 1)


def run_tile(source, case: GemmCase, tile: int, splits: int, seed: int, whole: int = 0) -> dict:
    library, arrays, workspace = source("sm90_gemm_shapes.cu"), case.arrays(), poisoned(1 << 26)
    fields = {**case.fields(arrays), "workspace": workspace, "workspace_bytes": workspace.nbytes}
    library.schedule(seed, 5)
    status = library.handle.try_gemm(packed("QfLinearParams", fields), tile, splits, whole)
    assert status == 0, library.complaint or status
    return arrays


@pytest.mark.parametrize(
    "along", ["kk", "kn", *(pytest.param(along, marks=pytest.mark.slow) for along in ("mk", "mn"))]
)
@pytest.mark.parametrize(("tile", "splits"), TILES)
def test_every_tile_and_layout(emulated_source, tile, splits, along):
    """x along m is what a backward pass wants (sm90_linear_bwd); no library of the forward pass has it."""
    k = 64 * steps(splits)
    for case in (
        GemmCase(300, 530, k - 54, x_along=along[0], w_along=along[1]),
        GemmCase(136, 264, k, x_along=along[0], w_along=along[1], bias="bfloat16"),
    ):
        first = run_tile(emulated_source, case, tile, splits, seed=tile)
        case.check(first)
        check_same_bits(case, first, run_tile(emulated_source, case, tile, splits, seed=tile + 7))


@pytest.mark.parametrize(("tile", "splits"), TILES)
def test_every_tile_of_integers(emulated_source, tile, splits):
    """To the bit, however k is cut."""
    k = 128 * steps(splits)
    case = GemmCase(300, 530, k - 98, "int8")
    case.check(run_tile(emulated_source, case, tile, splits, seed=splits))
    case = GemmCase(200, 140, k, "int8", "bfloat16", "swiglu", scales="each", bias="float32", pre=True)
    case.check(run_tile(emulated_source, case, tile, splits, seed=splits))


@pytest.mark.parametrize("seed", [pytest.param(i, marks=pytest.mark.slow) if i >= 8 else i for i in range(12)])
@pytest.mark.parametrize(("tile", "splits"), [(0, 1), (1, 1), (1, 2), (3, 2)])
def test_whoever_is_slow(emulated_source, tile, splits, seed):
    """Rings that go round several times, tiles without end between them: no phase may be missed, of either block."""
    case = GemmCase(390, 300, 1000, bias="float32")
    case.check(run_tile(emulated_source, case, tile, splits, seed))


# (tile, rows and columns of its clusters, splits of k, whole tiles): one wave of them, a part of one, several; all
# tiles but one, and one alone.
WHOLE = [(0, (128, 256), 3, 5), (1, (256, 256), 2, 2), (1, (256, 256), 4, 5), (1, (256, 256), 2, 1),
         (2, (256, 256), 2, 4), (3, (64, 128), 3, 20)]  # fmt: skip


@pytest.mark.parametrize(("tile", "shape", "splits", "whole"), WHOLE)
def test_whole_tiles_then_splits(emulated_source, tile, shape, splits, whole):
    """Whole tiles have the bits that they have without splits. Those that are cut have theirs in every order."""
    case = GemmCase(300, 530, 64 * steps(splits) - 54, bias="float32", residual=True)
    uncut = run_tile(emulated_source, case, tile, 1, seed=0)
    first = run_tile(emulated_source, case, tile, splits, 1, whole)
    case.check(first)
    check_same_bits(case, first, run_tile(emulated_source, case, tile, splits, 2, whole))
    # Bands hold every row of this problem: tiles are counted down a column, then in the next.
    rows = -(-case.m // shape[0])
    out, want = (np.asarray(arrays["out"]) for arrays in (first, uncut))
    for i in range(whole):
        row, column = i % rows * shape[0], i // rows * shape[1]
        own = np.s_[row : row + shape[0], column : column + shape[1]]
        np.testing.assert_array_equal(out[own], want[own])


@pytest.mark.parametrize(("tile", "shape", "splits", "whole"), WHOLE)
def test_whole_tiles_of_integers_then_splits(emulated_source, tile, shape, splits, whole):
    k = 128 * steps(splits)
    case = GemmCase(300, 530, k - 98, "int8")
    case.check(run_tile(emulated_source, case, tile, splits, 3, whole))
    case = GemmCase(300, 270, k, "int8", "bfloat16", "swiglu", scales="each", bias="float32", pre=True)
    case.check(run_tile(emulated_source, case, tile, splits, 4, whole))


# Of 40 or 41 steps: four tiles on three pairs of multiprocessors, six on four. One and two are left for the last wave.
LAST_WAVES = [
    GemmCase(136, 800, 2560, bias="float32", multiprocessors=THREE_PAIRS),
    GemmCase(300, 530, 2562, "float16", "float32", "gelu", w_along="n", bias="float16", multiprocessors=FOUR_PAIRS),
    GemmCase(136, 400, 2560, activation="swiglu", bias="float32", residual=True, pre=True, multiprocessors=THREE_PAIRS),
    GemmCase(300, 530, 5120, "int8", multiprocessors=FOUR_PAIRS),
    GemmCase(136, 400, 5121, "int8", "bfloat16", "swiglu", scales="each", bias="float32", multiprocessors=THREE_PAIRS),
]  # fmt: skip


@pytest.mark.parametrize("case", LAST_WAVES, ids=lambda case: f"{case.dtype}-{case.activation}-{case.multiprocessors}")
def test_the_last_wave_is_cut_along_k(library, case):
    """By the policy. The first wave has the bits of a GPU that cuts none, what is cut has the same bits whoever comes
    last to it."""
    first = run(library(case), case, 0)
    case.check(first)
    check_same_bits(case, first, run(library(case), case, 1))
    uncut = run(library(case), replace(case, multiprocessors=PAIR))
    out, want = (np.asarray(arrays["out"]) for arrays in (first, uncut))
    rows, columns = -(-case.m // 256), 128 if case.activation == "swiglu" else 256
    whole = case.multiprocessors // 2 // rows * columns  # columns of results, in the first wave
    np.testing.assert_array_equal(out[:, :whole], want[:, :whole])
    if case.out_dtype == "float32":  # where sums in another order show
        assert (out[:, whole:] != want[:, whole:]).any()


@pytest.mark.parametrize("multiprocessors", [PAIR, 6, MANY])
def test_bands_of_tiles(check, multiprocessors):
    """More row tiles than a band has, an odd number of them, the last band short."""
    check(GemmCase(128 * 17 + 5, 300, 70, multiprocessors=multiprocessors), seeds=(0,))


@pytest.mark.parametrize("multiprocessors", [PAIR, MANY])
@pytest.mark.parametrize(
    ("gaps", "offsets"),
    [((8, 16, 8), (0, 0, 0)), ((1, 0, 0), (0, 0, 0)), ((0, 3, 0), (0, 0, 0)), ((0, 0, 1), (0, 0, 0)),
     ((0, 0, 0), (1, 0, 0)), ((0, 0, 0), (0, 1, 0)), ((0, 0, 0), (0, 0, 1)), ((5, 7, 3), (3, 1, 5))],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize(("dtype", "w_along"), [("bfloat16", "k"), ("float16", "n"), ("int8", "k")])
def test_matrices_may_lie_anywhere(check, dtype, w_along, gaps, offsets, multiprocessors):
    """Gaps that keep and break the alignment of rows, addresses that nobody could plan for; nothing between rows of out
    is written."""
    words = {"out_dtype": "float16", "scales": "each"} if dtype == "int8" else {}
    case = GemmCase(150, 200, 208, dtype, w_along=w_along, gaps=gaps, offsets=offsets, residual=True, **words)
    check(replace(case, multiprocessors=multiprocessors), seeds=(0,))


@pytest.mark.parametrize("more", ["", "pre", "residual", "pre residual"])
@pytest.mark.parametrize("out_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_what_follows_a_product(check, activation, out_dtype, more):
    """Whole rows of 16 bytes and odd ones; bias of either type; h and u kept beside out."""
    words = {"activation": activation, "pre": "pre" in more, "residual": "residual" in more}
    check(GemmCase(150, 200, 130, "bfloat16", out_dtype, bias="float32", **words))
    check(GemmCase(150, 199, 130, "bfloat16", out_dtype, bias="bfloat16", w_along="n", **words), seeds=(0,))
    check(GemmCase(20, 200, 2000, "bfloat16", out_dtype, multiprocessors=MANY, **words), seeds=(0,))


@pytest.mark.parametrize("scales", ["", "one", "each"])
@pytest.mark.parametrize(
    ("out_dtype", "activation"), [("float32", ""), ("float16", ""), *(("bfloat16", word) for word in ACTIVATIONS)]
)
def test_what_follows_a_product_of_integers(check, activation, out_dtype, scales):
    """fma(float(sum) * x_scale, w_scale, bias) to the bit, and the activation of that."""
    case = GemmCase(150, 200, 260, "int8", out_dtype, activation, scales=scales, bias="float32", pre=bool(activation))
    if scales or not activation:  # sums themselves are too large for some activations of float16
        check(case)
    bias = out_dtype if scales else ""
    check(replace(case, m=9, n=131, k=3000, scales="each", bias=bias, residual=True, multiprocessors=MANY), seeds=(0,))


def test_scaled_integers_equal_the_cpus(library):
    rng = np.random.default_rng(0)
    case = GemmCase(150, 200, 260, "int8", "float32", scales="each", bias="float32")
    arrays = run(library(case), case)
    x_scale, w_scale = (arrays[name] * np.float32(rng.uniform(1, 2)) for name in ("x_scale", "w_scale"))
    arrays |= {"x_scale": x_scale, "w_scale": w_scale}
    library(case).launch_struct("QfLinearParams", case.fields(arrays), 3, MANY)
    cpu = qflash.int8_matmul(np.asarray(arrays["x"]), np.asarray(arrays["w"]), x_scale, w_scale, arrays["bias"])
    np.testing.assert_array_equal(arrays["out"], cpu)


@pytest.mark.parametrize("multiprocessors", [PAIR, MANY])
@pytest.mark.parametrize("activation", ["", "gelu", "gelu_tanh", "silu", "swiglu"])
def test_what_is_not_finite_stays_in_its_row_or_column(check, activation, multiprocessors):
    """NaN and infinity of x reach their row, of w and bias their column, of the residual their element."""
    plant = (
        ("x", (5, 3), np.nan), ("x", (140, 100), np.inf), ("x", (141, 7), -np.inf), ("w", (17, 150), np.nan),
        ("bias", (20, 0), -np.inf), ("residual", (30, 31), np.nan),
    )  # fmt: skip
    case = GemmCase(150, 200, 130, activation=activation, bias="float32", residual=True, plant=plant)
    arrays = check(replace(case, multiprocessors=multiprocessors))
    finite = np.isfinite(arrays["out"].astype(np.float32))
    assert not finite[5].any() and not finite[:, 150].any() and not finite[30, 31]
    clean = np.ones((150, 200), bool)
    clean[[5, 140, 141]] = clean[:, [20, 150]] = clean[30, 31] = False
    assert finite[clean].all()


def test_scales_that_are_not_finite(check):
    plant = (("x_scale", (3, 0), np.nan), ("w_scale", (7, 0), np.inf))
    arrays = check(GemmCase(40, 50, 64, "int8", "float32", scales="each", plant=plant))
    assert np.isnan(arrays["out"][3]).all() and np.isnan(arrays["out"]).sum() == 50


@pytest.mark.parametrize("multiprocessors", [PAIR, MANY])
@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_no_products_at_all(check, dtype, multiprocessors):
    """k = 0: sums are 0, so out is what follows of the bias."""
    out_dtype = "bfloat16" if dtype == "int8" else ""
    check(GemmCase(140, 72, 0, dtype, out_dtype, "gelu", bias="float32", multiprocessors=multiprocessors))


def test_extreme_integers(library):
    for value in (-128, 127):
        case = GemmCase(130, 20, 1000, "int8")
        arrays = case.arrays()
        arrays["x"][...], arrays["w"][...] = -128, value
        library(case).launch_struct("QfLinearParams", case.fields(arrays), 0, PAIR)
        assert (arrays["out"] == -128 * value * 1000).all()


def test_few_rows_are_cut_along_k(library):
    """One row to seventeen, many splits: the same bits whoever comes last, and again with counters that were used."""
    for m in (1, 2, 16, 17, 64):
        case = GemmCase(m, 200, 4000, bias="float32", multiprocessors=MANY)
        first = None
        for seed in range(3):
            arrays = run(library(case), case, seed)
            case.check(arrays)
            check_same_bits(case, first or arrays, arrays)
            first = first or arrays


def test_what_it_refuses(library):
    case = GemmCase(16, 16, 16)
    arrays = case.arrays()
    for change in ({"activation": 1}, {"dtype": 1}, {"out_dtype": 1}, {"x_stride_k": 2}, {"k": 1 << 40}, {"m": -1}):
        with pytest.raises(
            NoKernelError, match="kernel 'sm90_gemm' was built for another dtype, out_dtype or activation"
        ):
            library(case).launch_struct("QfLinearParams", {**case.fields(arrays), **change})
    gated = GemmCase(16, 16, 16, activation="swiglu")
    with pytest.raises(NoKernelError, match="up not as w"):
        library(gated).launch_struct("QfLinearParams", {**gated.fields(gated.arrays()), "up_stride_k": 16})
    integers = GemmCase(16, 16, 16, "int8", w_along="n")
    with pytest.raises(NoKernelError, match="int8: not along k"):
        run(library(integers), integers)
    spec = Spec("cuda", 90, "bfloat16", precision="int8", op="linear", layout="n")
    assert dispatch.choose(spec).name != KERNEL.name
    with pytest.raises(NoKernelError, match="contiguous along k"):
        dispatch.choose(spec, KERNEL.name)
    with pytest.raises(NoKernelError, match="multiplies float16, bfloat16 and int8, not float32"):
        dispatch.choose(Spec("cuda", 90, "float32", op="linear"), KERNEL.name)


def test_a_workspace_that_is_too_small_is_refused(emulated_source):
    case = GemmCase(20, 200, 4001)
    arrays, workspace = case.arrays(), poisoned(1000)
    fields = {**case.fields(arrays), "workspace": workspace, "workspace_bytes": workspace.nbytes}
    no_memory, library = 100002, emulated_source("sm90_gemm_shapes.cu")
    assert library.handle.try_gemm(packed("QfLinearParams", fields), 3, 4, 0) == no_memory
