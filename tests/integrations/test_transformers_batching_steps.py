"""The decode pass of a Batcher: fixed operations, shapes and addresses, what is captured of it, and tokens by row."""

from __future__ import annotations

import copy
import math
from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("transformers")

import torch

import qflash.integrations.transformers as qf
from qflash.integrations.transformers import passes
from qflash.integrations.transformers.requests import Request
from qflash.integrations.transformers.rows import Rows
from qflash.integrations.transformers.sampling import Sampling
from qflash.testing import tiny_models as tiny
from qflash.testing.torch_steps import Recorder

CPU = torch.device("cpu")
FAMILIES = ("llama", "gpt2", "mistral", "gemma2", "gemma3", "gpt_oss")
SHAPES = {(4, 2), (4, 4), (2, 4), (1, 4)}  # rows and pages of the passes that serve these:
LENGTHS = (20, 5, 11, 2, 30, 7)


def submitted(batch, new=12, **words):
    """Six requests that end one after another."""
    rows = tiny.tokens(len(LENGTHS), max(LENGTHS))
    return [
        batch.submit(row[:length], max_new_tokens=new + 3 * at, **words)
        for at, (row, length) in enumerate(zip(rows, LENGTHS, strict=True))
    ]


def served(family="llama", words=(), model=None, **sizes):
    """The tokens of six requests on four slots."""
    model = tiny.decoder(family) if model is None else model
    batch = qf.Batcher(model, **{"pages": 32, "page_size": 16, "slots": 4} | sizes)
    requests = submitted(batch, **dict(words))
    batch.run()
    assert all(request.error is None for request in requests)
    return batch, [request.tokens for request in requests]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "drawn"])
def test_every_pass_is_the_same(family, do_sample, monkeypatch):
    """Whoever is in the rows: operations and shapes, tensors where they were, and no value that is looked at."""
    seen = {}
    run = passes.DecodePass._pass

    def recorded(self):
        tensors = (self.rows.ids, self.rows.positions, self.chosen, self.step.page_table, self.step.lens)
        places = [x.data_ptr() for x in tensors]
        with Recorder() as recorder:
            run(self)
        seen.setdefault(self, []).append((places, recorder.calls))

    monkeypatch.setattr(passes.DecodePass, "_pass", recorded)
    served(family, {"do_sample": do_sample, "top_k": 9, "top_p": 0.9})
    assert {tuple(decode.step.page_table.shape) for decode in seen} == SHAPES
    for decode in seen:
        assert all(other == seen[decode][0] for other in seen[decode][1:]) and len(seen[decode]) > 2
        assert any("attention_paged" in name for name, _ in seen[decode][0][1])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_graph_serves_all_that_come_and_go(family, graphs):
    uncaptured, want = served(family, capture=False)
    assert (uncaptured.is_captured, uncaptured.reason) == (False, "capture is False") and not graphs.captures
    batch, got = served(family)
    assert got == want and batch.is_captured and batch.reason == ""
    assert graphs.captures == len(SHAPES)
    replays = graphs.replays
    again = submitted(batch)
    batch.run()
    assert [request.tokens for request in again] == want
    assert graphs.captures == len(SHAPES)
    assert graphs.replays == replays + len(SHAPES) + replays  # no pass warms up now


def test_rows_that_draw_have_a_graph_of_their_own(graphs):
    words = {"do_sample": True, "seed": 3, "top_k": 20}
    _, want = served(words=words, capture=False)
    batch, got = served(words=words)
    assert got == want and graphs.captures == len(SHAPES)
    greedy = submitted(batch)
    batch.run()
    assert [request.tokens for request in greedy] == served(capture=False)[1]
    assert graphs.captures == 2 * len(SHAPES)


def test_each_round_by_another_thread(graphs):
    """A thread computes a pass before it captures one: the first product that it asks for makes its cuBLAS handle."""
    _, want = served(capture=False)
    batch = qf.Batcher(tiny.decoder("llama"), pages=32, page_size=16, slots=4)
    requests = submitted(batch)
    is_left = True
    while is_left:
        with ThreadPoolExecutor(1) as thread:
            is_left = thread.submit(batch.step).result()
    assert batch.reason == "" and [request.tokens for request in requests] == want


def test_graphs_are_captured_again_with_other_weights(graphs):
    """They read them where they were."""
    model = copy.deepcopy(tiny.decoder("llama"))
    batch, _ = served(model=model)
    qf.quantize_linears(model)
    requests = submitted(batch)
    batch.run()
    assert [request.tokens for request in requests] == served(model=model, capture=False)[1]
    assert graphs.captures == 2 * len(SHAPES)


def test_a_pass_that_cannot_be_captured(graphs, monkeypatch):
    """Passes go on without a graph, and the reason is told; it is not tried again for other rows."""
    run = passes.DecodePass._pass
    looked = []

    def looks(self):
        run(self)
        looked.append(graphs.capturing is not None)
        assert self.chosen[0].item() >= 0

    _, want = served(capture=False)
    monkeypatch.setattr(passes.DecodePass, "_pass", looks)
    batch, got = served()
    assert got == want and sum(looked) == 1 and not batch.is_captured
    reason = "the step was not captured: RuntimeError: CUDA error: operation not permitted when stream is capturing"
    assert batch.reason == reason


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["llama", "gpt2", "mistral", "gemma3"])
@pytest.mark.parametrize("words", [{}, {"do_sample": True, "seed": 3}], ids=["greedy", "drawn"])
def test_a_real_graph(family, words):
    model = tiny.decoder(family).to("cuda", torch.bfloat16)  # no kernel of a GPU takes pages of float32
    try:
        batch, got = served(words=words, model=model)
        _, want = served(words=words, model=model, capture=False)
    finally:
        tiny.decoder.cache_clear()
    assert batch.is_captured, batch.reason
    assert got == want


# Tokens by row --------------------------------------------------------------------------------------------------------


def request(seed=0, generated=0, **words):
    made = Request([1, 2], 9, (), Sampling(True, **words), seed, None)
    made.known += [3] * generated
    return made


def chosen(logits, requests):
    rows = Rows(len(requests), CPU)
    rows.show(requests)
    return rows.choose(logits.expand(len(requests), -1))


def test_rows_tell_where_requests_stand():
    rows = Rows(3, CPU)
    rows.show([request(generated=2), request()])
    assert rows.ids.tolist() == [[3], [2], [0]] and rows.positions.tolist() == [[3], [1], [0]]


@pytest.mark.parametrize(
    "words",
    [{}, {"top_k": 7}, {"top_p": 0.6}, {"top_k": 20, "top_p": 0.8}, {"top_k": 10**30}, {"temperature": 0.3}],
    ids=str,
)
def test_only_tokens_that_sampling_leaves_are_drawn(words):
    """The same ones as `generate` draws from, each row by words of its own; and all of them, if it is asked often."""
    logits = torch.randn(1, 40, generator=torch.Generator().manual_seed(2))
    left = Sampling(True, **words).filtered(logits).isfinite()[0].nonzero()[:, 0].tolist()
    others = [request(seed, top_k=1) for seed in range(3)]
    drawn = chosen(logits, [request(seed, **words) for seed in range(6000)] + others).tolist()
    assert drawn[-3:] == [int(logits.argmax())] * 3
    assert set(drawn[:-3]) <= set(left)
    if "temperature" not in words:
        assert set(drawn[:-3]) == set(left)


@pytest.mark.parametrize("by", ["seed", "generated"])
def test_draws_follow_the_weights(by):
    """20000 draws of three tokens, by different seeds or one after another: within five standard deviations of what is
    expected, and so are pairs of neighbours, which must not depend on each other."""
    weights, count = torch.tensor([0.5, 0.3, 0.2]), 20000
    rows = Rows(count, CPU)
    rows.show([request(seed=7)] * count)
    getattr(rows, "_seed" if by == "seed" else "_index").copy_(torch.arange(count)[:, None])
    drawn = rows.choose(weights.log().expand(count, 3))
    pairs = drawn[:-1] * 3 + drawn[1:]
    for values, expected in ((drawn, weights), (pairs, torch.outer(weights, weights).flatten())):
        for value, weight in enumerate(expected.tolist()):
            mean, deviation = len(values) * weight, math.sqrt(len(values) * weight * (1 - weight))
            assert abs(int((values == value).sum()) - mean) < 5 * deviation


def test_all_bits_of_a_seed_count():
    logits = torch.zeros(1, 50000)
    seeds = [0, 1, 1 << 31, 1 << 32, 1 << 40, (1 << 63) - 1]
    assert len(set(chosen(logits, [request(seed) for seed in seeds]).tolist())) == len(seeds)
