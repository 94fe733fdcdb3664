"""softmax, layer_norm and cross_entropy: the CUDA kernels' own source run on the CPU (qflash/csrc/emulate).

Against the float64 definition within counted roundings (qflash/testing/rows.py), for every shape of team and every
alignment; reads and writes outside a row are caught by pages that may not be touched and by guard values.
"""

from __future__ import annotations

import ctypes
import mmap
from dataclasses import replace

import numpy as np
import pytest

from qflash.call.spec import DTYPES
from qflash.dispatch import VARIANTS
from qflash.frontends.numpy import describe
from qflash.ops import rows
from qflash.testing.rows import (
    LONG,
    SMALL,
    WHAT,
    RowCase,
    check_cross_entropy,
    check_layer_norm,
    check_softmax,
)

GUARD = 12345.0


def launch(library, plan, arrays: dict[str, np.ndarray], seed: int = 0, **fields: float) -> None:
    """Run a plan's struct, some fields changed, on the arrays given by pointer name."""
    op = plan.for_spec.op
    compiled = library(op, plan.for_spec.dtype)
    plan = replace(plan, fields=tuple((dict(plan.fields) | fields).items()))
    compiled.launch(compiled.prepare(plan, VARIANTS[op]), [arrays.get(name) for name in plan.pointers], seed)


def guarded(shape: tuple[int, ...], dtype: str, start: int = 0, gap: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """(memory full of a guard value, the rows in it)."""
    count, columns = shape
    memory = np.full(start + count * (columns + gap) + 16, GUARD, dtype)
    body = memory[start : start + count * (columns + gap)].reshape(count, columns + gap)[:, :columns]
    return memory, body


def run_softmax(library, x, scale=1.0, seed=0, start=0, gap=0):
    """The result, after checking that nothing beside it was written."""
    memory, out = guarded(x.shape, x.dtype, start, gap)
    plan = rows.SOFTMAX.plan(describe("x", x), scale, None)
    stride = x.strides[0] // x.itemsize
    launch(library, plan, {"x": x, "out": out}, seed, x_stride=stride, out_stride=x.shape[1] + gap)
    check_guard(memory, out)
    return out


def check_guard(memory: np.ndarray, out: np.ndarray) -> None:
    kept = out.copy()
    out[:] = GUARD
    assert (memory == np.array(GUARD, memory.dtype)).all(), "a result was written beside its row"
    out[:] = kept


def run_layer_norm(library, x, weight, bias, eps=1e-5, seed=0, start=0, gap=0):
    """(out, mean, rstd)"""
    memory, out = guarded(x.shape, x.dtype, start, gap)
    mean, rstd = (np.full(x.shape[0], GUARD, np.float32) for _ in range(2))
    vectors = {name: array for name, array in (("weight", weight), ("bias", bias)) if array is not None}
    described = (None if array is None else describe("vector", array) for array in (weight, bias))
    plan = rows.LAYER_NORM.plan(describe("x", x), *described, eps, True, None)
    arrays = {"x": x, **vectors, "out": out, "mean": mean, "rstd": rstd}
    launch(library, plan, arrays, seed, x_stride=x.strides[0] // x.itemsize, out_stride=x.shape[1] + gap)
    check_guard(memory, out)
    return out, mean, rstd


def run_cross_entropy(library, x, targets, smoothing=0.0, mean=True, want_lse=True, seed=0, ignore_index=-100):
    """(losses, lse or None, total)"""
    losses, total = np.full(x.shape[0], GUARD, np.float32), np.full(1, GUARD, np.float32)
    words = ("mean" if mean else "sum", ignore_index, smoothing, want_lse, None)
    plan = rows.CROSS_ENTROPY.plan(describe("logits", x), describe("targets", targets), *words)
    arrays = {"logits": x, "targets": targets, "losses": losses, "total": total}
    lse = np.full(x.shape[0], GUARD, np.float32) if want_lse else None
    launch(
        library, plan, arrays | ({} if lse is None else {"lse": lse}), seed, logits_stride=x.strides[0] // x.itemsize
    )
    return losses, lse, total


def check_case(library, case: RowCase, what: str) -> None:
    """The bounds hold, and the order that warps and lanes run in does not matter."""
    x = case.make()
    if what == "softmax":
        first, again = (run_softmax(library, x, seed=seed, start=case.start) for seed in (1, 2))
        check_softmax(x, first)
        assert first.tobytes() == again.tobytes()
    elif what == "layer_norm":
        weight, bias = case.columns_vector(1), case.columns_vector(2)
        first, again = (run_layer_norm(library, x, weight, bias, seed=seed, start=case.start) for seed in (1, 2))
        check_layer_norm(x, weight, bias, 1e-5, *first)
        assert all(a.tobytes() == b.tobytes() for a, b in zip(first, again, strict=True))
    else:
        targets = case.targets()
        for smoothing in (0.0, 0.1):
            first, again = (run_cross_entropy(library, x, targets, smoothing, seed=seed) for seed in (1, 2))
            losses, lse, total = first
            check_cross_entropy(x, targets, losses, smoothing=smoothing, lse=lse, total=total)
            assert all(a.tobytes() == b.tobytes() for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize("what", WHAT)
@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_small(library, case, what):
    check_case(library, case, what)


@pytest.mark.parametrize("what", WHAT)
@pytest.mark.parametrize("case", LONG, ids=lambda case: case.name)
def test_long_rows(library, case, what):
    check_case(library, case, what)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [5, 40, 1100])
def test_results_that_lie_otherwise_than_x(library, dtype, columns):
    """Rows of x and of out start at different places of a 16-byte word; weight and bias at a third."""
    x = RowCase(4, columns, dtype, start=1, gap=2).make()
    check_softmax(x, run_softmax(library, x, start=3, gap=1))
    vectors = [np.random.default_rng(seed).standard_normal(columns + 1).astype(dtype)[1:] for seed in (1, 2)]
    out, mean, rstd = run_layer_norm(library, x, *vectors, start=2, gap=5)
    check_layer_norm(x, *vectors, 1e-5, out, mean, rstd)


@pytest.mark.parametrize("scale", [0.125, -2.5, 0.0, -0.0, 1e-40, 1e38, -3e38])
@pytest.mark.parametrize("data", ["normal", "infinite", "huge"])
def test_softmax_scale(library, scale, data):
    x = RowCase(5, 70, data=data).make()
    check_softmax(x, run_softmax(library, x, np.float32(scale).item()), np.float32(scale).item())


@pytest.mark.parametrize("weight", [None, 1])
@pytest.mark.parametrize("bias", [None, 2])
@pytest.mark.parametrize("eps", [1e-5, 0.5])
def test_layer_norm_words(library, weight, bias, eps):
    case = RowCase(3, 300, "float16")
    x = case.make()
    vectors = [None if seed is None else case.columns_vector(seed) for seed in (weight, bias)]
    check_layer_norm(x, *vectors, np.float32(eps).item(), *run_layer_norm(library, x, *vectors, eps))


@pytest.mark.parametrize("eps", [0.0, 1e-31])
@pytest.mark.parametrize("columns", [2, 37, 1500, 33000])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_layer_norm_of_narrow_rows(library, dtype, columns, eps):
    x, eps = RowCase(5, columns, dtype, "narrow").make(), np.float32(eps).item()
    check_layer_norm(x, None, None, eps, *run_layer_norm(library, x, None, None, eps))


def test_layer_norm_without_eps(library):
    """Constant rows are NaN, as 0 / 0 is, and keep their mean; two numbers next to each other are -1 and 1."""
    x = np.array([[3e38, 3e38], [1e-30, 1e-30], [0, 0], [1e-30, -1e-30], [1e-44, -1e-44], [1, 1 + 2**-23]], np.float32)
    out, mean, _ = run_layer_norm(library, x, None, None, 0.0)
    assert np.isnan(out[:3]).all() and np.array_equal(mean[:3], x[:3, 0])
    np.testing.assert_allclose(out[3:], [[1, -1], [1, -1], [-1, 1]], rtol=1e-6)


def test_constant_rows_are_the_bias_to_the_bit(library):
    for columns in (3, 1000, 3000, 33000):
        case = RowCase(3, columns, "float32", "constant")
        x, bias = case.make(), case.columns_vector(1)
        out, mean, _ = run_layer_norm(library, x, None, bias)
        assert np.array_equal(out, np.broadcast_to(bias, x.shape)) and np.array_equal(mean, x[:, 0])


@pytest.mark.parametrize("bad", [-1, 7, 2**31 - 1, -(2**31), -100])
def test_a_target_out_of_range_spoils_its_row_and_the_total(library, bad):
    x = RowCase(4, 7).make()
    targets = np.array([1, bad, 6, 0], np.int32)
    losses, lse, total = run_cross_entropy(library, x, targets, ignore_index=5)
    assert np.isnan(losses).tolist() == [False, True, False, False] and np.isnan(total).all()
    assert np.isfinite(lse).all()


def test_ignored_rows_are_not_read(library):
    x = np.full((3, 64), np.nan, np.float32)
    x[1] = 0
    targets = np.array([-100, 5, -100], np.int32)
    losses, _, total = run_cross_entropy(library, x, targets, want_lse=False)
    assert losses[[0, 2]].tolist() == [0, 0] and total[0] == losses[1] == np.float32(np.log(64))


@pytest.mark.parametrize("mean", [True, False])
def test_totals(library, mean):
    """Also of no row at all, and of more rows than the block that adds them up takes at once."""
    x = RowCase(3, 5).make()
    nothing = run_cross_entropy(library, x, np.full(3, -100, np.int32), mean=mean)[2]
    assert np.isnan(nothing[0]) if mean else nothing[0] == 0
    x, targets = RowCase(9001, 3, "float16").make(), np.full(9001, -100, np.int32)
    targets[::60] = 2
    losses, _, total = run_cross_entropy(library, x, targets, mean=mean, want_lse=False)
    check_cross_entropy(x, targets, losses, total=total, mean=mean)


def between_forbidden_pages(x: np.ndarray, at_end: bool) -> np.ndarray:
    """A copy of x that starts where a page does, or ends where one does; touching a page beside it is fatal."""
    page = mmap.PAGESIZE
    pages = -(-x.nbytes // page)
    memory = mmap.mmap(-1, (pages + 2) * page)
    base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    libc = ctypes.CDLL(None, use_errno=True)
    for start in (base, base + (pages + 1) * page):
        assert libc.mprotect(ctypes.c_void_p(start), page, mmap.PROT_NONE if hasattr(mmap, "PROT_NONE") else 0) == 0
    offset = page + (pages * page - x.nbytes if at_end else 0)
    copy = np.frombuffer(memory, x.dtype, x.size, offset).reshape(x.shape)
    copy[:] = x
    return copy


@pytest.mark.parametrize("at_end", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("columns", [1, 13, 203, 1027])
def test_nothing_outside_a_row_is_touched(library, columns, dtype, at_end):
    """A touch is the end of the process."""
    case = RowCase(1, columns, dtype)
    x, out = (between_forbidden_pages(case.make(), at_end) for _ in range(2))
    vectors = [between_forbidden_pages(case.columns_vector(seed), at_end) for seed in (1, 2)]
    plan = rows.SOFTMAX.plan(describe("x", x), 1.0, None)
    launch(library, plan, {"x": x, "out": out})
    check_softmax(x, out)
    plan = rows.LAYER_NORM.plan(describe("x", x), *(describe("v", v) for v in vectors), 1e-5, False, None)
    launch(library, plan, dict(zip(("x", "weight", "bias", "out"), (x, *vectors, out), strict=True)))
    check_layer_norm(x, *vectors, 1e-5, out)
    losses, _, _ = run_cross_entropy(library, x, np.array([columns - 1], np.int32))
    check_cross_entropy(x, np.array([columns - 1], np.int32), losses)


def test_softmax_in_place(library):
    for columns in (60, 2000, 33000):
        x = RowCase(2, columns).make()
        out = x.copy()
        launch(library, rows.SOFTMAX.plan(describe("x", x), 1.0, None), {"x": out, "out": out})
        check_softmax(x, out)
