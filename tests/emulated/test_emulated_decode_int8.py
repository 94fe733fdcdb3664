"""The decode kernels on INT8 pages, run on the CPU: against the replay on the same integers, and exact attention."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from qflash.dispatch import VARIANTS
from qflash.reference.kv_write import quantize_tokens
from qflash.testing import Case, cases
from qflash.testing.case import Rotary
from qflash.testing.compare import REPLAY, check_contract, check_same_bits, errors
from qflash.testing.corners import ENDS
from qflash.testing.emulated_attention import UNTOUCHED, check_kernel, run_case, with_few_keys
from qflash.testing.oracle import expected
from qflash.testing.paged import PAGE_SIZES, POOLS, PagedInputs, on_pages, plan_of, replay_of

KERNELS = ("sm90_decode_pages_int8", "decode_pages_int8")
PORTABLE = KERNELS[1]


@pytest.fixture(params=KERNELS)
def kernel(request) -> str:
    return request.param


def run(library, kernel: str, case: Case, inputs: PagedInputs, seed: int = 0, multiprocessors: int = 3, arch: int = 90):
    """(out, lse) on pages as they are given."""
    plan, arrays = plan_of(case, inputs, kernel, "cpu")
    results = [np.full(result.shape, UNTOUCHED, result.dtype) for result in plan.results]
    compiled = library(kernel, case.dtype, case.head_dim, arch)
    operands = (arrays[operand.argument] for operand in plan.operands)
    compiled.launch(compiled.prepare(plan, VARIANTS[kernel]), (*operands, *results), seed, multiprocessors)
    return results


def check_replay(
    library, kernel: str, case: Case, inputs: PagedInputs, multiprocessors: int = 3, arch: int = 90
) -> None:
    """Rows by themselves, so that small ones count as large ones do."""
    found = run(library, kernel, case, inputs, multiprocessors=multiprocessors, arch=arch)
    wanted = replay_of(case, inputs)
    for got, want in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(np.isnan(got.astype(np.float64)), np.isnan(want))
    out, want = found[0].astype(np.float64), wanted[0]
    unit = {"float16": 2.0**-11, "bfloat16": 2.0**-8}[case.dtype]
    size = np.linalg.norm(np.nan_to_num(want), axis=-1)
    assert (np.linalg.norm(np.nan_to_num(out - want), axis=-1) <= (REPLAY + unit) * size + 1e-30).all()
    finite = np.isfinite(wanted[1])
    np.testing.assert_allclose(found[1][finite], wanted[1][finite], atol=2e-4, rtol=2e-6)


@pytest.mark.parametrize("case", [case for case in cases("quick") if not case.packed], ids=lambda case: case.name)
def test_contract(library, kernel, case):
    check_kernel(library, with_few_keys(case), kernel)


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize(("group", "q_len"), [(1, 1), (3, 2), (4, 1), (8, 1), (8, 4), (8, 8)])
def test_page_sizes(library, kernel, page_size, pool, group, q_len):
    case = Case("pages", q_len, 200, 2 * group, 2, 64, dtype="float16", causal=True, batch=2, kv_lens=(200, 77))
    case = replace(case, seed=page_size + group)
    check_replay(library, kernel, case, on_pages(case, case.make_inputs(), kernel, page_size, pool))


@pytest.mark.parametrize(("group", "q_len"), [(g, t) for g in (1, 3, 4, 8) for t in range(1, 9)])
def test_packed_rows(library, kernel, group, q_len):
    case = Case("rows", q_len, 300, 2 * group, 2, 128, dtype="bfloat16", causal=True, batch=2, kv_lens=(300, 70))
    check_kernel(library, replace(case, seed=group + q_len), kernel)


@pytest.mark.parametrize("head_dim", [64, 80, 96, 112, 128, pytest.param(192, marks=pytest.mark.slow), 256])
@pytest.mark.parametrize("q_heads", [4, 24, 60])
def test_head_dims(library, kernel, head_dim, q_heads):
    dtype = "float16" if head_dim % 32 or head_dim == 256 else "bfloat16"
    case = Case("dims", 1, 260, q_heads, 1, head_dim, dtype=dtype, window=(190, 0), seed=head_dim + q_heads)
    check_kernel(library, case, kernel)


WORDS = (
    {"window": (70, 0)}, {"window": (20, 3)}, {"softcap": 15.0}, {"softcap": 80.0, "causal": True}, {"scale": -0.1},
    {"scale": 0.0}, {"rope": Rotary(64)}, {"rope": Rotary(32, interleaved=True, positions="per_batch")},
    {"kv_lens": (0, 1)}, {"kv_lens": (128, 129), "window": (0, 0)},
)  # fmt: skip


@pytest.mark.parametrize("words", WORDS, ids=str)
@pytest.mark.parametrize("data", ["normal", "biased_k"])
def test_words(library, kernel, words, data):
    """biased_k has a k_mean, which lse and a softcap must get back."""
    case = Case("words", 4, 280, 8, 2, 64, dtype="float16", batch=2, data=data, seed=3)
    check_kernel(library, replace(case, **words), kernel)


@pytest.mark.parametrize(("scale", "softcap"), ENDS)
def test_ends_of_scale_and_softcap(library, kernel, scale, softcap):
    case = Case("ends", 4, 140, 4, 1, 64, dtype="float16", scale=scale, softcap=softcap, seed=5)
    check_contract(case, *run_case(library, case, kernel), "int8_pages")


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize(("data", "bound"), [("normal", 0.015), ("biased_k", 0.02), ("outlier", 0.02)])
def test_accuracy(library, kernel, head_dim, data, bound):
    """Relative L2 against float64 on k and v as they were before they were quantized."""
    case = Case("accurate", 4, 1000, 8, 2, head_dim, dtype="float16", causal=True, data=data, seed=2)
    out, _ = run_case(library, case, kernel)
    assert errors(out, expected(case).out).relative_l2 <= bound


@pytest.mark.parametrize("spread", [4, 20, 40])
def test_values_of_any_size(library, kernel, spread):
    """V's scales differ by 2^spread from key to key, and where scores are large values may be small or zero: float16
    weights neither overflow nor lose what the row is made of."""
    case = Case("sizes", 2, 400, 4, 1, 64, dtype="bfloat16", scale=1.0, seed=spread)
    inputs = on_pages(case, case.make_inputs(), kernel, 64)
    rng = np.random.default_rng(spread)
    v_scale = inputs.kv.v_scale
    v_scale *= np.exp2(rng.uniform(-spread, 0, v_scale.shape)).astype(np.float32)
    for page in inputs.kv.page_table[0, :2]:  # the first keys: scores of 2^9 and more, values of nothing
        inputs.kv.k_scale[page, :, ::16] *= 16
        v_scale[page, :, ::16] = rng.choice(np.array([0, 1e-30, 1e-6], np.float32), v_scale[page, :, ::16].shape)
    check_replay(library, kernel, case, inputs, 1)


@pytest.mark.parametrize("scale", [1e-33, 1e-20, 1e20, 1e33])
def test_values_all_tiny_or_huge(library, kernel, scale):
    case = Case("far", 1, 300, 4, 1, 64, dtype="bfloat16", seed=5)
    inputs = on_pages(case, case.make_inputs(), kernel, 32)
    inputs.kv.v_scale[...] *= np.float32(scale)
    check_replay(library, kernel, case, inputs)


def test_rising_scores(library, kernel):
    """The reference is raised again and again, in all warps at different times."""
    case = Case("rising", 1, 900, 4, 1, 128, dtype="float16", data="rising", scale=0.5, seed=4)
    check_replay(library, kernel, case, on_pages(case, case.make_inputs(), kernel), 1)


def test_tokens_that_are_not_finite(library, kernel):
    """At keys that all rows see, that some do and that none does: the rows that see them are NaN as a whole."""
    planted = [("v", 3, "nan"), ("k", 100, "inf"), ("v", 298, "-inf"), ("k", 299, "nan"), ("v", 230, "inf")]
    case = Case("planted", 4, 300, 2, 1, 64, dtype="float16", seed=2)
    for which in range(len(planted)):
        array, key, value = planted[which]
        one = replace(case, plant=((array, (0, key, 0, 5), value),))
        for words in ({}, {"causal": True}, {"causal": True, "window": (70, 0)}, {"kv_lens": (231,)}):
            check_kernel(library, replace(one, **words), kernel)
    for row in range(4):
        check_kernel(library, replace(case, plant=(("q", (0, row, 1, 7), "inf"),)), kernel)


def test_zeros(library, kernel):
    """Zero tokens have scale 0; so have rows of q. A sequence of such values gives zeros and the lse of its scores."""
    case = Case("zeros", 2, 200, 4, 1, 64, dtype="float16", seed=1)
    arrays = case.make_inputs()
    arrays.k[:, 5:9] = 0
    arrays.v[:, ::2] = 0
    arrays.q[:, 1] = 0
    inputs = on_pages(case, arrays, kernel)
    check_replay(library, kernel, case, inputs)
    inputs.kv.v_pages[...], inputs.kv.v_scale[...] = 0, 0
    check_replay(library, kernel, case, inputs)


def test_a_page_outside_the_pool_makes_its_rows_nan(library, kernel):
    case = Case("lost", 1, 300, 4, 2, 64, dtype="bfloat16", batch=3, kv_lens=(300, 290, 120), seed=6)
    inputs = on_pages(case, case.make_inputs(), kernel, 32)
    wanted = run(library, kernel, case, inputs)
    for bad in (-1, inputs.kv.pages, -(2**31), 2**31 - 1):
        inputs.kv.page_table[1, 4] = bad
        for got, want in zip(run(library, kernel, case, inputs), wanted, strict=True):
            assert np.isnan(got[1].astype(np.float32)).all()
            np.testing.assert_array_equal(got[::2], want[::2])


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("head_dim", "dtype", "q_heads"),
    [(64, "bfloat16", 4), (128, "bfloat16", 4), (128, "bfloat16", 40), (256, "float16", 4)],
)
def test_whoever_is_slow(library, kernel, head_dim, dtype, q_heads, seed):
    """Rings go round: whichever warp falls behind, nobody misses a phase of a barrier, and the bits are the same."""
    case = Case("slow", 1, 2300, q_heads, 1, head_dim, dtype=dtype, seed=1)
    inputs = on_pages(case, case.make_inputs(), kernel, 256)
    found = [run(library, kernel, case, inputs, order, 2) for order in (seed, seed + 50)]
    check_same_bits(case, *map(tuple, found))
    if seed == 0:
        check_replay(library, kernel, case, inputs, 2)


# Empty, one key, around a tile of 64 and of 128, all of them.
LENGTHS = (0, 1, 63, 64, 65, 0, 127, 128, 129, 300, 2, 299, 0)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("multiprocessors", [1, 3, 7])
def test_lengths_of_all_kinds(library, kernel, head_dim, multiprocessors):
    case = Case("lengths", 1, 300, 4, 2, head_dim, dtype="bfloat16", batch=len(LENGTHS), kv_lens=LENGTHS, seed=7)
    check_replay(library, kernel, case, on_pages(case, case.make_inputs(), kernel), multiprocessors)


def test_the_replay_tells_a_wrong_scale(library, kernel):
    """What the tests above rest on: one token's scale off by a hundredth is seen."""
    case = Case("wrong", 1, 64, 4, 1, 64, dtype="float16", seed=1)
    inputs = on_pages(case, case.make_inputs(), kernel, 64)
    good = replay_of(case, inputs)
    inputs.kv.v_scale[inputs.kv.page_table[0, 0], 0, 3] *= 1.1
    with pytest.raises(AssertionError):
        wrong = run(library, kernel, case, inputs)[0].astype(np.float64)
        size = np.linalg.norm(good[0], axis=-1)
        assert (np.linalg.norm(wrong - good[0], axis=-1) <= (REPLAY + 2.0**-11) * size).all()


def test_what_the_pages_hold(kernel):
    """The pages of these tests are made by the replay of kv_write, to the integers."""
    case = Case("made", 1, 100, 2, 2, 64, dtype="float16", seed=4)
    arrays = case.make_inputs()
    kv = on_pages(case, arrays, kernel, 16).kv
    token, (page, slot) = 37, divmod(37, 16)
    integers, scale = quantize_tokens(arrays.v[0, token].astype(np.float32))
    v_pages = kv.v_pages if kv.layout == "phtd" else kv.v_pages.swapaxes(1, 2)
    np.testing.assert_array_equal(v_pages[kv.page_table[0, page], :, slot], integers)
    np.testing.assert_array_equal(kv.v_scale[kv.page_table[0, page], :, slot], scale)


@pytest.mark.parametrize("arch", [75, pytest.param(80, marks=pytest.mark.slow), 86])
@pytest.mark.parametrize("page_size", [16, 48, 256])
@pytest.mark.parametrize("q_heads", [4, 24, 60])
def test_other_architectures(library, q_heads, page_size, arch):
    """Tiles of other sizes; on sm_75 bytes and scales pass through registers, and integers are multiplied otherwise."""
    case = Case("older", 1, 300, q_heads, 1, 64, dtype="float16", window=(250, 0), batch=2, kv_lens=(300, 133), seed=2)
    check_replay(library, PORTABLE, case, on_pages(case, case.make_inputs(), PORTABLE, page_size), arch=arch)


@pytest.mark.parametrize("arch", [75, 90])
def test_pages_at_odd_addresses(library, arch):
    """Rows of bytes that do not begin at multiples of 16 pass through registers."""
    case = Case("odd", 2, 300, 4, 2, 64, dtype="float16", causal=True, batch=2, kv_lens=(300, 77), seed=3)
    inputs = on_pages(case, case.make_inputs(), PORTABLE, 32, "phtd")
    aligned = run(library, PORTABLE, case, inputs, arch=arch)
    pools = {}
    for name in ("k_pages", "v_pages"):
        pool = getattr(inputs.kv, name)
        pools[name] = np.full((*pool.shape[:-1], pool.shape[-1] + 3), 77, pool.dtype)[..., 1:-2]
        pools[name][...] = pool
    odd = replace(inputs, kv=replace(inputs.kv, **pools))
    check_same_bits(case, aligned, run(library, PORTABLE, case, odd, arch=arch), "")
