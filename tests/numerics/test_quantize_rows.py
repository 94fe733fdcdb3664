"""Rows of a matrix with a scale each, as linear(precision="int8") quantizes x: the replay's bits on every device, at
any width, whichever of a device's kernels serves it (csrc/kernels/quantize/quantize/rows.cuh)."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import qflash
from qflash import dispatch
from qflash.reference import quantize as replay
from qflash.testing.runner import to_torch

CPU = [row.name for row in dispatch.kernels_of("quantize", "cpu")]
CUDA = [row.name for row in dispatch.kernels_of("quantize", "cuda")]
ON = [*CPU, *(pytest.param(name, marks=pytest.mark.gpu) for name in CUDA)]
TYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
WIDTHS = (1, 7, 8, 100, 504, 512, 520, 1032, 4096, 8192, 8200, 16384, 16392, 28672, 32768, 32776, 65536)


def quantized(kernel, x, columns=slice(None)):
    """(values, bits of the scales) of some columns of x, which are a view of all of them."""
    if kernel in CPU:
        got = qflash.quantize(x[:, columns], granularity="token", kernel=kernel)
        return got.values, got.scale.view(np.uint32)
    got = qflash.quantize(to_torch(x).cuda()[:, columns], granularity="token", kernel=kernel)
    return got.values.cpu().numpy(), got.scale.cpu().numpy().view(np.uint32)


def check(kernel, x, columns=slice(None)):
    want = replay.quantize(np.ascontiguousarray(x[:, columns])[None, :, None], group=1)
    values, scale = quantized(kernel, x, columns)
    np.testing.assert_array_equal(values, want.values[0, :, 0])
    np.testing.assert_array_equal(scale, want.scale.reshape(-1).view(np.uint32))


def matrix(rows, width, dtype):
    """Normal numbers with one that is far larger, in another place of each row."""
    generator = np.random.default_rng(width)
    x = generator.standard_normal((rows, width), np.float32)
    x[np.arange(rows), generator.integers(0, width, rows)] *= 30
    return x.astype(TYPES[dtype])


@pytest.mark.parametrize("kernel", ON)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("width", WIDTHS)
def test_widths(kernel, width, dtype):
    for rows in (1, 37):
        check(kernel, matrix(rows, width, dtype))


@pytest.mark.parametrize("kernel", ON)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("width", [512, 8192, 28672])
def test_rows_without_numbers_of_use(kernel, width, dtype):
    """Zeros of both signs, what is too small for a scale, the largest, and rows that are not finite."""
    limits = ml_dtypes.finfo(TYPES[dtype])
    x = matrix(9, width, dtype)
    x[0], x[1], x[2], x[3, ::3] = 0.0, -0.0, limits.smallest_subnormal, limits.min
    x[4, 0], x[5, -1], x[6, width // 2], x[7] = np.nan, np.inf, -np.inf, np.nan
    check(kernel, x)


@pytest.mark.parametrize("kernel", ON)
@pytest.mark.parametrize("dtype", TYPES)
def test_views(kernel, dtype):
    """Rows that begin at whole 16 bytes, and such that do not."""
    x = matrix(5, 4112, dtype)
    for columns in (slice(8, 4104), slice(0, 4096), slice(1, 4097), slice(3, 1003)):
        check(kernel, x, columns)
    check(kernel, matrix(5, 4097, dtype), slice(0, 4096))


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 64, 4096])
def test_kernels_that_follow_each_other_without_a_wait(rows):
    """x is written just before, its integers are read just after and their memory is used again at once: what overlaps
    must still wait. The same calls with a synchronization after each give the same bits."""
    import torch

    def steps(wait):
        x = torch.linspace(-1, 1, rows * 8192, device="cuda", dtype=torch.float32).reshape(rows, 8192).bfloat16()
        seen = []
        for step in range(20):
            x = (x * 1.01 + step / 7).roll(1, 1)
            wait()
            got = qflash.quantize(x, granularity="token")
            wait()
            seen.append(got.values.sum(1, dtype=torch.int64).double() * got.scale)
            wait()
        return torch.stack(seen)

    assert torch.equal(steps(lambda: None), steps(torch.cuda.synchronize))


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 64, 4096])
def test_a_linear_layer_that_follows_at_once(rows):
    """linear on x, whose product may start before the pass that quantizes x is done, is that on waited-for integers."""
    import torch

    w = torch.randn(8192, 512, device="cuda", generator=torch.Generator("cuda").manual_seed(1)).bfloat16()
    layer = qflash.quantize_linear(w)

    def steps(wait):
        x = torch.linspace(-1, 1, rows * 8192, device="cuda", dtype=torch.float32).reshape(rows, 8192).bfloat16()
        seen = []
        for step in range(20):
            x = (x * 1.01 + step / 7).roll(1, 1)
            wait()
            seen.append(qflash.linear(x, layer))
            wait()
        return torch.stack(seen)

    assert torch.equal(steps(lambda: None), steps(torch.cuda.synchronize))
