"""paged_write on a GPU: the replay's bits, graphs whose tables change between replays, compiled programs, JAX."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import qflash
from qflash.testing.page_writes import (
    CASES,
    PageWrite,
    arrays_of,
    check_pools,
    on_device,
    words_of,
)
from qflash.testing.runner import to_torch

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("cuda_torch")]
CASE = PageWrite("bfloat16", head_dim=128, heads=8, rope="half")
KINDS = (CASE, replace(CASE, int8=True, mean=True), replace(CASE, new=(1, 7, 0)))


def turn(x: np.ndarray):
    return to_torch(x, "cuda")


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_replays_bits(case):
    x = arrays_of(case)
    kv = on_device(x, turn)
    assert qflash.paged_write(kv, turn(x.k), turn(x.v), **words_of(x, turn)) is kv
    check_pools(kv, x.replay())


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("batch", [1, 33, 1100])
def test_which_sequence_a_packed_token_belongs_to(batch, int8):
    rng = np.random.default_rng(batch)
    counts = rng.integers(0, 3, batch)
    counts[-1] = 1
    lens = tuple(int(n) for n in counts + rng.integers(0, 17, batch))
    x = arrays_of(PageWrite("float32", int8, lens=lens, new=tuple(map(int, counts)), head_dim=16, heads=1))
    kv = on_device(x, turn)
    qflash.paged_write(kv, turn(x.k), turn(x.v), **words_of(x, turn))
    check_pools(kv, x.replay())


@pytest.mark.parametrize("int8", [False, True])
def test_tokens_without_a_place_are_left_out(int8):
    x = arrays_of(PageWrite(int8=int8, lens=(33, 33, 33, 33), new=20))
    x.page_table[0, 1], x.page_table[1, 2] = -1, len(x.pools["k_pages"])
    x.lens[2], x.lens[3] = 7, 60
    kv = on_device(x, turn)
    qflash.paged_write(kv, turn(x.k), turn(x.v))
    check_pools(kv, x.replay())


@pytest.mark.parametrize("case", KINDS, ids=str)
def test_a_graph_replays_with_other_tables_lengths_and_tokens(case):
    x, other = arrays_of(case), arrays_of(replace(case, seed=1))
    kv, k, v, words = on_device(x, turn), turn(x.k), turn(x.v), words_of(x, turn)
    qflash.paged_write(kv, k, v, **words)  # loads the kernel, which a capture may not
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        qflash.paged_write(kv, k, v, **words)
    for name, pool in other.pools.items():
        getattr(kv, name).copy_(turn(pool))
    other.lens[1] -= 9
    for mine, theirs in ((k, other.k), (v, other.v), (kv.page_table, other.page_table), (kv.lens, other.lens)):
        mine.copy_(turn(theirs))
    if kv.k_mean is not None:
        kv.k_mean.copy_(turn(other.k_mean))
    graph.replay()
    check_pools(kv, other.replay())


@pytest.mark.parametrize("case", KINDS, ids=str)
def test_compiled(case):
    x = arrays_of(case)
    kv, words = on_device(x, turn), words_of(x, turn)
    compiled = torch.compile(lambda kv, k, v, words: qflash.paged_write(kv, k, v, **words).k_pages * 2)
    twice = compiled(kv, turn(x.k), turn(x.v), words)
    check_pools(kv, x.replay())
    assert torch.equal(twice, kv.k_pages * 2)


def test_writes_and_reads_follow_one_another():
    """Launches overlap on Hopper: what the kernel before wrote is there when this one reads it, and so after it."""
    x = arrays_of(CASE)
    words = words_of(x, turn)
    kv, source = on_device(x, turn), turn(x.k)
    for i in range(200):
        k = source * (i + 1)
        qflash.paged_write(kv, k, k, **words)
        again = kv.v_pages.clone()
        k.zero_()
    wanted = replace(x, k=(source * 200).float().cpu().numpy().astype(x.k.dtype))
    check_pools(kv, replace(wanted, v=wanted.k).replay())
    assert torch.equal(again, kv.v_pages)


def test_another_stream():
    x = arrays_of(CASE)
    kv, k, v, words = on_device(x, turn), turn(x.k), turn(x.v), words_of(x, turn)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        qflash.paged_write(kv, k, v, **words)
    torch.cuda.synchronize()
    check_pools(kv, x.replay())


@pytest.mark.parametrize("case", KINDS, ids=str)
def test_jax_donated(case):
    jax = pytest.importorskip("jax")
    if jax.default_backend() != "gpu":
        pytest.skip("this JAX sees no GPU")
    x = arrays_of(case)
    kv, words = on_device(x, jax.numpy.array), words_of(x, jax.numpy.array)
    before = kv.k_pages.unsafe_buffer_pointer()
    step = jax.jit(lambda kv, k, v, words: qflash.paged_write(kv, k, v, **words), donate_argnums=0)
    written = step(kv, jax.numpy.array(x.k), jax.numpy.array(x.v), words)
    assert written.k_pages.unsafe_buffer_pointer() == before
    check_pools(written, x.replay())
