"""KVCache refuses what is wrong by name, and nothing has changed afterwards."""

from __future__ import annotations

import pickle
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import qflash

SIZES = {"layers": 2, "kv_heads": 2, "head_dim": 16, "pages": 8, "page_size": 16, "dtype": np.float32}


@pytest.fixture
def cache():
    return qflash.KVCache(**SIZES)


def tokens(*shape):
    return np.ones((*shape, 2, 16), np.float32)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ({"layers": 0}, "layers is 0; allowed: 1 to"),
        ({"kv_heads": 1.5}, "kv_heads is 1.5; allowed: an int"),
        ({"head_dim": 0}, "head_dim is 0; allowed: 1 to"),
        ({"head_dim": 24, "precision": "int8"}, "head_dim is 24; allowed: a multiple of 16 with precision 'int8'"),
        ({"pages": 0}, "pages is 0; allowed: 1 to"),
        ({"page_size": 48}, "page_size is 48; allowed: 16, 32, 64, 128, 256"),
        ({"page_size": 7}, "page_size is 7; allowed: 16, 32, 64, 128, 256"),
        ({"dtype": "float32"}, "dtype is 'float32', which names no framework; allowed: a framework's own, such as np"),
        ({"dtype": np.float64}, "dtype is float64; allowed: float32, float16, bfloat16 of a framework"),
        ({"dtype": None}, "dtype is None, which names no framework; allowed: a framework's own, such as np.float32"),
        ({"dtype": np.zeros(2)}, "dtype is a numpy.ndarray; allowed: a dtype"),
        ({"precision": "int8_fp8"}, "precision is 'int8_fp8'; allowed: None, 'int8'"),
        ({"device": "cuda"}, "device is 'cuda' and dtype is NumPy's; allowed: None, or a dtype of torch"),
    ],
)
def test_a_cache_is_refused(words, text):
    with pytest.raises((ValueError, TypeError)) as error:
        qflash.KVCache(**SIZES | words)
    assert str(error.value).startswith(text)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (
            lambda c, a: c.extend([a, 7], 1),
            "sequence 7 does not exist, the cache never opened it; allowed: what open()",
        ),
        (lambda c, a: c.extend([-1], 1), "sequence -1 does not exist, the cache never opened it"),
        (lambda c, a: c.extend([a, a], 1), "seqs has sequence 0 2 times; allowed: each sequence once"),
        (lambda c, a: c.extend([], 1), "seqs is empty; allowed: one sequence or more"),
        (lambda c, a: c.extend(a, 1), "seqs is 0; allowed: a list of ints"),
        (lambda c, a: c.extend([a], 1.0), "n is 1.0; allowed: an int, or a list of ints"),
        (lambda c, a: c.extend([1.0], 1), "seqs has 1.0; allowed: sequences, ints that open()"),
        (lambda c, a: c.extend([a], -1), "n is -1; allowed: 0 to 2147483647"),
        (lambda c, a: c.extend([a], [1, 2]), "n has 2 counts; allowed: one for each of the 1 sequences, or an int"),
        (lambda c, a: c.extend([a], [0.5]), "n is 0.5; allowed: an int"),
        (lambda c, a: c.extend([a], True), "n is True; allowed: an int"),
        (lambda c, a: c.extend([a], 2**31 - 1), "n makes sequence 0 2147483667 tokens long; allowed: up to 2147483647"),
        (lambda c, a: c.extend([a, c.open()], 2**30), "n is 2147483648 tokens in all; allowed: up to 2147483647"),
        (lambda c, a: c.extend([a], 1, columns=0), "columns is 0; allowed: 1 to"),
        (
            lambda c, a: c.extend([a], 40, columns=3),
            "sequence 0 needs 4 pages, and the page table has 3 columns; allow",
        ),
        (lambda c, a: c.extend([a], 1, into=a), "into is 0; allowed: None or a step that extend returned"),
        (lambda c, a: c.truncate(a, 21), "n is 21; allowed: 0 to the length of sequence 0, 20"),
        (lambda c, a: c.truncate(a, -1), "n is -1; allowed: 0 to 2147483647"),
        (lambda c, a: c.fork(9), "sequence 9 does not exist, the cache never opened it"),
        (lambda c, a: c.length("0"), "seq is '0'; allowed: sequences, ints that open()"),
    ],
)
def test_a_call_is_refused_and_nothing_changes(cache, call, text):
    a = cache.open()
    cache.extend([a], 20)
    with pytest.raises((ValueError, TypeError)) as error:
        call(cache, a)
    assert str(error.value).startswith(text)
    assert (cache.length(a), cache.free_pages, len(cache.pages_of(a))) == (20, 6, 2)


def test_a_closed_sequence_stays_closed(cache):
    a = cache.open()
    cache.close(a)
    b = cache.open()
    for call in (cache.close, cache.length, cache.fork, cache.pages_of, lambda s: cache.extend([b, s], 1)):
        with pytest.raises(ValueError, match=f"sequence {a} does not exist, it is closed; allowed: what open"):
            call(a)
    assert cache.length(b) == 0


def test_too_few_pages_change_nothing(cache):
    a, b = cache.open(), cache.open()
    cache.extend([a], 20)
    step = cache.extend([b], 60)
    lens = step.lens.copy()
    for into in (None, step):
        with pytest.raises(qflash.OutOfPagesError) as error:
            cache.extend([b], 50, into=into)
        assert str(error.value) == (
            "extend needs 3 more pages, and 2 of the cache's 8 are free; close or truncate sequences first"
        )
        assert str(pickle.loads(pickle.dumps(error.value))) == str(error.value)
    with pytest.raises(qflash.OutOfPagesError):
        cache.extend([a, b], [20, 50])  # a alone would fit
    assert (cache.length(a), cache.length(b), cache.free_pages) == (20, 60, 2)
    assert (step.lens == lens).all()
    step.write(0, tokens(60), tokens(60))  # it is still the newest
    with pytest.raises(qflash.OutOfPagesError, match="make the cache with more pages"):
        cache.extend([a], 1000)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda s: s.write(2, tokens(6), tokens(6)), "layer is 2; allowed: 0 to 1"),
        (lambda s: s.write(-1, tokens(6), tokens(6)), "layer is -1; allowed: 0 to 1"),
        (lambda s: s.kv(2), "layer is 2; allowed: 0 to 1"),
        (lambda s: s.write(0, tokens(7), tokens(7)), "k has shape [7, 2, 16]; allowed: [2, 3, 2, 16] or [6, 2, 16]"),
        (lambda s: s.write(0, tokens(2, 2), tokens(2, 2)), "k has shape [2, 2, 2, 16]; allowed: [2, 3, 2, 16] or"),
        (lambda s: s.write(0, tokens(6), tokens(2, 3)), "v has shape [2, 3, 2, 16]; allowed: [6, 2, 16]"),
        (lambda s: s.write(0, tokens(6).astype(np.float16), tokens(6)), "k has dtype float16; allowed: float32"),
        (lambda s: s.write(0, tokens(6), tokens(6).astype(np.float64)), "v has dtype float64; allowed: float32"),
        (lambda s: s.write(0, None, tokens(6)), "k is builtins.NoneType; allowed: numpy.ndarray"),
        (lambda s: s.write(0, tokens(6), tokens(6), rope=(1, 2)), "rope is"),
        (
            lambda s: s.write(0, tokens(6), tokens(6), rope=qflash.Rope(*qflash.rope_tables(22, 16))),
            "rope.cos has 22 rows; allowed: at least 23, the longest sequence's",
        ),
    ],
)
def test_a_write_is_refused(cache, call, text):
    a, b = cache.open(), cache.open()
    cache.extend([a], 20)
    step = cache.extend([a, b], 3)
    before = step.kv(0).k_pages.copy()
    with pytest.raises((ValueError, TypeError)) as error:
        call(step)
    assert str(error.value).startswith(text)
    assert (step.kv(0).k_pages == before).all()


def test_uneven_tokens_come_packed(cache):
    step = cache.extend([cache.open(), cache.open()], [1, 3])
    with pytest.raises(ValueError, match=r"k has shape \[2, 2, 2, 16\]; allowed: \[4, 2, 16\]"):
        step.write(0, tokens(2, 2), tokens(2, 2))


@pytest.mark.parametrize(
    "change",
    [
        lambda c, a: c.extend([a], 1),
        lambda c, a: c.truncate(a, 2),
        lambda c, a: c.close(a),
    ],
)
def test_a_stale_step_neither_writes_nor_reads(cache, change):
    a, b = cache.open(), cache.open()
    step = cache.extend([b, a], 3)
    change(cache, a)
    for call in (lambda: step.write(0, tokens(6), tokens(6)), lambda: step.kv(0)):
        with pytest.raises(
            ValueError, match=f"the step is stale, sequence {a} was extended, truncated or closed since"
        ):
            call()


def test_other_sequences_leave_a_step_alone(cache):
    a, b = cache.open(), cache.open()
    step = cache.extend([a], 3)
    cache.extend([b], 3)
    cache.truncate(b, 1)
    cache.fork(a)
    cache.close(b)
    step.write(0, tokens(3), tokens(3))


def test_a_step_is_renewed_where_it_stands(cache):
    a, b = cache.open(), cache.open()
    step = cache.extend([a, b], [3, 1], columns=3)
    kept = step.page_table, step.lens, step.cu_seqlens, step.kv(1)
    assert cache.extend([a, b], [20, 1], into=step) is step
    assert (step.page_table, step.lens, step.cu_seqlens, step.kv(1)) == kept  # arrays compare by identity in a tuple
    assert step.page_table.tolist() == [[*cache.pages_of(a), -1], [*cache.pages_of(b), -1, -1]]
    assert (step.lens.tolist(), step.cu_seqlens.tolist(), step.max_new, step.total) == ([23, 2], [0, 20, 21], 20, 21)
    cache.extend([b, a], 1, into=step)  # other rows
    assert step.page_table.tolist() == [[*cache.pages_of(b), -1, -1], [*cache.pages_of(a), -1]]
    assert (step.lens.tolist(), step.cu_seqlens.tolist(), step.sequences) == ([3, 24], [0, 1, 2], (b, a))
    cache.truncate(a, 0)
    cache.extend([a, b], 0, into=step)
    assert step.page_table.tolist() == [[-1, -1, -1], [*cache.pages_of(b), -1, -1]]
    assert step.lens.tolist() == [0, 3]


def test_a_step_is_renewed_with_fewer_sequences(cache):
    """Rows that no sequence has are padding: their pages and lengths of before are gone, and they come back."""
    sequences = [cache.open() for _ in range(3)]
    step = cache.extend(sequences, [3, 17, 2], columns=2)
    kept = step.page_table, step.lens, step.cu_seqlens
    cache.extend([sequences[1]], 1, into=step)
    assert (step.page_table, step.lens, step.cu_seqlens) == kept
    assert step.page_table.tolist() == [cache.pages_of(sequences[1]), [-1, -1], [-1, -1]]
    assert (step.lens.tolist(), step.cu_seqlens.tolist()) == ([18, 0, 0], [0, 1, 1, 1])
    assert (step.sequences, step.counts, step.max_new, step.total) == ((sequences[1],), (1,), 1, 1)
    with pytest.raises(ValueError, match=r"k has shape \[1, 1, 2, 16\]; allowed: \[3, 1, 2, 16\] or \[1, 2, 16\]"):
        step.write(0, tokens(1, 1), tokens(1, 1))
    for other in (sequences[0], sequences[2]):  # whose rows the step has no longer
        cache.close(other)
    step.write(0, tokens(3, 1), tokens(3, 1))
    sequences[::2] = cache.open(), cache.open()
    cache.extend(sequences, 1, into=step)
    assert step.page_table.tolist() == [[cache.pages_of(s)[0], *cache.pages_of(s)[1:], -1][:2] for s in sequences]
    assert (step.lens.tolist(), step.cu_seqlens.tolist()) == ([1, 19, 1], [0, 1, 2, 3])


def test_a_step_that_does_not_fit_is_not_renewed(cache):
    a, b = cache.open(), cache.open()
    step = cache.extend([a], 3)
    other = qflash.KVCache(**SIZES)
    for call, text in (
        (lambda: cache.extend([a, b], 1, into=step), "seqs has 2 sequences; allowed: up to into's 1 rows"),
        (
            lambda: cache.extend([a], 14, into=step),
            "sequence 0 needs 2 pages, and the page table has 1 columns; allowed",
        ),
        (
            lambda: cache.extend([a], 1, into=step, columns=1),
            "columns is 1 and into is given; allowed: None, into has 1",
        ),
        (lambda: other.extend([other.open()], 1, into=step), "into is a step of another cache; allowed: one that this"),
    ):
        with pytest.raises(ValueError) as error:
            call()
        assert str(error.value).startswith(text)
    assert (cache.length(a), cache.free_pages) == (3, 7)
    step.write(0, tokens(3), tokens(3))  # nothing has happened to it


def test_an_upload_that_fails_changes_nothing_but_the_step(cache, monkeypatch):
    """As when a GPU has no memory left: the cache is as before, and the step's tables are in doubt until renewed."""
    a = cache.open()
    step = cache.extend([a], 20, columns=4)
    storage = cache._state.storage
    with monkeypatch.context() as patch:
        patch.setattr(storage, "upload", lambda old, values: (_ for _ in ()).throw(MemoryError))
        for into in (None, step):
            with pytest.raises(MemoryError):
                cache.extend([a], 20, into=into)
            assert (cache.length(a), cache.free_pages) == (20, 6)
    with pytest.raises(ValueError, match="the step is stale, an extend into it failed"):
        step.kv(0)
    cache.extend([a], 20, into=step)
    assert step.page_table.tolist() == [[*cache.pages_of(a), -1]]
    step.write(0, tokens(20), tokens(20))


def test_a_failure_between_extend_and_write_is_undone_by_truncate(cache):
    a = cache.open()
    values = np.random.default_rng(0).standard_normal((20, 2, 16), np.float32)
    cache.extend([a], 20).write(0, values, values)
    for _ in range(10):  # which would use up all pages
        cache.extend([a], 40)
        cache.truncate(a, 20)
    assert (cache.length(a), cache.free_pages) == (20, 6)
    kv = cache.extend([a], 0).kv(0)
    stored = kv.v_pages[kv.page_table[0]].swapaxes(1, 2).reshape(-1, 2, 16)[:20]
    assert (stored == values).all()


def test_threads_open_extend_fork_and_close():
    """Each finds its own tokens however the others come in between, and at the end every page is free."""
    cache = qflash.KVCache(**SIZES | {"pages": 64})

    def work(thread):
        for turn in range(60):
            a = cache.open()
            value = np.full((21, 2, 16), thread + 8 * turn, np.float32)
            cache.extend([a], 21).write(1, value, value)
            b = cache.fork(a)
            step = cache.extend([b], 1)
            step.write(1, -value[:1], -value[:1])
            kv = step.kv(1)
            stored = kv.v_pages[kv.page_table[0]].swapaxes(1, 2).reshape(-1, 2, 16)
            assert (stored[:21] == value).all() and (stored[21] == -value[0]).all()
            cache.truncate(a, 5)
            cache.close(a)
            cache.close(b)

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(work, range(8)))  # raises what a thread raised
    assert cache.free_pages == 64
    assert repr(cache) == "<qflash KVCache, 64 of 64 pages of 16 tokens free, 0 sequences>"
