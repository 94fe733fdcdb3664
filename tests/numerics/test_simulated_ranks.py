"""Context parallelism over ranks that are simulated: every mask, length, offset and position, for 1 to 8 ranks, within
the contract of attention on one device."""

from __future__ import annotations

import numpy as np
import pytest

from qflash.testing.case import Case, Rotary
from qflash.testing.compare import HALF_FACTOR, check_contract, check_gradients, errors
from qflash.testing.oracle import expected
from qflash.testing.simulated_ranks import simulate
from qflash.testing.sink_gradients import check_sink_gradient

LENGTH = 96
BASE = {"q_len": LENGTH, "k_len": LENGTH, "q_heads": 4, "kv_heads": 2, "head_dim": 32, "batch": 2}
PACKED = {"q_heads": 4, "kv_heads": 2, "head_dim": 32, "q_lens": (3, 50, 0, 31, 12), "k_lens": (3, 50, 0, 31, 12)}
EVERYWHERE = [
    Case("full", **BASE),
    Case("causal", **BASE, causal=True),
    Case("causal_float16", **BASE, causal=True, dtype="float16"),
    Case("full_bfloat16", **BASE, dtype="bfloat16"),
    Case("window", **BASE, causal=True, window=(20, 0)),
    Case("window_bfloat16", **BASE, causal=True, window=(30, 0), dtype="bfloat16"),
    Case("window_both_ways", **BASE, window=(13, 7)),
    Case("window_to_the_right", **BASE, window=(-1, 5)),
    Case("window_to_the_left", **BASE, window=(5, -1)),
    Case("softcap", **BASE, causal=True, softcap=5.0, scale=0.3),
    Case("rope", **BASE, causal=True, rope=Rotary(32)),
    Case("rope_positions", **BASE, causal=True, rope=Rotary(16, True, "per_batch")),
    Case("rope_shared_positions", **BASE, window=(9, 9), rope=Rotary(32, positions="shared")),
    Case("sinks", **BASE, causal=True, sinks=("0.5", "-2", "1", "0")),
    Case("sinks_window", **BASE, window=(4, 4), sinks=("0.5", "-2", "1", "0")),
    Case("lens", **BASE, kv_lens=(96, 37)),
    Case("lens_sinks", **BASE, kv_lens=(5, 0), sinks=("0.5", "-2", "1", "0")),
    Case("lens_rope", **BASE, kv_lens=(90, 37), rope=Rotary(32)),
    Case("packed", **PACKED),
    Case("packed_causal", **PACKED, causal=True),
    Case("packed_rope", **PACKED, causal=True, rope=Rotary(32)),
]
PLACEMENTS = ["contiguous", "zigzag"]
GATHERED = [
    Case("lens_causal", **BASE, causal=True, kv_lens=(96, 37)),
    Case("lens_window", **BASE, causal=True, window=(20, 0), kv_lens=(50, 70)),
    Case("lens_causal_rope", **BASE, causal=True, kv_lens=(90, 37), rope=Rotary(32)),
    Case("packed_window", **PACKED, causal=True, window=(9, 0)),
]
CHOSEN = [
    *((case, strategy) for case in EVERYWHERE for strategy in ("ring", "all_gather", "masked")),
    *((case, strategy) for case in GATHERED for strategy in ("all_gather", "masked")),
]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize(("case", "strategy"), CHOSEN, ids=lambda x: getattr(x, "name", x))
def test_within_the_contract(case, strategy, placement, ranks):
    got = simulate(case, strategy, placement, ranks)
    check_contract(case, got.out, got.lse)
    check_gradients(case, got.dq, got.dk, got.dv)
    if got.dsinks is not None:
        check_sink_gradient(case, got.dsinks)


QUANTIZED = [case for case in EVERYWHERE if case.name not in ("causal_float16", "full_bfloat16", "window_bfloat16")]
QUANTIZED += [
    Case("biased_k_bfloat16", **BASE, causal=True, data="biased_k", dtype="bfloat16"),
    Case("packed_float16", **PACKED, causal=True, rope=Rotary(16, True), dtype="float16"),
]

SOME = (("contiguous", 3), ("zigzag", 4), ("zigzag", 8))


@pytest.mark.parametrize(
    ("placement", "ranks"),
    [
        pytest.param(kind, ranks, marks=[] if (kind, ranks) in SOME else pytest.mark.slow)
        for kind in PLACEMENTS
        for ranks in (1, 2, 3, 4, 8)
    ],
)
@pytest.mark.parametrize("case", QUANTIZED, ids=lambda case: case.name)
def test_a_ring_of_integers_within_the_contract(case, placement, ranks):
    got = simulate(case, "ring", placement, ranks, precision="int8")
    check_contract(case, got.out, got.lse, precision="int8")


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("causal", [False, True])
def test_parts_that_are_rounded_before_they_are_merged(causal, dtype, placement, ranks):
    """As kernels for GPUs leave them. A ring then rounds twice, not once: parts are rounded, and so is their sum. The
    first adds about as much as the second, which twice the error of one rounding, the bound, leaves room for."""
    case = Case("rounded", **BASE, causal=causal, dtype=dtype)
    got, want = simulate(case, "ring", placement, ranks, wide=False), expected(case)
    once = errors(want.rounded, want.out).relative_l2
    assert once < errors(got.out, want.out).relative_l2 < 1.6 * once < HALF_FACTOR * once
    check_gradients(case, got.dq, got.dk, got.dv)


def test_a_key_that_no_rank_sees_spoils_nothing():
    """NaN after the last key that exists, and before a window begins."""
    case = Case("unseen", **BASE, kv_lens=(40, 17), plant=(("k", (0, 41, 0, 3), "nan"), ("v", (1, 60, 1, 0), "nan")))
    for strategy in ("ring", "all_gather", "masked"):
        got = simulate(case, strategy, "zigzag", 4)
        check_contract(case, got.out, got.lse)
        assert all(np.isfinite(x.astype(np.float32)).all() for x in (got.dq, got.dk, got.dv))
    quantized = simulate(case, "ring", "zigzag", 4, precision="int8")
    check_contract(case, quantized.out, quantized.lse, "int8")


def test_what_is_not_finite_in_a_value_that_went_round():
    """Its token came as one of NaN: rows that see it are NaN, those of its own rank in its channel alone."""
    case = Case("nonfinite", **BASE, causal=True, plant=(("v", (0, 30, 1, 3), "inf"),))
    out = simulate(case, "ring", "contiguous", 3, precision="int8").out[0, :, 2:]  # of the heads that have this key
    assert np.isposinf(out[30:32, :, 3]).all() and np.isfinite(np.delete(out[:32], 3, -1)).all()
    assert np.isfinite(out[:30]).all() and np.isnan(out[32:]).all()


@pytest.mark.parametrize("bad", [-1, LENGTH + 1])
def test_a_length_that_no_sequence_can_have_stays_one(bad):
    case = Case("bad", **BASE, kv_lens=(LENGTH, bad))
    for strategy in ("ring", "all_gather"):
        with pytest.raises(ValueError, match=r"kv_lens\[1\] is"):
            simulate(case, strategy, "contiguous", 2)
