"""softmax, layer_norm and cross_entropy through the public API, against float64 within counted roundings.

One case list (qflash/testing/rows.py) for the CPU engine and for CUDA, which the emulator runs too
(tests/emulated/test_emulated_reductions.py).
"""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

import qflash
from qflash.testing.rows import (
    LONG,
    LONGEST,
    SMALL,
    WHAT,
    RowCase,
    check_cross_entropy,
    check_layer_norm,
    check_softmax,
)
from qflash.testing.runner import to_numpy, to_torch

CUDA = pytest.param("cuda", marks=pytest.mark.gpu)
PLACES = ["cpu", CUDA]


def on(place: str):
    """From NumPy arrays to what is computed with there."""
    return (lambda x: x) if place == "cpu" else (lambda x: to_torch(x, "cuda"))


def check_case(case: RowCase, what: str, place: str) -> None:
    """The bounds hold, and the same bits come out twice."""
    x, give = case.make(), on(place)
    there = give(x)
    if what == "softmax":
        first, again = (to_numpy(qflash.softmax(there)) for _ in range(2))
        check_softmax(x, first)
        assert first.tobytes() == again.tobytes()
    elif what == "layer_norm":
        vectors = case.columns_vector(1), case.columns_vector(2)
        words = [give(vector) for vector in vectors]
        first, again = (tuple(map(to_numpy, qflash.layer_norm(there, *words, return_stats=True))) for _ in range(2))
        check_layer_norm(x, *vectors, np.float32(1e-5).item(), *first)
        assert all(a.tobytes() == b.tobytes() for a, b in zip(first, again, strict=True))
    else:
        targets = case.targets()
        there_too = give(targets)
        for smoothing in (0.0, np.float32(0.1).item()):
            words = {"label_smoothing": smoothing, "return_lse": True}
            losses, lse = map(to_numpy, qflash.cross_entropy(there, there_too, reduction="none", **words))
            mean, again = map(to_numpy, qflash.cross_entropy(there, there_too, **words))
            check_cross_entropy(x, targets, losses, smoothing=smoothing, lse=lse, total=mean)
            assert lse.tobytes() == again.tobytes()
            total = to_numpy(qflash.cross_entropy(there, there_too, reduction="sum", **words)[0])
            check_cross_entropy(x, targets, losses, smoothing=smoothing, total=total, mean=False)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("what", WHAT)
@pytest.mark.parametrize("case", (*SMALL, *LONG, *LONGEST), ids=lambda case: case.name)
def test_every_case(case, what, place):
    check_case(case, what, place)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("scale", [0.125, -2.5, 0.0, 1e-40, 1e38, -3e38])
@pytest.mark.parametrize("data", ["normal", "infinite", "huge"])
def test_softmax_scale(scale, data, place):
    scale = np.float32(scale).item()
    x = RowCase(5, 70, data=data).make()
    check_softmax(x, to_numpy(qflash.softmax(on(place)(x), scale=scale)), scale)


@pytest.mark.parametrize("place", PLACES)
def test_constant_rows_are_the_bias_to_the_bit(place):
    give = on(place)
    for columns in (3, 1000, 33000):
        case = RowCase(5, columns, "float32", "constant")
        x, bias = case.make(), case.columns_vector(1)
        out = to_numpy(qflash.layer_norm(give(x), None, give(bias)))
        assert np.array_equal(out, np.broadcast_to(bias, x.shape))


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("eps", [0.0, 1e-40, 1e-33, 1e-31, 1e-29])
@pytest.mark.parametrize("columns", [2, 37, 1500, 33000])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_layer_norm_of_narrow_rows(dtype, columns, eps, place):
    """What eps does not outweigh counts, however small: variances down to 1e-68, and rstd past float32's range."""
    x, eps = RowCase(5, columns, dtype, "narrow").make(), np.float32(eps).item()
    check_layer_norm(x, None, None, eps, *map(to_numpy, qflash.layer_norm(on(place)(x), eps=eps, return_stats=True)))


@pytest.mark.parametrize("place", PLACES)
def test_layer_norm_without_eps(place):
    """Constant rows are NaN, as 0 / 0 is, and keep their mean; two numbers next to each other are -1 and 1."""
    x = np.array([[3e38, 3e38], [1e-30, 1e-30], [0, 0], [1e-30, -1e-30], [1e-44, -1e-44], [1, 1 + 2**-23]], np.float32)
    out, mean, _ = map(to_numpy, qflash.layer_norm(on(place)(x), eps=0.0, return_stats=True))
    assert np.isnan(out[:3]).all() and np.array_equal(mean[:3], x[:3, 0])
    np.testing.assert_allclose(out[3:], [[1, -1], [1, -1], [-1, 1]], rtol=1e-6)


_FLUSHED = """
import torch
import qflash
from qflash.testing.rows import RowCase, check_layer_norm
x = RowCase(5, 1500, "float32", "narrow").make()
torch.set_flush_denormal(True)
out = qflash.layer_norm(x, eps=0.0, return_stats=True)
torch.set_flush_denormal(False)
check_layer_norm(x, None, None, 0.0, *out)
"""


def test_layer_norm_of_narrow_rows_where_denormals_are_zero():
    torch = pytest.importorskip("torch")
    if not torch.set_flush_denormal(False):
        pytest.skip("this processor cannot flush denormals")
    done = subprocess.run([sys.executable, "-c", _FLUSHED], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("bad", [-1, 7, 2**31 - 2, 2**31 - 1, -(2**31), 2**40, -(2**40)])
def test_a_target_out_of_range(bad):
    """Is named on the CPU."""
    x = RowCase(4, 7).make()
    targets = np.array([1, 2, bad, 0])
    what = "2147483647 or more" if bad >= 2**31 - 1 else "-2147483648 or less" if bad <= -(2**31) else bad
    message = f"targets has {what} at row 2; allowed: 0 to 6, or ignore_index -100"
    with pytest.raises(ValueError, match=message):
        qflash.cross_entropy(x, targets)


@pytest.mark.gpu
@pytest.mark.parametrize("bad", [-1, 7, 2**31 - 1, -(2**31), 2**40])
def test_a_target_out_of_range_on_a_gpu(bad):
    """Spoils its row and the total, nothing else."""
    x, targets = to_torch(RowCase(4, 7).make(), "cuda"), to_torch(np.array([1, 2, bad, 0]), "cuda")
    losses = to_numpy(qflash.cross_entropy(x, targets, reduction="none"))
    assert np.isnan(losses).tolist() == [False, False, True, False]
    assert np.isnan(to_numpy(qflash.cross_entropy(x, targets)))


@pytest.mark.parametrize("place", PLACES)
def test_all_rows_ignored(place):
    x, targets = map(on(place), (RowCase(4, 7).make(), np.full(4, 3)))
    assert np.isnan(to_numpy(qflash.cross_entropy(x, targets, ignore_index=3)))
    assert to_numpy(qflash.cross_entropy(x, targets, ignore_index=3, reduction="sum")) == 0


def test_threads_do_not_change_the_bits():
    x = RowCase(300, 1000).make()
    threads = qflash.get_num_threads()
    try:
        results = []
        for count in (1, 3):
            qflash.set_num_threads(count)
            results.append((qflash.softmax(x).tobytes(), qflash.layer_norm(x).tobytes()))
    finally:
        qflash.set_num_threads(threads)
    assert results[0] == results[1]


@pytest.mark.parametrize("isa", ["generic", "avx2"])
def test_other_instruction_sets(isa):
    """The case list again on the instruction sets below this machine's best."""
    chosen = "test_every_case and cpu and not 1048577"
    without = ["-p", "no:cacheprovider", "-p", "no:hypothesispytest"]  # which is slow to import
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", *without, "-k", chosen, __file__],
        env={**os.environ, "QFLASH_CPU_ISA": isa},
        capture_output=True,
        text=True,
    )
    if "which this machine lacks" in done.stdout:
        pytest.skip(f"this machine has no {isa}")
    assert done.returncode == 0, done.stdout


@pytest.mark.gpu
@pytest.mark.parametrize("what", WHAT)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_shape_that_is_measured(what, dtype):
    check_case(RowCase(16384, 8192, dtype), what, "cuda")
