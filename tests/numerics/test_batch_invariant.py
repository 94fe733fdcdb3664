"""batch_invariant=True on the CPU: a sequence alone has the bits that it has beside others, wherever it stands."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import qflash
from qflash.testing import Case
from qflash.testing.runner import call

HEADS, KV_HEADS, HEAD_DIM = 8, 2, 64
# The sequence that is looked at, and its neighbours: shorter, longer, none.
LENGTH, NEIGHBOURS = 3000, (17, 5000, 0, 3000)


def same_bits(ours, theirs) -> bool:
    return all(np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in zip(ours, theirs, strict=True))


class Sequences:
    """Five sequences, of which the one at `place` is always the same: alone, and with the others."""

    def __init__(self, q_len: int, place: int, dtype: str = "float32"):
        self.place = place
        self.lens = [*NEIGHBOURS[:place], LENGTH, *NEIGHBOURS[place:]]
        own, others = np.random.default_rng(1), np.random.default_rng(2)

        def draw(rng, *shape):
            return rng.standard_normal(shape, np.float32).astype(np.dtype(getattr(ml_dtypes, dtype, dtype)))

        self.q = draw(others, 5, q_len, HEADS, HEAD_DIM)
        self.k, self.v = (draw(others, 5, max(self.lens), KV_HEADS, HEAD_DIM) for _ in "kv")
        self.q[place] = draw(own, q_len, HEADS, HEAD_DIM)
        for x in (self.k, self.v):
            x[place, :LENGTH] = draw(own, LENGTH, KV_HEADS, HEAD_DIM)

    def beside(self, **words):
        """(out, lse) of the sequence in the batch."""
        out, lse = qflash.attention(self.q, self.k, self.v, kv_lens=self.lens, return_lse=True, **words)
        return out[self.place], lse[self.place]

    def alone(self, **words):
        """And of a call that has no other."""
        q, k, v = (x[self.place : self.place + 1] for x in (self.q, self.k[:, :LENGTH], self.v[:, :LENGTH]))
        out, lse = qflash.attention(q, k, v, return_lse=True, **words)
        return out[0], lse[0]


WORDS = [{}, {"causal": True}, {"window": (700, 0)}, {"precision": "int8"}, {"precision": "int8", "causal": True}]


@pytest.mark.parametrize("words", WORDS, ids=str)
@pytest.mark.parametrize("place", [0, 2, 4])
@pytest.mark.parametrize("q_len", [1, 4, 60])  # rows that are read in place, that are packed, and blocks of many
def test_arrays(q_len, place, words):
    sequences = Sequences(q_len, place)
    assert same_bits(sequences.alone(batch_invariant=True, **words), sequences.beside(batch_invariant=True, **words))


def test_by_default_bits_depend_on_the_batch():
    """What the word is for: were it not so, the tests here would say nothing."""
    many = np.tile(Sequences(1, 0).q, (64, 1, 1, 1))
    sequences = Sequences(1, 0)
    k, v = (np.tile(x[:1, :LENGTH], (320, 1, 1, 1)) for x in (sequences.k, sequences.v))
    for invariant in (False, True):
        in_many = qflash.attention(many, k, v, batch_invariant=invariant)[0]
        assert same_bits([sequences.alone(batch_invariant=invariant)[0]], [in_many]) == invariant


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_16_bits(dtype):
    sequences = Sequences(2, 1, dtype)
    assert same_bits(sequences.alone(batch_invariant=True), sequences.beside(batch_invariant=True))


@pytest.mark.parametrize("precision", [None, "int8"])
@pytest.mark.parametrize("own", [1, 30, 100])
@pytest.mark.parametrize("longest", [1, 300])
def test_packed(own, longest, precision):
    """Beside sequences of many queries, which would choose another way for all."""
    q_lens, k_lens, at = [5, longest, own, 40], [700, 900, LENGTH, 40], 2
    rng = np.random.default_rng(3)
    q, k = (rng.standard_normal((sum(lens), HEADS, HEAD_DIM), np.float32) for lens in (q_lens, k_lens))
    k = k[:, :KV_HEADS]
    v = np.flip(k, 2).copy()
    cu_q, cu_k = (np.cumsum([0, *lens]).astype(np.int32) for lens in (q_lens, k_lens))
    words = {"causal": True, "return_lse": True, "batch_invariant": True, "precision": precision}
    out, lse = qflash.attention_varlen(q, k, v, cu_q, cu_k, max(q_lens), max(k_lens), **words)
    rows, keys = slice(cu_q[at], cu_q[at + 1]), slice(cu_k[at], cu_k[at + 1])
    alone = qflash.attention(q[None, rows], k[None, keys], v[None, keys], **words)
    assert same_bits([x[0] for x in alone], [out[rows], lse[:, rows]])


@pytest.mark.parametrize("precision", [None, "int8"])
@pytest.mark.parametrize("q_len", [1, 7])
def test_pages(q_len, precision):
    """In a cache of 16-bit or INT8 pages, and in a table with room for more."""
    shape = {"layers": 1, "kv_heads": KV_HEADS, "head_dim": HEAD_DIM, "pages": 800, "page_size": 16}
    cache = qflash.KVCache(**shape, dtype=np.float32, precision=precision)
    sequences = [cache.open() for _ in range(5)]
    lens = [40, 5000, LENGTH, q_len, 777]
    rng = np.random.default_rng(4)
    together = cache.extend(sequences, lens).write(
        0, *rng.standard_normal((2, sum(lens), KV_HEADS, HEAD_DIM), np.float32)
    )
    q = rng.standard_normal((5, q_len, HEADS, HEAD_DIM), np.float32)
    words = {"causal": True, "return_lse": True, "batch_invariant": True}
    both = qflash.attention(q, together, **words)
    for at in range(5):
        alone = qflash.attention(q[at : at + 1], cache.extend([sequences[at]], 0).kv(0), **words)
        assert same_bits([x[0] for x in alone], [x[at] for x in both])
    packed = [5, q_len, 9, 1, 0]
    cu_q = np.cumsum([0, *packed]).astype(np.int32)
    rows = rng.standard_normal((sum(packed), HEADS, HEAD_DIM), np.float32)
    out, lse = qflash.attention_varlen(rows, together, None, cu_q, None, max(packed), None, **words)
    for at in range(4):
        mine = slice(cu_q[at], cu_q[at + 1])
        kv = cache.extend([sequences[at]], 0).kv(0)
        alone = qflash.attention_varlen(rows[mine], kv, None, [0, packed[at]], None, packed[at], None, **words)
        assert same_bits(alone, [out[mine], lse[:, mine]])


@pytest.mark.parametrize("case", [
    Case("few", 1, 4000, HEADS, KV_HEADS, HEAD_DIM, batch=3, kv_lens=(4000, 0, 700)),
    Case("many", 50, 1500, HEADS, KV_HEADS, HEAD_DIM, batch=2, causal=True),
])  # fmt: skip
@pytest.mark.parametrize("precision", [None, "int8"])
def test_values_are_those_of_any_call(case, precision):
    """Where keys are cut moves nothing but the rounding of the last bits."""
    inputs = case.make_inputs()
    kernel = "cpu" if precision is None else "cpu_int8"
    for one, other in zip(*(call(case, inputs, kernel, batch_invariant=x) for x in (True, False)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


def test_gradients_are_unaffected():
    torch = pytest.importorskip("torch")
    sequences = Sequences(4, 2)
    grads = []
    for place in (slice(None), slice(2, 3)):
        arrays = (sequences.q[place], sequences.k[place, :LENGTH], sequences.v[place, :LENGTH])
        q, k, v = (torch.from_numpy(x.copy()).requires_grad_() for x in arrays)
        qflash.attention(q, k, v, causal=True, batch_invariant=True)[2 if place == slice(None) else 0].sum().backward()
        grads.append([x.grad[2 if place == slice(None) else 0].numpy() for x in (q, k, v)])
    assert same_bits(*grads)
