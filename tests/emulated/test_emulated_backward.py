"""The backward kernels' own source run on the CPU: the case list, tile shapes of other architectures, bad values."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from qflash import dispatch, reference
from qflash.ops.backward_memory import DEFAULT_BACKWARD_MEMORY
from qflash.testing import BY_NAME, Case, cases
from qflash.testing.case import Rotary
from qflash.testing.cases import FEW_KEYS, ONE_HOT
from qflash.testing.compare import GRADIENT_L2, check_same_bits, errors
from qflash.testing.emulated_attention import with_few_keys
from qflash.testing.emulated_backward import NAMES, check_gradients_of, run_gradients
from qflash.testing.random_cases import random_cases
from qflash.testing.runner import suited

KERNELS = [row.name for row in dispatch.variants_of("attention_backward", "cuda")]
PORTABLE = [name for name in KERNELS if dispatch.BY_NAME[name].min_arch < 90]
QUICK = [with_few_keys(case) for case in cases("quick")]
# Windows that leave tiles of keys without a query and rows without a key, groups of heads, lengths that differ.
MASKED = [
    Case("keys_unseen", 40, 300, 3, 1, 64, dtype="float16", window=(30, 10), seed=1),
    Case("rows_unseen", 300, 40, 8, 1, 64, dtype="bfloat16", window=(10, 30), seed=2),
    Case("group_of_three", 150, 150, 6, 2, 40, dtype="float16", causal=True, seed=3),
]
# Values that are not finite, in q, k, v, where some rows of their tiles see them and some do not.
NONFINITE = [case for case in cases("full") if case.plant]
# Kernels that may keep dS in the workspace, which the emulator fills with NaN. They do, unless told otherwise.
KEEPING = ["sm90_bwd", "fa_mma_bwd"]
# Strips of dS of every kind (attn/backward/ds_tiles.h), odd and even numbers of tiles, and tiles that are kept in part.
STRIPS = [
    Case("folded_odd", 300, 300, 4, 2, 64, batch=2, dtype="bfloat16", causal=True, seed=11),
    Case("folded_even", 250, 250, 3, 1, 128, dtype="float16", causal=True, seed=12),
    Case("folded_apart", 190, 330, 2, 2, 64, dtype="bfloat16", causal=True, kv_lens=(201,), seed=13),
    Case("folded_ahead", 330, 190, 2, 1, 64, dtype="float16", window=(-1, 70), seed=14),
    Case("round", 500, 500, 2, 1, 64, dtype="bfloat16", window=(60, 5), seed=15),
    Case("round_apart", 260, 420, 2, 2, 128, dtype="bfloat16", window=(100, 30), kv_lens=(391,), seed=16),
    Case("left_alone", 200, 200, 2, 1, 128, dtype="float16", window=(50, -1), seed=17),
    Case("softcap", 130, 140, 4, 1, 128, dtype="bfloat16", causal=True, softcap=20.0, seed=18),
    Case("rotated", 150, 150, 4, 2, 128, dtype="float16", causal=True, rope=Rotary(64, False), seed=19),
]


def by_name(case: Case) -> str:
    return case.name


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("case", QUICK + FEW_KEYS + MASKED, ids=by_name)
def test_contract(library, case, kernel):
    check_gradients_of(library, case, kernel)


@pytest.mark.parametrize("kernel", KEEPING)
@pytest.mark.parametrize("case", STRIPS, ids=by_name)
def test_strips_of_stored_ds(library, case, kernel):
    check_gradients_of(library, case, kernel)


@pytest.mark.parametrize("kernel", KEEPING)
@pytest.mark.parametrize("case", FEW_KEYS + MASKED + STRIPS, ids=by_name)
def test_contract_with_ds_computed_again(library, case, kernel):
    check_gradients_of(library, case, kernel, memory=0)


@pytest.mark.parametrize("kernel", KEEPING)
@pytest.mark.parametrize("case", NONFINITE, ids=by_name)
@pytest.mark.parametrize("memory", [0, DEFAULT_BACKWARD_MEMORY], ids=["recomputed", "stored"])
def test_values_that_are_not_finite(library, case, kernel, memory):
    check_gradients_of(library, case, kernel, memory=memory)


@pytest.mark.parametrize("kernel", PORTABLE)
@pytest.mark.parametrize("value", ["nan", "-inf"])
@pytest.mark.parametrize("keys", [2, 90])
def test_what_is_not_finite_in_dout_reaches_what_float64_gives_it_to(library, kernel, value, keys):
    """Infinities, too: also in rows of few keys, whose delta is computed otherwise."""
    case = suited(Case("dout", 80, keys, 2, 1, 64, dtype="float16", window=(40, 5), seed=2), kernel, 90)
    dout, dlse = case.make_gradients()
    dout[0, 77, 1, 5] = dout[0, 79, 0, 9] = float(value)
    inputs = case.make_inputs()
    with np.errstate(invalid="ignore"):  # infinities of both signs add up
        wants = reference.attention_backward(inputs.q, inputs.k, inputs.v, dout, dlse, **case.options())
    got = run_gradients(library, case, kernel, changes={"dout": dout})
    for name, x, want in zip(NAMES, got, wants, strict=True):
        x = x.astype(np.float64)
        np.testing.assert_array_equal(x[~np.isfinite(want)], want[~np.isfinite(want)], err_msg=name)
        assert np.isfinite(x[np.isfinite(want)]).all(), name


def one_column(case: Case) -> int:
    """Bytes that dS of one pair of a sequence and a KV head needs at most."""
    query_tiles, key_tiles = (case.q_len + 63) // 64, (case.k_len + 63) // 64
    return case.q_heads // case.kv_heads * (query_tiles + 1) * key_tiles * 64 * 64 * 2


@pytest.mark.parametrize("kernel", KEEPING)
@pytest.mark.parametrize("name", ["folded_odd", "left_alone", "round_apart"])
def test_sections_of_stored_ds_have_the_same_bits(library, kernel, name):
    case = next(replace(case, batch=3, kv_lens=None) for case in STRIPS if case.name == name)
    want = run_gradients(library, case, kernel)
    for columns in (1, 2):
        got = run_gradients(library, case, kernel, memory=columns * one_column(case))
        check_same_bits(case, want, got, names=NAMES)


@pytest.mark.parametrize("kernel", KEEPING)
def test_too_little_room_for_ds_computes_it_again(library, kernel):
    case = Case("little_room", 100, 100, 2, 1, 64, dtype="bfloat16", causal=True, seed=20)
    want = run_gradients(library, case, kernel, memory=0)
    got = run_gradients(library, case, kernel, memory=2 * 64 * 64 * 2)
    check_same_bits(case, want, got, names=NAMES)


@pytest.mark.slow
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("case", cases("full"), ids=by_name)
def test_contract_in_full(library, case, kernel):
    check_gradients_of(library, case, kernel)


@pytest.mark.slow
@pytest.mark.parametrize("kernel", KEEPING)
@pytest.mark.parametrize("case", cases("full") + list(random_cases(20, seed=23)), ids=by_name)
def test_contract_in_full_with_ds_computed_again(library, case, kernel):
    check_gradients_of(library, case, kernel, memory=0)


@pytest.mark.slow
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("case", list(random_cases(20, seed=19)), ids=lambda case: str(case.seed))
def test_random_problems(library, case, kernel):
    check_gradients_of(library, case, kernel)


@pytest.mark.parametrize("kernel", PORTABLE)
@pytest.mark.parametrize(("name", "arch"), [("dim_128", 75), ("dim_256", 86)])  # test_all_tile_shapes has more
def test_tile_shapes_of_other_architectures(library, name, kernel, arch):
    check_gradients_of(library, BY_NAME[name], kernel, arch)


@pytest.mark.parametrize("kernel", [name for name in KEEPING if name in PORTABLE])
@pytest.mark.parametrize(("name", "arch"), [("dim_128", 75), ("dim_256", 86), ("causal", 80)])
def test_ds_computed_again_in_tile_shapes_of_other_architectures(library, name, kernel, arch):
    check_gradients_of(library, BY_NAME[name], kernel, arch, memory=0)


@pytest.mark.slow
@pytest.mark.parametrize("kernel", PORTABLE)
@pytest.mark.parametrize("arch", [75, 80, 86])
@pytest.mark.parametrize("name", ["dim_20", "dim_40", "dim_72", "dim_128", "dim_136", "dim_256", "nan_k"])
def test_all_tile_shapes(library, name, kernel, arch):
    check_gradients_of(library, BY_NAME[name], kernel, arch)
    if kernel in KEEPING:
        check_gradients_of(library, BY_NAME[name], kernel, arch, memory=0)


@pytest.mark.parametrize("kernel", KERNELS)
def test_what_is_not_seen_gets_exactly_zero(library, kernel):
    # Query i stands at i + 50 - 120: the first 70 see nothing. Keys past 50 are padding.
    case = suited(Case("unseen", 120, 80, 4, 2, kv_lens=(50,), causal=True, seed=9), kernel, 90)
    dq, dk, dv = run_gradients(library, case, kernel)
    assert not dq[:, :70].any() and not dk[:, 50:].any() and not dv[:, 50:].any()
    assert (np.abs(dq[:, 71:].astype(np.float32)).max(-1) > 0).all()
    assert (np.abs(dv[:, :50].astype(np.float32)).max(-1) > 0).all()


@pytest.mark.parametrize("kernel", KERNELS)
def test_gradient_of_lse_alone_and_none(library, kernel):
    case = suited(Case("dlse", 70, 60, 2, 2, 64, causal=True, seed=8), kernel, 90)
    dout, dlse = case.make_gradients()
    nothing = np.zeros_like(dout)
    dq, dk, dv = run_gradients(library, case, kernel, changes={"dout": nothing})
    assert not dv.any() and dq.any() and dk.any()
    zero = run_gradients(library, case, kernel, changes={"dout": nothing, "dlse": np.zeros_like(dlse)})
    assert not any(x.any() for x in zero)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("bad", [-1, 41, 2**31 - 1])
def test_a_length_out_of_range_is_nan_for_its_sequence_only(library, kernel, bad):
    good = suited(Case("bad_length", 30, 40, batch=3, kv_lens=(20, 0, 40), causal=True), kernel, 90)
    want = run_gradients(library, good, kernel)
    found = run_gradients(library, good, kernel, changes={"kv_lens": np.array([20, bad, 40], np.int32)})
    for x, y in zip(found, want, strict=True):
        assert np.isnan(x[1].astype(np.float32)).all()
        assert all(x[b].tobytes() == y[b].tobytes() for b in (0, 2))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("case", ONE_HOT, ids=by_name)
def test_what_lse_rounds_off_is_no_gradient(library, case, kernel):
    dout, dlse = case.make_gradients()
    *grads, _ = run_gradients(library, case, kernel, changes={"dlse": np.zeros_like(dlse)})
    inputs = case.make_inputs()
    words = {**case.options(), "kv_lens": inputs.kv_lens, "sinks": inputs.sinks}
    wants = reference.attention_backward(inputs.q, inputs.k, inputs.v, dout, **words)
    for got, want in zip(grads, wants, strict=False):
        assert np.linalg.norm(got - want) <= 1e-3 * np.linalg.norm(wants[2])


BAD_OFFSETS = {
    "falling q": ({"cu_seqlens_q": [0, 30, 20, 70]}, (slice(None), slice(None))),
    "falling k": ({"cu_seqlens_k": [0, 30, 20, 70]}, (slice(20, 70), slice(None))),
    "k past the end": ({"cu_seqlens_k": [0, 20, 30, 71]}, (slice(40, 70), slice(30, 70))),
    "q past the end": ({"cu_seqlens_q": [0, 20, 40, 71]}, (slice(40, 70), slice(30, 70))),
}


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("what", BAD_OFFSETS)
def test_offsets_out_of_range_are_nan_where_they_are_not_trusted(library, kernel, what):
    """Every element is written: NaN where nobody can tell, numbers elsewhere."""
    offsets, (rows, keys) = BAD_OFFSETS[what]
    case = suited(Case("offsets", q_lens=(20, 20, 30), k_lens=(20, 10, 40), causal=True, seed=4), kernel, 90)
    changes = {name: np.array(values, np.int32) for name, values in offsets.items()}
    dq, dk, dv = (x.astype(np.float32) for x in run_gradients(library, case, kernel, changes=changes))
    assert np.isnan(dq[rows]).all() and np.isnan(dk[keys]).all() and np.isnan(dv[keys]).all()
    want = run_gradients(library, case, kernel)
    for x, y, bad in zip((dq, dk, dv), want, (rows, keys, keys), strict=True):
        trusted = np.ones(len(x), bool)
        trusted[bad] = False
        assert np.isfinite(x[trusted]).all() or what.startswith("falling")
        if not what.startswith("falling"):
            np.testing.assert_array_equal(x[trusted], y[trusted].astype(np.float32))


@pytest.mark.parametrize("kernel", KERNELS)
def test_packed_rows_outside_every_sequence(library, kernel):
    """Queries there get NaN, as their outputs are; keys there, which nobody sees, get zeros."""
    case = suited(Case("outside", q_lens=(20, 20), k_lens=(20, 20), seed=4), kernel, 90)
    changes = {"cu_seqlens_q": np.array([3, 20, 36], np.int32), "cu_seqlens_k": np.array([2, 20, 35], np.int32)}
    dq, dk, dv = (x.astype(np.float32) for x in run_gradients(library, case, kernel, changes=changes))
    assert np.isnan(dq[:3]).all() and np.isnan(dq[36:]).all() and np.isfinite(dq[3:36]).all()
    for x in (dk, dv):
        assert not x[:2].any() and not x[35:].any() and np.isfinite(x).all() and x[2:35].any()


@pytest.mark.parametrize("kernel", KERNELS)
def test_the_same_bits_in_any_layout(library, kernel):
    case = suited(Case("layout", 70, 90, 4, 2, 72, batch=2, causal=True, seed=6), kernel, 90)
    want = run_gradients(library, case, kernel)
    for layout in ("bhtd", "gaps"):
        got = run_gradients(library, replace(case, layout=layout), kernel)
        check_same_bits(case, want, got, names=NAMES)


def test_kernels_agree(library):
    """Not with each other's bits, but each with the other's numbers: an error in the oracle would show here."""
    case = Case("agree", 70, 90, 4, 2, 64, dtype="float16", causal=True, seed=6)
    by_cores, by_tensor_cores = (run_gradients(library, case, kernel) for kernel in ("fa_bwd", "fa_mma_bwd"))
    for a, b in zip(by_cores, by_tensor_cores, strict=True):
        assert errors(a, b.astype(np.float64)).relative_l2 <= GRADIENT_L2["float16"]


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("head_dim", [64, 256])
def test_large_gradients_do_not_overflow_in_float16(library, kernel, head_dim):
    """A loss that was scaled up: gradients are in the hundreds, and so is dS, which kernels keep in 16 bits."""
    case = Case("scaled_loss", 64, 64, 1, 1, head_dim, dtype="float16", causal=True, seed=3)
    dout, dlse = case.make_gradients()
    dout = dout * np.float16(100)
    got = run_gradients(library, case, kernel, changes={"dout": dout, "dlse": np.zeros_like(dlse)})
    inputs = case.make_inputs()
    wants = reference.attention_backward(inputs.q, inputs.k, inputs.v, dout, **case.options())
    for name, x, want in zip(NAMES, got, wants, strict=True):
        assert errors(x, want).relative_l2 <= GRADIENT_L2["float16"] and np.isfinite(x).all(), name


@pytest.mark.parametrize("kernel", KEEPING)
def test_small_gradients_of_long_rows_are_not_lost_in_float16(library, kernel):
    """Weights of 1/2048 and small gradients: dS is about 2^-18, below float16's least normal number, unless shifted."""
    case = Case("long_rows", 16, 2048, 1, 1, 64, dtype="float16", scale=1.0, seed=3)
    inputs = case.make_inputs()
    q = np.zeros_like(inputs.q)
    out, lse = reference.attention(q, inputs.k, inputs.v, scale=1.0)
    dout = (case.make_gradients()[0].astype(np.float32) / 1024).astype(np.float16)
    changes = {"q": q, "out": out.astype(np.float16), "lse": lse.astype(np.float32), "dout": dout}
    changes["dlse"] = np.zeros(lse.shape, np.float32)
    dq, _, dv = run_gradients(library, case, kernel, changes=changes)
    want_q, _, want_v = reference.attention_backward(q, inputs.k, inputs.v, dout, scale=1.0)
    assert errors(dq, want_q).relative_l2 <= GRADIENT_L2["float16"]
    assert np.abs(dv.astype(np.float64) - want_v).max() <= 2.0**-25  # half of float16's least number
