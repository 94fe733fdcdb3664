"""The CUDA kernels' own source run on the CPU, thread by thread (qflash/csrc/emulate): no GPU, no nvcc, only g++.

Slow but thorough: every case of the contract, tile shapes of every architecture, bad values on the device, and, since
warps and lanes take turns in a seeded order, missing barriers.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from qflash.dispatch import VARIANTS as BY_KERNEL
from qflash.frontends.numpy import describe
from qflash.ops.problem import Options, RopeArrays, check, check_packed
from qflash.rotary import Rope
from qflash.testing import BY_NAME, Case, cases
from qflash.testing.compare import check_contract
from qflash.testing.corners import ENDS
from qflash.testing.emulated_attention import call, check_kernel, run_case, with_few_keys
from qflash.testing.runner import problem_of, suited

KERNELS = ("fa", "fa_warps", "fa_tc", "fa_mma", "decode", "sm90_decode", "sm90_fwd", "unfused")
QUICK = [with_few_keys(case) for case in cases("quick")]
ROTATING = PACKING = ("fa", "fa_mma", "sm90_fwd")  # the others refuse rope and packed arrays: tests/unit/test_rungs.py


def dtype_of(kernel: str) -> str:
    """The first dtype that a kernel takes."""
    return BY_KERNEL[kernel].dtypes[0]


def by_name(case: Case) -> str:
    return case.name


def check_result(case: Case, kernel: str, out: np.ndarray, lse: np.ndarray) -> None:
    row = BY_KERNEL[kernel]
    hides = row.kernel.hides_masked_nonfinite_v
    check_contract(case, out, lse, row.precision, hides_masked_nonfinite_v=hides)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("case", QUICK, ids=by_name)
def test_contract(library, case, kernel):
    check_kernel(library, case, kernel)


@pytest.mark.slow
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("case", cases("full"), ids=by_name)
def test_contract_in_full(library, case, kernel):
    check_kernel(library, case, kernel)


@pytest.mark.parametrize("kernel", (*KERNELS, "fa_int8"))
@pytest.mark.parametrize(("scale", "softcap"), ENDS)
def test_ends_of_scale_and_softcap(library, scale, softcap, kernel):
    plant = (("q", (0, 3), "0"),)
    case = Case("ends", 20, 70, 1, 1, 64, scale=scale, softcap=softcap, plant=plant, seed=5)
    case = suited(case, kernel, 90)
    check_contract(case, *run_case(library, case, kernel), BY_KERNEL[kernel].precision)


# docs/numerics.md, "Ranges": sums of weights and values fit float32 while |v| times the keys of a row is below this.
MOST_VALUES = {
    "fa": 128,
    "fa_warps": 128,
    "fa_tc": 120,
    "fa_mma": 120,
    "fa_int8": 120,
    "decode": 120,
    "sm90_decode": 120,
    "sm90_fwd": 118,
    "sm90_int8": 118,
}
HEAD_DIM = {"sm90_int8": 256}  # not 64: a library that other tests have of bfloat16


@pytest.mark.parametrize("data", ["normal", "rising"])
@pytest.mark.parametrize("kernel", MOST_VALUES)
def test_values_up_to_their_bound(library, kernel, data):
    dtype = "float32" if kernel in ("fa", "fa_warps") else "bfloat16"
    case = Case("values", 64, 300, 1, 1, HEAD_DIM.get(kernel, 64), dtype=dtype, data=data, seed=1)
    inputs = case.make_inputs()
    inputs.v[...] = np.array(0.99 * 2.0 ** MOST_VALUES[kernel] / 300).astype(dtype)
    problem = problem_of(case, inputs, None, "cpu")
    out, _ = call(library(kernel, dtype, case.head_dim), kernel, problem, inputs.q, inputs.k, inputs.v)
    np.testing.assert_allclose(out.astype(np.float64), inputs.v[0, 0, 0, 0].astype(np.float64), rtol=2**-7)


@pytest.mark.parametrize(("dtype", "most"), [("float16", 28), ("bfloat16", 32)])
@pytest.mark.parametrize("kernel", ["fa_tc", "fa_mma", "fa_int8", "decode", "sm90_decode", "sm90_fwd", "sm90_int8"])
def test_scores_up_to_their_bound(library, kernel, dtype, most):
    """In base 2. Beyond it one step of float32 in a score is more than the format of weights has room for."""
    case = Case("scores", 64, 300, 1, 1, HEAD_DIM.get(kernel, 64) if dtype == "bfloat16" else 64, dtype=dtype, seed=1)
    inputs = case.make_inputs()
    scores = np.einsum("bqhd,bkhd->bhqk", inputs.q.astype(np.float64), inputs.k.astype(np.float64))
    factor = 2.0**most / (np.abs(scores).max() / case.head_dim**0.5 * np.log2(np.e))
    for x in (inputs.q, inputs.k):
        x[...] = (x.astype(np.float64) * factor**0.5).astype(dtype)
    problem = problem_of(case, inputs, None, "cpu")
    found = call(library(kernel, dtype, case.head_dim), kernel, problem, inputs.q, inputs.k, inputs.v)
    assert all(np.isfinite(x.astype(np.float64)).all() for x in found)


def test_sums_of_values_that_overflow_are_infinite(library):
    """Not the largest finite number, to which `fa_tc` rounds averages that are a little past it."""
    case = Case("overflow", 16, 300, 1, 1, 64, dtype="bfloat16", seed=1)
    inputs = case.make_inputs()
    inputs.v[...] = 1e37
    problem = problem_of(case, inputs, None, "cpu")
    out, _ = call(library("fa_tc", "bfloat16", 64), "fa_tc", problem, inputs.q, inputs.k, inputs.v)
    assert set(out.ravel().tolist()) <= {float("inf"), float(inputs.v[0, 0, 0, 0])} and np.isinf(out).any()


SHAPES = ("dim_40", "dim_72", "dim_128", "dim_136", "dim_256", "many_heads", "nan_v")


def check_on(library, name: str, kernel: str, arch: int, **changes: int) -> None:
    case = suited(replace(BY_NAME[name], **changes), kernel, arch)
    check_result(case, kernel, *run_case(library, case, kernel, arch))


# Architectures in turn; test_all_tile_shapes_of_other_architectures has each shape for each of them.
@pytest.mark.parametrize(("name", "arch"), [(name, (75, 80)[turn % 2]) for turn, name in enumerate(SHAPES)])
def test_tile_shapes_of_other_architectures(library, name, arch):
    check_on(library, name, "fa", arch)


@pytest.mark.parametrize("kernel", ["fa_warps", "fa_tc", "fa_mma"])
@pytest.mark.parametrize(("name", "arch"), [("dim_128", 75), ("dim_256", 86), ("nan_v", 75)])
def test_a_few_tile_shapes_of_other_architectures(library, name, kernel, arch):
    """One head_dim for each architecture, whose library all of its cases share."""
    check_on(library, name, kernel, arch, head_dim=128 if arch == 75 else 256)


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["fa", "fa_warps", "fa_tc", "fa_mma"])
@pytest.mark.parametrize("arch", [75, 80, 86])
@pytest.mark.parametrize("name", SHAPES)
def test_all_tile_shapes_of_other_architectures(library, name, kernel, arch):
    check_on(library, name, kernel, arch)


@pytest.mark.parametrize("kernel", ["fa", "fa_warps"])
def test_float32_sums_are_folded(library, kernel):
    """Past kFoldKeys keys, where partial sums wait in `out`; the last key has the largest score of all."""
    case = Case("folded", 70, 2500, 1, 1, head_dim=32, window=(1800, 300), seed=1)
    check_contract(case, *run_case(library, case, kernel))
    rng = np.random.default_rng(2)
    q, k, v = (rng.standard_normal((1, t, 1, 32), np.float32) for t in (3, 2500, 2500))
    k[0, -1, 0] = 30 * q[0, 0, 0]
    problem = check(*map(lambda x: describe("x", x), (q, k, v)), Options())
    out, _ = call(library(kernel, "float32", 32), kernel, problem, q, k, v)
    s = np.einsum("qd,kd->qk", q[0, :, 0].astype(float), k[0, :, 0].astype(float)) / np.sqrt(32)
    weights = np.exp(s - s.max(1, keepdims=True))
    want = weights @ v[0, :, 0].astype(float) / weights.sum(1, keepdims=True)
    np.testing.assert_allclose(out[0, :, 0], want, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("name", ["len_300x5", "layout_one_batch"])
def test_rows_with_few_keys_keep_what_rounding_takes_off_weights(library, name):
    """With float16 weights alone these miss the contract's 1e-3."""
    check_kernel(library, replace(BY_NAME[name], dtype="float16"), "fa_tc")


def test_finite_values_near_the_largest_stay_finite(library):
    """A mean of them, whose weights were rounded, may be a little past float16's largest."""
    q, k, v = tensors((1, 200, 1, 32), dtype="float16")
    v[...] = 65504.0
    problem = check(*(describe("x", x) for x in (q, k, v)), Options(causal=True))
    out, _ = call(library("fa_tc", "float16", 32), "fa_tc", problem, q, k, v)
    np.testing.assert_allclose(out.astype(np.float32), 65504.0, rtol=1e-3)


def test_nonfinite_v_spreads_no_further_than_fa_tc_says(library):
    """docs/numerics.md: in its channel, through the tile it stands in; never from the padding past kv_lens."""
    q, k, v = tensors((1, 200, 1, 32), dtype="float16")
    v[0, 150, 0, 3], v[0, 180, 0, 5] = np.nan, np.inf
    lens = np.array([180], np.int32)
    problem = check(*(describe("x", x) for x in (q, k, v)), Options(window=(-1, 20)), describe("kv_lens", lens))
    out, _ = call(library("fa_tc", "float16", 32), "fa_tc", problem, q, k, v, lens)
    nonfinite = ~np.isfinite(out[0, :, 0].astype(np.float32))
    assert nonfinite[150:, 3].all() and not nonfinite[:64, 3].any() and not np.delete(nonfinite, 3, axis=1).any()


def tensors(shape=(2, 20, 2, 32), seed=0, dtype="float32"):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape, np.float32).astype(dtype) for _ in range(3)]


def packed_problem(q, k, v, cu_q, cu_k, longest, options=None, kv_lens=None):
    arrays = [describe("x", x) for x in (q, k, v, cu_q, cu_k)]
    lens = None if kv_lens is None else describe("kv_lens", kv_lens)
    return check_packed(*arrays, *longest, options or Options(), lens)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("bad", [-1, 21, 2**31 - 1, -(2**31)])
def test_length_out_of_range_spoils_its_sequence_alone(library, kernel, bad):
    q, k, v = tensors(dtype=dtype_of(kernel))
    lens = np.array([bad, 7], np.int32)
    problem = check(*(describe("x", x) for x in (q, k, v)), Options(), describe("kv_lens", lens))
    handle = library(kernel, dtype_of(kernel), 32)
    out, lse = call(handle, kernel, problem, q, k, v, lens)
    assert np.isnan(out[0]).all() and np.isnan(lse[0]).all()
    lens[0] = 20
    good, good_lse = call(handle, kernel, problem, q, k, v, lens)
    assert np.isfinite(good).all() and np.array_equal(good[1], out[1]) and np.array_equal(good_lse[1], lse[1])


# cu_seqlens_q, cu_seqlens_k, (max_seqlen_q, max_seqlen_k) for 40 rows, and the rows that must come out NaN.
PACKED = {
    "good": ([0, 10, 40], [0, 25, 40], (30, 25), []),
    "past the end": ([0, 10, 41], [0, 25, 40], (31, 25), range(10, 40)),
    "far past the end": ([0, 2**31 - 1, 2**31 - 1], [0, 25, 40], (30, 25), range(40)),
    "falls": ([0, 30, 20, 40], [0, 10, 20, 40], (30, 20), range(40)),
    "negative": ([-5, 10, 40], [0, 25, 40], (30, 25), range(40)),
    "starts late": ([4, 10, 40], [0, 25, 40], (30, 25), range(4)),
    "ends early": ([0, 10, 33], [0, 25, 40], (30, 25), range(33, 40)),
    "longer than said": ([0, 10, 40], [0, 25, 40], (29, 25), range(10, 40)),
    "longer than the tiles there are": ([0, 0, 40], [0, 25, 40], (0, 25), range(40)),
    "keys longer than said": ([0, 10, 40], [0, 25, 40], (30, 24), range(10)),
    "keys past the end": ([0, 10, 40], [0, 25, 50], (30, 25), range(10, 40)),
    "keys fall": ([0, 10, 40], [0, 25, 20], (30, 25), range(10, 40)),
    "keys negative": ([0, 10, 40], [-3, 25, 40], (30, 28), range(10)),
    "no sequences": ([0], [0], (0, 0), range(40)),
}


@pytest.mark.parametrize("kernel", PACKING)
@pytest.mark.parametrize("name", PACKED)
def test_bad_packing_spoils_rows_and_reads_nothing_outside(library, kernel, name):
    cu_q, cu_k, longest, spoiled = PACKED[name]
    q, k, v = tensors((40, 2, 32), dtype=dtype_of(kernel))
    cu_q, cu_k = np.array(cu_q, np.int32), np.array(cu_k, np.int32)
    problem = packed_problem(q, k, v, cu_q, cu_k, longest)
    out, lse = call(library(kernel, dtype_of(kernel), 32), kernel, problem, q, k, v, None, cu_q, cu_k)
    wanted = np.isin(np.arange(40), list(spoiled))
    assert np.array_equal(np.isnan(out).any((1, 2)), wanted) and np.array_equal(np.isnan(out).all((1, 2)), wanted)
    assert np.array_equal(np.isnan(lse).any(0), wanted)
    assert np.abs(out[~wanted]).max(initial=0) < 100  # written


@pytest.mark.parametrize("kernel", ROTATING)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotary_dim", [6, 16, 32])
@pytest.mark.parametrize("bad", [40, -40, 2**31 - 1, -(2**31)])
def test_position_outside_the_table(library, kernel, interleaved, rotary_dim, bad):
    """The row at a bad query position is NaN; so is every row that sees a key at one."""
    q, k, v = tensors((1, 20, 1, 32), dtype=dtype_of(kernel))
    cos = np.full((40, rotary_dim // 2), 0.6, np.float32)
    positions = np.arange(20, dtype=np.int32)
    bad_q, bad_k = positions.copy(), positions.copy()
    bad_q[3] = bad_k[15] = bad
    handle = library(kernel, dtype_of(kernel), 32)
    for positions_q, positions_k, wanted in ((bad_q, positions, [3]), (positions, bad_k, [15, 16, 17, 18, 19])):
        rope = Rope(cos, cos, interleaved, positions_q, positions_k)
        case = problem_with_rope(q, k, v, rope, Options(causal=True))
        out, lse = call(handle, kernel, case, q, k, v, rope=rope)
        assert np.flatnonzero(np.isnan(out).any((0, 2, 3))).tolist() == wanted
        assert np.flatnonzero(np.isnan(lse[0, 0])).tolist() == wanted


def problem_with_rope(q, k, v, rope: Rope, options: Options):
    arrays = [describe("x", x) for x in (rope.cos, rope.sin, rope.positions_q, rope.positions_k)]
    table = RopeArrays(*arrays[:2], rope.interleaved, *arrays[2:])
    return check(*(describe("x", x) for x in (q, k, v)), options, None, table)
