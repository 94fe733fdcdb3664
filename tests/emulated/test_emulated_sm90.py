"""`sm90_fwd` run on the CPU, thread by thread, on emulated mbarriers, copies and products of warpgroups
(qflash/csrc/emulate/hopper.h), which are as late or as early as the hardware may be. Fast enough for every case of the
contract, in buckets of every size."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from qflash.frontends.numpy import describe
from qflash.ops.problem import Options, check
from qflash.testing import Case, cases
from qflash.testing.cases import MASKS, NONFINITE_LATER
from qflash.testing.compare import check_contract, check_same_bits
from qflash.testing.emulated_attention import call, check_kernel, run_case
from qflash.testing.runner import problem_of

KERNEL = "sm90_fwd"


def by_name(case: Case) -> str:
    return case.name


@pytest.mark.parametrize("case", [case for case in cases("full") if "quick" not in case.tags], ids=by_name)
def test_contract(library, case):
    check_kernel(library, case, KERNEL)


@pytest.mark.parametrize("seed", range(12))
def test_whoever_is_slow(library, seed):
    """Many tiles that every row sees, whose V nobody inspects, then one with what must be found: whichever warp falls
    behind must miss no phase of a barrier."""
    plant = (("v", (0, 1190, 0, 3), "nan"), ("v", (0, 1110, 0, 9), "inf"))
    case = Case("slow", 100, 1200, 2, 1, 128, causal=True, dtype="bfloat16", plant=plant, seed=1)
    check_contract(case, *run_case(library, case, KERNEL, seed=seed))


# Every number of consumers, keys in a tile, stages of q and panels.
SHAPES = [
    (64, "float16"), (64, "bfloat16"), (72, "float16"), (96, "bfloat16"), (112, "float16"),
    (128, "float16"), (128, "bfloat16"), (192, "float16"), (256, "float16"), (256, "bfloat16"),
]  # fmt: skip


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("head_dim", "dtype"), SHAPES)
def test_scores_that_outgrow_the_first_tiles(library, head_dim, dtype, mask):
    """Weights that overflow, or nearly do, in some rows of some warps: their scores are computed again."""
    data = "rising" if mask in ("plain", "window") else "hills"
    case = Case("outgrown", 150, 450, 2, 1, head_dim, dtype=dtype, data=data, seed=head_dim, **MASKS[mask])
    check_kernel(library, case, KERNEL)


@pytest.mark.parametrize(("head_dim", "dtype"), [(64, "float16"), (128, "bfloat16"), (256, "float16")])
def test_scores_that_rise_for_long(library, head_dim, dtype):
    """By so little from one tile to the next that it takes many to outgrow the first."""
    check_kernel(library, Case("long", 40, 1500, 1, 1, head_dim, dtype=dtype, data="rising", seed=2), KERNEL)


@pytest.mark.parametrize("where", NONFINITE_LATER)
@pytest.mark.parametrize(("head_dim", "dtype"), [(64, "float16"), (128, "bfloat16"), (256, "float16")])
def test_scores_that_are_not_finite_in_later_tiles(library, head_dim, dtype, where):
    case = Case("late", 70, 450, 1, 1, head_dim, dtype=dtype, plant=NONFINITE_LATER[where], seed=7)
    for changes in ({"data": "rising"}, {"causal": True}):
        check_kernel(library, replace(case, **changes), KERNEL)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_many_work_tiles_without_keys(library, head_dim):
    """Between work tiles that have some, however many come in a row, and whether or not they have rows."""
    none, more = (0,) * 9, (3, 0, 200, 1, 64, 0, 130, 7, 20)
    packed = {"q_lens": (70, *more, 150, *none, *more), "k_lens": (150, *none, 300, *more, *none)}
    for case in (
        Case("packed", **packed, causal=True),
        Case("packed_padded", **packed, kv_lens=(0, *none, 290, *none, *none)),
        Case("padded", 200, 150, 3, 1, batch=9, kv_lens=(0, 0, 0, 0, 0, 150, 0, 0, 0)),
        Case("padded_all", 70, 150, 3, 1, batch=6, kv_lens=(0,) * 6),
        Case("first_rows", 1500, 100, 1, 1, causal=True),  # most see nothing
    ):
        check_kernel(library, replace(case, head_dim=head_dim, dtype="float16"), KERNEL)


@pytest.mark.parametrize("q_len", [1, 70, 129, 200])
@pytest.mark.parametrize(("head_dim", "dtype"), [(40, "bfloat16"), (64, "float16"), (104, "float16"), (256, "float16")])
def test_consumers_without_rows_or_tiles(library, head_dim, dtype, q_len):
    """Of which the last tiles, where NaN is to be found, are nobody's but the last consumer's."""
    plant = (("v", (0, 449, 0, 3), "nan"), ("v", (0, 330, 0, 9), "inf"), ("v", (0, 270, 0, 1), "-inf"))
    case = Case("rows", q_len, 450, 2, 1, head_dim, dtype=dtype, plant=plant, seed=q_len)
    for changes in ({"causal": True}, {"window": (60, 30)}):
        check_kernel(library, replace(case, **changes), KERNEL)


@pytest.mark.parametrize("head_dim", [64, 72, 128, 256])
def test_odd_outputs(library, head_dim):
    """They may begin anywhere: one element at a time then, and nothing beside them."""
    case = Case("odd", 150, 200, 4, 2, head_dim, dtype="float16", causal=True)
    inputs = case.make_inputs()
    problem = problem_of(case, inputs, None, "cpu")
    memory = np.full(inputs.q.size + 24, 777.0, np.float16)
    shift = (-memory.ctypes.data // 2) % 8 + 9
    out = memory[shift : shift + inputs.q.size].reshape(inputs.q.shape)
    assert out.ctypes.data % 16 == 2
    arrays = (inputs.q, inputs.k, inputs.v)
    found = call(library(KERNEL, "float16", head_dim), KERNEL, problem, *arrays, out=out)
    check_same_bits(case, found, run_case(library, case, KERNEL))
    assert (memory[:shift] == 777).all() and (memory[shift + out.size :] == 777).all()


@pytest.mark.parametrize("odd", ["q", "k", "v", "all"])
def test_odd_addresses_are_copied(library, odd):
    """The copy engine reads from whole 16 bytes; nobody can plan for tensors that begin elsewhere."""
    rng = np.random.default_rng(0)

    def tensor(name: str) -> np.ndarray:
        memory = rng.standard_normal(2 * 150 * 64 + 8, np.float32).astype(np.float16)
        shift = (-memory.ctypes.data // 2) % 8 + (odd in (name, "all"))  # whole 16 bytes, or one element past them
        return memory[shift : shift + 2 * 150 * 64].reshape(1, 150, 2, 64)

    q, k, v = tensors = [tensor(name) for name in "qkv"]
    assert [x.ctypes.data % 16 > 0 for x in tensors] == [odd in (name, "all") for name in "qkv"]
    problem = check(*(describe("x", x) for x in tensors), Options(causal=True))
    handle = library(KERNEL, "float16", 64)
    found = call(handle, KERNEL, problem, q, k, v)
    wanted = call(handle, KERNEL, problem, *(aligned(x) for x in tensors))
    assert all(np.array_equal(x, y) for x, y in zip(found, wanted, strict=True)) and np.isfinite(found[0]).all()


def aligned(x: np.ndarray) -> np.ndarray:
    memory = np.empty(x.size + 8, x.dtype)
    shift = (-memory.ctypes.data // 2) % 8
    copy = memory[shift : shift + x.size].reshape(x.shape)
    copy[:] = x
    return copy


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("bad", [None, "outside", "falling", "longer than said"])
def test_packed_sequences_of_many_lengths(library, seed, bad):
    """Only work tiles that exist are scheduled, in the order of their sequences; but where some rows belong to no good
    sequence all are, so that somebody fills these rows with NaN."""
    rng = np.random.default_rng(seed)
    q_lens = [int(n) for n in rng.integers(0, 400, 12)] + [0, 129, 0]
    k_lens = [n + int(rng.integers(0, 40)) for n in q_lens]
    case = Case("packed", q_lens=tuple(q_lens), k_lens=tuple(k_lens), q_heads=2, kv_heads=1, head_dim=64, causal=True,
                dtype="float16", seed=seed)  # fmt: skip
    if bad is None:
        check_kernel(library, case, KERNEL)
        return
    inputs = case.make_inputs()
    problem = problem_of(case, inputs, None, "cpu")
    starts = inputs.cu_seqlens_q.copy()
    if bad == "outside":
        starts[-3:] -= 5
        rows = slice(starts[-1], None)  # of no sequence
    elif bad == "falling":
        starts[3] = starts[4] + 1
        rows = slice(None)
    else:
        longest = int(np.argmax(q_lens))
        if longest == len(q_lens) - 2:
            pytest.skip("the longest sequence is the one before the last, which has nobody to give rows to")
        starts[longest + 1] += 1  # one row more than max_seqlen_q
        rows = slice(starts[longest], starts[longest + 1])
    out, lse = call(
        library(KERNEL, "float16", 64, 90), KERNEL, problem, inputs.q, inputs.k, inputs.v,
        None, starts, inputs.cu_seqlens_k,
    )  # fmt: skip
    assert np.isnan(out[rows].astype(np.float32)).all() and np.isnan(lse[..., rows]).all()
    assert not (out.astype(np.float32) == 12345.0).any(), "a row that nobody wrote"
