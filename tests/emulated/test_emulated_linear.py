"""The kernels of linear layers on the CPU, thread by thread (qflash/csrc/emulate): sums of small integers exact for every
tail, layout and alignment on the tile shapes of every architecture, in any order of warps; activations and gradients
within their bounds of float64."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from qflash.testing.emulated_linear import run_linear
from qflash.testing.emulator import MOST_MULTIPROCESSORS
from qflash.testing.linear import KINDS, LinearCase, check_near, linear

# Of the emulated GPU. Wide tiles are for problems that have one for each: few of them make any problem large.
FEW, MANY = 1, MOST_MULTIPROCESSORS
LAYOUTS = [("k", "k"), ("k", "n"), ("m", "k"), ("m", "n")]
BOTH = pytest.mark.parametrize("layouts", LAYOUTS, ids="-".join)


@pytest.fixture
def run(shared_cache):
    return partial(run_linear, shared_cache)


def whole(m: int, n: int, k: int, layouts: tuple[str, str], **words) -> LinearCase:
    """Integers, and sums in float32."""
    x_layout, w_layout = layouts
    words = {"dtype": "float16", "out_dtype": "float32", **words}
    return LinearCase(m, n, k, x_layout=x_layout, w_layout=w_layout, integers=True, **words)


def check_exact(run, kernel: str, case: LinearCase, **how) -> None:
    arrays, results = run(kernel, case, **how)
    want, _ = linear(case, arrays)
    assert np.array_equal(results["out"], want["out"].astype(KINDS[case.out_dtype or case.dtype]))


# m, n, k: one element, single rows and columns, exact tiles, one more and one less than tiles and vectors.
SHAPES = [(1, 1, 1), (1, 17, 3), (33, 1, 65), (16, 8, 16), (128, 128, 64), (130, 129, 33), (127, 140, 72), (5, 264, 192)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@BOTH
def test_sums_are_exact_whatever_the_shape(run, layouts, shape):
    """Packed rows at the end of readable memory: seldom aligned, and nothing may be read past the last byte."""
    check_exact(run, "gemm_mma", whole(*shape, layouts, at_end=True))


@pytest.mark.parametrize("gaps", [(0, 0), (8, 24), (3, 0), (0, 5), (4, 4)], ids=str)
@BOTH
def test_rows_may_lie_anywhere(run, layouts, gaps):
    """Aligned at the start of readable memory, with gaps that keep (8) and break (3, 4, 5) the alignment of rows."""
    check_exact(run, "gemm_mma", whole(40, 96, 104, layouts, gaps=gaps), pad=gaps[0])


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
        check_exact(run, "gemm_mma", whole(136, 256, 264, layouts), seed=seed, multiprocessors=multiprocessors)


@BOTH
def test_several_tiles_each_way(run, layouts):
    """Bands of tiles: more than one, the last one short."""
    check_exact(run, "gemm_mma", whole(128 * 16 + 5, 140, 8, layouts))


@pytest.mark.parametrize("out_dtype", ["float16", "float32"])
def test_no_products_at_all(run, out_dtype):
    """k = 0: sums are 0, so out is the bias."""
    case = LinearCase(3, 5, 0, out_dtype=out_dtype, bias="float16")
    arrays, results = run("gemm_mma", case)
    assert (results["out"] == arrays["bias"].astype(KINDS[out_dtype])).all()


# Each activation in one library; between them every type of out and bias, and every architecture's way to load.
ENDINGS = [("", 90, "float16"), ("gelu", 90, "float16"), ("gelu_tanh", 80, "bfloat16"), ("silu", 75, "float16"),
           ("swiglu", 90, "float16")]  # fmt: skip


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("bias, residual", [("", False), ("float32", True), ("same", True)])
@pytest.mark.parametrize("activation, arch, dtype", ENDINGS)
def test_what_follows_the_sums(run, activation, arch, dtype, bias, residual, wide):
    """Bias, activation, residual and what the backward pass wants; vector stores and, with a gap, single ones."""
    case = LinearCase(37, 72, 80, dtype, activation, "float32" if wide else "", dtype if bias == "same" else bias, residual)
    for pad in (0, 8, 1):
        arrays, results = run("gemm_mma", case, arch=arch, pad=pad, keep_pre=True)
        check_near(results, *linear(case, arrays))


@pytest.mark.parametrize("arch, dtype, multiprocessors", [(75, "float16", MANY), (90, "float16", MANY), (90, "float16", FEW)])
@pytest.mark.parametrize("aligned", [True, False])
@BOTH
def test_swiglu_in_every_layout(run, arch, dtype, multiprocessors, aligned, layouts):
    """Square and wide tiles, of which half of the columns are up's; tails on every side."""
    case = LinearCase(40, 136 if aligned else 139, 72 if aligned else 75, dtype, "swiglu", bias="float32",
                      x_layout=layouts[0], w_layout=layouts[1], at_end=not aligned)  # fmt: skip
    arrays, results = run("gemm_mma", case, arch=arch, multiprocessors=multiprocessors, keep_pre=True)
    check_near(results, *linear(case, arrays))


@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_a_row_that_is_not_finite_stays_one_row(run, activation):
    case = LinearCase(20, 24, 40, activation=activation)
    arrays, plain = run("gemm_mma", case)
    x = arrays["x"].copy()
    x[3, 5] = np.nan
    _, results = run("gemm_mma", case, given=arrays | {"x": x})
    lost = np.isnan(results["out"].astype(float))
    assert lost[3].all() and not np.delete(lost, 3, axis=0).any()
    assert np.array_equal(np.delete(results["out"], 3, axis=0), np.delete(plain["out"], 3, axis=0))
