"""The error table: bad input raises ValueError or TypeError naming the argument, what came and what is allowed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from qflash.call.array import Array
from qflash.ops.problem import Options, Problem, RopeArrays, check, check_packed


def array(*shape: int, dtype: str = "float32", device: str = "cpu", strides: tuple[int, ...] | None = None) -> Array:
    return Array(shape, strides, dtype, device)


Q = array(2, 16, 8, 64)
K = array(2, 32, 4, 64)
TABLE = array(32, 32)
INT = {"dtype": "int32"}


def checked(q=Q, k=K, v=None, kv_lens=None, rope=None, **options) -> Problem:
    return check(q, k, k if v is None else v, Options(**options), kv_lens, rope)


def rope(cos=TABLE, sin=None, positions_q=None, positions_k=None) -> RopeArrays:
    return RopeArrays(cos, cos if sin is None else sin, False, positions_q, positions_k)


def packed(q=None, k=None, cu_q=None, cu_k=None, max_q=16, max_k=32, kv_lens=None, rope=None, **options) -> Problem:
    q = array(50, 8, 64) if q is None else q
    k = array(70, 4, 64) if k is None else k
    cu_q = array(4, **INT) if cu_q is None else cu_q
    cu_k = array(4, **INT) if cu_k is None else cu_k
    return check_packed(q, k, k, cu_q, cu_k, max_q, max_k, Options(**options), kv_lens, rope)


# (what is wrong, the arguments, the exception, every piece of text it must carry)
BAD = [
    ("rank of q", {"q": array(16, 8, 64)}, ValueError, ["q ", "(16, 8, 64)", "rank 4"]),
    ("rank of k", {"k": array(2, 32, 4, 64, 1)}, ValueError, ["k ", "(2, 32, 4, 64, 1)", "rank 4"]),
    ("rank of v", {"v": array(64)}, ValueError, ["v ", "(64,)", "rank 4"]),
    ("batch of k", {"k": array(3, 32, 4, 64)}, ValueError, ["k ", "3", "2"]),
    ("batch of v", {"v": array(3, 32, 4, 64)}, ValueError, ["v ", "3", "(2, 32, 4, 64)"]),
    ("length of v", {"v": array(2, 31, 4, 64)}, ValueError, ["v ", "(2, 31, 4, 64)", "(2, 32, 4, 64)"]),
    ("heads of v", {"v": array(2, 32, 2, 64)}, ValueError, ["v ", "(2, 32, 2, 64)", "(2, 32, 4, 64)"]),
    ("head_dim of k", {"k": array(2, 32, 4, 32)}, ValueError, ["k ", "head_dim 32", "64"]),
    ("head_dim of v", {"v": array(2, 32, 4, 128)}, ValueError, ["v ", "head_dim 128", "64"]),
    ("heads that do not divide", {"k": array(2, 32, 3, 64)}, ValueError, ["k ", "3 heads", "8"]),
    ("more key heads than query heads", {"k": array(2, 32, 16, 64)}, ValueError, ["k ", "16 heads", "8"]),
    ("no query heads", {"q": array(2, 16, 0, 64)}, ValueError, ["q ", "0 heads", "1 or more"]),
    ("no key heads", {"k": array(2, 32, 0, 64)}, ValueError, ["k ", "0 heads"]),
    (
        "head_dim 0",
        {"q": array(2, 16, 8, 0), "k": array(2, 32, 4, 0)},
        ValueError,
        ["head_dim 0", "1 to 256"],
    ),
    (
        "head_dim 257",
        {"q": array(2, 16, 8, 257), "k": array(2, 32, 4, 257)},
        ValueError,
        ["head_dim 257", "1 to 256"],
    ),
    ("integer q", {"q": array(2, 16, 8, 64, dtype="int32")}, TypeError, ["q ", "int32", "float32, float16, bfloat16"]),
    ("float64 q", {"q": array(2, 16, 8, 64, dtype="float64")}, TypeError, ["q ", "float64", "float32"]),
    ("bool v", {"v": array(2, 32, 4, 64, dtype="bool")}, TypeError, ["v ", "bool", "float32"]),
    ("dtype of k", {"k": array(2, 32, 4, 64, dtype="float16")}, TypeError, ["k ", "float16", "float32"]),
    ("dtype of v", {"v": array(2, 32, 4, 64, dtype="bfloat16")}, TypeError, ["v ", "bfloat16", "float32"]),
    ("device of k", {"k": array(2, 32, 4, 64, device="cuda:1")}, ValueError, ["k ", "cuda:1", "cpu"]),
    ("device of v", {"v": array(2, 32, 4, 64, device="cuda:0")}, ValueError, ["v ", "cuda:0", "cpu"]),
    (
        "last dim of q",
        {"q": array(2, 16, 8, 64, strides=(8192, 1, 16, 128))},
        ValueError,
        ["q ", "stride 128", "last dimension", "1"],
    ),
    (
        "last dim of v",
        {"v": array(2, 32, 4, 64, strides=(8192, 256, 1, 4))},
        ValueError,
        ["v ", "stride 4", "last dimension"],
    ),
    ("length over 2^31", {"q": array(2, 2**31, 8, 64)}, ValueError, ["q ", "2^31"]),
    ("shape of kv_lens", {"kv_lens": array(3, **INT)}, ValueError, ["kv_lens", "[3]", "[2]"]),
    ("rank of kv_lens", {"kv_lens": array(2, 1, **INT)}, ValueError, ["kv_lens", "[2, 1]", "[2]"]),
    ("dtype of kv_lens", {"kv_lens": array(2, dtype="int64")}, TypeError, ["kv_lens", "int64", "int32"]),
    ("device of kv_lens", {"kv_lens": array(2, device="cuda:0", **INT)}, ValueError, ["kv_lens", "cuda:0", "cpu"]),
    ("window of one", {"window": (3,)}, ValueError, ["window", "(3,)", "(left, right)"]),
    ("window of three", {"window": (1, 2, 3)}, ValueError, ["window", "(1, 2, 3)", "(left, right)"]),
    ("window an int", {"window": 128}, TypeError, ["window", "128", "(left, right)"]),
    ("window below -1", {"window": (-2, 0)}, ValueError, ["window", "(-2, 0)", "-1"]),
    ("window of floats", {"window": (1.5, 0)}, TypeError, ["window", "1.5", "two ints"]),
    ("window of None", {"window": (None, 0)}, TypeError, ["window", "None", "two ints"]),
    ("window of bools", {"window": (True, 0)}, TypeError, ["window", "True", "two ints"]),
    ("window text", {"window": "ab"}, TypeError, ["window", "'ab'", "(left, right)"]),
    ("causal text", {"causal": "yes"}, TypeError, ["causal", "'yes'", "True or False"]),
    ("causal 2", {"causal": 2}, TypeError, ["causal", "2", "True or False"]),
    ("causal None", {"causal": None}, TypeError, ["causal", "None", "True or False"]),
    ("scale NaN", {"scale": float("nan")}, ValueError, ["scale", "nan", "finite"]),
    ("scale inf", {"scale": float("inf")}, ValueError, ["scale", "inf", "finite"]),
    ("scale text", {"scale": "1"}, TypeError, ["scale", "'1'", "number"]),
    ("scale bool", {"scale": True}, TypeError, ["scale", "True", "number"]),
    ("scale beyond float32", {"scale": 1e39}, ValueError, ["scale", "1e+39", "float32"]),
    ("softcap negative", {"softcap": -1.0}, ValueError, ["softcap", "-1", "0 or more"]),
    ("softcap NaN", {"softcap": float("nan")}, ValueError, ["softcap", "nan", "finite"]),
    ("softcap text", {"softcap": "30"}, TypeError, ["softcap", "'30'", "number"]),
    ("softcap beyond float32", {"softcap": 1e39}, ValueError, ["softcap", "1e+39", "float32"]),
    ("softcap that float32 cannot tell from 0", {"softcap": 1e-50}, ValueError, ["softcap", "1e-50", "float32"]),
    ("precision", {"precision": "int4"}, ValueError, ["precision", "'int4'", "'int8'", "'int8_fp8'", "None"]),
    ("precision type", {"precision": 8}, TypeError, ["precision", "8", "'int8'"]),
    ("kernel type", {"kernel": 3}, TypeError, ["kernel", "3", "name"]),
    ("rope rows", {"rope": rope(array(31, 32))}, ValueError, ["rope.cos", "31 rows", "32"]),
    ("rope rows of a long query", {"q": array(2, 40, 8, 64), "rope": rope()}, ValueError, ["rope.cos", "32", "40"]),
    (
        "rope without rows",
        {"rope": rope(array(0, 32), positions_q=array(16, **INT), positions_k=array(32, **INT))},
        ValueError,
        ["rope.cos", "0 rows", "1"],
    ),
    ("rope too wide", {"rope": rope(array(32, 33))}, ValueError, ["rope.cos", "33 columns", "32"]),
    ("rope rank", {"rope": rope(array(32))}, ValueError, ["rope.cos", "(32,)", "[positions, rotary_dim / 2]"]),
    ("rope without columns", {"rope": rope(array(32, 0))}, ValueError, ["rope.cos", "(32, 0)", "2 or more"]),
    ("rope dtype", {"rope": rope(array(32, 32, dtype="float64"))}, TypeError, ["rope.cos", "float64", "float32"]),
    ("rope sin shape", {"rope": rope(sin=array(32, 16))}, ValueError, ["rope.sin", "(32, 16)", "(32, 32)"]),
    ("rope device", {"rope": rope(array(32, 32, device="cuda:0"))}, ValueError, ["rope.cos", "cuda:0", "cpu"]),
    (
        "positions_q shape",
        {"rope": rope(positions_q=array(17, **INT))},
        ValueError,
        ["rope.positions_q", "[17]", "[16]", "[2, 16]"],
    ),
    (
        "positions_k dtype",
        {"rope": rope(positions_k=array(32, dtype="int64"))},
        TypeError,
        ["rope.positions_k", "int64", "int32"],
    ),
]

BAD_PACKED = [
    ("rank of q", {"q": array(1, 50, 8, 64)}, ValueError, ["q ", "(1, 50, 8, 64)", "rank 3"]),
    ("rank of cu_seqlens_q", {"cu_q": array(2, 2, **INT)}, ValueError, ["cu_seqlens_q", "(2, 2)", "batch + 1"]),
    ("empty cu_seqlens_q", {"cu_q": array(0, **INT)}, ValueError, ["cu_seqlens_q", "(0,)", "batch + 1"]),
    ("length of cu_seqlens_k", {"cu_k": array(5, **INT)}, ValueError, ["cu_seqlens_k", "[5]", "[4]"]),
    ("dtype of cu_seqlens_k", {"cu_k": array(4, dtype="int64")}, TypeError, ["cu_seqlens_k", "int64", "int32"]),
    ("max_seqlen_q text", {"max_q": "16"}, TypeError, ["max_seqlen_q", "'16'", "int"]),
    ("max_seqlen_q float", {"max_q": 16.0}, TypeError, ["max_seqlen_q", "16.0", "int"]),
    ("max_seqlen_q beyond int32", {"max_q": 2**31}, ValueError, ["max_seqlen_q", str(2**31), f"0 to {2**31 - 1}"]),
    ("max_seqlen_k negative", {"max_k": -1}, ValueError, ["max_seqlen_k", "-1", f"0 to {2**31 - 1}"]),
    ("kv_lens shape", {"kv_lens": array(4, **INT)}, ValueError, ["kv_lens", "[4]", "[3]"]),
    ("rope rows", {"rope": rope(array(31, 32))}, ValueError, ["rope.cos", "31 rows", "32"]),
    (
        "positions of packed queries",
        {"rope": rope(positions_q=array(3, 16, **INT))},
        ValueError,
        ["rope.positions_q", "[3, 16]", "[50]"],
    ),
]


def ids(row) -> str:
    return row[0].replace(" ", "_")


@pytest.mark.parametrize("row", BAD, ids=ids)
def test_bad_input(row) -> None:
    _, arguments, kind, words = row
    with pytest.raises(kind) as raised:
        checked(**arguments)
    assert type(raised.value) is kind
    assert "allowed" in str(raised.value)
    assert [word for word in words if word not in str(raised.value)] == []


@pytest.mark.parametrize("row", BAD_PACKED, ids=ids)
def test_bad_packed_input(row) -> None:
    _, arguments, kind, words = row
    with pytest.raises(kind) as raised:
        packed(**arguments)
    assert type(raised.value) is kind
    assert "allowed" in str(raised.value)
    assert [word for word in words if word not in str(raised.value)] == []


def test_defaults() -> None:
    problem = checked()
    assert problem.scale == 1 / 8
    assert (problem.window_left, problem.window_right, problem.softcap) == (-1, -1, 0.0)
    assert problem.precision == "native"
    assert (problem.batch, problem.q_len, problem.k_len, problem.q_heads, problem.kv_heads) == (2, 16, 32, 8, 4)


def test_causal_closes_the_right_side_and_keeps_the_left() -> None:
    assert checked(causal=True).window_right == 0
    problem = checked(causal=True, window=(5, 9))
    assert (problem.window_left, problem.window_right) == (5, 0)
    assert checked(causal=np.bool_(True)).window_right == 0


def test_window_takes_any_kind_of_int_and_a_list() -> None:
    problem = checked(window=[np.int64(4), np.int32(-1)])
    assert (problem.window_left, problem.window_right) == (4, -1)


def test_a_window_past_every_length_is_open() -> None:
    assert checked(window=(2**40, 2**31)).window_left == -1


def test_numbers_of_numpy_are_numbers() -> None:
    assert checked(scale=np.float32(0.5), softcap=np.float64(30)).scale == 0.5
    assert checked(softcap=0).softcap == 0.0


def test_contiguous_strides_are_worked_out() -> None:
    assert checked().q_strides == (16 * 8 * 64, 8 * 64, 64)
    assert packed().q_strides == (0, 8 * 64, 64)


def test_strides_are_kept() -> None:
    transposed = array(2, 16, 8, 64, strides=(8192, 64, 1024, 1))
    assert checked(q=transposed).q_strides == (8192, 64, 1024)


def test_a_last_dim_of_one_may_have_any_stride() -> None:
    q = array(2, 16, 8, 1, strides=(128, 8, 1, 77))
    assert checked(q=q, k=array(2, 32, 4, 1)).head_dim == 1


def test_strides_of_an_empty_array_mean_nothing() -> None:
    assert checked(q=array(2, 0, 8, 64, strides=(0, 0, 0, 0))).q_len == 0


def test_rope_is_described() -> None:
    problem = checked(rope=rope(array(40, 8), positions_q=array(2, 16, **INT), positions_k=array(32, **INT)))
    assert (problem.rope_rows, problem.rotary_dim) == (40, 16)
    assert (problem.positions_q_stride, problem.positions_k_stride) == (16, 0)


def test_explicit_positions_need_no_row_per_key() -> None:
    table = array(5, 32)
    assert checked(rope=rope(table, positions_q=array(16, **INT), positions_k=array(32, **INT))).rope_rows == 5


def test_problems_are_keys() -> None:
    assert hash(checked()) == hash(checked())
    assert checked() == checked()
    assert checked() != checked(causal=True)


def test_spec_has_what_selects_a_kernel() -> None:
    problem = checked(causal=True, softcap=3.0, rope=rope(), kv_lens=array(2, **INT))
    spec = problem.spec(90)
    assert (spec.device, spec.arch, spec.dtype, spec.head_dim) == ("cpu", 90, "float32", 64)
    assert (spec.window, spec.softcap, spec.rope, spec.kv_lens, spec.packed, spec.op) == (
        True, True, "half", True, False, "attention",
    )  # fmt: skip
    assert packed().spec(0, op="attention_backward").op == "attention_backward"
    assert replace(problem, rope_interleaved=True).spec(0).rope == "interleaved"
    assert replace(problem, device="cuda:1").spec(90).device == "cuda"
