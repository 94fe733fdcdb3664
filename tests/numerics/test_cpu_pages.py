"""Kernel `cpu` on pages: the bits of the same keys in arrays; int8 pages against the oracle and their own integers."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import ml_dtypes  # noqa: F401  (teaches NumPy the name "bfloat16")
import numpy as np
import pytest

import qflash
from qflash import PagedKV, Rope, reference
from qflash.call.spec import DTYPES
from qflash.reference.kv_write import dequantize_keys, write_pages
from qflash.rotary import rope_tables

PAGE_SIZES = (16, 32, 64, 128, 256)
HEAD_DIMS = (64, 80, 128, 256)
GROUPS = (1, 3, 4, 8)
OVER_ALLOCATED = 3


def random(*shape: int, seed: int, dtype: str = "float32") -> np.ndarray:
    return np.random.default_rng([seed, len(shape), *shape]).standard_normal(shape, np.float32).astype(dtype)


def in_pages(k, v, lens, page_size: int, *, int8: bool = False, k_mean=None, layout: str = "phtd") -> PagedKV:
    """k, v `[B, T, Hkv, D]` in shuffled pages, three times as many as it takes; NaN in every slot without a token."""
    rng = np.random.default_rng(page_size)
    needed = [-(-length // page_size) for length in lens]
    pages = OVER_ALLOCATED * max(1, sum(needed))
    order = iter(rng.permutation(pages))
    table = np.full((len(lens), max(needed) + 2), -1, np.int32)
    for b, count in enumerate(needed):
        table[b, :count] = [next(order) for _ in range(count)]
    shape = (pages, k.shape[2], page_size, k.shape[3])
    pools = [np.full(shape, 99 if int8 else np.nan, np.int8 if int8 else k.dtype) for _ in range(2)]
    scales = {name: np.full(shape[:3], np.nan, np.float32) for name in ("k_scale", "v_scale")} if int8 else {}
    for b, length in enumerate(lens):
        tokens = (k[b : b + 1, :length], v[b : b + 1, :length])
        write_pages(*pools, table[b : b + 1], [length], *tokens, **scales, k_mean=k_mean)
    if layout == "pthd":
        pools = [np.ascontiguousarray(pool.swapaxes(1, 2)) for pool in pools]
    return PagedKV(*pools, table, np.array(lens, np.int32), **scales, k_mean=k_mean, layout=layout)


def integers_of(kv: PagedKV, length: int) -> tuple[np.ndarray, np.ndarray]:
    """The k and v that int8 pages stand for, `[B, length, Hkv, D]` in float64; NaN past a sequence's end."""
    shape = (len(kv.lens), length, kv.kv_heads, kv.head_dim)
    k, v = np.full(shape, np.nan), np.full(shape, np.nan)
    for b, tokens in enumerate(kv.lens):
        for j in range(tokens):
            at = (kv.page_table[b, j // kv.page_size], slice(None), j % kv.page_size)
            k[b, j] = dequantize_keys(kv.k_pages[at], kv.k_scale[at], kv.k_mean)
            v[b, j] = kv.v_pages[at] * kv.v_scale[at][:, None].astype(np.float64)
    return k, v


def relative(x, y) -> float:
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    return float(np.linalg.norm(x - y) / np.linalg.norm(y))


def check_bits(q, k, v, lens, page_size: int, layout: str = "phtd", **words) -> None:
    """attention on pages has every bit of attention on arrays."""
    kv = in_pages(k, v, lens, page_size, layout=layout)
    got = qflash.attention(q, kv, kernel="cpu", return_lse=True, **words)
    wanted = qflash.attention(q, k, v, kv_lens=np.array(lens, np.int32), kernel="cpu", return_lse=True, **words)
    for mine, theirs in zip(got, wanted, strict=True):
        assert not np.isnan(mine.astype(np.float32)).any()
        assert mine.tobytes() == theirs.tobytes(), (page_size, q.shape, k.shape, lens, words)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_the_bits_of_arrays(page_size: int, head_dim: int) -> None:
    lens = (0, 1, page_size - 1, page_size, page_size + 1, 300)
    for i, group in enumerate(GROUPS):
        dtype = DTYPES[(i + page_size // 16) % 3]
        k, v = (random(6, 300, 2, head_dim, seed=seed, dtype=dtype) for seed in (1, 2))
        for q_len in (2 * i + 1, 2 * i + 2):
            q = random(6, q_len, 2 * group, head_dim, seed=3, dtype=dtype)
            check_bits(q, k, v, lens, page_size, causal=True)
            check_bits(q, k, v, lens, page_size, "pthd", window=(70, 3), softcap=5.0)
    check_bits(random(6, 300, 2, head_dim, seed=4, dtype=dtype), k, v, lens, page_size, causal=True)


@pytest.mark.parametrize("page_size", [48, 80, 144, 1008])
def test_pages_that_tiles_of_keys_do_not_divide(page_size: int) -> None:
    k, v = (random(2, 300, 2, 64, seed=seed) for seed in (1, 2))
    for q_len in (1, 60, 300):
        check_bits(random(2, q_len, 4, 64, seed=3), k, v, (300, 129), page_size, causal=True)


def test_long_sequences_are_split_as_arrays_are() -> None:
    """Few blocks and many keys: by the longest sequence, however many columns the table has."""
    k, v = (random(1, 3000, 2, 64, seed=seed) for seed in (1, 2))
    q = random(1, 1, 8, 64, seed=3)
    check_bits(q, k, v, (3000,), 64)
    kv = in_pages(k, v, (3000,), 64)
    wide = replace(kv, page_table=np.pad(kv.page_table, ((0, 0), (0, 5000)), constant_values=-1))
    assert qflash.attention(q, wide).tobytes() == qflash.attention(q, kv).tobytes()


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_packed_queries(dtype: str, int8: bool) -> None:
    lens, q_lens = (100, 0, 17, 300), (1, 3, 0, 90)
    k, v = (random(4, 300, 2, 64, seed=seed, dtype=dtype) for seed in (1, 2))
    kv = in_pages(k, v, lens, 32, int8=int8)
    cu = np.cumsum([0, *q_lens]).astype(np.int32)
    q = random(int(cu[-1]), 6, 64, seed=3, dtype=dtype)
    rope = Rope(*rope_tables(512, 64))
    words = {"causal": True, "rope": rope, "return_lse": True}
    out, lse = qflash.attention_varlen(q, kv, None, cu, None, max(q_lens), None, **words)
    for b, (first, end) in enumerate(pairwise(cu)):
        one = replace(kv, page_table=kv.page_table[b : b + 1], lens=kv.lens[b : b + 1])
        wanted, wanted_lse = qflash.attention(q[None, first:end], one, **words)
        assert out[first:end].tobytes() == wanted[0].tobytes()
        assert lse[:, first:end].tobytes() == wanted_lse[0].tobytes()


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("q_len", [1, 8, 100])
def test_pages_that_a_window_has_left_behind_are_not_looked_at(q_len: int, int8: bool) -> None:
    k, v = (random(1, 600, 2, 64, seed=seed) for seed in (1, 2))
    q = random(1, q_len, 4, 64, seed=3)
    kv = in_pages(k, v, (600,), 16, int8=int8)
    first_seen = 600 - q_len - 50
    table = kv.page_table.copy()
    gone = table[0, : first_seen // 16].copy()
    table[0, : first_seen // 16] = (-1, kv.pages, 2**31 - 1) * (len(gone) // 3) + (-5,) * (len(gone) % 3)
    words = {"causal": True, "window": (50, 0), "return_lse": True}
    for mine, theirs in zip(qflash.attention(q, replace(kv, page_table=table), **words),
                            qflash.attention(q, kv, **words), strict=True):  # fmt: skip
        assert mine.tobytes() == theirs.tobytes() and np.isfinite(mine).all()


@pytest.mark.parametrize("int8", [False, True])
def test_threads_do_not_change_the_bits(int8: bool) -> None:
    k, v = (random(2, 1500, 2, 64, seed=seed) for seed in (1, 2))
    kv = in_pages(k, v, (1500, 800), 64, int8=int8)
    before = qflash.get_num_threads()
    try:
        for q_len in (1, 70):
            q = random(2, q_len, 8, 64, seed=3)
            found = []
            for threads in (1, 2, 5):
                qflash.set_num_threads(threads)
                found.append(qflash.attention(q, kv, causal=True).tobytes())
            assert found[0] == found[1] == found[2]
    finally:
        qflash.set_num_threads(before)


# int8 pages ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("outliers", [False, True])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_int8_pages(page_size: int, head_dim: int, outliers: bool) -> None:
    """Relative L2 of 0.015 from the oracle on normal inputs, 0.02 with outliers, 2e-3 from what the integers say."""
    lens, dtype = (page_size + 1, 1, 300), DTYPES[page_size // 16 % 3]
    k, v = (random(3, 300, 2, head_dim, seed=seed) for seed in (1, 2))
    if outliers:  # channels of k with a mean of their own, as models have them, and some tokens that are large
        k[..., :: head_dim // 4] += 8.0
        v[:, ::17] *= 5.0
    k, v = k.astype(dtype), v.astype(dtype)
    k_mean = k.astype(np.float32).mean((0, 1)) if outliers else None
    kv = in_pages(k, v, lens, page_size, int8=True, k_mean=k_mean)
    integers = integers_of(kv, 300)
    for group, q_len in ((1, 1), (3, 8), (4, 2), (8, 5), (2, 150)):
        q = random(3, q_len, 2 * group, head_dim, seed=3, dtype=dtype)
        out, lse = qflash.attention(q, kv, causal=True, return_lse=True)
        words = {"causal": True, "kv_lens": np.array(lens)}
        wanted, wanted_lse = reference.attention(q, k, v, **words)
        replayed, replayed_lse = reference.attention(q, *integers, **words)
        assert relative(out, wanted) < (0.02 if outliers else 0.015)
        assert relative(out, replayed) < 2e-3
        sees = np.isfinite(wanted_lse)
        assert (np.isneginf(lse) == ~sees).all()
        assert np.abs(lse[sees] - wanted_lse[sees]).max() < 0.1
        assert np.abs(lse[sees] - replayed_lse[sees]).max() < 1e-4


@pytest.mark.parametrize(
    "words",
    [
        {"softcap": 3.0},
        {"softcap": 2.0, "scale": -0.2},
        {"scale": -0.2},
        {"scale": 0.0},
        {"window": (30, 2)},
        {"causal": True, "rope": Rope(*rope_tables(400, 64))},
        {"rope": Rope(*rope_tables(400, 32), interleaved=True)},
    ],
    ids=str,
)
@pytest.mark.parametrize("q_len", [1, 130])
def test_words_on_int8_pages_that_lack_their_mean(q_len: int, words: dict) -> None:
    k, v = random(2, 300, 2, 64, seed=1) + random(2, 64, seed=5), random(2, 300, 2, 64, seed=2)
    kv = in_pages(k, v, (300, 77), 32, int8=True, k_mean=k.mean((0, 1)))
    q = random(2, q_len, 4, 64, seed=3)
    out, lse = qflash.attention(q, kv, return_lse=True, **words)
    rope = words.get("rope")  # of q alone
    rotated = q.astype(np.float64)
    if rope is not None:
        for b, length in enumerate((300, 77)):
            rotated[b] = reference.apply_rope(q[b], np.arange(q_len) + length - q_len, rope)
    plain = {name: word for name, word in words.items() if name != "rope"}
    wanted, wanted_lse = reference.attention(rotated, *integers_of(kv, 300), kv_lens=np.array([300, 77]), **plain)
    assert relative(out, wanted) < 1e-5
    sees = np.isfinite(wanted_lse)
    assert (np.isneginf(lse) == ~sees).all()
    assert np.abs(lse[sees] - wanted_lse[sees]).max() < 1e-4


@pytest.mark.parametrize("q_len", [6, 80])
def test_a_token_that_is_not_finite_in_int8_pages(q_len: int) -> None:
    """It makes the rows that see it NaN, and no others."""
    k, v = (random(1, 200, 1, 64, seed=seed) for seed in (1, 2))
    for name, token in (("k", 197), ("v", 196)):
        spoiled = {"k": k.copy(), "v": v.copy()}
        spoiled[name][0, token, 0, 5] = np.inf
        out = qflash.attention(random(1, q_len, 2, 64, seed=3), in_pages(*spoiled.values(), (200,), 16, int8=True),
                               causal=True)  # fmt: skip
        sees = np.arange(q_len) + 200 - q_len >= token
        assert np.isnan(out[0, sees]).all() and np.isfinite(out[0, ~sees]).all()


# Errors ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("q_len", [1, 100])
@pytest.mark.parametrize("entry", [-1, 15, 2**31 - 1, -(2**31)])
def test_an_entry_of_the_table_that_is_needed_and_out_of_range(entry: int, q_len: int) -> None:
    k = random(2, 64, 2, 16, seed=1)
    kv = in_pages(k, k, (20, 33), 16)
    assert kv.pages == 15
    kv.page_table[1, 2] = entry
    q = random(2, q_len, 2, 16, seed=3)
    with pytest.raises(ValueError, match=rf"kv.page_table\[1, 2\] is {entry}, where token 32 is; allowed: 0 to 14"):
        qflash.attention(q, kv)
    qflash.attention(q, replace(kv, lens=np.array([20, 32], np.int32)))  # and now it is not needed


@pytest.mark.parametrize("length", [-1, 65, 2**31 - 1])
def test_a_length_out_of_range(length: int) -> None:
    k = random(1, 32, 2, 16, seed=1)
    kv = replace(in_pages(k, k, (32,), 16), lens=np.array([length], np.int32))
    with pytest.raises(ValueError, match=rf"kv.lens\[0\] is {length}; allowed: 0 to 64"):
        qflash.attention(random(1, 1, 2, 16, seed=3), kv)


def test_positions_past_the_ropes_tables() -> None:
    k = random(1, 32, 2, 16, seed=1)
    with pytest.raises(ValueError, match=r"position of query\[0\] is 31; allowed: -30 to 30"):
        qflash.attention(random(1, 1, 2, 16, seed=3), in_pages(k, k, (32,), 16), rope=Rope(*rope_tables(31, 16)))


def test_no_pages_and_no_tokens() -> None:
    empty = np.zeros((0, 2, 16, 64), np.float32)
    kv = PagedKV(empty, empty, np.zeros((3, 0), np.int32), np.zeros(3, np.int32))
    out, lse = qflash.attention(random(3, 5, 4, 64, seed=1), kv, return_lse=True)
    assert not out.any() and np.isneginf(lse).all()
