"""The portable kernels of linear layers on a GPU, and all kernels of their gradients, by their C structs: sums of small
integers exact in every layout and on every tile shape, activations and gradients within their bounds of float64; then
through PyTorch's autograd."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

import qflash
from qflash import dispatch
from qflash.ops.linear import LINEAR, SWIGLU
from qflash.ops.run import run as run_op
from qflash.testing.by_kernel import differentiated_by
from qflash.testing.linear_calls import spec_of
from qflash.testing.linear_problems import KINDS, LinearProblem, check_near, gradients, linear, operands, upstream

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.gpu

DTYPES = ("float32", "float16", "bfloat16")
HALVES = DTYPES[1:]
ACTIVATIONS = ("", "gelu", "gelu_tanh", "silu", "swiglu")
LAYOUTS = tuple(product("km", "kn"))
KERNELS = [*(("gemm_tiled", dtype) for dtype in DTYPES), *(("gemm_mma", dtype) for dtype in HALVES)]
EACH = pytest.mark.parametrize("kernel, dtype", KERNELS)
# One element, single rows and columns, tails on either side of tiles and vectors, nothing at all.
SHAPES = ((1, 1, 1), (1, 1000, 64), (17, 3, 5), (128, 128, 128), (129, 255, 257), (64, 96, 1025), (33, 513, 31),
          (300, 40, 600), (5, 3, 0))  # fmt: skip
WIDE = (
    2104,
    2112,
    520,
)  # more tiles of 128 x 256 than any GPU has multiprocessors, in bands of which the last is short


def run(kernel: str, problem: LinearProblem, arrays: dict[str, np.ndarray], **words) -> dict[str, np.ndarray]:
    from qflash.testing.cuda_linear import run_linear

    skip_unserved(kernel, problem)
    return run_linear(kernel, problem, arrays, **words)


def skip_unserved(kernel: str, problem: LinearProblem) -> None:
    from qflash.testing.runner import arch_of

    spec = spec_of(kernel, problem, arch_of("cuda"))
    if why := dispatch.reasons(dispatch.BY_NAME[kernel], spec):
        pytest.skip("; ".join(why))


def check_exact(kernel: str, problem: LinearProblem, **words) -> None:
    arrays = operands(problem)
    want, _ = linear(problem, arrays)
    got = run(kernel, problem, arrays, **words)["out"]
    assert np.array_equal(got, want["out"].astype(KINDS[problem.out_dtype or problem.dtype]))


def whole(shape: tuple[int, int, int], dtype: str, layouts: tuple[str, str], **words) -> LinearProblem:
    """Integers, and sums in float32."""
    x_layout, w_layout = layouts
    return LinearProblem(
        *shape, dtype, out_dtype="float32", x_layout=x_layout, w_layout=w_layout, integers=True, **words
    )


@pytest.mark.parametrize("layouts", LAYOUTS, ids="-".join)
@EACH
def test_sums_are_exact(kernel, dtype, layouts):
    """Aligned where the shape allows it, then one element off, then with gaps."""
    for shape in SHAPES:
        for words in ({}, {"at_end": True}, {"gaps": (8, 24)}, {"gaps": (3, 5)}):
            check_exact(kernel, whole(shape, dtype, layouts, **words), pad=words.get("gaps", (0,))[0])


@pytest.mark.parametrize("layouts", LAYOUTS, ids="-".join)
@EACH
def test_sums_of_many_tiles_are_exact(kernel, dtype, layouts):
    check_exact(kernel, whole(WIDE, dtype, layouts))


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("kernel, dtype", [*KERNELS, *(("gelu_linear_wmma", dtype) for dtype in HALVES)])
def test_what_follows_the_sums(kernel, dtype, activation):
    """Biases of either type, residual, both types of out, vector stores and single ones; what a backward pass wants."""
    for bias, residual, out_dtype in product(("", "float32", dtype), (False, True), ("", "float32")):
        for pad, w_layout, at_end in ((0, "k", False), (8, "n", False), (1, "n", True)):
            shape, lies = (37, 136, 72), {"w_layout": w_layout, "at_end": at_end}
            problem = LinearProblem(*shape, dtype, activation, out_dtype, bias, residual, **lies)
            arrays = operands(problem)
            got = run(kernel, problem, arrays, pad=pad, keep_pre=True)
            check_near(got, *linear(problem, arrays))


@pytest.mark.parametrize("layouts", LAYOUTS, ids="-".join)
@EACH
def test_swiglu_of_many_tiles(kernel, dtype, layouts):
    x_layout, w_layout = layouts
    problem = LinearProblem(2104, 1064, 264, dtype, "swiglu", bias="float32", x_layout=x_layout, w_layout=w_layout)
    arrays = operands(problem)
    check_near(run(kernel, problem, arrays, keep_pre=True), *linear(problem, arrays))


def run_backward(kernel: str, problem: LinearProblem):
    """(operands, dout, saved, gradients)."""
    from qflash.testing.cuda_linear import run_gradients

    skip_unserved(kernel, problem)
    arrays = operands(problem)
    dout, saved = upstream(problem, arrays)
    return arrays, dout, saved, run_gradients(kernel, problem, arrays, dout, saved)


BACKWARD = [(row.name, dtype) for row in dispatch.kernels_of("linear_backward", "cuda") for dtype in row.dtypes]
EACH_BACKWARD = pytest.mark.parametrize("kernel, dtype", BACKWARD)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("w_layout", ["k", "n"])
@EACH_BACKWARD
def test_gradients(kernel, dtype, w_layout, activation):
    for shape in ((70, 72, 40), (1, 1, 1), (129, 139, 67), (300, 9, 130), (257, 264, 136)):
        for at_end in (False, True):
            lies = {"w_layout": w_layout, "at_end": at_end}
            problem = LinearProblem(*shape, dtype, activation, bias="float32", residual=True, **lies)
            arrays, dout, saved, got = run_backward(kernel, problem)
            check_near(got, *gradients(problem, arrays, dout, saved))


@pytest.mark.parametrize("activation", ["", "swiglu"])
@EACH_BACKWARD
def test_gradients_where_all_rows_are_one(kernel, dtype, activation):
    """Stride 0: what sums and means over rows hand back, and tokens that were expanded."""
    from qflash.testing.cuda_linear import run_gradients

    problem = LinearProblem(300, 264, 136, dtype, activation)
    skip_unserved(kernel, problem)
    arrays = operands(problem)
    dout, saved = upstream(problem, arrays)
    one_dout, one_x = (np.broadcast_to(x[:1], x.shape) for x in (dout, arrays["x"]))
    for x, of_out in ((arrays["x"], one_dout), (one_x, dout)):
        given = arrays | {"x": x}
        got = run_gradients(kernel, problem, given, of_out, saved)
        check_near(got, *gradients(problem, given, of_out, saved))


@pytest.mark.parametrize("shape", [(2104, 2112, 2120), (60, 4096, 1000), (8192, 60, 1000)], ids=str)
@pytest.mark.parametrize("activation", ["", "swiglu"])
@pytest.mark.parametrize("w_layout", ["k", "n"])
@pytest.mark.parametrize("kernel, dtype", [pair for pair in BACKWARD if pair[1] in HALVES])
def test_gradients_of_many_tiles(kernel, dtype, w_layout, activation, shape):
    """Wide tiles in every product, and depths that are cut into splits; the same bits the second time."""
    problem = LinearProblem(*shape, dtype, activation, bias=dtype, w_layout=w_layout)
    arrays, dout, saved, got = run_backward(kernel, problem)
    check_near(got, *gradients(problem, arrays, dout, saved))
    again = run_backward(kernel, problem)[-1]
    assert all(np.array_equal(x, again[name]) for name, x in got.items())


@EACH
def test_a_row_that_is_not_finite_stays_one_row(kernel, dtype):
    problem = LinearProblem(200, 300, 100, dtype, "gelu")
    arrays = operands(problem)
    plain = run(kernel, problem, arrays)["out"]
    x = arrays["x"].copy()
    x[130, 7] = np.inf
    got = run(kernel, problem, arrays | {"x": x})["out"]
    assert not np.isfinite(got[130].astype(float)).all()
    assert np.array_equal(np.delete(got, 130, axis=0), np.delete(plain, 130, axis=0))


@pytest.mark.parametrize("kernel, dtype", [*((None, dtype) for dtype in DTYPES), *BACKWARD])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_autograd_is_no_farther_from_float64_than_pytorch(activation, kernel, dtype):
    """Results and gradients through the public call, and with each kernel of gradients: at most twice the error of the
    same math in PyTorch's kernels."""
    if kernel:
        skip_unserved(kernel, LinearProblem(300, 320, 256, dtype, activation))
    kind = getattr(torch, dtype)
    generator = torch.Generator("cuda").manual_seed(2)

    def normal(*shape, scale=1.0):
        return (torch.randn(*shape, generator=generator, device="cuda") * scale).to(kind)

    gated = activation == "swiglu"
    x, dout = normal(3, 100, 256), normal(3, 100, 320)
    weights = [normal(320, 256, scale=1 / 16).T for _ in range(1 + gated)]
    biases = [normal(320) for _ in range(1 + gated)]

    def plain(x, *parameters):
        half = len(parameters) // 2
        h, *u = (x @ w + b for w, b in zip(parameters[:half], parameters[half:], strict=True))
        if gated:
            return torch.nn.functional.silu(h) * u[0]
        if activation.startswith("gelu"):
            approximate = "tanh" if activation == "gelu_tanh" else "none"
            return torch.nn.functional.gelu(h, approximate=approximate)
        return torch.nn.functional.silu(h) if activation == "silu" else h

    def ours(x, *parameters):
        if kernel:
            op, words = (SWIGLU, ()) if gated else (LINEAR, (activation or None,))
            out, *_ = run_op(differentiated_by(op, kernel), (x, *parameters, None), (*words, None, False, None))
            return out
        if gated:
            return qflash.swiglu(x, *parameters)
        return qflash.linear(x, *parameters, activation=activation or None)

    def results(function, dtype):
        arrays = [array.detach().to(dtype).requires_grad_() for array in (x, *weights, *biases)]
        out = function(*arrays)
        return [out.detach(), *torch.autograd.grad(out, arrays, dout.to(dtype))]

    tf32, torch.backends.cuda.matmul.allow_tf32 = torch.backends.cuda.matmul.allow_tf32, False
    try:
        exact, theirs = results(plain, torch.float64), results(plain, kind)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = tf32
    for mine, peer, want in zip(results(ours, kind), theirs, exact, strict=True):
        error, allowed = ((got.double() - want).norm() / want.norm() for got in (mine, peer))
        assert mine.dtype == kind and error <= 2 * allowed + 1e-7, (float(error), float(allowed))
