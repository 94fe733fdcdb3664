"""`sm90_linear_bwd` run on the CPU: every gradient against float64, on both tiles, in every layout of w, with tails on
every side, with k in splits, and in any order that warps, copies and products may run in. The passes over elements and
rows are linear_bwd's (test_emulated_linear.py), the products sm90_gemm's (test_emulated_sm90_gemm.py)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from qflash import NoKernelError, dispatch
from qflash.call.spec import ACTIVATIONS, Spec
from qflash.testing import emulator
from qflash.testing.emulated_linear import run_gradients
from qflash.testing.emulator import packed, poisoned
from qflash.testing.linear_calls import backward
from qflash.testing.linear_problems import LinearProblem, check_near, gradients, operands, upstream

KERNEL = "sm90_linear_bwd"
# Of the emulated GPU (gemm/policy.h): with two the large tile serves, with many the small one, and splits of depths.
PAIR, MANY = 2, emulator.MOST_MULTIPROCESSORS
EITHER = pytest.mark.parametrize("multiprocessors", [PAIR, MANY])
ONE_AND_TWO = pytest.mark.parametrize("activation", ["", "swiglu"])  # weights; the second of swiglu follows the first


@pytest.fixture
def check(shared_cache):
    """check(case): the gradients, which are within their bounds."""

    def run_and_compare(case: LinearProblem, gap: int = 0, **how) -> dict[str, np.ndarray]:
        arrays = operands(case)
        dout, saved = upstream(case, arrays, gap)
        want, bound = gradients(case, arrays, dout, saved)
        got = run_gradients(shared_cache, case, arrays, dout, saved, kernel=KERNEL, **how)
        assert set(got) == set(how.get("wanted", want))
        check_near(got, want, bound)
        return got

    return run_and_compare


def problem(m: int, n: int, k: int, activation: str, **words) -> LinearProblem:
    words = {"dtype": "bfloat16", "bias": "float32", "residual": True, **words}
    return LinearProblem(m, n, k, activation=activation, **words)


@EITHER
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("w_layout", ["k", "n"])
def test_gradients(check, w_layout, activation, multiprocessors):
    """Of everything; rows that the copy engine walks as they are, then odd ones at the end of readable memory."""
    lies = {"w_layout": w_layout, "bias": "bfloat16"}
    check(problem(130, 144, 72, activation, **lies), multiprocessors=multiprocessors)
    check(problem(129, 139, 67, activation, at_end=True, **lies), multiprocessors=multiprocessors)


# One element, single rows and columns, whole tiles and steps, one more and one less of them.
SHAPES = [(1, 1, 1), (1, 17, 3), (17, 1, 130), (64, 64, 128), (65, 129, 8), (127, 256, 64), (257, 65, 300)]


@EITHER
@ONE_AND_TWO
@pytest.mark.parametrize("w_layout", ["k", "n"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_shape(check, shape, w_layout, activation, multiprocessors):
    check(problem(*shape, activation, w_layout=w_layout), multiprocessors=multiprocessors)


@pytest.mark.parametrize("activation", ["", "silu", "swiglu"])
@pytest.mark.parametrize("shape", [(0, 5, 3), (5, 0, 3), (5, 3, 0), (0, 0, 3)], ids=str)
def test_gradients_of_nothing(check, shape, activation):
    """Without rows dw and dbias are zeros, without columns dx is."""
    check(problem(*shape, activation, w_layout="n"))


@ONE_AND_TWO
def test_rows_of_dout_x_and_w_may_have_gaps(check, activation):
    """Gaps that keep and break the alignment of rows; nothing between the rows of results is written."""
    for gap, w_layout in ((8, "n"), (8, "k"), (3, "n"), (3, "k")):
        check(problem(70, 72, 40, activation, gaps=(gap, gap), w_layout=w_layout), gap=gap)


@ONE_AND_TWO
def test_all_rows_of_dout_or_x_may_be_one(shared_cache, activation):
    """Stride 0: what sums and means over rows hand back, and tokens that were expanded."""
    case = problem(70, 72, 40, activation)
    arrays = operands(case)
    dout, saved = upstream(case, arrays)
    one_dout, one_x = (np.broadcast_to(x[:1], x.shape) for x in (dout, arrays["x"]))
    for x, of_out in ((arrays["x"], one_dout), (one_x, dout)):
        given = arrays | {"x": x}
        got = run_gradients(shared_cache, case, given, of_out, saved, kernel=KERNEL)
        check_near(got, *gradients(case, given, of_out, saved))


@pytest.mark.parametrize("wanted", [("dx",), ("dw",), ("dbias",), ("dresidual",), ("dw", "dbias")], ids="-".join)
@pytest.mark.parametrize("activation", ["", "silu"])
def test_only_what_is_wanted(check, activation, wanted):
    check(problem(20, 24, 16, activation), wanted=wanted)


# Depths that are cut into splits on many multiprocessors: n of dx, m of dw.
DEEP = [(40, 1500, 72), (2100, 40, 72)]


@ONE_AND_TWO
@pytest.mark.parametrize("shape", DEEP, ids=str)
def test_the_same_bits_in_every_order(check, shape, activation):
    """Whoever comes last to a tile adds its splits up, in their order."""
    for multiprocessors in (PAIR, MANY):
        runs = [check(problem(*shape, activation), seed=seed, multiprocessors=multiprocessors) for seed in range(3)]
        for name, first in runs[0].items():
            assert all(np.array_equal(first, other[name]) for other in runs[1:]), name


# Four tiles of dx and of dw for three pairs of multiprocessors.
@pytest.mark.parametrize(
    ("name", "shape", "activation"),
    [("dx", (136, 2560, 1000), ""), ("dx", (136, 1280, 1000), "swiglu"), ("dw", (2560, 1000, 136), "")],
)
def test_the_last_wave_is_cut_along_its_depth(check, name, shape, activation):
    """Of four tiles the last has other bits than on a GPU that cuts none, and the same in every order."""
    case = problem(*shape, activation)
    got = [check(case, wanted=(name,), seed=seed, multiprocessors=6)[name] for seed in (0, 1)]
    uncut = check(case, wanted=(name,), multiprocessors=PAIR)[name]
    assert np.array_equal(*got) and np.array_equal(got[0][:, :768], uncut[:, :768])
    assert not np.array_equal(got[0], uncut)


@pytest.mark.slow
@EITHER
@ONE_AND_TWO
@pytest.mark.parametrize("w_layout", ["k", "n"])
@pytest.mark.parametrize("shape", [(700, 530, 650), (513, 1029, 257)], ids=str)
def test_many_tiles(check, shape, w_layout, activation, multiprocessors):
    """Bands of tiles and rings that go round, of float16."""
    for seed in range(4):
        case = problem(*shape, activation, w_layout=w_layout, dtype="float16", bias="float16")
        check(case, seed=seed, multiprocessors=multiprocessors)


@EITHER
@ONE_AND_TWO
def test_what_is_not_finite_stays_in_its_row_or_column(shared_cache, activation, multiprocessors):
    """NaN of dout reaches its row of dx and its column of dw; nothing comes from beyond a matrix, or from between its
    rows, where tiles and steps end."""
    case = problem(150, 90, 100, activation)
    arrays = operands(case)
    dout, saved = upstream(case, arrays)

    def run(dout: np.ndarray) -> dict[str, np.ndarray]:
        how = {"kernel": KERNEL, "multiprocessors": multiprocessors}
        return run_gradients(shared_cache, case, arrays, dout, saved, **how)

    clean, planted = run(dout), dout.copy()
    planted[140, 89] = np.nan
    got = run(planted)
    reached = {"dx": np.s_[140], "dw": np.s_[:, 89], "dup": np.s_[:, 89], "dbias": np.s_[89], "dup_bias": np.s_[89]}
    for name, x in got.items():
        lost = np.zeros(x.shape, bool)
        lost[reached.get(name, np.s_[140, 89])] = True
        assert np.array_equal(np.isnan(x.astype(np.float32)), lost), name
        assert np.array_equal(x[~lost], clean[name][~lost]), name


@pytest.mark.parametrize("kernel", [KERNEL, "linear_bwd"])
def test_windows_that_overlap_beside_weights_that_do_not(shared_cache, kernel):
    """Both dimensions of gate have stride 1, so it lies along k as up does, and up has another stride along n."""
    case = LinearProblem(40, 24, 16, "bfloat16", "swiglu")
    arrays = operands(case)
    line = np.random.default_rng(0).standard_normal(24 + 16).astype(arrays["w"].dtype)
    arrays["w"] = np.lib.stride_tricks.as_strided(line, (16, 24), (2, 2))
    dout, saved = upstream(case, arrays)
    got = run_gradients(shared_cache, case, arrays, dout, saved, kernel=kernel)
    check_near(got, *gradients(case, arrays, dout, saved))


def test_what_it_refuses(shared_cache):
    case = problem(16, 16, 16, "gelu")
    arrays = operands(case)
    call = backward(case, arrays, *upstream(case, arrays))
    library = emulator.kernel_library(KERNEL, "bfloat16", 0, cache=shared_cache)
    fields = {**call.numbers, **call.arrays}
    for change in ({"dtype": 1}, {"bias_dtype": 1}, {"activation": 5}, {"w_stride_k": 2}, {"k": 1 << 40}, {"m": -1}):
        with pytest.raises(NoKernelError, match=f"kernel '{KERNEL}' was built for another dtype"):
            library.launch_struct(call.struct, fields | change)
    workspace = poisoned(100)
    short = packed(call.struct, fields | {"workspace": workspace, "workspace_bytes": workspace.nbytes})
    no_memory = 100002
    assert library.handle.qf_sm90_linear_bwd(short, None) == no_memory


def test_who_serves_gradients_on_hopper():
    spec = Spec("cuda", 90, "bfloat16", op="linear_backward", layout="n", activation="gelu")
    assert dispatch.choose(spec).name == KERNEL
    for change, why in (
        ({"dtype": "float32"}, "takes float16, bfloat16, not float32"),
        ({"arch": 80}, "needs compute capability 9.0, this GPU has 8.0"),
        ({"arch": 100}, "runs on compute capability 9.0 alone, this GPU has 10.0"),
    ):
        other = replace(spec, **change)
        assert dispatch.choose(other).name == "linear_bwd"
        assert (KERNEL, "no", why) in dispatch.verdicts(other)
