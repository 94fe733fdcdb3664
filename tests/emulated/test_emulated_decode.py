"""The decode kernels run on the CPU: few rows of queries, keys split over blocks, sums merged by the last of them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from qflash.testing import Case, cases
from qflash.testing.compare import check_contract, check_same_bits
from qflash.testing.emulated_attention import call, check_kernel, run_case
from qflash.testing.runner import problem_of

KERNELS = ("sm90_decode", "decode")
PAGED = tuple(f"{kernel}_pages" for kernel in KERNELS)
both = pytest.mark.parametrize("kernel", KERNELS)


def by_name(case: Case) -> str:
    return case.name


# The second half of the list has the same kinds of problems with other sizes, and takes as long.
@pytest.mark.parametrize("case", [case for case in cases("full") if "quick" not in case.tags][::2], ids=by_name)
@both
def test_contract(library, kernel, case):
    check_kernel(library, case, kernel)


ROWS = [(group, q_len) for group in (1, 3, 4, 5, 7, 8, 16) for q_len in (1, 2, 4, 8) if group * q_len <= 64]


@pytest.mark.parametrize(("group", "q_len"), ROWS)
@both
def test_packed_rows(library, kernel, group, q_len):
    """Tokens times heads of a group are rows, in one, two and four warps of rows."""
    case = Case("rows", q_len, 150, 2 * group, 2, 64, dtype="bfloat16", causal=True, batch=2, kv_lens=(150, 70))
    check_kernel(library, replace(case, seed=group), kernel)


@pytest.mark.parametrize(
    ("head_dim", "dtype"), [(80, "bfloat16"), (96, "float16"), (112, "bfloat16"), (192, "float16")]
)
@pytest.mark.parametrize("q_heads", [4, 24, 60])
@both
def test_head_dims(library, kernel, head_dim, dtype, q_heads):
    case = Case("dims", 1, 200, q_heads, 1, head_dim, dtype=dtype, window=(150, 0), seed=head_dim)
    check_kernel(library, case, kernel)


@pytest.mark.parametrize("seed", [*range(6), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(6, 12))])
@pytest.mark.parametrize(
    ("head_dim", "dtype", "q_heads"),
    [(64, "bfloat16", 4), (128, "bfloat16", 4), (128, "bfloat16", 40), (256, "float16", 4)],
)
@both
def test_whoever_is_slow(library, kernel, head_dim, dtype, q_heads, seed):
    """Rings go round many times: whichever warp falls behind, nobody misses a phase of a barrier."""
    case = Case("slow", 1, 2300, q_heads, 1, head_dim, dtype=dtype, seed=1)
    check_contract(case, *run_case(library, case, kernel, seed=seed, multiprocessors=2))


# Empty, one key, around a tile of 64 and of 128, all of them; and lengths that are out of range.
LENGTHS = (0, 1, 63, 64, 65, 0, 127, 128, 129, 300, 2, 299, 0)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("multiprocessors", [1, 3, 7])
@both
def test_lengths_of_all_kinds(library, kernel, head_dim, multiprocessors):
    case = Case("lengths", 1, 300, 4, 2, head_dim, dtype="bfloat16", batch=len(LENGTHS), kv_lens=LENGTHS)
    found = run_case(library, case, kernel, multiprocessors=multiprocessors)
    check_contract(case, *found)
    check_same_bits(case, found, run_case(library, case, kernel, seed=1, multiprocessors=multiprocessors), "")


@pytest.mark.parametrize("kv_heads", [1, 3, 8, 10, 11])
@both
def test_heads_side_by_side(library, kernel, kv_heads):
    """Chunks of up to 8 heads, on fewer multiprocessors than a chunk has heads, and on more."""
    case = Case("heads", 1, 400, 2 * kv_heads, kv_heads, 64, dtype="float16", batch=3, kv_lens=(400, 10, 250))
    for multiprocessors in (4, 24):
        check_contract(case, *run_case(library, case, kernel, multiprocessors=multiprocessors))


@both
def test_counters_are_zero_again(library, kernel):
    """Calls of other shapes and cuts between two that must agree: each leaves its counters as it found them."""
    case = Case("first", 1, 1000, 4, 1, 64, dtype="bfloat16", seed=3)
    first = run_case(library, case, kernel, multiprocessors=5)
    for other in (replace(case, k_len=129), replace(case, batch=3, kv_lens=(1000, 64, 700)), replace(case, kv_heads=2)):
        run_case(library, other, kernel, multiprocessors=7)
    check_same_bits(case, first, run_case(library, case, kernel, multiprocessors=5), "")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@both
def test_values_that_are_not_finite(library, kernel, dtype):
    """At keys that all rows see, that some do and that none does."""
    plant = tuple(
        ("v", (0, key, 0, 5 + i), value)
        for i, (key, value) in enumerate(
            [(3, "nan"), (100, "inf"), (299, "nan"), (297, "-inf"), (150, "inf"), (230, "nan")]
        )
    )
    case = Case("planted", 4, 300, 2, 1, 64, dtype=dtype, plant=plant, seed=2)
    for changes in ({}, {"causal": True}, {"causal": True, "window": (70, 0)}, {"kv_lens": (231,)}, {"window": (5, 2)}):
        check_kernel(library, replace(case, **changes), kernel)


@both
def test_a_length_out_of_range_is_nan(library, kernel):
    """The others have the bits that they have beside a sequence of no keys, which takes as much of the grid."""
    case = Case("bad", 2, 100, 2, 1, 64, dtype="bfloat16", batch=3, kv_lens=(100, 0, 7))
    inputs = case.make_inputs()
    good = run_case(library, case, kernel)
    problem = problem_of(case, inputs, None, "cpu")
    for bad in (101, -1):
        lens = np.array([100, bad, 7], np.int32)
        found = call(library(kernel, "bfloat16", 64), kernel, problem, inputs.q, inputs.k, inputs.v, lens)
        for got, want in zip(found, good, strict=True):
            assert np.isnan(got[1].astype(np.float32)).all()
            np.testing.assert_array_equal(got[::2], want[::2])
