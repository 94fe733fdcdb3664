"""The case list: tests, `qflash verify` and benchmarks all take their problems from here.

Tags: "quick" is a small selection that shows whether a kernel works, "full" is everything small, "large" takes seconds.
"""

from __future__ import annotations

from dataclasses import replace

from qflash.testing.case import Case, Rotary

_QUICK = ("quick", "full")
_LARGE = ("large",)


def _lengths() -> list[Case]:
    """Irregular lengths, around every possible tile size."""
    pairs = [(1, 1), (1, 2), (2, 1), (17, 17), (63, 65), (65, 63), (127, 129), (300, 300), (5, 300), (300, 5)]
    return [Case(f"len_{tq}x{tk}", tq, tk, causal=tq % 2 == 0, seed=tq * 1000 + tk) for tq, tk in pairs]


def _head_dims() -> list[Case]:
    dims = (1, 3, 8, 20, 40, 72, 100, 128, 136, 200, 255, 256)
    return [Case(f"dim_{d}", 67, 93, head_dim=d, causal=d % 8 == 0, seed=d) for d in dims]


def _dtypes() -> list[Case]:
    shapes = {
        "full": Case(q_len=130, k_len=130),
        "causal_gqa": Case(q_len=96, k_len=150, q_heads=6, kv_heads=2, causal=True),
        "odd_dim": Case(q_len=65, k_len=65, head_dim=40, window=(20, 3)),
        "rope": Case(q_len=70, k_len=70, causal=True, rope=Rotary(64)),
    }
    return [
        replace(case, name=f"{dtype}_{name}", dtype=dtype, seed=11, tags=_QUICK if name == "causal_gqa" else ("full",))
        for dtype in ("float16", "bfloat16")
        for name, case in shapes.items()
    ]


def _heads() -> list[Case]:
    return [
        Case("gqa_8_2", 50, 77, 8, 2, batch=2, causal=True, seed=21, tags=_QUICK),
        Case("mqa_7_1", 33, 64, 7, 1, seed=22),
        Case("many_heads", 9, 40, 32, 8, head_dim=32, batch=3, causal=True, seed=23),
    ]


def _masks() -> list[Case]:
    return [
        Case("plain", 128, 128, seed=30, tags=_QUICK),
        Case("causal", 200, 200, causal=True, seed=31, tags=_QUICK),
        Case("causal_short_q", 31, 200, causal=True, seed=32),
        Case("causal_long_q", 200, 31, causal=True, seed=33),  # the first 169 rows see no keys
        Case("window_0_0", 80, 80, window=(0, 0), seed=34),
        Case("window_0_0_long_k", 40, 120, window=(0, 0), seed=35),
        Case("window_left", 150, 150, window=(16, -1), seed=36),
        Case("window_right", 150, 150, window=(-1, 7), seed=37),
        Case("window_both", 150, 190, window=(33, 5), seed=38, tags=_QUICK),
        Case("window_wider_than_k", 60, 60, window=(1000, 1000), seed=39),
        Case("window_causal", 170, 170, causal=True, window=(40, 12), seed=40),
        Case("window_long_q", 150, 20, window=(5, 5), seed=41),  # rows at the top see no keys
        Case("window_open", 45, 45, window=(-1, -1), seed=42),
        Case("padding", 64, 96, 4, 2, batch=4, kv_lens=(0, 1, 50, 96), seed=43, tags=_QUICK),
        Case("padding_causal", 40, 96, batch=4, kv_lens=(0, 17, 40, 96), causal=True, seed=44),
        Case("padding_window", 70, 70, batch=3, kv_lens=(70, 69, 3), window=(10, 2), seed=45),
        Case("padding_all", 20, 20, batch=2, kv_lens=(0, 0), seed=46),
    ]


def _packed() -> list[Case]:
    return [
        Case(
            "packed", q_lens=(5, 0, 64, 1, 99), k_lens=(5, 3, 64, 90, 99), q_heads=4, causal=True, seed=50, tags=_QUICK
        ),
        Case("packed_empty_keys", q_lens=(7, 30, 0), k_lens=(0, 65, 0), window=(12, 4), seed=51),
        Case("packed_padded", q_lens=(9, 33, 20), k_lens=(40, 33, 8), kv_lens=(25, 0, 8), causal=True, seed=52),
        Case("packed_rope", q_lens=(40, 2, 17), k_lens=(40, 30, 5), rope=Rotary(32), causal=True, seed=53),
        Case("packed_positions", q_lens=(21, 8), k_lens=(30, 8), rope=Rotary(64, True, "per_batch"), seed=54),
        Case("packed_half_layout", q_lens=(13, 50), k_lens=(20, 50), dtype="float16", layout="bhtd", seed=55),
        Case("packed_nothing", q_lens=(0, 0), k_lens=(0, 4), seed=56),
        Case("packed_no_sequences", q_lens=(), k_lens=(), seed=57),
    ]


def _rope() -> list[Case]:
    return [
        Case("rope_half", 75, 75, causal=True, rope=Rotary(64), seed=60, tags=_QUICK),
        Case("rope_interleaved", 75, 75, causal=True, rope=Rotary(64, True), seed=61),
        Case("rope_partial", 40, 90, rope=Rotary(24), seed=62),
        Case("rope_partial_interleaved", 40, 90, 4, 2, head_dim=72, rope=Rotary(50, True), seed=63),
        Case("rope_pair", 33, 33, head_dim=3, rope=Rotary(2), seed=64),
        Case("rope_shared_positions", 30, 60, batch=2, rope=Rotary(64, False, "shared"), seed=65),
        Case("rope_batch_positions", 30, 60, batch=2, causal=True, rope=Rotary(64, False, "per_batch"), seed=66),
        Case("rope_negative_positions", 30, 60, batch=2, rope=Rotary(32, True, "negative"), seed=67),
        Case("rope_long_q", 90, 40, rope=Rotary(64), seed=68),  # the implied positions of early queries are negative
        Case("rope_padding", 30, 60, batch=3, kv_lens=(0, 12, 60), causal=True, rope=Rotary(64), seed=69),
        # The implied position of query 0 of the first sequence is -40, one past the table: no key needs it.
        Case("rope_no_keys", 40, 40, batch=2, kv_lens=(0, 40), rope=Rotary(64), seed=59),
    ]


def _scores() -> list[Case]:
    return [
        Case("softcap", 90, 90, softcap=5.0, causal=True, seed=70, tags=_QUICK),
        Case("softcap_saturated", 50, 70, softcap=20.0, scale=3.0, seed=71),
        Case("softcap_large", 50, 70, softcap=30.0, data="large", seed=72),
        # No score is near the cap: scores must be unchanged, however coarse a step of the cap would be.
        Case("softcap_vast", 50, 70, softcap=1e6, seed=79, tags=_QUICK),
        Case("softcap_between", 50, 70, softcap=70.0, scale=3.0, seed=78),
        Case("scale_zero", 40, 60, scale=0.0, causal=True, seed=73),
        Case("scale_negative", 40, 60, scale=-0.2, seed=74),
        Case("scale_one", 64, 64, head_dim=32, scale=1.0, seed=75),
        Case("large", 64, 130, data="large", seed=76),
        Case(
            "large_one_key", 15, 3, 4, 1, batch=2, kv_lens=(1, 3), data="large", seed=83
        ),  # smoothing leaves 0 of one key
        Case("large_causal_half", 64, 64, data="large", dtype="float16", causal=True, seed=77),
        Case("large_causal_bfloat16", 64, 64, data="large", dtype="bfloat16", causal=True, seed=78),
        Case("biased_k", 128, 256, 4, 2, data="biased_k", seed=79, tags=_QUICK),
        Case("biased_k_causal_half", 200, 200, head_dim=128, data="biased_k", dtype="float16", causal=True, seed=80),
        Case("outlier", 100, 200, data="outlier", seed=81),
        Case("uniform", 70, 70, data="uniform", causal=True, seed=82),
        Case("rising", 100, 400, data="rising", seed=84),
        Case("rising_causal", 300, 300, 4, 2, head_dim=128, data="rising", dtype="bfloat16", causal=True, seed=85),
        Case("rising_padding", 90, 350, batch=2, kv_lens=(350, 260), data="rising", dtype="float16", seed=86),
        Case("hills", 100, 600, data="hills", dtype="bfloat16", seed=87),
        Case("hills_window", 300, 500, head_dim=128, data="hills", dtype="float16", window=(220, 90), seed=88),
        Case("hills_packed", q_lens=(40, 3, 70), k_lens=(300, 0, 250), data="hills", causal=True, seed=89),
    ]


def _layouts() -> list[Case]:
    return [
        Case("layout_bhtd", 60, 80, 4, 2, batch=2, layout="bhtd", causal=True, seed=90),
        Case("layout_fused", 70, 70, 4, 2, batch=2, layout="fused", causal=True, rope=Rotary(64), seed=91),
        Case("layout_gaps", 37, 53, 3, 3, batch=2, head_dim=20, layout="gaps", seed=92),
        Case("layout_gaps_half", 37, 53, 4, 2, batch=2, head_dim=72, layout="gaps", dtype="float16", seed=93),
        Case("layout_one_batch", 33, 66, batch=3, layout="one_batch", kv_lens=(10, 66, 33), seed=94),
    ]


def _empty() -> list[Case]:
    return [
        Case("empty_batch", batch=0),
        Case("empty_q", q_len=0, rope=Rotary(64)),
        Case("empty_k", k_len=0, causal=True),
        Case("empty_both", q_len=0, k_len=0),
    ]


def _decode() -> list[Case]:
    return [
        Case("decode", 1, 1000, 8, 2, head_dim=128, batch=2, causal=True, seed=100, tags=_QUICK),
        Case("decode_padding", 1, 700, 8, 2, batch=4, kv_lens=(0, 1, 333, 700), causal=True, seed=101),
        Case("decode_rope_half", 1, 513, 4, 1, dtype="float16", causal=True, rope=Rotary(64), seed=102),
        Case("decode_window", 1, 900, 4, 4, window=(100, 0), seed=103),
        Case("decode_four_rows", 4, 600, 8, 2, head_dim=40, causal=True, seed=104),
    ]


def _sinks() -> list[Case]:
    """Logits next to those of the keys: of similar size, and so far above or below that one of the two is lost."""
    near = ("0.5", "-1.25", "3")
    far = ("80", "-80", "1e4", "-1e4", "0")
    return [
        Case("sinks", 100, 130, 3, 3, sinks=near, seed=130, tags=_QUICK),
        Case("sinks_causal_gqa", 90, 90, 6, 2, causal=True, sinks=near, seed=131),
        Case("sinks_window", 150, 150, 4, 2, window=(20, 3), sinks=near, seed=132),
        Case("sinks_half", 96, 150, 6, 2, dtype="float16", causal=True, sinks=near, seed=133, tags=_QUICK),
        Case("sinks_bfloat16", 96, 150, 6, 2, head_dim=128, dtype="bfloat16", causal=True, sinks=near, seed=134),
        Case("sinks_packed", q_lens=(5, 0, 64, 40), k_lens=(5, 3, 64, 0), q_heads=4, causal=True, sinks=near, seed=135),
        Case("sinks_padding", 40, 96, 4, 2, batch=3, kv_lens=(0, 17, 96), causal=True, sinks=near, seed=136),
        Case("sinks_long_q", 200, 31, causal=True, sinks=near, seed=137),  # the first 169 rows see no keys
        Case("sinks_no_keys", 20, 0, 3, 3, sinks=("0.5", "nan", "-inf"), seed=138),
        Case("sinks_far", 70, 90, 5, 5, sinks=far, seed=139),
        Case("sinks_far_half", 70, 90, 5, 1, dtype="float16", sinks=far, seed=140),
        Case("sinks_softcap", 60, 80, softcap=5.0, sinks=near, seed=141),
        Case("sinks_rope", 60, 60, causal=True, rope=Rotary(64), sinks=near, seed=142),
        Case("sinks_biased_k", 90, 200, 4, 2, data="biased_k", sinks=near, seed=143),
        Case("sinks_large", 64, 130, 4, 4, data="large", sinks=("9000", "-5", "2e4", "1e5"), seed=144),
        Case("sinks_scale_zero", 40, 60, scale=0.0, causal=True, sinks=near, seed=145),
        Case("sinks_nonfinite", 40, 70, 4, 4, causal=True, sinks=("inf", "-inf", "nan", "1"), seed=146),
        Case("sinks_decode", 1, 700, 8, 2, head_dim=128, batch=3, kv_lens=(0, 1, 700), sinks=near, seed=147),
        Case("sinks_nan_k", 70, 70, causal=True, sinks=near, plant=(("k", (0, 40, 0, 3), "nan"),), seed=148),
        # The only key has a score of -inf: next to a sink its weight is 0, and the softmax of only -inf is NaN.
        Case(
            *("sinks_scores_all_minus_inf", 2, 1), head_dim=1, data="uniform", sinks=("0.5", "-inf"),
            plant=(("k", (0, 0, 0, 0), "-inf"), ("k", (0, 0, 1, 0), "-inf")),
        ),
    ]  # fmt: skip


def _non_finite() -> list[Case]:
    """NaN and Inf in visible and in masked places: early rows of a causal square do not see late keys."""
    square = Case(q_len=70, k_len=70, causal=True, seed=110)
    padded = Case(q_len=40, k_len=70, batch=2, kv_lens=(50, 70), seed=111)

    def planted(name: str, case: Case, *plant: tuple[str, tuple[int, ...], str], **changes) -> Case:
        return replace(case, name=name, plant=plant, **changes)

    return [
        planted("nan_q", square, ("q", (0, 33, 1, 5), "nan"), tags=_QUICK),
        planted("nan_k", square, ("k", (0, 40, 0, 63), "nan"), tags=_QUICK),
        planted("nan_v", square, ("v", (0, 40, 1, 0), "nan"), tags=_QUICK),
        planted("nan_v_first_key", square, ("v", (0, 0, 0, 7), "nan")),
        planted("inf_q", square, ("q", (0, 65, 0, 1), "inf")),
        planted("inf_k", square, ("k", (0, 35, 1, 2), "-inf")),
        planted("inf_v", square, ("v", (0, 20, 0, 3), "inf"), ("v", (0, 50, 0, 3), "-inf"), ("v", (0, 3, 1, 9), "inf")),
        planted("nan_in_padding", padded, *((x, (0, 50, 0, 0), "nan") for x in "kv"), ("v", (0, 69, 1, 1), "inf")),
        planted("nan_in_padding_half", padded, *((x, (0, 55, 1, 3), "nan") for x in "kv"), dtype="float16"),
        planted("nan_outside_window", square, *((x, (0, 30, 0, 4), "nan") for x in "kv"), causal=False, window=(6, 6)),
        planted("nan_row_sees_nothing", square, ("q", (0, 3, 0, 0), "nan"), k_len=20),
        planted("nan_rope", square, ("k", (0, 44, 0, 10), "nan"), ("q", (0, 12, 1, 50), "nan"), rope=Rotary(32)),
        planted("nan_softcap", square, ("k", (0, 44, 0, 10), "nan"), softcap=10.0),
        planted("inf_softcap", square, ("k", (0, 44, 0, 10), "inf"), softcap=10.0),
        planted("nan_bfloat16", square, ("k", (0, 9, 1, 10), "nan"), ("v", (0, 60, 0, 1), "inf"), dtype="bfloat16"),
        planted("nan_packed", Case(q_lens=(20, 30), k_lens=(20, 30), seed=112), ("k", (19, 0, 0), "nan")),
        planted("nan_decode", Case(q_len=1, k_len=600, batch=2, seed=113), ("v", (0, 599, 0, 2), "nan")),
        # One key with a score of -inf: the softmax of only -inf is NaN, although a row that sees no key is zeros.
        planted(
            "scores_all_minus_inf", Case(q_len=2, k_len=1, head_dim=1, data="uniform"), ("k", (0, 0, 0, 0), "-inf")
        ),
    ]


def _large() -> list[Case]:
    return [
        Case("t1024", 1024, 1024, 2, 2, causal=True, seed=120, tags=_LARGE),
        Case("t2048_half", 2048, 2048, 2, 1, head_dim=128, dtype="float16", seed=121, tags=_LARGE),
        Case("t4096_window", 4096, 4096, 1, 1, window=(256, 0), seed=122, tags=_LARGE),
        Case("t4096_rope", 4096, 4096, 1, 1, head_dim=128, causal=True, rope=Rotary(128), seed=123, tags=_LARGE),
        Case("t2048_rising", 2048, 2048, 4, 2, head_dim=128, data="rising", dtype="bfloat16", seed=125, tags=_LARGE),
        Case("t3000_hills", 3000, 3000, 2, 2, data="hills", dtype="float16", causal=True, seed=126, tags=_LARGE),
        Case("decode_32768", 1, 32768, 8, 2, head_dim=128, causal=True, seed=124, tags=_LARGE),
    ]


CASES: tuple[Case, ...] = tuple(
    case
    for group in (
        _masks, _lengths, _head_dims, _dtypes, _heads, _packed, _rope, _scores, _layouts, _empty, _decode, _sinks,
        _non_finite, _large,
    )
    for case in group()
)  # fmt: skip

BY_NAME = {case.name: case for case in CASES}


def cases(tag: str = "full") -> list[Case]:
    """The cases with the tag `tag`: "quick", "full" or "large"."""
    chosen = [case for case in CASES if tag in case.tags]
    if not chosen:
        raise ValueError(f"tag is {tag!r}; allowed: quick, full, large")
    return chosen


# Arguments of a Case, for tests of kernels with a reference maximum: masks that hide keys from some rows, of 450 keys,
MASKS = {"plain": {}, "causal": {"causal": True}, "window": {"window": (230, 100)}, "padding": {"kv_lens": (333,)}}
# and nonfinite keys, in tiles after the first.
NONFINITE_LATER = {
    "nan": (("k", (0, 300, 0, 3), "nan"),),
    "inf": (("k", (0, 300, 0, 3), "inf"),),  # +inf in some rows, -inf in others
    "both": (("k", (0, 200, 0, 3), "inf"), ("k", (0, 420, 0, 3), "-inf")),
    "nothing finite at first": tuple(("k", (0, key, 0, 3), "-inf") for key in range(140)),
    "nothing finite in between": tuple(("k", (0, key, 0, 3), "-inf") for key in range(100, 300)),
}

# Gradients where rows see few keys: dP - delta cancels, and the error of a delta computed from 16-bit `out` would be
# most of what is left.
FEW_KEYS = [
    Case("two_keys_float16", 2, 2, 2, 1, 80, dtype="float16", seed=505),
    Case("two_keys_bfloat16", 2, 2, 2, 1, 80, dtype="bfloat16", seed=601),
    Case("one_row", 1, 2, 1, 1, 80, batch=2, dtype="float16", kv_lens=(2, 0), softcap=30.0, data="uniform", seed=1577),
    Case("rope", 3, 2, 4, 1, 80, 3, "float16", kv_lens=(0, 0, 2), rope=Rotary(2, True), data="uniform", seed=8565),
]
# If lse has no gradient, q and k have none in these rows: one key has all the weight. Scores are in the thousands, and
# exp(score - lse) with lse in float32 is 1 to three digits.
ONE_HOT = [
    Case("one_hot", 15, 15, 1, 1, 128, 2, "float16", causal=True, kv_lens=(14, 7), data="large", seed=496956),
    Case("one_hot_sinks", 6, 6, 2, 1, 80, dtype="bfloat16", sinks=("5e3", "-3"), data="large", seed=7),
]
