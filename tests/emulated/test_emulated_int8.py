"""`fa_int8` run on the CPU, thread by thread: the contract of precision="int8", and the replay."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from qflash.frontends.numpy import describe
from qflash.ops.problem import Options, check
from qflash.testing import BY_NAME, Case, Rotary, cases
from qflash.testing.compare import check_replay
from qflash.testing.emulated_attention import call, check_kernel, run_case, with_few_keys
from qflash.testing.emulator import ARCH
from qflash.testing.oracle import replayed
from qflash.testing.runner import suited

KERNEL = "fa_int8"
SHAPES = ("dim_40", "dim_72", "dim_128", "dim_136", "dim_256", "many_heads", "nan_v")


QUICK = [with_few_keys(case) for case in cases("quick")]


def by_name(case: Case) -> str:
    return case.name


@pytest.mark.parametrize("case", QUICK, ids=by_name)
def test_contract(library, case):
    check_kernel(library, case, KERNEL)


@pytest.mark.slow
@pytest.mark.parametrize("case", cases("full"), ids=by_name)
def test_contract_in_full(library, case):
    check_kernel(library, case, KERNEL)


@pytest.mark.parametrize("name", ["sinks", "sinks_softcap"])
def test_sinks_meet_the_scores_that_keys_had_before_smoothing_without_lse_too(library, name):
    case = suited(BY_NAME[name], KERNEL, ARCH)
    (_, lse), (out, _) = (run_case(library, case, KERNEL, wants_lse=wanted) for wanted in (True, False))
    check_replay(case, out, lse, replayed(case, KERNEL), weights_dtype=case.dtype)


@pytest.mark.parametrize(("name", "arch"), [("dim_72", 75)])
def test_a_tile_shape_of_another_architecture(library, name, arch):
    check_kernel(library, BY_NAME[name], KERNEL, arch)


@pytest.mark.slow
@pytest.mark.parametrize("arch", [75, 80, 86])
@pytest.mark.parametrize("name", SHAPES)
def test_all_tile_shapes_of_other_architectures(library, name, arch):
    check_kernel(library, BY_NAME[name], KERNEL, arch)


# Keys 32 to 47 share a scale, and so does key 64 with none but itself: no finite key, so their scale is NaN.
@pytest.mark.parametrize("keys", [range(32, 48), [64]])
def test_a_group_of_keys_without_a_finite_one_spoils_only_rows_that_see_it(library, keys):
    plant = tuple(("k", (0, key, 0, 3), "nan") for key in keys)
    check_kernel(library, Case("nonfinite_group", 65, 65, 1, 1, causal=True, plant=plant, seed=1), KERNEL)


def test_steep_scores(library):
    """In the thousands, scores are a few float32 steps apart: the replay must round where the kernel does."""
    case = Case("steep", 100, 17, 3, 1, head_dim=16, dtype="bfloat16", data="large", seed=3066)
    check_kernel(library, case, KERNEL)


def test_a_weight_and_then_its_row_rounded_to_other_sides(library):
    """Row 94 sees one key, and shares its warp with steep scores, which takes the offset off exactly for it too."""
    words = {"causal": True, "window": (0, 0), "scale": 0.5, "rope": Rotary(2), "layout": "gaps", "data": "outlier"}
    check_kernel(library, Case("sides", 129, 127, 6, 3, 16, 2, "bfloat16", seed=3013, **words), KERNEL)


def test_a_key_that_shares_its_scale_with_an_outlier(library):
    """Rows see one key each; key 5 makes the integers of its group of 16 coarse, and key 20 is in the next."""
    plant = (("k", (0, 5, 0, 1), "90"),)
    case = Case("outlier", 32, 32, 1, 1, 8, dtype="bfloat16", window=(0, 0), softcap=30.0, plant=plant, seed=3)
    check_kernel(library, case, KERNEL)


def test_tiny_queries_on_huge_keys(library):
    """Powers of two that cancel in every product change no bit, though either scale alone is far outside the usual."""
    rng = np.random.default_rng(1)
    q, k, v = (rng.standard_normal((1, 40, 1, 32), np.float32).astype(ml_dtypes.bfloat16) for _ in range(3))
    far = np.array(2.0**60, ml_dtypes.bfloat16)
    handle = library(KERNEL, "bfloat16", 32)
    problem = check(*(describe("x", x) for x in (q, k, v)), Options(causal=True, precision="int8"))
    near_out, near_lse = call(handle, KERNEL, problem, q, k, v)
    far_out, far_lse = call(handle, KERNEL, problem, q / far, k * far, v)
    assert np.array_equal(near_out, far_out) and np.array_equal(near_lse, far_lse)
