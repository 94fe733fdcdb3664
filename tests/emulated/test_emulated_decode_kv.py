"""The decode kernels on what `quantize_kv` left, run on the CPU: against the replay of the same integers, and exact
attention."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from qflash import NoKernelError
from qflash.dispatch import VARIANTS
from qflash.testing import Case, cases
from qflash.testing.case import Rotary
from qflash.testing.compare import check_contract, check_replay, check_same_bits, errors
from qflash.testing.corners import ENDS
from qflash.testing.emulated_attention import UNTOUCHED, check_kernel, run_case, with_few_keys
from qflash.testing.kept import KeptInputs, on_kept, plan_of
from qflash.testing.oracle import expected, integers_of, replayed

KERNELS = ("sm90_decode_kv", "decode_kv")
PORTABLE = KERNELS[1]


@pytest.fixture(params=KERNELS)
def kernel(request) -> str:
    return request.param


def run(
    library,
    kernel: str,
    case: Case,
    inputs: KeptInputs,
    seed: int = 0,
    multiprocessors: int = 3,
    arch: int = 90,
    change=(),
    without: str | None = None,
):
    """(out, lse) on a QuantizedKV as it is given. change: fields of the struct; without: an operand left out."""
    plan, arrays = plan_of(case, inputs, kernel, "cpu")
    plan = replace(plan, fields=tuple({**dict(plan.fields), **dict(change)}.items()))
    results = [np.full(result.shape, UNTOUCHED, result.dtype) for result in plan.results]
    compiled = library(kernel, case.dtype, case.head_dim, arch)
    operands = (None if x.field == without else arrays[x.argument] for x in plan.operands)
    compiled.launch(compiled.prepare(plan, VARIANTS[kernel]), (*operands, *results), seed, multiprocessors)
    return results


@pytest.mark.parametrize("case", [case for case in cases("quick") if not case.packed], ids=lambda case: case.name)
def test_contract(library, kernel, case):
    check_kernel(library, with_few_keys(case), kernel)


@pytest.mark.parametrize(
    ("group", "q_len"), [(g, t) for g in (1, 3, 4, 8) for t in range(1, 9)] + [(5, 12), (16, 4), (64, 1)]
)
def test_packed_rows(library, kernel, group, q_len):
    case = Case("rows", q_len, 300, 2 * group, 2, 128, dtype="bfloat16", causal=True, batch=2, kv_lens=(300, 70))
    check_kernel(library, replace(case, seed=group + q_len), kernel)


@pytest.mark.parametrize(
    "head_dim", [8, 64, 72, 80, 120, 128, *(pytest.param(x, marks=pytest.mark.slow) for x in (136, 192)), 200, 256]
)
@pytest.mark.parametrize("q_heads", [4, 24, 60])
def test_head_dims(library, kernel, head_dim, q_heads):
    """Rows of K are whole blocks of 16 channels, rows of q and V are not always."""
    dtype = "float16" if head_dim % 32 or head_dim == 256 else "bfloat16"
    case = Case("dims", 1, 260, q_heads, 1, head_dim, dtype=dtype, window=(190, 0), seed=head_dim + q_heads)
    check_kernel(library, case, kernel)


WORDS = (
    {"window": (70, 0)}, {"window": (20, 3)}, {"softcap": 15.0}, {"softcap": 80.0, "causal": True}, {"scale": -0.1},
    {"scale": 0.0}, {"rope": Rotary(64)}, {"rope": Rotary(32, interleaved=True, positions="per_batch")},
    {"rope": Rotary(24)}, {"kv_lens": (0, 1)}, {"kv_lens": (128, 129), "window": (0, 0)},
    {"sinks": ("0.5", "-1.25", "3")}, {"sinks": ("inf", "-inf", "0"), "softcap": 20.0},
)  # fmt: skip


@pytest.mark.parametrize("words", WORDS, ids=str)
@pytest.mark.parametrize("data", ["normal", "biased_k"])
def test_words(library, kernel, words, data):
    """biased_k has a k_mean, which lse, a softcap and a sink must get back."""
    case = Case("words", 4, 280, 8, 2, 64, dtype="float16", batch=2, data=data, seed=3)
    check_kernel(library, replace(case, **words), kernel)


@pytest.mark.parametrize(("scale", "softcap"), ENDS)
def test_ends_of_scale_and_softcap(library, kernel, scale, softcap):
    case = Case("ends", 4, 140, 4, 1, 64, dtype="float16", scale=scale, softcap=softcap, seed=5)
    check_contract(case, *run_case(library, case, kernel), "int8", integers=integers_of(kernel))


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize(("data", "bound"), [("normal", 0.0125), ("biased_k", 0.0125), ("outlier", 0.02)])
def test_accuracy(library, kernel, head_dim, data, bound):
    """Relative L2 against float64 on k and v as they were before they were quantized."""
    case = Case("accurate", 4, 1000, 8, 2, head_dim, dtype="float16", causal=True, data=data, seed=2)
    out, _ = run_case(library, case, kernel)
    assert errors(out, expected(case).out).relative_l2 <= bound


def test_scales_of_64_keys(library, kernel):
    """Each group of keys has its own: they differ by factors here, in one tile of 128 keys as well."""
    case = Case("scales", 1, 330, 4, 1, 64, dtype="float16", seed=6)
    arrays = case.make_inputs()
    for group in range(6):
        arrays.k[:, 64 * group : 64 * (group + 1)] *= (1.0, 0.125, 2.0, 0.0, 0.5, 1.5)[group]
    inputs = on_kept(case, arrays)
    assert len(np.unique(inputs.kv.k_scale)) == 6
    whole = run(library, kernel, case, inputs)
    for group in range(6):
        kv_scale = inputs.kv.k_scale.copy()
        kv_scale[..., group] *= 1.5
        other = run(library, kernel, case, replace(inputs, kv=replace(inputs.kv, k_scale=kv_scale)))
        changed = not np.array_equal(other[0], whole[0])
        assert changed == (inputs.kv.k_scale[0, 0, group] > 0)


def test_keys_and_values_that_are_not_finite(library, kernel):
    """At keys that all rows see, that some do and that none does. A key spoils the rows that see it, a value its
    channel."""
    planted = [("v", 3, "nan"), ("k", 100, "inf"), ("v", 298, "-inf"), ("k", 299, "nan"), ("v", 230, "inf")]
    case = Case("planted", 4, 300, 2, 1, 64, dtype="float16", seed=2)
    for array, key, value in planted:
        one = replace(case, plant=((array, (0, key, 0, 5), value),))
        for words in ({}, {"causal": True}, {"causal": True, "window": (70, 0)}, {"kv_lens": (231,)}):
            check_kernel(library, replace(one, **words), kernel)
    for row in range(4):
        check_kernel(library, replace(case, plant=(("q", (0, row, 1, 7), "inf"),)), kernel)


def test_who_counts_no_nonfinite_keys_looks_at_all(library, kernel):
    """k_nonfinite may be missing from the struct; a key is then told by its bytes."""
    case = Case("uncounted", 2, 200, 2, 1, 64, dtype="float16", plant=(("k", (0, 150, 0, 5), "nan"),), causal=True)
    inputs = on_kept(case, case.make_inputs())
    assert inputs.kv.k_nonfinite.sum() == 1
    wanted = run(library, kernel, case, inputs)
    assert np.isnan(wanted[0]).all()
    check_same_bits(case, wanted, run(library, kernel, case, inputs, without="kv.k_nonfinite"))


def test_zeros(library, kernel):
    """A group of zero keys has scale 0, and so has a row of q: their scores are those of K's mean."""
    case = Case("zeros", 2, 200, 4, 1, 64, dtype="float16", seed=1)
    arrays = case.make_inputs()
    arrays.k[:, 64:128] = 0
    arrays.k[:, :64] = -arrays.k[:, 128:192]
    arrays.q[:, 1] = 0
    out, _ = run(library, kernel, case, on_kept(case, arrays))
    assert np.isfinite(out).all()
    mean = arrays.v[0].astype(np.float64).mean(0)
    np.testing.assert_allclose(out[0, 1], np.broadcast_to(mean, out[0, 1].shape), atol=2e-3)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("head_dim", "dtype", "q_heads"),
    [(64, "bfloat16", 4), (128, "bfloat16", 4), (128, "bfloat16", 40), (256, "float16", 4)],
)
def test_whoever_is_slow(library, kernel, head_dim, dtype, q_heads, seed):
    """Rings go round: whichever warp falls behind, nobody misses a phase of a barrier, and the bits are the same."""
    case = Case("slow", 1, 2300, q_heads, 1, head_dim, dtype=dtype, seed=1)
    inputs = on_kept(case, case.make_inputs())
    found = [run(library, kernel, case, inputs, order, 2) for order in (seed, seed + 50)]
    check_same_bits(case, *map(tuple, found))
    if seed == 0:
        check_replay(case, *found[0], replayed(case, kernel), weights_dtype=dtype)


# Empty, one key, around a tile of 64 and of 128, all of them.
LENGTHS = (0, 1, 63, 64, 65, 0, 127, 128, 129, 300, 2, 299, 0)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("multiprocessors", [1, 3, 7])
def test_lengths_of_all_kinds(library, kernel, head_dim, multiprocessors):
    case = Case("lengths", 1, 300, 4, 2, head_dim, dtype="bfloat16", batch=len(LENGTHS), kv_lens=LENGTHS, seed=7)
    inputs = on_kept(case, case.make_inputs())
    found = run(library, kernel, case, inputs, multiprocessors=multiprocessors)
    check_contract(case, *found, "int8", integers=integers_of(kernel))
    check_replay(case, *found, replayed(case, kernel), weights_dtype=case.dtype)


def test_lengths_on_the_device(library, kernel):
    """The grid depends on shapes alone: other lengths than those that keys were quantized with, and bad ones."""
    case = Case("lengths", 1, 300, 4, 2, 64, dtype="float16", batch=3, kv_lens=(300, 200, 100), seed=8)
    inputs = on_kept(case, case.make_inputs())
    first = run(library, kernel, case, inputs)
    shorter = np.array([300, 150, -1], np.int32)
    found = run(library, kernel, case, replace(inputs, kv=replace(inputs.kv, lens=shorter)))
    assert np.array_equal(found[0][0], first[0][0]) and not np.array_equal(found[0][1], first[0][1])
    assert np.isnan(found[0][2]).all() and np.isnan(found[1][2]).all()


OLDER = [(64, 75), (128, 80), (256, 86)]  # a library each
SLOW_OLDER = [pair for pair in product((64, 128, 256), (75, 80, 86)) if pair not in OLDER]


@pytest.mark.parametrize("q_heads", [4, 24, 60])
@pytest.mark.parametrize(
    ("head_dim", "arch"), [*OLDER, *(pytest.param(*pair, marks=pytest.mark.slow) for pair in SLOW_OLDER)]
)
def test_other_architectures(library, head_dim, arch, q_heads):
    """Tiles of other sizes; on sm_75 K and V pass through registers, and integers are multiplied otherwise."""
    case = Case("older", 1, 300, q_heads, 1, head_dim, dtype="float16", window=(250, 0), batch=2, kv_lens=(300, 133))
    check_kernel(library, replace(case, seed=2), PORTABLE, arch)


@pytest.mark.parametrize("arch", [75, 90])
def test_at_odd_addresses(library, arch):
    """Rows that do not begin at multiples of 16 bytes pass through registers."""
    case = Case("odd", 2, 300, 4, 2, 64, dtype="float16", causal=True, batch=2, kv_lens=(300, 77), seed=3)
    inputs = on_kept(case, case.make_inputs())
    aligned = run(library, PORTABLE, case, inputs, arch=arch)
    memory = np.empty(inputs.kv.k.size + 16, np.int8)
    start = -memory.ctypes.data % 16 + 1
    k = memory[start : start + inputs.kv.k.size].reshape(inputs.kv.k.shape)
    k[...] = inputs.kv.k
    wider = np.full((*inputs.kv.v.shape[:-1], 67), np.nan, inputs.kv.v.dtype)
    wider[..., 1:65] = inputs.kv.v
    odd = replace(inputs, kv=replace(inputs.kv, k=k, v=wider[..., 1:65]))
    check_same_bits(case, aligned, run(library, PORTABLE, case, odd, arch=arch))
    with pytest.raises(NoKernelError, match="begins at no whole 16 bytes"):  # what the copy engine cannot fetch
        run(library, KERNELS[0], case, odd)


def test_values_that_the_copy_engine_cannot_walk(library):
    """V goes through a pass before; K and q do not."""
    case = Case("strides", 2, 300, 4, 2, 64, dtype="float16", causal=True, seed=3)
    inputs = on_kept(case, case.make_inputs())
    wider = np.full((*inputs.kv.v.shape[:-1], 67), np.nan, inputs.kv.v.dtype)
    wider[..., :64] = inputs.kv.v
    odd = replace(inputs, kv=replace(inputs.kv, v=wider[..., :64]))
    check_same_bits(case, run(library, KERNELS[0], case, inputs), run(library, KERNELS[0], case, odd))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("precision", 0),
        ("precision", 2),
        ("kv.kind", 0),  # its k is int8
        ("kv.kind", 4),
        ("kv.k_dtype", 1),
        ("kv.v_dtype", 5),
        ("kv.k.stride_h", 80),
        ("kv.k_scales.group", 128),
        ("kv.page_size", 16),
        ("batch_invariant", 1),
        ("q_len", 17),
    ],
)
def test_what_the_kernel_does_not_serve_is_refused(library, kernel, field, value):
    """By the C entry too: a stored program may come past the front ends."""
    case = Case("refused", 2, 70, 8, 2, 64, dtype="float16")
    with pytest.raises(NoKernelError):
        run(library, kernel, case, on_kept(case, case.make_inputs()), change={field: value})
