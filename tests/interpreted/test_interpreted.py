"""Triton kernels on Triton's interpreter, on the CPU: the contract that all kernels are held to (docs/numerics.md)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import qflash
from qflash import dispatch, reference
from qflash.backends import triton as backend
from qflash.reference.quantize import quantize
from qflash.rotary import Rope, rope_tables
from qflash.testing import BY_NAME, Case, check, interpreted_ops, oracle
from qflash.testing.compare import check_contract
from qflash.testing.interpreted import ARCH, in_interpreter
from qflash.testing.linear_problems import LinearProblem, check_near, linear, operands
from qflash.testing.rotations import check_rotated
from qflash.testing.rows import LONG, SMALL, RowCase, check_softmax
from qflash.testing.runner import run_interpreted, suited

pytestmark = pytest.mark.skipif(bool(backend.why_not()), reason=backend.why_not())

# Each costs a tenth of a second or three; kernels that take 16 bits alone are given them in these.
FORWARD = (
    "plain", "causal", "causal_long_q", "window_both", "window_long_q", "padding", "packed", "packed_padded",
    "packed_empty_keys", "rope_half", "rope_partial_interleaved", "rope_batch_positions", "rope_no_keys", "softcap",
    "softcap_vast", "scale_negative", "scale_zero", "sinks", "sinks_half", "sinks_nonfinite", "nan_q", "nan_k", "nan_v",
    "nan_bfloat16", "inf_v", "scores_all_minus_inf", "nan_in_padding_half", "nan_row_sees_nothing", "layout_gaps_half",
    "dim_3", "dim_136", "dim_256", "empty_k", "float16_causal_gqa", "bfloat16_odd_dim", "bfloat16_rope",
    "rising_padding", "large_causal_bfloat16",
)  # fmt: skip
IN_16_BITS = ("causal", "window_both", "softcap", "nan_v", "layout_one_batch")  # cases of float32
DECODING = (
    "plain", "window_both", "causal_long_q", "padding_causal", "gqa_8_2", "softcap", "scale_negative", "decode",
    "decode_window", "sinks_half", "sinks_nonfinite", "nan_q", "nan_k", "nan_v", "nan_bfloat16", "inf_v", "dim_3",
    "dim_136", "empty_k", "layout_one_batch",
)  # fmt: skip
ON_PAGES = (
    "window_both", "padding_causal", "gqa_8_2", "decode_window", "rope_half", "rope_padding", "nan_k", "inf_v",
)  # fmt: skip
INT8 = (
    "causal_short_q", "window_both", "padding_causal", "packed_padded", "rope_partial_interleaved", "softcap",
    "scale_negative", "biased_k", "sinks_biased_k", "nan_q", "nan_k", "nan_v", "inf_k", "layout_gaps_half", "dim_3",
)  # fmt: skip
QUERIES = 6  # of a case of decoding: every row is a program of its own in the merge
KEYS = 100  # of a case in INT8: keys are added up one after another


def check_case(case: Case, kernel: str) -> None:
    check(suited(case, kernel, ARCH), kernel, "interpreted")


def with_few_queries(case: Case) -> Case:
    q_len = min(case.q_len, QUERIES)
    return replace(case, q_len=q_len, plant=tuple(one for one in case.plant if one[0] != "q" or one[1][1] < q_len))


@pytest.mark.parametrize("name", FORWARD)
def test_forward(name):
    check_case(BY_NAME[name], "triton_fwd")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", IN_16_BITS)
def test_forward_in_16_bits(name, dtype):
    check_case(replace(BY_NAME[name], dtype=dtype), "triton_fwd")


@pytest.mark.parametrize("name", DECODING)
def test_decoding(name):
    check_case(with_few_queries(BY_NAME[name]), "triton_decode")


@pytest.mark.parametrize("name", ON_PAGES)
def test_decoding_on_pages(name):
    check_case(with_few_queries(BY_NAME[name]), "triton_decode_pages")


@pytest.mark.parametrize("name", INT8)
def test_int8(name):
    case = BY_NAME[name]
    check_case(replace(case, k_len=min(case.k_len, KEYS)), "triton_int8")


# Tiles of GPUs before Hopper, which have a table of their own.
OLDER = (
    ("triton_fwd", replace(BY_NAME["float16_causal_gqa"], head_dim=128)),
    ("triton_fwd", replace(BY_NAME["bfloat16_rope"], head_dim=128)),
    ("triton_fwd", replace(BY_NAME["nan_bfloat16"], head_dim=136)),
    ("triton_int8", replace(BY_NAME["window_both"], k_len=KEYS, head_dim=96, dtype="bfloat16")),
)


@pytest.mark.parametrize(("kernel", "case"), OLDER, ids=lambda one: getattr(one, "name", one))
def test_tiles_of_older_gpus(kernel, case):
    spec = dispatch.VARIANTS[kernel].spec(80, case.dtype, case.head_dim)
    tiles = [backend.launches(dispatch.BY_NAME[kernel], replace(spec, arch=arch)).choices[0] for arch in (80, ARCH)]
    assert tiles[0] != tiles[1]
    result = in_interpreter(run_interpreted, case, kernel, 80)
    check_contract(case, *result, dispatch.VARIANTS[kernel].contract, integers=oracle.integers_of(kernel))


# What passes leave in the workspace ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["nan_k", "float16_rope"])
def test_integers_are_those_of_quantize_to_the_bit(name):
    case = replace(suited(BY_NAME[name], "triton_int8", ARCH), q_len=70, k_len=70, plant=BY_NAME[name].plant[:1])
    inputs, channels = case.make_inputs(), case.head_dim  # which is a power of two
    found = in_interpreter(interpreted_ops.regions, case, "triton_int8")
    shape = (1, case.k_len, case.kv_heads)
    keys = quantize(inputs.k, group=16, smooth=True, rope=inputs.rope)
    values = np.resize(found["k_values"].view(np.int8), (*shape, channels))
    scales = np.resize(found["k_scales"].view(np.float32), (case.kv_heads, case.k_len))
    finite = np.isfinite(scales).T[None]
    wanted = np.repeat(keys.scale[0], 16, axis=-1)[:, : case.k_len]
    np.testing.assert_array_equal(np.where(finite[..., None], values, -128), keys.values)
    np.testing.assert_array_equal(scales, np.where(finite[0].T, wanted, np.nan))
    means = np.resize(found["mean"].view(np.float32), (case.kv_heads, channels))
    np.testing.assert_array_equal(means, keys.mean[0])
    queries = quantize(inputs.q, group=1, rope=inputs.rope)
    values = np.resize(found["q_values"].view(np.int8), (1, case.q_len, case.q_heads, channels))
    np.testing.assert_array_equal(values, queries.values)
    scales = np.resize(found["q_scales"].view(np.float32), (case.q_heads, case.q_len))
    np.testing.assert_array_equal(scales, queries.scale[0])


# Descriptions that are out of range ----------------------------------------------------------------------------------

ATTENTION = [row.name for row in dispatch.kernels_of("attention") if row.backend == "triton"]
PACKING = [name for name in ATTENTION if not dispatch.BY_NAME[name].few_rows]


def is_nan(out: np.ndarray, lse: np.ndarray) -> bool:
    return bool(np.isnan(out.astype(np.float32)).all() and np.isnan(lse).all())


@pytest.mark.parametrize("bad", [-1, 41])
@pytest.mark.parametrize("kernel", ATTENTION)
def test_a_length_that_is_out_of_range_makes_its_sequence_nan(kernel, bad):
    case = Case("bad", 5, 40, batch=2, kv_lens=(9, 40), dtype="float16", head_dim=32)
    lens = np.array([bad, 40], np.int32)
    out, lse = in_interpreter(run_interpreted, case, kernel, ARCH, {"kv_lens": lens})
    assert is_nan(out[0], lse[0])
    assert np.isfinite(out[1]).all() and np.isfinite(lse[1]).all()


@pytest.mark.parametrize("kernel", PACKING)
def test_offsets_that_fall_make_all_rows_nan(kernel):
    case = Case("falls", q_lens=(5, 6, 7), k_lens=(5, 6, 7), dtype="float16", head_dim=32)
    changed = {"cu_seqlens_q": np.array([0, 11, 5, 18], np.int32)}
    assert is_nan(*in_interpreter(run_interpreted, case, kernel, ARCH, changed))


@pytest.mark.parametrize("kernel", PACKING)
def test_packed_rows_of_no_sequence_are_nan(kernel):
    case = Case("gaps", q_lens=(5, 6, 7), k_lens=(5, 6, 7), dtype="float16", head_dim=32)
    changed = {"cu_seqlens_q": np.array([2, 5, 11, 16], np.int32)}
    out, lse = in_interpreter(run_interpreted, case, kernel, ARCH, changed)
    assert is_nan(out[:2], lse[:, :2]) and is_nan(out[16:], lse[:, 16:])
    assert np.isfinite(out[2:16]).all() and np.isfinite(lse[:, 2:16]).all()


@pytest.mark.parametrize("kernel", PACKING)
def test_keys_past_the_end_make_their_sequence_nan(kernel):
    case = Case("past", q_lens=(5, 6), k_lens=(5, 6), dtype="float16", head_dim=32)
    changed = {"cu_seqlens_k": np.array([0, 5, 12], np.int32)}
    out, lse = in_interpreter(run_interpreted, case, kernel, ARCH, changed)
    assert np.isfinite(out[:5]).all() and is_nan(out[5:], lse[:, 5:])


@pytest.mark.parametrize("entry", [-1, 1000])
def test_an_entry_that_points_nowhere_makes_its_sequence_nan(entry):
    case = Case("lost", 2, 300, 2, 1, 32, batch=2, dtype="float16", seed=2)
    table = in_interpreter(interpreted_ops.page_table, case, "triton_decode_pages")
    table[1, 0] = entry
    out, lse = in_interpreter(run_interpreted, case, "triton_decode_pages", ARCH, {"kv.page_table": table})
    assert np.isfinite(out[0]).all() and is_nan(out[1], lse[1])
    window = replace(case, window=(16, 0))  # which no row sees through
    out, _ = in_interpreter(run_interpreted, window, "triton_decode_pages", ARCH, {"kv.page_table": table})
    assert np.isfinite(out).all()


# Bits ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", ATTENTION)
def test_a_sequence_has_the_same_bits_in_every_batch(kernel):
    case = Case("batch", 3, 300, 2, 1, 32, batch=2, kv_lens=(40, 260), dtype="bfloat16", seed=5)
    inputs = case.make_inputs()
    out, lse = in_interpreter(run_interpreted, case, kernel)
    alone = replace(case, batch=1, kv_lens=(260,), k_len=270)
    arrays = {name: getattr(inputs, name)[1:2, : 3 if name == "q" else 270].copy() for name in "qkv"}
    one_out, one_lse = in_interpreter(run_interpreted, alone, kernel, ARCH, arrays)
    assert one_out.tobytes() == out[1:2].tobytes() and one_lse.tobytes() == lse[1:2].tobytes()


# Rows ----------------------------------------------------------------------------------------------------------------

SOFTMAX = (
    *(RowCase(3, columns) for columns in (1, 63, 64, 65, 257, 1025, 4099, 16384, 16385)),
    *(case for case in SMALL if case.columns in (37, 255, 1030) and (case.data != "normal" or case.gap)),
    *LONG,
)


def test_softmax():
    for case in SOFTMAX:
        check_softmax(case.make(), in_interpreter(interpreted_ops.softmax, case))


@pytest.mark.parametrize("scale", [0.125, -2.5, 0.0, 1e-40, 1e38, -3e38])
def test_softmax_scale(scale):
    scale = np.float32(scale).item()
    for data in ("normal", "infinite", "huge"):
        case = RowCase(5, 70, data=data)
        check_softmax(case.make(), in_interpreter(interpreted_ops.softmax, case, scale), scale)


# Rope ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("interleaved", [False, True], ids=["half", "interleaved"])
@pytest.mark.parametrize(
    ("shape", "rotary_dim"),
    [((2, 5, 4, 64), 64), ((1, 3, 9, 128), 32), ((2, 20, 3, 24), 16), ((1, 5, 2, 7), 6), ((1, 3, 2, 300), 260)],
)
def test_rope(shape, rotary_dim, interleaved):
    rng = np.random.default_rng(rotary_dim)
    rope = Rope(*rope_tables(50, rotary_dim), interleaved)
    places = (None, rng.integers(-49, 50, shape[1]), rng.integers(-49, 50, shape[:2]))
    for dtype, positions in zip(("float32", "float16", "bfloat16"), places, strict=True):
        x = rng.standard_normal(shape, np.float32).astype(dtype)
        positions = None if positions is None else positions.astype(np.int32)
        for inverse in (False, True):
            got = in_interpreter(interpreted_ops.rope, x, rope, positions, inverse)
            check_rotated(got, x, rope, positions, inverse)


def test_a_position_outside_the_tables_makes_what_it_rotates_nan():
    x = np.ones((1, 3, 2, 24), np.float16)
    positions = np.array([1, 50, -(2**31)], np.int32)
    got = in_interpreter(interpreted_ops.rope, x, Rope(*rope_tables(50, 16)), positions)
    assert np.isfinite(got[:, 0]).all() and np.isnan(got[:, 1:, :, :16]).all() and (got[..., 16:] == 1).all()


@pytest.mark.parametrize("interleaved", [False, True])
def test_what_is_not_finite_reaches_its_pair_alone(interleaved):
    x = np.ones((1, 4, 3, 24), np.float32)
    x[0, 1, 2, 5], x[0, 2, 0, 3], x[0, 3, 1, 20] = np.nan, np.inf, -np.inf  # the last one is not rotated
    rope = Rope(*rope_tables(50, 16), interleaved)
    with np.errstate(invalid="ignore"):
        wanted = reference.apply_rope(x[0].astype(np.float64), np.arange(4), rope)
    got = in_interpreter(interpreted_ops.rope, x, rope)[0]
    for kind in (np.isnan, np.isposinf, np.isneginf):
        np.testing.assert_array_equal(kind(got), kind(wanted))
    assert np.count_nonzero(~np.isfinite(got)) == 5  # two pairs, and the channel behind them


# Linear layers -------------------------------------------------------------------------------------------------------

LAYERS = (
    LinearProblem(130, 144, 72, "bfloat16", "gelu", bias="bfloat16", residual=True),
    LinearProblem(130, 144, 72, "float16", "gelu_tanh", bias="float32", w_layout="n"),
    LinearProblem(130, 272, 72, "float16", residual=True),
    LinearProblem(130, 144, 72, "bfloat16", "swiglu", bias="float32", residual=True, out_dtype="float32"),
    LinearProblem(37, 75, 45, "float16", "silu", bias="float16", residual=True, w_layout="n"),
    LinearProblem(37, 75, 45, "bfloat16", "swiglu", bias="bfloat16"),
    LinearProblem(37, 75, 45, "bfloat16", x_layout="m", w_layout="n", out_dtype="float32"),
    LinearProblem(16, 64, 256, "float16", "gelu", bias="float32"),
    LinearProblem(5, 3, 0, "float16", "gelu", bias="float32"),
)


@pytest.mark.parametrize("arch", [ARCH, 80])
@pytest.mark.parametrize("problem", LAYERS, ids=str)
def test_linear(problem, arch):
    keeps, pad = bool(problem.activation), 3 if problem.m == 37 else 0
    got = in_interpreter(interpreted_ops.linear, problem, pad, keeps, arch)
    assert set(got) == {"out", *({"pre"} if keeps else ()), *({"pre_up"} if problem.gated else ())}
    check_near(got, *linear(problem, operands(problem)))


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_linear_in_int8(dtype):
    rng = np.random.default_rng(6)
    for m, n, k in ((37, 75, 45), (130, 144, 272)):
        x, w = (rng.standard_normal(shape, np.float32).astype(dtype) for shape in ((m, k), (k, n)))
        bias = rng.standard_normal(n, np.float32)
        got = in_interpreter(interpreted_ops.int8_linear, x, w, bias)
        assert np.array_equal(got, qflash.linear(x, w, bias, precision="int8"))  # by the CPU engine: the same bits
        got = in_interpreter(interpreted_ops.int8_linear, x, w, bias, "silu")
        wanted = qflash.linear(x, w, bias, activation="silu", precision="int8")
        np.testing.assert_allclose(got.astype(np.float64), wanted.astype(np.float64), rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("along", ["n", "k"])
def test_integer_sums_are_exact(along):
    rng = np.random.default_rng(7)
    a, b = (rng.integers(-128, 128, shape, np.int8) for shape in ((70, 200), (200, 130)))
    b = b if along == "n" else np.ascontiguousarray(b.T).T
    assert np.array_equal(in_interpreter(interpreted_ops.int8_sums, a, b), a.astype(np.int64) @ b.astype(np.int64))
