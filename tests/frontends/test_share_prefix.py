"""Sequences that share their first pages: attention reads these once, and gives what it gives without."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

import qflash
from qflash.kvcache.sharing import pays
from qflash.testing.runner import converter, to_numpy

HEADS, KV_HEADS, HEAD_DIM, PAGE = 8, 2, 64, 16
TOLERANCE = {"float32": 2e-6, "float16": 2e-3, "bfloat16": 1.6e-2}  # parts in 16 bits are rounded once more


@pytest.fixture
def counted(monkeypatch) -> list[str]:
    """The operations that calls run, in order."""
    ran = []

    def counting(op, arrays, words):
        ran.append(op.name)
        return run(op, arrays, words)

    from qflash.ops import prefix

    run = prefix.run
    monkeypatch.setattr(prefix, "run", counting)
    return ran


SHARED = ["attention_paged", "attention_paged", "merge"]
WHOLE = ["attention_paged"]


def forked(sequences=5, q_len=1, prefix=40, dtype=np.float32, precision=None):
    """(q, PagedKV, shared pages) of a prompt that sequences forked from, each with tokens of its own after it."""
    shape = {"layers": 1, "kv_heads": KV_HEADS, "head_dim": HEAD_DIM, "pages": 64, "page_size": PAGE}
    cache = qflash.KVCache(**shape, dtype=np.dtype(dtype).type, precision=precision)
    rng = np.random.default_rng(7)

    def tokens(*shape):
        return rng.standard_normal((*shape, KV_HEADS, HEAD_DIM), np.float32).astype(dtype)

    system = cache.open()
    cache.extend([system], prefix).write(0, tokens(1, prefix), tokens(1, prefix))
    chats = [cache.fork(system) for _ in range(sequences)]
    counts = [q_len + 9 * i for i in range(sequences)]
    cache.extend(chats, counts).write(0, tokens(sum(counts)), tokens(sum(counts)))
    step = cache.extend(chats, q_len)
    kv = step.write(0, tokens(sequences, q_len), tokens(sequences, q_len))
    q = rng.standard_normal((sequences, q_len, HEADS, HEAD_DIM), np.float32).astype(dtype)
    return q, kv, prefix // PAGE


def check(q, kv, pages, **words):
    """Shared and not, with lse."""
    found = qflash.attention(q, qflash.share_prefix(kv, pages), return_lse=True, **words)
    wanted = qflash.attention(q, kv, return_lse=True, **words)
    for one, other, tolerance in zip(found, wanted, (TOLERANCE[str(q.dtype)], 1e-5), strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        np.testing.assert_allclose(*(x.astype(np.float64) for x in (one, other)), rtol=tolerance, atol=tolerance)


ROPE = qflash.Rope(*qflash.rope_tables(200, HEAD_DIM))


@pytest.mark.parametrize(
    "words",
    [
        {},
        {"causal": True},
        {"causal": True, "softcap": 5.0},
        {"window": (-1, 2), "scale": 0.3},
        {"causal": True, "sinks": np.linspace(-2, 3, HEADS, dtype=np.float32)},
    ],
    ids=str,
)
@pytest.mark.parametrize("q_len", [1, 3, 9])
def test_it_is_the_same(q_len, words, counted):
    check(*forked(q_len=q_len), **words)
    assert counted == SHARED


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_16_bits(dtype, counted):
    check(*forked(dtype=np.dtype(getattr(ml_dtypes, dtype, dtype))), causal=True)
    assert counted == SHARED


def test_int8_pages(counted):
    q, kv, pages = forked(precision="int8")
    check(q, kv, pages, causal=True)
    assert counted == SHARED


@pytest.mark.parametrize("q_len", [1, 4])
@pytest.mark.parametrize("given", [False, True])
def test_rope(q_len, given, counted):
    """Positions are those in the whole sequence. Without them, several queries are not shared."""
    q, kv, pages = forked(q_len=q_len)
    rope = ROPE
    if given:
        rope = replace(ROPE, positions_q=(kv.lens[:, None] - q_len + np.arange(q_len)).astype(np.int32))
    check(q, kv, pages, causal=True, rope=rope)
    assert counted == (SHARED if given or q_len == 1 else WHOLE)


@pytest.mark.parametrize("words", [{"window": (30, 0)}, {"causal": True, "batch_invariant": True}], ids=str)
def test_what_is_not_shared_has_the_same_bits(words, counted):
    q, kv, pages = forked()
    found = qflash.attention(q, qflash.share_prefix(kv, pages), **words)
    np.testing.assert_array_equal(found, qflash.attention(q, kv, **words))
    assert counted == WHOLE


def test_without_pages_and_of_another_layer():
    q, kv, pages = forked()
    nothing = qflash.share_prefix(kv, 0)
    assert nothing.prefix is None
    np.testing.assert_array_equal(qflash.attention(q, nothing), qflash.attention(q, kv))
    other = replace(kv, k_pages=kv.k_pages[::-1].copy(), v_pages=kv.v_pages[::-1].copy())
    shared = qflash.share_prefix(kv, pages).of(other)
    np.testing.assert_allclose(qflash.attention(q, shared), qflash.attention(q, other), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("framework", ["torch", "jax"])
@pytest.mark.parametrize("compiled", [False, True])
def test_frameworks(framework, compiled):
    pytest.importorskip(framework)
    q, kv, pages = forked(q_len=1)
    turn = converter(framework)
    parts = {name: turn(getattr(kv, name)) for name in ("k_pages", "v_pages", "page_table", "lens")}

    def attend(q, k_pages, v_pages, page_table, lens):
        kv = qflash.share_prefix(qflash.PagedKV(k_pages, v_pages, page_table, lens), pages)
        return qflash.attention(q, kv, causal=True)

    if compiled and framework == "jax":
        import jax

        attend = jax.jit(attend)
    elif compiled:
        import torch

        attend = torch.compile(attend, backend="aot_eager", fullgraph=True)
    found = to_numpy(attend(turn(q), **parts))
    np.testing.assert_allclose(found, qflash.attention(q, kv, causal=True), rtol=1e-5, atol=1e-5)


def test_a_jitted_program_takes_the_value():
    jax = pytest.importorskip("jax")
    q, kv, pages = forked()
    turn = converter("jax")
    parts = {name: turn(getattr(kv, name)) for name in ("k_pages", "v_pages", "page_table", "lens")}
    shared = qflash.share_prefix(qflash.PagedKV(**parts), pages)
    found = jax.jit(lambda q, kv: qflash.attention(q, kv, causal=True))(turn(q), shared)
    np.testing.assert_allclose(found, qflash.attention(q, kv, causal=True), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rope", [None, ROPE], ids=["plain", "rope"])
@pytest.mark.parametrize("framework", ["numpy", "torch", "jax"])
def test_rows_of_padding(framework, rope):
    """A step that was renewed with fewer sequences: these have what they have without sharing, and padding no NaN."""
    pytest.importorskip(framework)
    turn = converter(framework)
    q, kv, pages = forked()
    table, lens = kv.page_table.copy(), kv.lens.copy()
    table[3:], lens[3:] = -1, 0
    kv = replace(kv, page_table=table, lens=lens)
    wanted = qflash.attention(q, kv, causal=True, rope=rope)
    parts = {name: turn(getattr(kv, name)) for name in ("k_pages", "v_pages", "page_table", "lens")}
    shared = qflash.share_prefix(qflash.PagedKV(**parts), pages)
    rope = rope and qflash.Rope(turn(rope.cos), turn(rope.sin))
    found = to_numpy(qflash.attention(turn(q), shared, causal=True, rope=rope))
    np.testing.assert_allclose(found[:3], wanted[:3], rtol=2e-6, atol=2e-6)
    assert np.isfinite(found[3:]).all()


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda q, kv: qflash.share_prefix(q, 1), TypeError, "kv is numpy.ndarray; allowed: qflash.PagedKV"),
        (lambda q, kv: qflash.share_prefix(kv, 99), ValueError, "pages is 99; allowed: 0 to"),
        (lambda q, kv: qflash.share_prefix(kv, 1.0), TypeError, "pages is 1.0; allowed: an int"),
        (lambda q, kv: qflash.share_prefix(replace(kv, lens=[1] * 5), 1), ValueError, "kv.lens is"),
        (lambda q, kv: qflash.share_prefix(replace(kv, page_table=kv.lens), 1), ValueError, "kv.page_table has shape"),
        (lambda q, kv: qflash.share_prefix(replace(kv, k_pages=None), 1), ValueError, "kv.k_pages has shape"),
        (lambda q, kv: qflash.share_prefix(kv, 1).of(q), TypeError, "kv is numpy.ndarray; allowed: qflash.PagedKV"),
        (
            lambda q, kv: qflash.share_prefix(kv, 1).of(replace(kv, layout="pthd")),
            ValueError,
            "kv has pages of 2 tokens; allowed: another layer's, 16",
        ),
        (lambda q, kv: qflash.attention(q, qflash.share_prefix(kv, 2), kv), TypeError, "v is qflash.PagedKV"),
        (lambda q, kv: qflash.attention(q, qflash.share_prefix(kv, 2), softcap=-1), ValueError, "softcap is -1"),
        (
            lambda q, kv: qflash.attention_varlen(q[0], qflash.share_prefix(kv, 2), None, [0, 1], None, 1, None),
            TypeError,
            "k is qflash.SharedPrefixKV; allowed: an array, only attention takes SharedPrefixKV",
        ),
        # Words that are wrong are refused by name, though they decide whether the prefix is shared.
        (
            lambda q, kv: qflash.attention(q, qflash.share_prefix(kv, 2), batch_invariant=kv.lens),
            TypeError,
            "batch_invariant is a numpy.ndarray; allowed: True or False",
        ),
        (
            lambda q, kv: qflash.attention(q, qflash.share_prefix(kv, 2), window=(kv.lens, 0)),
            TypeError,
            "window is .*; allowed: None or",
        ),
        # A sequence that does not have all of the prefix, and pages that are not shared.
        (
            lambda q, kv: qflash.share_prefix(replace(kv, lens=kv.lens * 0 + 20), 2),
            ValueError,
            r"pages is 2, 32 tokens, and kv.lens\[0\] is 20; allowed: pages that every sequence has whole",
        ),
        (
            lambda q, kv: qflash.share_prefix(replace(kv, lens=kv.lens + 16), 3),
            ValueError,
            "pages is 3, and row 1 of kv.page_table begins with other pages than row 0; allowed: leading columns",
        ),
    ],
)
def test_bad_input(call, error, text):
    q, kv, _ = forked()
    with pytest.raises(error, match=text):
        call(q, kv)


class TestSharedPages:
    """What a step counts."""

    @staticmethod
    def cache():
        return qflash.KVCache(layers=1, kv_heads=8, head_dim=128, pages=300, page_size=16, dtype=np.float32)

    def test_forks_share_what_is_full(self):
        cache = self.cache()
        system = cache.open()
        cache.extend([system], 1000)
        chats = [cache.fork(system) for _ in range(3)]
        assert cache.extend(chats, 1).shared_pages == 1000 // 16
        assert cache.extend([*chats, cache.fork(system)], 1).shared_pages == 1000 // 16
        assert cache.extend(chats[:1], 1).shared_pages == 0  # nobody to share with
        assert cache.extend([*chats, cache.open()], 1).shared_pages == 0

    def test_new_tokens_are_not_part_of_it(self):
        """Those of a step, even where a page of them is full: its queries stand there."""
        cache = self.cache()
        system = cache.open()
        cache.extend([system], 960)
        chats = [cache.fork(system) for _ in range(2)]
        assert cache.extend(chats, 0).shared_pages == 60
        for chat in chats:
            cache.truncate(chat, 950)
        assert cache.extend(chats, 0).shared_pages == 59

    def test_a_stale_step_refuses(self):
        cache = self.cache()
        a, b = cache.open(), cache.open()
        step = cache.extend([a, b], 4)
        cache.close(b)
        with pytest.raises(ValueError, match="the step is stale"):
            assert step.shared_pages

    def test_what_pays(self):
        assert not pays(1, 10**12, "cpu") and not pays(8, 0, "cpu")
        on_gpu = type("device", (), {"type": "cuda"})()
        assert pays(8, 2**26, on_gpu) and not pays(8, 2**25, on_gpu) and pays(2, 2**23, "cpu")
