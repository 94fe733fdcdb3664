"""Launches of the library one after another, with no other launch in between: on Hopper one begins while the one before
ends. What it reads, and what it writes over, must be waited for."""

from __future__ import annotations

import pytest

import qflash

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("cuda_torch")]
BATCH, HEADS, KV_HEADS, HEAD_DIM, PAST = 5, 16, 4, 128, 700
WIDTH = HEADS * HEAD_DIM


class Step:
    """A decoding step of some layers: products in INT8 and in 16 bits, whose k is split, a write to pages, attention
    with rope. Memory goes from hand to hand, as frameworks reuse it."""

    def __init__(self, precision: str | None, device: str = "cuda") -> None:
        generator = torch.Generator().manual_seed(0)

        def normal(*shape: int):
            x = torch.randn(shape, generator=generator) * shape[0] ** -0.5
            return x.to(torch.bfloat16).to(device)

        self.x = normal(BATCH, WIDTH) * BATCH**0.5
        self.wide = normal(WIDTH, WIDTH + 2 * KV_HEADS * HEAD_DIM)
        self.narrow = qflash.quantize_linear(normal(WIDTH, WIDTH))
        self.plain = normal(WIDTH, WIDTH)
        sizes = {"layers": 3, "kv_heads": KV_HEADS, "head_dim": HEAD_DIM, "pages": BATCH * 4, "page_size": 256}
        cache = qflash.KVCache(**sizes, dtype=torch.bfloat16, precision=precision, device=device)
        sequences = [cache.open() for _ in range(BATCH)]
        past = cache.extend(sequences, [PAST] * BATCH)
        self.rope = qflash.Rope(*(torch.from_numpy(x).to(device) for x in qflash.rope_tables(1024, HEAD_DIM)))
        for layer in range(3):
            k, v = (normal(BATCH * PAST, KV_HEADS, HEAD_DIM).view(BATCH, PAST, KV_HEADS, HEAD_DIM) for _ in "kv")
            past.write(layer, k * (BATCH * PAST) ** 0.5, v * (BATCH * PAST) ** 0.5, rope=self.rope)
        self.step = cache.extend(sequences, [1] * BATCH)  # written anew in every run, with the same tokens

    def run(self, between=lambda: None):
        x = self.x
        for layer in range(3):
            new = qflash.linear(x, self.wide)
            between()
            q, k, v = (part.view(BATCH, 1, -1, HEAD_DIM) for part in new.split([WIDTH, *[KV_HEADS * HEAD_DIM] * 2], -1))
            kv = self.step.write(layer, k, v, rope=self.rope)
            between()
            out = qflash.attention(q, kv, causal=True, rope=self.rope)
            between()
            out = qflash.linear(out.view(BATCH, WIDTH), self.narrow, residual=x)
            between()
            x = qflash.linear(out, self.plain, activation="silu", residual=out)
            between()
        return x


def captured(step: Step):
    """A graph of a step, and its result."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step.run()
    return graph, out


@pytest.mark.parametrize("precision", [None, "int8"])
def test_a_chain_of_launches_has_the_bits_of_single_ones(precision):
    step = Step(precision)
    want = step.run(torch.cuda.synchronize)
    assert torch.isfinite(want).all()
    found = [step.run() for _ in range(200)]
    torch.cuda.synchronize()
    assert all(torch.equal(x, want) for x in found)


@pytest.mark.parametrize("precision", [None, "int8"])
def test_the_same_in_a_graph(precision):
    step = Step(precision)
    want = step.run(torch.cuda.synchronize)
    graph, out = captured(step)
    for _ in range(200):
        graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, want)


@pytest.mark.parametrize("precision", [None, "int8"])
def test_two_streams_of_one_graph(precision):
    """Their launches may run at the same time, so they share no counters; those of one stream do."""
    steps = [Step(precision), Step(precision)]
    want = steps[0].run(torch.cuda.synchronize)
    steps[1].run(torch.cuda.synchronize)
    graph, other = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph):
        this = torch.cuda.current_stream()
        other.wait_stream(this)
        with torch.cuda.stream(other):
            beside = steps[1].run()
        out = steps[0].run()
        this.wait_stream(other)
    for _ in range(200):
        graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, want) and torch.equal(beside, want)


def test_captured_launches_for_which_no_counters_are_left():
    """Sixteen streams of captures are remembered. With more of them each launch takes new counters, until none are left
    and launches clear some in their workspace."""
    step = Step(None)
    q = step.x.view(BATCH, 1, HEADS, HEAD_DIM)
    k, v = (torch.randn(BATCH, PAST, KV_HEADS, HEAD_DIM, device="cuda", dtype=torch.bfloat16) for _ in "kv")

    def launches():
        return qflash.linear(step.x, step.wide), qflash.attention(q, k, v)

    want, streams, kept = launches(), [torch.cuda.Stream() for _ in range(17)], []
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        this = torch.cuda.current_stream()
        for stream in streams:
            stream.wait_stream(this)
        for index in range(2200):  # of 96 and 264 counters, of 188416 and 393216
            with torch.cuda.stream(streams[index % 17]):
                found = launches()
            if index % 100 == 0 or index > 2180:
                kept.append(found)
        for stream in streams:
            this.wait_stream(stream)
    for _ in range(3):
        graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(x, y) for found in kept for x, y in zip(found, want, strict=True))
