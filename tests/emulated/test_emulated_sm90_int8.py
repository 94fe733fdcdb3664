"""`sm90_int8` and `sm90_int8_fp8` run on the CPU, thread by thread, on emulated mbarriers, copies
and products of warpgroups: the contracts of both precisions, and the replay."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from qflash.dispatch import VARIANTS as BY_KERNEL
from qflash.reference import attention as attention_in_float64
from qflash.reference import attention_sm90_int8
from qflash.testing import Case, cases
from qflash.testing.cases import MASKS, NONFINITE_LATER
from qflash.testing.compare import check_contract, check_replay, check_same_bits, errors
from qflash.testing.emulated_attention import call, run_case
from qflash.testing.oracle import expected, integers_of, replayed
from qflash.testing.runner import problem_of, suited

KERNELS = ("sm90_int8", "sm90_int8_fp8")
WEIGHTS = {"sm90_int8_fp8": "float8_e4m3fn"}  # what they are rounded to, where that is not the dtype of the arrays
pytestmark = pytest.mark.parametrize("kernel", KERNELS)

# Every number of keys in a tile and of stages; compilation takes as long as the tests, so few kinds by default.
SHAPES = [(64, "float16"), (256, "bfloat16"), pytest.param(128, "bfloat16", marks=pytest.mark.slow)]
BEYOND_64_SLOW = [64, *(pytest.param(head_dim, marks=pytest.mark.slow) for head_dim in (72, 128, 256))]


def by_name(case: Case) -> str:
    return case.name


def check_kernel(library, case: Case, kernel: str) -> None:
    """The contract holds, the replay gives the same, and neither the order that warps and lanes run in nor whether lse
    is wanted, for which int8_fp8 makes sums of its own, matters."""
    case = suited(case, kernel, 90)
    first = run_case(library, case, kernel, seed=1)
    check_contract(case, *first, BY_KERNEL[kernel].precision, integers=integers_of(kernel))
    check_replay(case, *first, replayed(case, kernel), weights_dtype=WEIGHTS.get(kernel, case.dtype))
    out, _ = run_case(library, case, kernel, seed=2, wants_lse=False)
    check_same_bits(case, first, (out, first[1]))


@pytest.mark.parametrize("case", cases("quick"), ids=by_name)
def test_contract(library, case, kernel):
    check_kernel(library, replace(case, head_dim=min(case.head_dim, 64), dtype="float16"), kernel)


@pytest.mark.slow
@pytest.mark.parametrize("case", cases("full"), ids=by_name)
def test_contract_in_full(library, case, kernel):
    check_kernel(library, case, kernel)


@pytest.mark.parametrize("seed", range(4))
def test_whoever_is_slow(library, kernel, seed):
    """Many tiles that every row sees, whose V nobody inspects, then one with what must be found: whichever warp falls
    behind must miss no phase of a barrier."""
    plant = (("v", (0, 1190, 0, 3), "nan"), ("v", (0, 1110, 0, 9), "inf"))
    case = Case("slow", 100, 1200, 2, 1, 64, causal=True, dtype="float16", plant=plant, seed=1)
    found = run_case(library, case, kernel, seed=seed)
    check_contract(case, *found, BY_KERNEL[kernel].precision, integers=integers_of(kernel))


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("head_dim", "dtype"), SHAPES)
def test_scores_that_outgrow_the_first_tiles(library, kernel, head_dim, dtype, mask):
    """Weights that overflow, or nearly do, in some rows of some warps: their scores are computed again."""
    data = "rising" if mask in ("plain", "window") else "hills"
    case = Case("outgrown", 150, 450, 2, 1, head_dim, dtype=dtype, data=data, seed=head_dim, **MASKS[mask])
    check_kernel(library, case, kernel)


def test_rows_that_fall_while_one_of_their_warp_rises(library, kernel):
    """References of the others rise a little with it; brought down again by more, they would take sums to infinity."""
    head_dim, keys, bits = 256, 6500, 2.9  # that the others fall in 128 keys; the first rises 23
    case = Case("fall", 16, keys, 1, 1, head_dim=head_dim, dtype="bfloat16")
    inputs = case.make_inputs()
    key, scale = np.arange(keys), np.sqrt(head_dim)
    inputs.q[..., :2] = inputs.q[0, 0, 0, 2:] = 0
    inputs.q[0, 0, 0, 0] = scale / 8
    inputs.q[0, 1:, 0, 1] = bits / 128 / np.log2(np.e) * scale
    inputs.k[0, :, 0, 0] = key
    inputs.k[0, :, 0, 1] = np.where(key < 256, key * 23 / bits, 256 * 23 / bits - (key - 256))
    handle, problem = library(kernel, case.dtype, head_dim), problem_of(case, inputs, None, "cpu")
    out, lse = call(handle, kernel, problem, inputs.q, inputs.k, inputs.v)
    replay = attention_sm90_int8(inputs.q, inputs.k, inputs.v, precision=BY_KERNEL[kernel].precision)
    np.testing.assert_allclose(out.astype(np.float32), replay[0], atol=0.02)
    np.testing.assert_allclose(lse, replay[1], rtol=1e-3)


@pytest.mark.parametrize("where", NONFINITE_LATER)
@pytest.mark.parametrize(("head_dim", "dtype"), SHAPES)
def test_scores_that_are_not_finite_in_later_tiles(library, kernel, head_dim, dtype, where):
    case = Case("late", 70, 450, 1, 1, head_dim, dtype=dtype, plant=NONFINITE_LATER[where], seed=7)
    for changes in ({"data": "rising"}, {"causal": True}):
        check_kernel(library, replace(case, **changes), kernel)


@pytest.mark.parametrize("head_dim", BEYOND_64_SLOW)
def test_many_work_tiles_without_keys(library, kernel, head_dim):
    """Between work tiles that have some, however many come in a row, and whether or not they have rows."""
    none, more = (0,) * 9, (3, 0, 200, 1, 64, 0, 130, 7, 20)
    packed = {"q_lens": (70, *more, 150, *none, *more), "k_lens": (150, *none, 300, *more, *none)}
    for case in (
        Case("packed", **packed, causal=True),
        Case("packed_padded", **packed, kv_lens=(0, *none, 290, *none, *none)),
        Case("padded", 200, 150, 3, 1, batch=9, kv_lens=(0, 0, 0, 0, 0, 150, 0, 0, 0)),
        Case("first_rows", 700, 100, 1, 1, causal=True),  # most see nothing
    ):
        check_kernel(library, replace(case, head_dim=head_dim, dtype="float16"), kernel)


@pytest.mark.parametrize("q_len", [1, 70, 129])
@pytest.mark.parametrize(("head_dim", "dtype"), [(40, "float16"), (200, "bfloat16")])
def test_consumers_without_rows_or_tiles(library, kernel, head_dim, dtype, q_len):
    """Of which the last tiles, where NaN is to be found, are nobody's but the last consumer's."""
    plant = (("v", (0, 449, 0, 3), "nan"), ("v", (0, 330, 0, 9), "inf"), ("v", (0, 270, 0, 1), "-inf"))
    case = Case("rows", q_len, 450, 2, 1, head_dim, dtype=dtype, plant=plant, seed=q_len)
    for changes in ({"causal": True}, {"window": (60, 30)}):
        check_kernel(library, replace(case, **changes), kernel)


def misplaced(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(x again, one element past whole 16 bytes; the memory around it, full of 777)."""
    memory = np.full(x.size + 24, 777.0, x.dtype)
    shift = (-memory.ctypes.data // 2) % 8 + 9
    copy = memory[shift : shift + x.size].reshape(x.shape)
    copy[:] = x
    assert copy.ctypes.data % 16 == 2
    return copy, memory


@pytest.mark.parametrize("head_dim", BEYOND_64_SLOW)
def test_odd_outputs(library, kernel, head_dim):
    """They may begin anywhere: one element at a time then, and nothing beside them."""
    case = Case("odd", 150, 200, 4, 2, head_dim, dtype="float16", causal=True)
    inputs = case.make_inputs()
    out, memory = misplaced(np.zeros_like(inputs.q))
    problem = problem_of(case, inputs, None, "cpu")
    found = call(library(kernel, "float16", head_dim), kernel, problem, inputs.q, inputs.k, inputs.v, out=out)
    check_same_bits(case, found, run_case(library, case, kernel))
    assert np.count_nonzero(memory == 777) >= 24


@pytest.mark.parametrize("odd", ["q", "k", "v", "qkv"])
def test_odd_addresses(library, kernel, odd):
    """The copy engine reads V from whole 16 bytes, the pass before reads them at once: neither can plan for arrays
    that begin elsewhere."""
    case = Case("odd", 70, 150, 2, 2, 64, dtype="float16", causal=True)
    inputs = case.make_inputs()
    arrays = [
        misplaced(x)[0] if name in odd else x for name, x in zip("qkv", (inputs.q, inputs.k, inputs.v), strict=True)
    ]
    problem = problem_of(case, inputs, None, "cpu")
    found = call(library(kernel, "float16", 64), kernel, problem, *arrays)
    check_same_bits(case, found, run_case(library, case, kernel))


KEYS = 600  # of which the mean of K and the scale of V are taken from every third
HEAD = (0, tuple(range(KEYS)), 1)  # of every token of a sequence
PLANTED = {
    "q is zero": (("q", ..., "0"),),
    "k is zero": (("k", ..., "0"),),
    "v is zero": (("v", ..., "0"),),
    "a head of k is zero": (("k", HEAD, "0"),),
    "a head of v is zero": (("v", HEAD, "0"),),
    "k is constant": (("k", ..., "3.25"),),
    "k is constant and large": (("k", ..., "30000"),),
    "v is constant": (("v", ..., "-1.75"),),
    "v near the limit of float16": (("v", (0, tuple(range(0, KEYS, 3))), "60000"), ("v", (0, 17), "-60000")),
    "k at the limit of float16": (("k", (0, 170, 0, 5), "65504"),),
    "a large token of v": (("v", (0, 201), "3000"),),
    "large tokens of v, not sampled": (("v", (0, 133), "3000"), ("v", (0, 329), "-2000")),
}


@pytest.mark.parametrize("what", PLANTED)
@pytest.mark.parametrize("head_dim", BEYOND_64_SLOW)
def test_constant_and_large_values(library, kernel, head_dim, what):
    plant = PLANTED[what]
    case = Case("values", 70, KEYS, 2, 2, head_dim, dtype="float16", data="outlier", causal=True, plant=plant, seed=3)
    check_kernel(library, case, kernel)


@pytest.mark.parametrize("token", [10000, 60000])
def test_a_value_that_the_sample_missed(library, kernel, token):
    """Its tile has so large an exponent that other weights round to 0 beside it, and must count all the same."""
    plant = (("q", ..., "0"), ("v", (0, 1), str(token)))
    case = Case("missed", 40, 512, 1, 1, 64, dtype="float16", plant=plant, seed=5)
    out, _ = run_case(library, case, kernel)
    assert errors(out, expected(case).out).relative_l2 < 0.045


def test_rows_of_one_key_at_the_limit_of_float16(library, kernel):
    """Rounded weights, or V in E4M3, may come out a little larger than they were; finite values must stay finite."""
    case = Case("limit", 70, KEYS, 2, 2, 64, dtype="float16", data="large", plant=(("v", ..., "65504"),), seed=3)
    out, _ = run_case(library, case, kernel)
    assert np.isfinite(out).all()


@pytest.mark.parametrize(("head_dim", "dtype"), [*SHAPES, (40, "float16"), (200, "bfloat16")])
def test_a_constant_v_comes_back(library, kernel, head_dim, dtype):
    """Less its mean it is zeros: in E4M3 rows are that mean, to the bit; those that see no key are zeros."""
    case = Case("constant", 150, 130, 2, 1, head_dim, dtype=dtype, causal=True)
    inputs = case.make_inputs()
    inputs.v[:] = inputs.v[:, :1] * 100
    problem = problem_of(case, inputs, None, "cpu")
    out, _ = call(library(kernel, dtype, head_dim), kernel, problem, inputs.q, inputs.k, inputs.v)
    assert (out[:, :20] == 0).all()
    found, wanted = (x.astype(np.float32) for x in np.broadcast_arrays(out[:, 20:], inputs.v[:, :1]))
    np.testing.assert_allclose(found, wanted, rtol=0 if kernel == "sm90_int8_fp8" else 2e-2)


@pytest.mark.parametrize("spread", [1.0, 2.0**-6])
def test_values_with_a_mean(library, kernel, spread):
    """The error is one of what is left without the mean, however large that is."""
    case = Case("mean", 70, 600, 2, 1, 64, dtype="float16", seed=3)
    inputs = case.make_inputs()
    mean = np.linspace(-8, 8, 64, dtype=np.float16)
    inputs.v[:] = (inputs.v * np.float16(spread) + mean).astype(np.float16)
    problem = problem_of(case, inputs, None, "cpu")
    out, _ = call(library(kernel, "float16", 64), kernel, problem, inputs.q, inputs.k, inputs.v)
    exact, _ = attention_in_float64(inputs.q, inputs.k, inputs.v)
    replayed_out, _ = attention_sm90_int8(inputs.q, inputs.k, inputs.v, precision=BY_KERNEL[kernel].precision)
    ulp = 2.0**-8  # of 8 in float16
    assert np.abs(out - replayed_out).max() <= ulp
    assert np.abs(out - exact).max() <= 0.02 * spread + ulp


@pytest.mark.parametrize(("head_dim", "dtype"), SHAPES)
def test_steep_slopes(library, kernel, head_dim, dtype):
    """Scores so far apart that references do not come off them exactly."""
    for changes in ({"scale": 1e4}, {"data": "large"}, {"scale": -30.0, "causal": True}, {"scale": 1e-30}):
        check_kernel(library, Case("steep", 70, 300, 1, 1, head_dim, dtype=dtype, seed=1, **changes), kernel)


@pytest.mark.parametrize("gain", [10000, 14000])
def test_scores_as_large_as_float16_makes_them(library, kernel, gain):
    """References of 2^28 and more are rounded by more than float16's largest weight: rows stay finite averages."""
    case = Case("large", 128, 600, 1, 1, 64, dtype="float16", seed=1)
    inputs = case.make_inputs()
    q, k = ((x * np.float16(gain)).astype(np.float16) for x in (inputs.q, inputs.k))
    assert np.isfinite(q).all() and np.isfinite(k).all()
    run = library(kernel, "float16", 64)
    out, _ = call(run, kernel, problem_of(case, inputs, None, "cpu"), q, k, inputs.v)
    assert np.isfinite(out).all() and np.abs(out).max() <= np.abs(inputs.v).max() * 1.1


ONE_WARP_APART = {
    "nan": (("q", (0, 20, 0, 3), "nan"),),
    "steep": (("q", (0, 20, 0), "3000"),),
    "outgrown": (("q", (0, 20, 0), "4"), ("k", (0, 300, 0), "4")),
}


@pytest.mark.parametrize("apart", ONE_WARP_APART)
@pytest.mark.parametrize(("head_dim", "dtype"), SHAPES)
def test_one_warp_of_a_consumer_is_apart(library, kernel, head_dim, dtype, apart):
    """A query unlike the others must not take its warp through other code: a warpgroup's warps start products together,
    which the emulator looks at."""
    case = Case("apart", 64, 1300, 1, 1, head_dim, dtype=dtype, plant=ONE_WARP_APART[apart], seed=1)
    check_kernel(library, case, kernel)


@pytest.mark.parametrize("head_dim", BEYOND_64_SLOW)
def test_neighbours_in_a_tile(library, kernel, head_dim):
    """The last tile of a packed sequence reaches into the next, whose values are none of its business."""
    plant = tuple((name, (tuple(range(150, 220)),), value) for name, value in (("v", "nan"), ("k", "inf")))
    case = Case("next", q_lens=(60, 70, 20), k_lens=(150, 70, 200), head_dim=head_dim, dtype="float16", plant=plant)
    for changes in ({}, {"causal": True}, {"kv_lens": (140, 70, 3)}):
        check_kernel(library, replace(case, **changes), kernel)


@pytest.mark.parametrize("head_dim", BEYOND_64_SLOW)
def test_outputs_are_promoted(library, kernel, head_dim):
    """More keys than the sums of 8-bit floats hold well, twice over; references move before, between and after."""
    for data in ("normal", "uniform", "hills"):
        case = Case("promoted", 20, 4700, 1, 1, head_dim, dtype="float16", data=data, seed=5)
        check_kernel(library, case, kernel)
