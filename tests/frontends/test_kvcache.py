"""KVCache in every framework: sequences that share a prefix, against plain attention over each of them alone."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import pytest

import qflash

FRAMEWORKS = ("numpy", "torch", "jax")
LAYERS, Q_HEADS, KV_HEADS, HEAD_DIM = 2, 4, 2, 32
PREFIX, QUESTIONS, STEPS, LONGEST = 37, (5, 1, 20), 3, 80
# Relative L2 of docs/numerics.md. Both sides of float32 have an error of their own.
BOUNDS = {("float32", None): 4e-6, ("bfloat16", None): 1e-2, ("float32", "int8"): 1.5e-2, ("bfloat16", "int8"): 2e-2}


@lru_cache
def framework(name: str) -> Any:
    """The module that has the dtypes of a framework."""
    return np if name == "numpy" else pytest.importorskip("jax.numpy" if name == "jax" else name)


def dtype_of(name: str, dtype: str) -> Any:
    if name == "numpy" and dtype == "bfloat16":
        import ml_dtypes

        return ml_dtypes.bfloat16
    return getattr(framework(name), dtype)


def as_array(name: str, x: np.ndarray, dtype: str = "float32") -> Any:
    module = framework(name)
    if name == "torch":
        return module.from_numpy(x).to(getattr(module, dtype))
    return module.asarray(x, dtype_of(name, dtype))


def as_numpy(x: Any) -> np.ndarray:
    return np.array(x.float().numpy() if hasattr(x, "float") else x, np.float32)  # a copy, whatever is written later


def make_cache(name: str, dtype: str = "float32", **words: Any) -> qflash.KVCache:
    sizes = {"layers": LAYERS, "kv_heads": KV_HEADS, "head_dim": HEAD_DIM, "pages": 24, "page_size": 16}
    return qflash.KVCache(**sizes | words, dtype=dtype_of(name, dtype))


class Served:
    """Sequences in a cache, and beside them all they were given, as plain NumPy arrays."""

    def __init__(self, name: str, dtype: str, precision: str | None) -> None:
        self.name, self.dtype = name, dtype
        self.random = np.random.default_rng(0)
        self.cache = make_cache(name, dtype, precision=precision)
        self.tables = qflash.rope_tables(LONGEST, HEAD_DIM)
        self.rope = qflash.Rope(*(as_array(name, x) for x in self.tables))
        self.bias = 3 * self.random.standard_normal((KV_HEADS, HEAD_DIM), np.float32)  # what k_mean is for
        # Pages hold keys that were rotated and then rounded, to 8 bits of mantissa or to an integer.
        self.lse_bound = 0.1 if precision else 1e-5 if dtype == "float32" else 0.03
        self.seen: dict[tuple[int, int], tuple[np.ndarray, np.ndarray]] = {}
        self.got: list[np.ndarray] = []
        self.wanted: list[np.ndarray] = []

    def fork(self, sequence: int) -> int:
        new = self.cache.fork(sequence)
        self.seen |= {(new, layer): kv for (of, layer), kv in list(self.seen.items()) if of == sequence}
        return new

    def numbers(self, *shape: int) -> np.ndarray:
        """What the dtype can hold, in float32."""
        return as_numpy(as_array(self.name, self.random.standard_normal(shape, np.float32), self.dtype))

    def run(self, step: qflash.kvcache.Step, packed: bool) -> None:
        """New tokens of every layer through the cache, and the same by plain attention."""
        shape = (step.total,) if packed else (len(step.sequences), step.max_new)
        for layer in range(LAYERS):
            q = self.numbers(*shape, Q_HEADS, HEAD_DIM)
            k = as_numpy(as_array(self.name, self.numbers(*shape, KV_HEADS, HEAD_DIM) + self.bias, self.dtype))
            v = self.numbers(*shape, KV_HEADS, HEAD_DIM)
            new = [as_array(self.name, x, self.dtype) for x in (q, k, v)]
            kv = step.write(layer, *new[1:], rope=self.rope)
            words = {"causal": True, "rope": self.rope, "return_lse": True}
            if packed:
                out, lse = qflash.attention_varlen(new[0], kv, None, step.cu_seqlens, None, step.max_new, None, **words)
            else:
                out, lse = qflash.attention(new[0], kv, **words)
                lse = lse.swapaxes(0, 1).reshape(Q_HEADS, -1)  # as that of packed tokens
            self.compare(step, layer, q, k, v, as_numpy(out), as_numpy(lse))

    def compare(self, step, layer, q, k, v, out, lse) -> None:
        q, k, v, out = (x.reshape(-1, *x.shape[-2:]) for x in (q, k, v, out))
        rope, start = qflash.Rope(*self.tables), 0
        for sequence, count in zip(step.sequences, step.counts, strict=True):
            own = slice(start, start + count)
            start += count
            before = self.seen.get((sequence, layer), (k[:0], v[:0]))
            now = tuple(np.concatenate([x, new[own]]) for x, new in zip(before, (k, v), strict=True))
            self.seen[sequence, layer] = now
            plain, plain_lse = qflash.attention(
                q[None, own], *(x[None] for x in now), causal=True, rope=rope, return_lse=True
            )
            self.got.append(out[own])
            self.wanted.append(plain[0])
            np.testing.assert_allclose(lse[:, own], plain_lse[0], atol=self.lse_bound)

    def error(self) -> float:
        got, wanted = (np.concatenate(x).astype(np.float64) for x in (self.got, self.wanted))
        return float(np.linalg.norm(got - wanted) / np.linalg.norm(wanted))


@pytest.mark.parametrize("precision", [None, "int8"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", FRAMEWORKS)
def test_three_sequences_with_a_shared_prefix(name, dtype, precision):
    served = Served(name, dtype, precision)
    cache = served.cache
    a = cache.open()
    served.run(cache.extend([a], PREFIX), packed=False)
    sequences = [a, served.fork(a), served.fork(a)]
    assert cache.pages - cache.free_pages == 3
    served.run(cache.extend(sequences, QUESTIONS), packed=True)
    assert cache.pages - cache.free_pages == 2 + 1 + 1 + 2  # two full pages for all, and the rest of each
    step = cache.extend(sequences, 1, columns=LONGEST // 16)
    served.run(step, packed=False)
    for _ in range(STEPS):
        served.run(cache.extend(sequences, 1, into=step), packed=False)
    cache.truncate(a, PREFIX - 3)  # tokens of a page that nobody shares, then one that others still read
    served.seen |= {(a, layer): tuple(x[: PREFIX - 3] for x in served.seen[a, layer]) for layer in range(LAYERS)}
    served.run(cache.extend([sequences[2], a], [1, 4]), packed=True)
    served.run(cache.extend(sequences, 2), packed=False)
    assert served.error() < BOUNDS[dtype, precision]


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_the_mean_of_the_first_keys_is_kept(name):
    """Over all tokens alike, rotated where they stand; what is written later does not change it."""
    served = Served(name, "float32", "int8")
    cache, (cos, sin) = served.cache, served.tables
    a, b = cache.open(), cache.open()
    cache.extend([a], 3)  # whose tokens nobody writes
    step = cache.extend([a, b], [2, 5])
    k = served.numbers(7, KV_HEADS, HEAD_DIM) + served.bias
    step.write(0, *(as_array(name, x) for x in (k, k)), rope=served.rope)
    angles = [np.array([3, 4, 0, 1, 2, 3, 4]), slice(None), None]
    low, high = np.split(k, 2, -1)
    c, s = (table[angles[0]][:, None] for table in (cos, sin))
    rotated = np.concatenate([low * c - high * s, high * c + low * s], -1)
    np.testing.assert_allclose(as_numpy(step.kv(0).k_mean), rotated.mean(0), atol=1e-5)
    assert not as_numpy(step.kv(1).k_mean).any()  # a layer that has no keys yet
    before = as_numpy(step.kv(0).k_mean)
    cache.extend([a, b], 1, into=step)
    step.write(0, *(as_array(name, k[:2, None] + 7) for _ in "kv"), rope=served.rope)
    assert (as_numpy(step.kv(0).k_mean) == before).all()


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_a_write_of_nothing_decides_no_mean(name):
    cache = make_cache(name, precision="int8")
    step = cache.extend([cache.open()], 0)
    nothing = as_array(name, np.zeros((0, KV_HEADS, HEAD_DIM), np.float32))
    step.write(0, nothing, nothing)
    ones = as_array(name, np.ones((1, 4, KV_HEADS, HEAD_DIM), np.float32))
    kv = cache.extend(step.sequences, 4, columns=2).write(0, ones, ones)
    assert (as_numpy(kv.k_mean) == 1).all()


def test_a_write_that_fails_decides_no_mean(monkeypatch):
    """Whatever fails, the next write to the layer is the first."""
    cache = make_cache("numpy", precision="int8")
    step = cache.extend([cache.open()], 4)
    ones = np.ones((1, 4, KV_HEADS, HEAD_DIM), np.float32)
    with monkeypatch.context() as patch:
        patch.setattr(cache._state.storage, "write", lambda *_: (_ for _ in ()).throw(MemoryError))
        with pytest.raises(MemoryError):
            step.write(0, ones, ones)
    assert (step.write(0, 2 * ones, ones).k_mean == 2).all()


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_bad_positions_leave_the_pages_as_they_are(name):
    """The CPU refuses them while it runs."""
    served = Served(name, "float32", None)
    step = served.cache.extend([served.cache.open()], 4)
    x = as_array(name, np.ones((1, 4, KV_HEADS, HEAD_DIM), np.float32))
    step.write(0, x, x)
    before = as_numpy(step.kv(0).v_pages)
    wrong = qflash.Rope(served.rope.cos, served.rope.sin, positions_k=[0, 1, 2, LONGEST])
    with pytest.raises(ValueError, match="positions_k"):
        step.write(0, x + 1, x + 1, rope=wrong)
    assert (as_numpy(step.kv(0).v_pages) == before).all()
    step.write(0, x, x, rope=served.rope)


@pytest.mark.parametrize("precision", [None, "int8"])
@pytest.mark.parametrize("name", FRAMEWORKS)
def test_a_step_with_rows_of_padding(name, precision):
    """A step made for four sequences serves two: the same bits as a step of two, and nothing of what padding holds."""
    padded, alone = (make_cache(name, precision=precision) for _ in range(2))
    rope = qflash.Rope(*(as_array(name, x) for x in qflash.rope_tables(LONGEST, HEAD_DIM)))
    random = np.random.default_rng(0)
    made_for_four = padded.extend([padded.open() for _ in range(4)], 0, columns=LONGEST // 16)
    served = [(cache, [cache.open(), cache.open()]) for cache in (padded, alone)]
    for new in (PREFIX, 1, 1):  # of which the first decides the mean, and must not take NaN from padding
        numbers = random.standard_normal((4, new, Q_HEADS + 2 * KV_HEADS, HEAD_DIM), np.float32)
        numbers[2:] = np.nan
        q, k, v = np.split(numbers, [Q_HEADS, Q_HEADS + KV_HEADS], axis=2)
        results = []
        for (cache, pair), rows, into in zip(served, (4, 2), (made_for_four, None), strict=True):
            step = cache.extend(pair, new, into=into)
            kv = step.write(0, *(as_array(name, x[:rows]) for x in (k, v)), rope=rope)
            out, lse = qflash.attention(as_array(name, q[:rows]), kv, causal=True, rope=rope, return_lse=True)
            pools = [as_numpy(x) for x in (kv.k_pages, kv.v_pages, kv.k_scale, kv.v_scale, kv.k_mean) if x is not None]
            results.append((as_numpy(out), as_numpy(lse), pools))
        (out, lse, pools), (wanted, wanted_lse, wanted_pools) = results
        np.testing.assert_array_equal(out[:2], wanted)
        np.testing.assert_array_equal(lse[:2], wanted_lse)
        assert not out[2:].any() and np.isneginf(lse[2:]).all()
        for x, y in zip(pools, wanted_pools, strict=True):
            np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_positions_of_padding_decide_no_mean(name):
    """rope.positions_k has a row for each row of the step, and those of padding are not looked at."""
    rope = qflash.Rope(*(as_array(name, x) for x in qflash.rope_tables(LONGEST, HEAD_DIM)))
    k = np.random.default_rng(0).standard_normal((3, 4, KV_HEADS, HEAD_DIM), np.float32)
    means = []
    for rows in (3, 1):
        cache = make_cache(name, precision="int8")
        step = cache.extend([cache.open() for _ in range(rows)], 0, columns=1)
        positions = np.arange(4 * rows, dtype=np.int32).reshape(rows, 4)
        at = qflash.Rope(rope.cos, rope.sin, positions_k=positions.tolist())
        kv = cache.extend(step.sequences[:1], 4, into=step).write(0, *(as_array(name, k[:rows]) for _ in "kv"), rope=at)
        means.append(as_numpy(kv.k_mean))
    np.testing.assert_array_equal(*means)


class TestTorch:
    @pytest.fixture(autouse=True)
    def torch(self):
        self.torch = pytest.importorskip("torch")

    def test_tables_keep_their_addresses(self):
        cache = make_cache("torch")
        a, b = cache.open(), cache.open()
        step = cache.extend([a, b], 3, columns=4)

        def arrays():
            kv = step.kv(1)
            return kv.k_pages, kv.v_pages, kv.page_table, kv.lens, step.page_table, step.lens, step.cu_seqlens

        before = [x.data_ptr() for x in arrays()]
        cache.extend([a, b], [20, 1], into=step)
        assert [x.data_ptr() for x in arrays()] == before
        assert [x.dtype for x in arrays()[2:]] == [self.torch.int32] * 5
        assert step.lens.tolist() == [23, 4] and step.cu_seqlens.tolist() == [0, 20, 21]

    def test_a_cache_made_in_inference_mode_works_outside(self):
        x = self.torch.ones(1, 3, KV_HEADS, HEAD_DIM)
        with self.torch.inference_mode():
            cache = make_cache("torch", precision="int8")
            step = cache.extend([cache.open()], 3)
            step.write(0, x, x)
        cache.extend(step.sequences, 3, into=step)
        step.write(0, x, x)
        cache.extend([cache.fork(step.sequences[0])], 1)

    def test_what_is_no_tensor_of_the_cache_is_refused(self):
        cache = make_cache("torch")
        step = cache.extend([cache.open()], 3)
        x = self.torch.ones(1, 3, KV_HEADS, HEAD_DIM)
        for k, text in (
            (x.numpy(), "k is numpy.ndarray; allowed: torch.Tensor, as dtype is"),
            (x.half(), "k has dtype float16; allowed: float32"),
            (x.to("meta"), "k is on meta; allowed: the cache's device, cpu"),
            (x[:, :2], r"k has shape \[1, 2, 2, 32\]; allowed: \[1, 3, 2, 32\] or \[3, 2, 32\]"),
        ):
            with pytest.raises((TypeError, ValueError), match=text):
                step.write(0, k, x)
        with pytest.raises(ValueError, match="device is 'nowhere'; allowed: one that torch has"):
            make_cache("torch", device="nowhere")


class TestJax:
    @pytest.fixture(autouse=True)
    def jax(self):
        self.jax = pytest.importorskip("jax")

    def test_what_is_no_array_of_the_cache_is_refused(self):
        cache = make_cache("jax")
        step = cache.extend([cache.open()], 3)
        x = self.jax.numpy.ones((1, 3, KV_HEADS, HEAD_DIM))
        with pytest.raises(
            TypeError, match=r"k is traced, and the cache is no part of a program; allowed: qflash.paged"
        ):
            self.jax.jit(lambda k: step.write(0, k, k))(x)
        with pytest.raises(TypeError, match=r"k is numpy.ndarray; allowed: jax.Array"):
            step.write(0, np.asarray(x), x)
        with pytest.raises(TypeError, match="k has dtype float16; allowed: float32"):
            step.write(0, x.astype("float16"), x)
        with pytest.raises(TypeError, match=r"device is 'gpu'; allowed: None or a jax.Device"):
            make_cache("jax", device="gpu")
        assert step.write(0, x, x).k_pages.shape == (24, KV_HEADS, 16, HEAD_DIM)

    def test_tables_of_before_keep_their_values(self):
        """A CPU device may take memory of the host as it is, where that is aligned; the host writes to its own."""
        cache = make_cache("jax")
        sequences = [cache.open() for _ in range(16)]
        for count in range(1, 17):
            step = cache.extend(sequences[:count], 1, columns=1)
            before = step.page_table, step.lens, step.cu_seqlens
            copies = [np.array(x) for x in before]
            cache.extend(sequences[16 - count :], 0, into=step)
            assert all((np.asarray(x) == y).all() for x, y in zip(before, copies, strict=True))
            for sequence in sequences:
                cache.truncate(sequence, 0)

    def test_a_device_is_kept_to(self):
        device = self.jax.devices()[0]
        cache = make_cache("jax", device=device)
        step = cache.extend([cache.open()], 3)
        assert {*step.kv(0).k_pages.devices(), *step.lens.devices()} == {cache.device} == {device}

    def test_a_write_takes_no_second_pool(self):
        """Pools are donated: those of an earlier kv are gone, and no copy of them was made."""
        cache = make_cache("jax")
        step = cache.extend([cache.open()], 3)
        x = self.jax.numpy.ones((1, 3, KV_HEADS, HEAD_DIM))
        first = step.write(0, x, x)
        step.write(0, x, x)
        assert first.k_pages.is_deleted()
