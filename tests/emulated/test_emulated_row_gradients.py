"""Gradients of softmax, layer_norm and cross_entropy: the CUDA kernels' source run on the CPU (qflash/csrc/emulate).

Against the float64 definition within counted roundings (qflash/testing/row_gradients.py). Rows of results lie among
guard values, and those of operands at other places of a 16-byte word.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from qflash import reference
from qflash.dispatch import VARIANTS
from qflash.frontends.numpy import describe
from qflash.ops.row_gradients import CROSS_ENTROPY_BACKWARD, LAYER_NORM_BACKWARD, SOFTMAX_BACKWARD
from qflash.testing.row_gradients import (
    CASES,
    check_cross_entropy_backward,
    check_layer_norm_backward,
    check_softmax_backward,
    cotangents_of,
)
from qflash.testing.rows import WHAT, RowCase

GUARD = 12345.0
EPS = np.float32(1e-5).item()
SMOOTHING = np.float32(0.1).item()
KERNELS = {
    SOFTMAX_BACKWARD: "softmax_bwd",
    LAYER_NORM_BACKWARD: "layer_norm_bwd",
    CROSS_ENTROPY_BACKWARD: "cross_entropy_bwd",
}
# One of each thing: an emulated block of many threads takes a second.
CHOSEN = [*[case for case in CASES if case.rows * case.columns < 20000][::3], CASES[-1]]


def run(library, op, arrays, words, seed: int = 0, start: int = 0, gap: int = 0) -> list[np.ndarray]:
    """The results, the first of them in rows of their own with guard values around."""
    described = [
        None if x is None else describe(name, x, op.arrays[0]) for name, x in zip(op.arrays, arrays, strict=True)
    ]
    plan = op.plan(*described, *words)
    first, *more = plan.results
    rows, columns = first.shape
    memory = np.full(start + rows * (columns + gap) + 16, GUARD, first.dtype)
    body = memory[start : start + rows * (columns + gap)].reshape(rows, columns + gap)[:, :columns]
    results = [body, *(np.full(one.shape, GUARD, one.dtype) for one in more)]
    plan = replace(plan, fields=tuple((dict(plan.fields) | {f"{first.field}_stride": columns + gap}).items()))
    operands = [arrays[op.arrays.index(one.argument)] for one in plan.operands]
    assert all(one.dtype in (None, x.dtype.name) for one, x in zip(plan.operands, operands, strict=True))
    compiled = library(KERNELS[op], plan.for_spec.dtype)
    compiled.launch(compiled.prepare(plan, VARIANTS[KERNELS[op]]), [*operands, *results], seed)
    kept = body.copy()
    body[:] = GUARD
    assert (memory == np.array(GUARD, memory.dtype)).all(), "a result was written beside its row"
    return [kept, *results[1:]]


def softmax_backward(library, case: RowCase, **where: int) -> list[np.ndarray]:
    dout = cotangents_of(case).rows
    out = case.make()
    out[:] = reference.softmax(out).astype(case.dtype)
    found = run(library, SOFTMAX_BACKWARD, (dout, out), (1.0, None), **where)
    check_softmax_backward(out, dout, *found)
    return found


def statistics(x: np.ndarray) -> list[np.ndarray]:
    return [one.astype(np.float32) for one in reference.layer_norm(x, None, None, EPS)[1:]]


def layer_norm_backward(library, case: RowCase, **where: int) -> list[np.ndarray]:
    x, weight, g = case.make(), case.columns_vector(1), cotangents_of(case)
    arrays = (g.rows, None, None, x, weight, weight, *statistics(x))
    found = run(library, LAYER_NORM_BACKWARD, arrays, (EPS, True, None), **where)
    check_layer_norm_backward(x, weight, g.rows, EPS, *found)
    return found


def cross_entropy_backward(library, case: RowCase, **where: int) -> list[np.ndarray]:
    x, targets, g = case.make(), case.targets(), cotangents_of(case)
    lse = reference.cross_entropy(x, np.zeros_like(targets))[1].astype(np.float32)
    words = ("none", -100, SMOOTHING, True, None)
    found = run(library, CROSS_ENTROPY_BACKWARD, (g.first, g.second, None, x, targets, lse), words, **where)
    check_cross_entropy_backward(x, targets, *found, g.first, g.second, smoothing=SMOOTHING)
    return found


BACKWARD = {
    "softmax": softmax_backward,
    "layer_norm": layer_norm_backward,
    "cross_entropy": cross_entropy_backward,
}


@pytest.mark.parametrize("what", WHAT)
@pytest.mark.parametrize("case", CHOSEN, ids=lambda case: case.name)
def test_cases(library, case, what):
    """The bounds hold, and the order that warps and lanes run in does not matter."""
    first, again = (BACKWARD[what](library, case, seed=seed, start=case.start, gap=1) for seed in (1, 2))
    assert all(a.tobytes() == b.tobytes() for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize("rows", [1, 64, 65, 200])
def test_sums_over_rows(library, rows):
    """Chunks of rows, and columns that are no whole tile."""
    layer_norm_backward(library, RowCase(rows, 70, "float32", "offset"))


def test_more_chunks_than_a_block_has_warps_and_uneven_ones(library):
    layer_norm_backward(library, RowCase(64 * 130 + 3, 3, "float16"))


def test_sums_over_no_row_are_zero(library):
    none, per_row, vector = np.zeros((0, 70), np.float32), np.zeros(0, np.float32), np.ones(70, np.float32)
    arrays = (none, None, None, none, vector, vector, per_row, per_row)
    dx, dweight, dbias = run(library, LAYER_NORM_BACKWARD, arrays, (EPS, True, None))
    assert dx.shape == (0, 70) and not dweight.any() and not dbias.any()


def test_words_of_layer_norm(library):
    case = RowCase(5, 37)
    x, weight, g = case.make(), case.columns_vector(1), cotangents_of(case)
    words = (EPS, True, None)
    arrays = (g.rows, g.first, g.second, x, None, weight, *statistics(x))
    dx, dbias = run(library, LAYER_NORM_BACKWARD, arrays, words)
    check_layer_norm_backward(x, None, g.rows, EPS, dx, None, dbias, dmean=g.first, drstd=g.second)
    (dx,) = run(library, LAYER_NORM_BACKWARD, (g.rows, None, None, x, None, None, *statistics(x)), words)
    check_layer_norm_backward(x, None, g.rows, EPS, dx)


def test_an_offset_costs_no_accuracy(library):
    case = RowCase(6, 300)
    x, g, weight = (case.make() + 2.0**18).astype(np.float32), cotangents_of(case).rows, case.columns_vector(1)
    found = run(library, LAYER_NORM_BACKWARD, (g, None, None, x, weight, weight, *statistics(x)), (EPS, True, None))
    check_layer_norm_backward(x, weight, g, EPS, *found)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_the_gradient_of_a_total(library, reduction):
    case = RowCase(1500, 5)
    x, targets, total = case.make(), case.targets(), np.array(1.5, np.float32)
    lse, nothing = reference.cross_entropy(x, targets)[1].astype(np.float32), np.zeros(1500, np.float32)
    words = (reduction, -100, 0.0, True, None)
    (dx,) = run(library, CROSS_ENTROPY_BACKWARD, (nothing, None, total, x, targets, lse), words)
    share = 1.5 / (targets != -100).sum() if reduction == "mean" else 1.5
    check_cross_entropy_backward(x, targets, dx, np.full(1500, share))


def test_ignored_rows_are_cleared_and_not_read(library):
    x = np.full((3, 1100), np.nan, np.float16)
    targets, per_row = np.full(3, -100, np.int32), np.full(3, np.nan, np.float32)
    words = ("none", -100, 0.0, True, None)
    (dx,) = run(library, CROSS_ENTROPY_BACKWARD, (per_row, None, None, x, targets, per_row), words, start=3, gap=5)
    assert not dx.any()


def test_a_bad_target_spoils_its_row(library):
    x, per_row = RowCase(3, 7).make(), np.ones(3, np.float32)
    arrays = (per_row, None, None, x, np.array([0, 9, 1], np.int32), per_row)
    (dx,) = run(library, CROSS_ENTROPY_BACKWARD, arrays, ("none", 5, 0.0, True, None))
    assert np.isnan(dx).all(-1).tolist() == [False, True, False]
