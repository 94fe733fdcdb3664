"""Kernel `cpu_kv_write` against its replay, bit by bit, and what it refuses before it writes."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import ml_dtypes
import numpy as np
import pytest

import qflash
from qflash.testing.page_writes import CASES, PageWrite, WriteArrays, arrays_of, check_written

DTYPES = ("float32", "float16", "bfloat16")
PAGE_SIZES = (16, 32, 48, 64, 128, 256)
ROPES = (None, "half", "interleaved", "partial", "partial_interleaved")


def written(x: WriteArrays) -> WriteArrays:
    """The call on pools of its own."""
    after = x.copied()
    kv = qflash.PagedKV(
        **after.pools, page_table=x.page_table, lens=x.lens, k_mean=x.k_mean, layout=x.layout
    )  # fmt: skip
    assert qflash.paged_write(kv, x.k, x.v, rope=x.rope, cu_seqlens=x.cu_seqlens, kernel="cpu_kv_write") is kv
    return after


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_replays_bits(case: PageWrite) -> None:
    x = arrays_of(case)
    check_written(written(x), x.replay())


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("head_dim", [16, 64, 80, 128, 256])
def test_every_page_size_dtype_and_rope(head_dim: int, int8: bool) -> None:
    for i, (page_size, dtype) in enumerate(product(PAGE_SIZES, DTYPES)):
        packed = (page_size + 1, 0, 100)
        case = PageWrite(
            *(dtype, int8, page_size, head_dim, 1 + i % 3, (page_size + 6, 5, 130), (5, packed)[i % 2]),
            rope=ROPES[i % 5],
            positions=i % 4 == 0,
            mean=int8 and i % 3 != 0,
            layout=("phtd", "pthd")[i // 2 % 2],
            seed=i,
        )
        x = arrays_of(case)
        check_written(written(x), x.replay())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("int8", [False, True])
def test_extreme_tokens(int8: bool, dtype: str) -> None:
    """NaN, infinities, zeros, denormals, the largest numbers, whose butterflies overflow, and ties."""
    x = arrays_of(PageWrite(dtype, int8, lens=(20, 40), new=12))
    large = float(ml_dtypes.finfo(x.k.dtype).max)
    for array in (x.k, x.v):
        array[0, 0, 0, 3], array[0, 1, 1, 9], array[0, 2, 0, 0] = np.nan, np.inf, -np.inf
        array[0, 3], array[0, 4] = 0.0, -0.0
        array[0, 5] = float(ml_dtypes.finfo(x.k.dtype).smallest_subnormal)
        array[1, 0], array[1, 1] = large, np.where(np.arange(64) % 2, large, -large)
        array[1, 2], array[1, 3, :, ::16] = 2.0**-20, 127.0
        array[1, 4] = np.arange(64) - 31.5
        array[1, 4, :, 0] = 127.0
    after = written(x)
    check_written(after, x.replay())
    if int8:
        spoiled = np.isnan(after.pools["v_scale"]).sum()
        assert spoiled == 3  # a token and head each


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            {"lens": (2, 40, 17)},
            r"kv.lens\[0\] is 2; allowed: 3, its new tokens, to 48, what kv.page_table holds, or 0",
        ),
        ({"lens": (5, 40, 49)}, r"kv.lens\[2\] is 49; allowed: 3, its new tokens, to 48"),
        ({"lens": (5, -1, 17)}, r"kv.lens\[1\] is -1; allowed: 3"),
        ({"entry": (2, 1, 27)}, r"kv.page_table\[2, 1\] is 27, where token 16 is; allowed: 0 to 26"),
        ({"entry": (1, 2, -1)}, r"kv.page_table\[1, 2\] is -1, where token 37 is; allowed: 0 to 26"),
        ({"positions": 48}, r"rope.positions_k\[2\] is 48; allowed: -47 to 47, the rows of rope.cos"),
    ],
)
@pytest.mark.parametrize("int8", [False, True])
def test_a_refused_call_writes_nothing(change: dict, text: str, int8: bool) -> None:
    x = arrays_of(PageWrite("float32", int8, rope="half"))
    if "lens" in change:
        x.lens[:] = change["lens"]
    if "entry" in change:
        *at, entry = change["entry"]
        x.page_table[tuple(at)] = entry
    if "positions" in change:
        positions = np.zeros((3, 3), np.int32)
        positions[2, 2] = change["positions"]
        x.rope = replace(x.rope, positions_k=positions)
    after = x.copied()
    kv = qflash.PagedKV(**after.pools, page_table=x.page_table, lens=x.lens)
    with pytest.raises(ValueError, match=text):
        qflash.paged_write(kv, x.k, x.v, rope=x.rope)
    check_written(after, x)


@pytest.mark.parametrize("int8", [False, True])
def test_a_row_of_padding_writes_nothing(int8: bool) -> None:
    """Its length is 0; its pages, its tokens and their positions may be anything."""
    x = arrays_of(PageWrite("float32", int8, rope="half"))
    x.lens[1], x.page_table[1] = 0, -1
    x.k[1], x.v[1] = np.nan, np.nan
    positions = np.zeros((3, 3), np.int32)
    positions[1] = 2**31 - 1
    x.rope = replace(x.rope, positions_k=positions)
    check_written(written(x), x.replay())


def test_a_packed_sequence_with_new_tokens_is_no_padding() -> None:
    x = arrays_of(PageWrite("float32", new=(2, 0, 5)))
    x.lens[2] = 0
    with pytest.raises(ValueError, match=r"kv.lens\[2\] is 0; allowed: 5, its new tokens, to 48, what .* holds$"):
        written(x)


def test_entries_that_no_new_token_needs_may_hold_anything() -> None:
    x = arrays_of(PageWrite())
    x.page_table[1, :2] = -1  # tokens 37 to 39 are in its third page
    x.page_table[0, 1:] = 2**31 - 1
    check_written(written(x), x.replay())


def test_a_decode_step_through_pages() -> None:
    """What is written token by token is what attention on arrays sees."""
    rng = np.random.default_rng(0)
    k, v = (rng.standard_normal((1, 40, 2, 64), np.float32) for _ in range(2))
    q = rng.standard_normal((1, 1, 4, 64), np.float32)
    rope = qflash.Rope(*qflash.rope_tables(64, 64))
    pages = np.full((6, 2, 16, 64), np.nan, np.float32)
    kv = qflash.PagedKV(pages, pages.copy(), np.array([[4, 1, 5]], np.int32), np.zeros(1, np.int32))
    for first, end in ((0, 30), *((t, t + 1) for t in range(30, 40))):
        kv.lens[0] = end
        qflash.paged_write(kv, k[:, first:end], v[:, first:end], rope=rope)
        out = qflash.attention(q, kv, causal=True, rope=rope)
        wanted = qflash.attention(q, k[:, :end], v[:, :end], causal=True, rope=rope)
        np.testing.assert_allclose(out, wanted, rtol=0, atol=1e-6)
