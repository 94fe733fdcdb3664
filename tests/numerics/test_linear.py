"""qflash.linear and qflash.swiglu against float64, element by element; their gradients; where NaN goes; bits that
depend on nothing but a row and the weights; and INT8 against its replay and against what quantization may cost."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import numpy as np
import pytest

import qflash
from qflash import _native, dispatch, reference
from qflash.call.op import Result
from qflash.call.prepare import prepare
from qflash.frontends.numpy import plan_of
from qflash.ops.linear import LINEAR, SWIGLU
from qflash.ops.linear_gradient import LINEAR_BACKWARD
from qflash.ops.run import run
from qflash.reference.linear import activate, slope
from qflash.testing import compare
from qflash.testing.by_kernel import differentiated_by
from qflash.testing.linear import ACTIVATIONS, DTYPES, LAYOUTS, SHAPES, LinearCase, U, check_close
from qflash.testing.runner import to_numpy, to_torch


def kernels(op: str, precision: str = "native") -> list[Any]:
    """Every pair of a kernel and a dtype that it computes in; those on a GPU are marked."""
    rows = [row for row in dispatch.kernels_of(op) if precision in row.precisions]
    return [
        pytest.param(row.name, dtype, marks=[pytest.mark.gpu] if row.device == "cuda" else [], id=f"{row.name}-{dtype}")
        for row in rows
        for dtype in row.dtypes
        if dtype in DTYPES
    ]


def placed(kernel: str) -> Any:
    """From NumPy arrays to those of the device that a kernel is for; strides stay."""
    return (lambda x: x) if dispatch.BY_NAME[kernel].device == "cpu" else (lambda x: to_torch(x, "cuda"))


@contextmanager
def skipping_unserved(kernel: str) -> Iterator[None]:
    """A kernel of a GPU may leave out an architecture, a dtype, an activation or a layout; those of the CPU do not."""
    try:
        yield
    except qflash.NoKernelError as refusal:
        if dispatch.BY_NAME[kernel].device == "cuda":
            pytest.skip(str(refusal).splitlines()[0])
        raise


def call(case: LinearCase, kernel: str, **words) -> np.ndarray:
    function = qflash.swiglu if case.activation == "swiglu" else qflash.linear
    arrays = {name: placed(kernel)(x) for name, x in case.arrays.items()}
    with skipping_unserved(kernel):
        return to_numpy(function(**arrays, **case.words, kernel=kernel, **words))


def activation_error(kernel: str, activation: str | None, result: str) -> float:
    """How far off an activation by a polynomial (fast_activation.cuh) may be, absolutely."""
    if kernel != "sm90_gemm":
        return 0.0
    return {"gelu": 5e-5, "gelu_tanh": 8e-5 if result != "float32" else 0.0}.get(activation or "", 0.0)


EVERY = pytest.mark.parametrize(("kernel", "dtype"), kernels("linear"))
CPU = [row.name for row in dispatch.kernels_of("linear", "cpu") if "native" in row.precisions]
FLOATS = pytest.mark.parametrize(("kernel", "dtype"), list(product(CPU, DTYPES)))


@pytest.mark.parametrize("layout", LAYOUTS)
@EVERY
def test_products(kernel, dtype, layout):
    for m, n, k in SHAPES:
        case = LinearCase(m, n, k, dtype, layout)
        case.check(call(case, kernel))


@pytest.mark.parametrize("activation", ACTIVATIONS)
@EVERY
def test_everything_behind_the_products(kernel, dtype, activation):
    """Biases of either dtype, a residual, a float32 result, each with and without the others."""
    for bias, residual, out in product((None, "float32", dtype), (False, True), (None, "float32")):
        for layout in ("k odd", "n"):
            case = LinearCase(37, 131, 70, dtype, layout, activation, bias, residual, out)
            case.check(call(case, kernel), activation_error(kernel, activation, case.result_dtype))


@EVERY
def test_rows_of_any_rank(kernel, dtype):
    case = LinearCase(12, 33, 40, dtype, residual=True)
    arrays = {name: placed(kernel)(x) for name, x in case.arrays.items()}
    with skipping_unserved(kernel):
        flat = to_numpy(qflash.linear(**arrays, kernel=kernel))
    arrays |= {name: arrays[name].reshape(2, 3, 2, -1) for name in ("x", "residual")}
    assert np.array_equal(to_numpy(qflash.linear(**arrays, kernel=kernel)), flat.reshape(2, 3, 2, 33))
    one = {name: arrays[name][1, 2, 1] for name in ("x", "residual")}
    got = to_numpy(qflash.linear(**arrays | one, kernel=kernel))
    assert got.shape == (33,)
    check_close(got[None], *(part[-1:] for part in case.expected()), "one row")


def grid() -> np.ndarray:
    """Numbers on every scale, and where activations bend."""
    near = np.linspace(-12, 12, 4001)
    far = np.concatenate([10.0**power * np.linspace(1, 9, 20) for power in range(-30, 31, 3)])
    return np.unique(np.concatenate([near, far, -far, [0.0]])).astype(np.float32)


# What the exponential is taken of, which has the rounding of one float32: the tails feel it.
EXPONENTS = {
    "gelu": lambda h: h * h / 2,
    "gelu_tanh": lambda h: np.abs(1.6 * (h + 0.044715 * h**3)),
    "silu": np.abs,
}


@pytest.mark.parametrize("activation", EXPONENTS)
@pytest.mark.parametrize("kernel", CPU)
def test_activations_keep_their_tails(kernel, activation):
    """Relative to the exact value, down to where float32 ends: not 1e-4 of one, as approximations have."""
    h = grid()
    got = qflash.linear(np.ones((1, 1), np.float32), h[None], activation=activation, kernel=kernel)[0]
    exact = h.astype(np.float64)
    want = activate(activation, exact)
    with np.errstate(over="ignore"):
        # Of a result that is a share of h, the share may be off; below 2^-126 there are no shares any more.
        share = (32 + 4 * EXPONENTS[activation](exact)) * U * np.abs(want)
    bound = np.where(np.isfinite(share), share, 0) + np.abs(exact) * 2.0**-125
    assert (np.abs(got - want) <= bound).all()
    assert np.abs(got - want)[np.abs(h) < 1e3].max() <= 1e-4  # the contract, of any kernel


@pytest.mark.gpu
@pytest.mark.parametrize("activation", EXPONENTS)
@pytest.mark.parametrize(("kernel", "dtype"), [pair for pair in kernels("linear") if pytest.mark.gpu in pair.marks])
def test_activations_of_a_gpu(kernel, dtype, activation):
    import torch

    h = torch.tensor(grid()[np.abs(grid()) < 1e3]).cuda()
    words = {"device": "cuda", "dtype": getattr(torch, dtype)}
    ones, zeros = torch.ones(16, 16, **words), torch.zeros(16, len(h), **words)
    with skipping_unserved(kernel):
        got = qflash.linear(ones, zeros, h, activation=activation, out_dtype="float32", kernel=kernel)
    want = activate(activation, h.double().cpu().numpy())
    assert np.abs(got[3].cpu().numpy() - want).max() <= 1e-4


@pytest.mark.parametrize("activation", EXPONENTS)
@pytest.mark.parametrize("kernel", [row.name for row in dispatch.kernels_of("linear_backward", "cpu")])
def test_slopes(kernel, activation):
    h = grid()
    one = np.ones((1, 1), np.float32)
    arrays = (np.ones_like(h)[None], one, h[None], np.zeros_like(h), h[None])
    _, _, got = run(LINEAR_BACKWARD, arrays, (activation, None, True, None))
    want = slope(activation, h.astype(np.float64))
    assert np.abs(got - want).max() <= 1e-6


@pytest.mark.parametrize("activation", [None, "gelu", "swiglu"])
@EVERY
def test_no_less_accurate_than_pytorch(kernel, dtype, activation):
    """The contract: within twice the error of PyTorch's own math in the dtype, against float64."""
    torch = pytest.importorskip("torch")
    functional = torch.nn.functional
    case = LinearCase(96, 160, 700, dtype, "k", activation, bias_dtype=dtype)
    x, *rest = (to_torch(a) for a in case.arrays.values())
    if activation == "swiglu":
        gate, up, gate_bias, up_bias = rest
        theirs = functional.silu(x @ gate + gate_bias) * (x @ up + up_bias)
    else:
        w, bias = rest
        theirs = functional.linear(x, w.T, bias)
        theirs = functional.gelu(theirs) if activation else theirs
    want, _ = case.expected()
    ours, its = (compare.errors(a, want).relative_l2 for a in (call(case, kernel), to_numpy(theirs)))
    assert ours <= 2 * its, f"{ours:.3g}, PyTorch's {its:.3g}"
    if dtype == "float32":
        assert ours <= compare.FLOAT32_L2


NONFINITE = {"nan": np.nan, "inf": np.inf, "-inf": -np.inf}


@pytest.mark.parametrize("value", NONFINITE)
@pytest.mark.parametrize("activation", [None, "gelu", "swiglu"])
@EVERY
def test_what_is_not_finite_reaches_its_row_or_column_alone(kernel, dtype, activation, value):
    case = LinearCase(40, 150, 300, dtype, "n", activation, dtype, residual=True)
    clean = call(case, kernel)
    for name, place, row, column in (
        ("x", (7, 299), 7, slice(None)), (case.weights[-1], (3, 140), slice(None), 140),
        (case.biases[0], (11,), slice(None), 11), ("residual", (39, 149), 39, 149),
    ):  # fmt: skip
        planted = case.arrays[name].copy()
        planted[place] = NONFINITE[value]
        there = replace(case)
        there.__dict__["arrays"] = case.arrays | {name: planted}
        got = call(there, kernel)
        reached = np.zeros(clean.shape, bool)
        reached[row, column] = True
        assert np.array_equal(got[~reached], clean[~reached])
        want = there.expected()[0]
        for test in (np.isnan, np.isposinf, np.isneginf):
            assert np.array_equal(test(got.astype(np.float64)), test(want)), name


@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
@EVERY
def test_what_the_backward_pass_is_given(kernel, dtype, activation):
    """keep_pre: the products, rounded once, beside a result that is the same."""
    case = LinearCase(37, 131, 300, dtype, "k", activation, dtype, residual=True)
    op = SWIGLU if activation == "swiglu" else LINEAR
    words = (None, True, kernel) if op is SWIGLU else (activation, None, True, kernel)
    arrays = [placed(kernel)(case.arrays[name]) for name in op.arrays]
    with skipping_unserved(kernel):
        out, *kept = map(to_numpy, run(op, arrays, words))
    assert np.array_equal(out, call(case, kernel))
    for got, (want, error) in zip(kept, case.products(), strict=True):
        assert got.dtype == DTYPES[dtype]
        check_close(got, want, error, "pre")


# Bits ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("activation", [None, "gelu", "swiglu"])
@FLOATS
def test_a_row_does_not_depend_on_the_others(kernel, dtype, activation):
    """Nor on threads, nor on which dimension of w is contiguous. One thread has the widest blocks of columns."""
    case = LinearCase(301, 490, 700, dtype, "n", activation, dtype, residual=True)
    all_rows = call(case, kernel)
    along_k = {name: np.asfortranarray(x) if name in case.weights else x for name, x in case.arrays.items()}
    starts = {1: 100, 2: 7, 3: 298, 4: 31, 5: 37, 16: 2, 195: 5, 301: 0}
    before = qflash.get_num_threads()
    try:
        for threads, (count, start) in product((1, before), starts.items()):
            qflash.set_num_threads(threads)
            rows = slice(start, start + count)
            for arrays in (case.arrays, along_k):
                part = replace(case)
                part.__dict__["arrays"] = {
                    name: x[rows] if name in ("x", "residual") else x for name, x in arrays.items()
                }
                assert np.array_equal(call(part, kernel), all_rows[rows]), (rows, threads)
        for threads in (3, 16):
            qflash.set_num_threads(threads)
            assert np.array_equal(call(case, kernel), all_rows), threads
    finally:
        qflash.set_num_threads(before)


# Gradients -----------------------------------------------------------------------------------------------------------


def gradients(case: LinearCase, kernel: str) -> dict[str, np.ndarray]:
    """By autograd's way, or by the operation itself: the names of the arrays and their gradients."""
    op = SWIGLU if case.activation == "swiglu" else LINEAR
    if dispatch.BY_NAME[kernel].device == "cuda":
        arrays = {name: to_torch(x, "cuda").requires_grad_() for name, x in case.arrays.items()}
        words = (None, False, None) if op is SWIGLU else (case.activation, None, False, None)
        out, *_ = run(differentiated_by(op, kernel), [arrays.get(name) for name in op.arrays], words)
        with skipping_unserved(kernel):
            out.backward(to_torch(case.dout(), "cuda"))
        return {name: to_numpy(x.grad) for name, x in arrays.items()}
    words = (None, True, None) if op is SWIGLU else (case.activation, None, True, None)
    arrays = [case.arrays.get(name) for name in op.arrays]
    _, *kept = run(op, arrays, words)
    named = op.named(arrays) | dict(zip(op.results[1:], kept, strict=False)) | {"dout": case.dout()}
    backward = op.gradient.op
    found = run(backward, [named.get(name) for name in backward.arrays], words)
    return dict(zip([name for name in op.gradient.of if name in named], found, strict=True))


EVERY_BACKWARD = pytest.mark.parametrize(("kernel", "dtype"), kernels("linear_backward"))
BACKWARD_SHAPES = (
    (1, 1, 1),
    (129, 130, 70),
    (5, 600, 33),
    (300, 17, 260),
    (2, 3, 700),
    (0, 5, 3),
    (5, 0, 3),
    (5, 3, 0),
)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@EVERY_BACKWARD
def test_gradients(kernel, dtype, activation):
    for number, (m, n, k) in enumerate(BACKWARD_SHAPES):
        bias = (None, "float32", dtype)[number % 3]
        case = LinearCase(m, n, k, dtype, LAYOUTS[number % len(LAYOUTS)], activation, bias)
        got, want = gradients(case, kernel), case.expected_gradients()
        assert set(got) == set(want)
        for name, gradient in got.items():
            assert gradient.shape == case.arrays[name].shape and gradient.dtype == case.arrays[name].dtype
            check_close(gradient, *want[name], f"{name} of {case}")


@pytest.mark.parametrize("activation", [None, "swiglu"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_threads_do_not_change_a_gradient(dtype, activation):
    case = LinearCase(333, 270, 150, dtype, "k", activation, "float32")
    before = qflash.get_num_threads()
    try:
        results = []
        for threads in (1, 2, 7):
            qflash.set_num_threads(threads)
            results.append(gradients(case, "cpu_linear_bwd"))
    finally:
        qflash.set_num_threads(before)
    for other in results[1:]:
        assert all(np.array_equal(x, other[name]) for name, x in results[0].items())


@pytest.mark.parametrize("activation", [None, "gelu"])
def test_the_gradient_of_the_residual_can_be_asked_of_the_kernel(activation):
    """Front ends pass the result's own on. The struct has a place for a copy of it all the same."""
    case = LinearCase(70, 600, 20, "float16", "k odd", activation)
    pre = None if activation is None else case.products()[0][0].astype(np.float16)
    arrays = {"dout": case.dout(), "x": case.arrays["x"], "w": case.arrays["w"], "pre": pre}
    given = [arrays.get(name) for name in LINEAR_BACKWARD.arrays]
    plan = plan_of(LINEAR_BACKWARD, given, (activation, None, True, None))
    plan = replace(plan, results=(*plan.results, Result("dresidual", (70, 600), "float16")))
    results = [np.empty(result.shape, result.dtype) for result in plan.results]
    operands = [arrays[operand.argument] for operand in plan.operands]
    prepare(plan).call(*(x.ctypes.data for x in (*operands, *results)), 0, 0, 0)
    assert np.array_equal(results[-1], case.dout())


# INT8 ----------------------------------------------------------------------------------------------------------------

INT8 = pytest.mark.parametrize(("kernel", "dtype"), kernels("linear", "int8"))


@cache
def replayed(case: LinearCase) -> list[np.ndarray]:
    """What the activation is taken of, by the replay."""
    names = zip(case.weights, case.biases, strict=True)
    return [reference.linear_int8(case.arrays["x"], case.arrays[w], case.arrays.get(bias)) for w, bias in names]


@pytest.mark.parametrize("activation", ACTIVATIONS)
@INT8
def test_int8_is_its_replay(kernel, dtype, activation):
    """Bit by bit where nothing follows the products; else within what activations may be off."""
    for m, n, k, layout in ((37, 131, 300, "k odd"), (3, 40, 2100, "n"), (130, 5, 7, "k")):
        for bias, residual in ((None, False), ("float32", True), (dtype, False)):
            case = LinearCase(m, n, k, dtype, layout, activation, bias, residual)
            got = call(case, kernel, precision="int8")
            h, *u = (x.astype(np.float64) for x in replayed(case))
            want = activate("silu", h) * u[0] if u else activate(activation, h)
            error = 32 * U * np.abs(want) if activation else np.zeros_like(want)
            if dispatch.BY_NAME[kernel].device == "cuda" and activation == "gelu":
                error = error + 2 * U * np.abs(h)  # (1 + erf) / 2, as PyTorch has it: nothing is kept of the tail
            error = error + activation_error(kernel, activation, dtype)
            if residual:
                want = want + case.arrays["residual"].astype(np.float64)
            check_close(got, want, error + U * np.abs(want), str(case))
            if activation is None and not residual:
                assert np.array_equal(got, replayed(case)[0].astype(DTYPES[dtype]))


@INT8
def test_int8_of_what_was_quantized_before(kernel, dtype):
    case = LinearCase(20, 60, 130, dtype, "n", "swiglu", "float32")
    put = placed(kernel)
    layers = {name: qflash.quantize_linear(put(case.arrays[name])) for name in case.weights}
    assert {layer.dtype for layer in layers.values()} == {dtype}
    others = {name: put(x) for name, x in case.arrays.items() if name not in layers}
    try:
        got = qflash.swiglu(**others, **layers, kernel=kernel)
    except qflash.NoKernelError as refusal:
        pytest.skip(str(refusal).splitlines()[0])
    assert np.array_equal(to_numpy(got), call(case, kernel, precision="int8"))


# Relative L2 error of the product against float64. Normal numbers: a step of absmax / 127 of x and of w, 0.9 % each at
# K = 4096. One channel of x at 20 times the others' size: steps of x that are as much larger, whatever K is.
INT8_L2 = {"normal": 1.5e-2, "outliers": 6e-2}


@pytest.mark.parametrize("data", INT8_L2)
@INT8
def test_int8_costs_what_the_contract_says(kernel, dtype, data):
    case = LinearCase(64, 192, 2048, dtype, "k")
    if data == "outliers":
        case.arrays["x"][:, 5] *= DTYPES[dtype](20)
    want = reference.linear(case.arrays["x"], case.arrays["w"])
    error = compare.errors(call(case, kernel, precision="int8"), want).relative_l2
    assert error <= INT8_L2[data]
    assert error >= INT8_L2[data] / 4  # the bound says something


@INT8
def test_int8_of_what_is_not_finite(kernel, dtype):
    """A row of x, or a column of w, that holds NaN or an infinity is NaN, and no other."""
    case = LinearCase(9, 30, 50, dtype, "n", "silu")
    clean = call(case, kernel, precision="int8")
    case.arrays["x"][4, 49], case.arrays["w"][0, 29] = np.inf, np.nan
    got = call(case, kernel, precision="int8")
    reached = np.zeros(got.shape, bool)
    reached[4] = reached[:, 29] = True
    assert np.isnan(got[reached]).all() and np.array_equal(got[~reached], clean[~reached])


ISAS = ("generic", "avx2", "avx512", "amx")


@pytest.mark.parametrize("isa", ISAS)
def test_every_instruction_set(isa):
    """This file again, where it says something about one, on each that the machine has and does not run anyway."""
    if ISAS.index(isa) >= ISAS.index(_native.cpu_isa()) or "QFLASH_CPU_ISA" in os.environ:
        pytest.skip(f"{isa} is what every other test runs, or this machine lacks it")
    chosen = "products or behind or slopes or tails or others or test_gradients or replay or not_finite"
    without = ["-p", "no:cacheprovider", "-p", "no:hypothesispytest"]  # which is slow to import
    command = [sys.executable, "-m", "pytest", "-q", *without, "-m", "not gpu", "-k", chosen, __file__]
    done = subprocess.run(command, env=os.environ | {"QFLASH_CPU_ISA": isa}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
