"""KVCache on a GPU: graphs that are replayed while sequences grow, fork and move, against steps made anew."""

from __future__ import annotations

import pytest

import qflash

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("cuda_torch")]
LAYERS, Q_HEADS, KV_HEADS, HEAD_DIM, COLUMNS = 2, 8, 2, 64, 12


@pytest.fixture
def rope():
    return qflash.Rope(*(torch.from_numpy(x).cuda() for x in qflash.rope_tables(16 * COLUMNS, HEAD_DIM)))


def tokens(seed: int, *shape: int) -> list:
    """q, k and v of each layer, one after another."""
    generator = torch.Generator("cuda").manual_seed(seed)
    heads = (Q_HEADS, KV_HEADS, KV_HEADS) * LAYERS
    return [torch.randn(*shape, h, HEAD_DIM, dtype=torch.bfloat16, device="cuda", generator=generator) for h in heads]


def run(step, new, rope) -> list:
    """A step through all layers."""
    out = []
    for layer in range(LAYERS):
        q, k, v = new[3 * layer : 3 * layer + 3]
        out.append(qflash.attention(q, step.write(layer, k, v, rope=rope), causal=True, rope=rope))
    return out


def prefilled(precision, rope):
    """A cache with two sequences of 40 tokens, of which the second is a fork."""
    cache = qflash.KVCache(
        layers=LAYERS, kv_heads=KV_HEADS, head_dim=HEAD_DIM, pages=32, page_size=16, dtype=torch.bfloat16,
        precision=precision, device="cuda",
    )  # fmt: skip
    a = cache.open()
    run(cache.extend([a], 40), tokens(0, 1, 40), rope)
    return cache, [a, cache.fork(a)]


@pytest.mark.parametrize("precision", [None, "int8"])
def test_a_graph_stays_valid_while_sequences_change(precision, rope):
    (captured, pair), (anew, same) = prefilled(precision, rope), prefilled(precision, rope)
    inputs = tokens(1, 2, 1)
    step = captured.extend(pair, 1, columns=COLUMNS)
    run(step, inputs, rope)  # kernels are compiled and loaded before the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = run(step, inputs, rope)
    expected = run(anew.extend(same, 1, columns=COLUMNS), inputs, rope)
    for seed in range(2, 40):  # through several pages
        graph.replay()
        assert [torch.equal(x, y) for x, y in zip(results, expected, strict=True)] == [True] * LAYERS
        if seed == 20:  # drafts that were rejected, and rows that change places
            for cache, sequences in ((captured, pair), (anew, same)):
                cache.truncate(sequences[0], 33)
                sequences.reverse()
        captured.extend(pair, 1, into=step)
        for x, new in zip(inputs, tokens(seed, 2, 1), strict=True):
            x.copy_(new)
        expected = run(anew.extend(same, 1, columns=COLUMNS), inputs, rope)


@pytest.mark.parametrize("precision", [None, "int8"])
def test_a_graph_serves_fewer_sequences_than_it_was_captured_for(precision, rope):
    """Rows of padding give zeros, whatever their tokens hold, and write nothing."""
    (captured, pair), (anew, same) = prefilled(precision, rope), prefilled(precision, rope)
    inputs = tokens(1, 4, 1)
    step = captured.extend([*pair, captured.open(), captured.open()], 1, columns=COLUMNS)
    run(step, inputs, rope)  # kernels are compiled and loaded before the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = run(step, inputs, rope)
    run(anew.extend([*same, anew.open(), anew.open()], 1, columns=COLUMNS), inputs, rope)
    for seed, count in enumerate((2, 1, 2), 2):
        for x, new in zip(inputs, tokens(seed, 4, 1), strict=True):
            x.copy_(new)
            x[count:] = float("nan")
        captured.extend(pair[:count], 1, into=step)
        pools = [step.kv(layer).v_pages.clone() for layer in range(LAYERS)]
        graph.replay()
        expected = run(anew.extend(same[:count], 1, columns=COLUMNS), [x[:count] for x in inputs], rope)
        for layer, (x, y) in enumerate(zip(results, expected, strict=True)):
            # Fewer rows may be split over more blocks, which adds up in another order.
            torch.testing.assert_close(x[:count], y, rtol=0, atol=0.02)
            assert not x[count:].any()
            changed = (step.kv(layer).v_pages != pools[layer]).any(-1).any(1).sum()
            assert changed <= count  # slots: a token of each sequence


def test_the_first_write_of_int8_pages_is_not_captured(rope):
    cache = qflash.KVCache(
        layers=1, kv_heads=KV_HEADS, head_dim=HEAD_DIM, pages=4, dtype=torch.bfloat16, precision="int8", device="cuda"
    )
    _, k, v = tokens(0, 1, 4)[:3]
    qflash.quantize(k, smooth=True)  # compiled before the capture
    step = cache.extend([cache.open()], 4)
    with (
        pytest.raises(RuntimeError, match="the first write to layer 0 is captured"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        step.write(0, k, v)


def test_tokens_on_another_device_are_refused():
    cache = qflash.KVCache(layers=1, kv_heads=1, head_dim=16, pages=2, dtype=torch.float16, device="cuda")
    step = cache.extend([cache.open()], 1)
    x = torch.ones(1, 1, 1, 16, dtype=torch.float16)
    with pytest.raises(ValueError, match=f"k is on cpu; allowed: the cache's device, {cache.device}"):
        step.write(0, x, x)
    assert cache.device.index is not None


@pytest.mark.parametrize("precision", [None, "int8"])
@pytest.mark.parametrize("sequences", [5, 40])  # rows of queries that a decode kernel takes, and that it does not
def test_a_graph_of_a_shared_prefix(precision, sequences, rope):
    """Captured once, replayed with other lengths; the values are those of attention that does not share."""
    cache = qflash.KVCache(
        layers=1, kv_heads=KV_HEADS, head_dim=HEAD_DIM, pages=16 * sequences, page_size=16, dtype=torch.bfloat16,
        precision=precision, device="cuda",
    )  # fmt: skip
    system = cache.open()
    cache.extend([system], 80).write(0, *tokens(0, 1, 80)[1:3], rope=rope)
    chats = [cache.fork(system) for _ in range(sequences)]
    q, k, v = tokens(1, sequences, 1)[:3]
    step = cache.extend(chats, 1, columns=COLUMNS)

    def attend(pages: int):
        kv = step.write(0, k, v, rope=rope)
        return qflash.attention(q, qflash.share_prefix(kv, pages), causal=True, rope=rope, return_lse=True)

    attend(5), attend(0)  # kernels are compiled and loaded before the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = attend(5)
    for length in range(81, 120):
        graph.replay()
        # 40 sequences are served on the prefix by a kernel that does not quantize q.
        of_lse = 1e-3 if precision is None else 1e-2
        for found, wanted, tolerance in zip(results, attend(0), (2e-2, of_lse), strict=True):
            torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)
        assert cache.length(chats[0]) == length
        cache.extend(chats, 1, into=step)
