"""`quantize`'s kernel for rows of a matrix (rows.cuh), run on the CPU thread by thread: the replay's bits, and those of
the kernels that serve everything else."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from qflash.call.spec import DTYPES
from qflash.reference import quantize as replay

UNTOUCHED = 77
TYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
# Below the shortest row, at it, one and several warps, a last piece that is not full, places of both kinds, the
# longest, past it; and rows that do not come in pieces of eight.
WIDTHS = (1, 7, 8, 100, 504, 512, 520, 1032, 4096, 8192, 8200, 16384, 16392, 28672, 32768, 32776)


def run(library, x, order=1, sums=False, gap=0):
    """(values, scale) of a matrix. gap: channels between rows of values, which must stay as they are; sums: ask for
    them too, which rows.cuh does not serve."""
    rows, width = x.shape
    values = np.full((rows, width + gap), UNTOUCHED, np.int8)
    scale = np.full(rows, UNTOUCHED, np.float32)
    step = x.strides[0] // x.itemsize
    fields = {
        "batch": 1, "length": rows, "heads": 1, "head_dim": width, "dtype": DTYPES.index(np.dtype(x.dtype).name),
        "granularity": 1, "group": 1, "symmetric": 1, "x.data": x, "x.stride_b": rows * step, "x.stride_t": step,
        "x.stride_h": width, "values.data": values, "values.stride_b": values.size, "values.stride_t": width + gap,
        "values.stride_h": width, "scale": scale, "sums": np.full(rows, UNTOUCHED, np.int32) if sums else None,
    }  # fmt: skip
    library("quantize", np.dtype(x.dtype).name).launch_struct("QfQuantizeParams", fields, order)
    assert (values[:, width:] == UNTOUCHED).all()
    return values[:, :width], scale


def check(library, x, gap=0):
    want = replay.quantize(np.ascontiguousarray(x)[None, :, None], group=1)
    for order, sums in ((1, False), (2, False), (1, True)):
        values, scale = run(library, x, order, sums, gap)
        np.testing.assert_array_equal(values, want.values[0, :, 0])
        np.testing.assert_array_equal(scale.view(np.uint32), want.scale.reshape(-1).view(np.uint32))


def matrix(rows, width, dtype, seed=0):
    """Normal numbers with one that is far larger, in another place of each row."""
    generator = np.random.default_rng(seed)
    x = generator.standard_normal((rows, width), np.float32)
    x[np.arange(rows), generator.integers(0, width, rows)] *= 30
    return x.astype(TYPES[dtype])


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("width", WIDTHS)
def test_widths(library, width, dtype):
    check(library, matrix(2, width, dtype, seed=width))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("width", [512, 1000, 2600])
def test_the_largest_may_stand_anywhere(library, width, dtype):
    """Of either sign, in either half of a word, at a row's ends and around those of a warp's places."""
    places = sorted({0, 1, 2, 7, 8, 255, 256, 511, width // 2, width - 257, width - 2, width - 1})
    x = np.full((len(places), width), 0.75, TYPES[dtype])
    x[np.arange(len(places)), places] = [(-1) ** i * (1 + i / 64) for i in range(len(places))]
    check(library, x)


@pytest.mark.parametrize("dtype", TYPES)
def test_rows_without_numbers_of_use(library, dtype):
    """Zeros of both signs, what is too small for a scale, the largest, and rows that are not finite."""
    limits = ml_dtypes.finfo(TYPES[dtype])
    x = matrix(12, 1032, dtype)
    x[0], x[1], x[2] = 0.0, -0.0, limits.smallest_subnormal
    x[3] = 0.0
    x[3, 1031] = -limits.smallest_subnormal
    x[4, ::3], x[5, 5] = limits.max, limits.min
    x[6, 0], x[7, 1031], x[8, 517] = np.nan, np.inf, -np.inf
    x[9, 3], x[9, 4] = np.nan, np.inf
    x[10] = np.nan
    check(library, x)


@pytest.mark.parametrize("dtype", TYPES)
def test_strided_rows(library, dtype):
    """Aligned ones, and such that only single elements can be read or written of."""
    wide = matrix(3, 700, dtype)
    check(library, wide[:, 8:648])
    check(library, wide[:, :640], gap=24)
    check(library, wide[:, 1:641])
    check(library, wide[:, :640], gap=3)
    check(library, matrix(3, 641, dtype)[:, :640])
    check(library, wide[::2, :640])


def test_rows_of_no_stride_and_no_rows(library):
    one = matrix(1, 640, "bfloat16")
    check(library, np.broadcast_to(one, (3, 640)))
    values, scale = run(library, matrix(0, 640, "bfloat16"))
    assert values.shape == (0, 640) and scale.shape == (0,)
