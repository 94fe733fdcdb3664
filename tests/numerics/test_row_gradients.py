"""Gradients of softmax, layer_norm and cross_entropy against float64 within counted roundings.

One case list (qflash/testing/row_gradients.py) for the CPU engine and for CUDA, which the emulator runs too
(tests/emulated/test_emulated_row_gradients.py).
"""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

import qflash
from qflash import reference
from qflash.ops.row_gradients import CROSS_ENTROPY_BACKWARD, LAYER_NORM_BACKWARD, SOFTMAX_BACKWARD
from qflash.ops.run import run
from qflash.testing.row_gradients import (
    CASES,
    check_cross_entropy_backward,
    check_layer_norm_backward,
    check_softmax_backward,
    cotangents_of,
)
from qflash.testing.rows import WHAT, RowCase
from qflash.testing.runner import to_numpy, to_torch

CUDA = pytest.param("cuda", marks=pytest.mark.gpu)
PLACES = ["cpu", CUDA]
EPS = np.float32(1e-5).item()
SMOOTHING = np.float32(0.1).item()


def on(place: str):
    """From NumPy arrays, or None, to what is computed with there."""
    return (lambda x: x) if place == "cpu" else (lambda x: None if x is None else to_torch(x, "cuda"))


def gradients(op, arrays, words, place: str) -> list[np.ndarray]:
    return [to_numpy(x) for x in run(op, [on(place)(x) for x in arrays], words)]


def softmax_backward(case: RowCase, place: str) -> list[np.ndarray]:
    """The gradient of qflash's own result, checked."""
    dout = cotangents_of(case).rows
    out = to_numpy(qflash.softmax(on(place)(case.make())))
    (dx,) = gradients(SOFTMAX_BACKWARD, (dout, out), (1.0, None), place)
    check_softmax_backward(out, dout, dx)
    return [dx]


def layer_norm_backward(case: RowCase, place: str) -> list[np.ndarray]:
    x, weight, g = case.make(), case.columns_vector(1), cotangents_of(case)
    _, mean, rstd = map(to_numpy, qflash.layer_norm(on(place)(x), eps=EPS, return_stats=True))
    found = []
    for of_mean, of_rstd, scaled, moved in ((None, None, True, True), (g.first, g.second, False, True)):
        arrays = (g.rows, of_mean, of_rstd, x, weight if scaled else None, weight if moved else None, mean, rstd)
        dx, *vectors = gradients(LAYER_NORM_BACKWARD, arrays, (EPS, True, None), place)
        dweight, dbias = vectors if scaled else (None, *vectors)
        words = {"dmean": of_mean, "drstd": of_rstd}
        check_layer_norm_backward(x, weight if scaled else None, g.rows, EPS, dx, dweight, dbias, **words)
        found += [dx, *vectors]
    return found


def cross_entropy_backward(case: RowCase, place: str) -> list[np.ndarray]:
    x, targets, g = case.make(), case.targets(), cotangents_of(case)
    _, lse = map(to_numpy, qflash.cross_entropy(on(place)(x), on(place)(targets), return_lse=True))
    count = max(int((targets != -100).sum()), 1)
    total = np.array(1.5, np.float32)
    found = []
    for reduction, smoothing, dlse in (("none", 0.0, None), ("none", SMOOTHING, g.second), ("mean", SMOOTHING, None)):
        dtotal = None if reduction == "none" else total
        words = (reduction, -100, smoothing, True, None)
        (dx,) = gradients(CROSS_ENTROPY_BACKWARD, (g.first, dlse, dtotal, x, targets, lse), words, place)
        dlosses = g.first if dtotal is None else g.first + 1.5 / count
        check_cross_entropy_backward(x, targets, dx, dlosses, dlse, smoothing=smoothing)
        found.append(dx)
    return found


BACKWARD = {
    "softmax": softmax_backward,
    "layer_norm": layer_norm_backward,
    "cross_entropy": cross_entropy_backward,
}


def bits(arrays: list[np.ndarray]) -> list[bytes]:
    return [x.tobytes() for x in arrays]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("what", WHAT)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_case(case, what, place):
    """The bounds hold, and the same bits come out twice."""
    assert bits(BACKWARD[what](case, place)) == bits(BACKWARD[what](case, place))


@pytest.mark.parametrize("what", WHAT)
def test_same_bits_for_any_number_of_threads(what):
    before = qflash.get_num_threads()
    found = []
    try:
        for threads in (1, 2, 3, 7):
            qflash.set_num_threads(threads)
            found.append(bits(BACKWARD[what](RowCase(700, 130), "cpu")))
    finally:
        qflash.set_num_threads(before)
    assert all(one == found[0] for one in found)


@pytest.mark.parametrize("place", PLACES)
def test_sums_over_many_rows(place):
    """More rows than one sum in float32 takes, in every way that blocks and chunks of them are cut."""
    for rows, columns in ((1, 40), (63, 5), (65, 300), (1000, 33), (4100, 70)):
        layer_norm_backward(RowCase(rows, columns, "float32", "offset"), place)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("scale", [0.125, -2.5, 0.0, 1e-30])
def test_softmax_scale(scale, place):
    scale, case = np.float32(scale).item(), RowCase(5, 70)
    out, dout = reference.softmax(case.make(), scale).astype(np.float32), cotangents_of(case).rows
    (dx,) = gradients(SOFTMAX_BACKWARD, (dout, out), (scale, None), place)
    check_softmax_backward(out, dout, dx, scale)


@pytest.mark.parametrize("place", PLACES)
def test_an_offset_costs_no_accuracy(place):
    """The rounded mean is off by up to 2^-6 of a deviation here; what z is off by is found and taken off."""
    case = RowCase(6, 300)
    x = (case.make() + 2.0**18).astype(np.float32)
    g, (_, mean, rstd) = cotangents_of(case).rows, map(to_numpy, qflash.layer_norm(on(place)(x), return_stats=True))
    arrays = (g, None, None, x, case.columns_vector(1), None, mean, rstd)
    dx, dweight = gradients(LAYER_NORM_BACKWARD, arrays, (EPS, True, None), place)
    check_layer_norm_backward(x, case.columns_vector(1), g, EPS, dx, dweight)


@pytest.mark.parametrize("place", PLACES)
def test_nothing_to_differentiate(place):
    """No row: sums over rows are zero. No column: no gradient has an element."""
    none, per_row = np.zeros((0, 5), np.float32), np.zeros(0, np.float32)
    vector = np.ones(5, np.float32)
    arrays = (none, None, None, none, vector, vector, per_row, per_row)
    dx, dweight, dbias = gradients(LAYER_NORM_BACKWARD, arrays, (EPS, True, None), place)
    assert dx.shape == (0, 5) and not dweight.any() and not dbias.any() and dweight.shape == dbias.shape == (5,)
    assert gradients(SOFTMAX_BACKWARD, (none, none), (1.0, None), place)[0].shape == (0, 5)
    empty = np.zeros((3, 0), np.float32)
    assert gradients(SOFTMAX_BACKWARD, (empty, empty), (1.0, None), place)[0].shape == (3, 0)
    arrays = (per_row, None, np.array(1, np.float32), none, np.zeros(0, np.int32), per_row)
    words = ("mean", -100, 0.0, True, None)
    assert gradients(CROSS_ENTROPY_BACKWARD, arrays, words, place)[0].shape == (0, 5)


@pytest.mark.parametrize("place", PLACES)
def test_ignored_rows_have_no_gradient_and_are_not_read(place):
    x = np.full((3, 64), np.nan, np.float32)
    x[1] = 0
    targets, lse = np.array([-100, 5, -100], np.int32), np.array([np.nan, np.log(64), np.nan], np.float32)
    one, total = np.ones(3, np.float32), np.array(np.inf, np.float32)
    words = ("mean", -100, 0.0, True, None)
    (dx,) = gradients(CROSS_ENTROPY_BACKWARD, (one, None, None, x, targets, lse), words, place)
    assert not dx[[0, 2]].any() and np.allclose(dx[1], 1 / 64 - (np.arange(64) == 5))
    nobody = np.full(3, -100, np.int32)  # the mean of no loss is NaN, and its gradient nobody's
    (dx,) = gradients(CROSS_ENTROPY_BACKWARD, (one, None, total, x, nobody, lse), words, place)
    assert not dx.any()


@pytest.mark.parametrize("bad", [-1, 7, 2**31 - 1, -(2**31)])
def test_a_bad_target_is_refused_on_the_cpu(bad):
    x, per_row = RowCase(3, 7).make(), np.zeros(3, np.float32)
    arrays = (per_row, None, None, x, np.array([0, bad, 1], np.int32), per_row)
    with pytest.raises(ValueError, match=rf"targets has {bad}.* at row 1; allowed: 0 to 6, or ignore_index 5"):
        run(CROSS_ENTROPY_BACKWARD, arrays, ("none", 5, 0.0, True, None))


@pytest.mark.gpu
def test_a_bad_target_spoils_its_row_on_a_gpu():
    x, per_row = RowCase(3, 7).make(), np.ones(3, np.float32)
    arrays = (per_row, None, None, x, np.array([0, 9, 1], np.int32), per_row)
    (dx,) = gradients(CROSS_ENTROPY_BACKWARD, arrays, ("none", 5, 0.0, True, None), "cuda")
    assert np.isnan(dx).all(-1).tolist() == [False, True, False]


def test_the_oracle_agrees_with_torch_in_float64():
    torch = pytest.importorskip("torch")
    functional, case = torch.nn.functional, RowCase(5, 37)
    g, weight, targets = cotangents_of(case), case.columns_vector(1).astype(np.float64), case.targets()
    x = torch.from_numpy(case.make().astype(np.float64)).requires_grad_()
    w = torch.from_numpy(weight).requires_grad_()
    tops = [torch.from_numpy(one.astype(np.float64)) for one in (g.rows, g.first, g.second)]

    out = torch.softmax(0.7 * x, -1)
    (want,) = torch.autograd.grad(out, x, tops[0])
    np.testing.assert_allclose(reference.softmax_backward(out.detach().numpy(), g.rows, 0.7), want, atol=1e-14)

    mean, var = x.mean(-1), x.var(-1, correction=0)
    rstd = (var + EPS).rsqrt()
    out = functional.layer_norm(x, (37,), w, torch.zeros(37, dtype=torch.float64), EPS)
    wants = torch.autograd.grad((out, mean, rstd), (x, w), tops)
    got = reference.layer_norm_backward(x.detach().numpy(), weight, g.rows, EPS, g.first, g.second)
    for one, want in zip(got, wants, strict=False):
        np.testing.assert_allclose(one, want, atol=1e-12)

    losses = functional.cross_entropy(x, torch.from_numpy(targets).long(), reduction="none", label_smoothing=0.1)
    (want,) = torch.autograd.grad((losses, torch.logsumexp(x, -1)), x, tops[1:])
    arguments = (x.detach().numpy(), targets, g.first, g.second)
    np.testing.assert_allclose(reference.cross_entropy_backward(*arguments, label_smoothing=0.1), want, atol=1e-14)


def given(**changes):
    return changes


SOFTMAX, LAYER_NORM, CROSS_ENTROPY = SOFTMAX_BACKWARD, LAYER_NORM_BACKWARD, CROSS_ENTROPY_BACKWARD
REFUSALS = {
    "dout dtype": (SOFTMAX, given(dout=np.zeros((3, 4), np.float16)), TypeError, "out has dtype float32; allowed"),
    "out missing": (SOFTMAX, given(out=None), TypeError, "out is None; allowed: an array"),
    "out shape": (SOFTMAX, given(out=np.zeros((3, 5), np.float32)), ValueError, r"out has shape \[3, 5\]; allowed"),
    "x missing": (LAYER_NORM, given(x=None), TypeError, "x is None; allowed: an array"),
    "mean missing": (LAYER_NORM, given(mean=None), TypeError, "mean is None; allowed: an array"),
    "mean shape": (LAYER_NORM, given(mean=np.zeros(4, np.float32)), ValueError, r"mean has shape \[4\]; allowed"),
    "drstd dtype": (LAYER_NORM, given(drstd=np.zeros(3)), TypeError, "drstd has dtype float64; allowed: float32"),
    "weight shape": (LAYER_NORM, given(weight=np.zeros(3, np.float32)), ValueError, r"weight has shape \[3\]; allowed"),
    "lse missing": (CROSS_ENTROPY, given(lse=None), TypeError, "lse is None; allowed: an array"),
    "logits missing": (CROSS_ENTROPY, given(logits=None), TypeError, "logits is None; allowed: an array"),
    "targets missing": (CROSS_ENTROPY, given(targets=None), TypeError, "targets is None; allowed: an array of int"),
    "targets dtype": (CROSS_ENTROPY, given(targets=np.zeros(3)), TypeError, "targets has dtype float64; allowed: int"),
    "dtotal shape": (CROSS_ENTROPY, given(dtotal=np.zeros(3, np.float32)), ValueError, r"dtotal has shape \[3\]; all"),
    "dlosses shape": (CROSS_ENTROPY, given(dlosses=np.zeros(4, np.float32)), ValueError, r"dlosses has shape \[4\]"),
}  # fmt: skip
PER_ROW, MATRIX = np.zeros(3, np.float32), np.zeros((3, 4), np.float32)
GOOD = {
    SOFTMAX_BACKWARD: ({"dout": MATRIX, "out": MATRIX}, (1.0, None)),
    LAYER_NORM_BACKWARD: ({"dout": MATRIX, "x": MATRIX, "mean": PER_ROW, "rstd": PER_ROW}, (EPS, True, None)),
    CROSS_ENTROPY_BACKWARD: (
        {"dlosses": PER_ROW, "logits": MATRIX, "targets": np.zeros(3, np.int32), "lse": PER_ROW},
        ("none", -100, 0.0, True, None),
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals(name):
    """What torch.ops.qflash lets anybody give."""
    op, changes, error, text = REFUSALS[name]
    arrays, words = GOOD[op]
    run(op, [arrays.get(one) for one in op.arrays], words)
    with pytest.raises(error, match=text):
        run(op, [(arrays | changes).get(one) for one in op.arrays], words)


@pytest.mark.parametrize("isa", ["avx2", "generic"])
def test_on_another_instruction_set(isa):
    without = ["-p", "no:cacheprovider", "-p", "no:hypothesispytest"]  # which is slow to import
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", *without, "-k", "test_every_case and cpu and 37", __file__],
        env={**os.environ, "QFLASH_CPU_ISA": isa},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.gpu
@pytest.mark.parametrize("what", WHAT)
def test_a_thousand_runs_give_the_same_bits(what):
    import torch

    case = RowCase(2048, 4096, "bfloat16")
    give, g = on("cuda"), cotangents_of(case)
    x = give(case.make()).requires_grad_()
    vectors = [give(case.columns_vector(seed)).requires_grad_() for seed in (1, 2)]
    call = {
        "softmax": lambda: (qflash.softmax(x), (x,)),
        "layer_norm": lambda: (qflash.layer_norm(x, *vectors), (x, *vectors)),
        "cross_entropy": lambda: (qflash.cross_entropy(x, give(case.targets()), reduction="none"), (x,)),
    }[what]
    out, inputs = call()
    top = give(g.first if what == "cross_entropy" else g.rows)
    first = torch.autograd.grad(out, inputs, top, retain_graph=True)
    for _ in range(1000):
        again = torch.autograd.grad(out, inputs, top, retain_graph=True)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
