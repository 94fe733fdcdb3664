"""A step of generate and Decoder as a CUDA graph holds it: stand-ins on the CPU, real graphs on a GPU."""

from __future__ import annotations

import copy

import pytest

pytest.importorskip("transformers")

import torch

import qflash.integrations.transformers as qf
from qflash.integrations.transformers import decoding
from qflash.testing import tiny_models as tiny
from qflash.testing.torch_steps import Recorder

NEW = 12


def reference(family, rows=slice(None), **words):
    words = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0} | words
    with tiny.attention_by(tiny.decoder(family), tiny.reference_of(family)) as model:
        return model.generate(tiny.tokens()[rows], attention_mask=tiny.padding("left")[rows], **words)


def generated(family, **words):
    """What qflash makes of the same batch."""
    words = {"max_new_tokens": NEW, "page_size": 16, "pad_token_id": 0} | words
    return qf.generate(tiny.decoder(family), tiny.tokens(), tiny.padding("left"), **words)


@pytest.mark.parametrize("family", tiny.DECODERS)
@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampled"])
def test_every_step_is_the_same(family, do_sample, monkeypatch):
    """The same operations on the same shapes, tensors of the loop where they were, and no value that is looked at."""
    calls, places = [], []
    step = decoding._DecodeStep._step

    def recorded(self):
        tables = self._decoder.cache.tables
        tensors = (self._tokens, self._positions, self._has_ended, tables.page_table, tables.lens)
        places.append([x.data_ptr() for x in tensors])
        with Recorder() as recorder:
            step(self)
        calls.append(recorder.calls)

    monkeypatch.setattr(decoding._DecodeStep, "_step", recorded)
    monkeypatch.setattr(tiny.decoder(family).generation_config, "eos_token_id", tiny.VOCABULARY)  # never comes
    generated(family, max_new_tokens=24, do_sample=do_sample, top_k=9, top_p=0.9)
    assert len(calls) == 23  # which takes every sequence to another page, and past the window
    assert calls[0] and all(other == calls[0] for other in calls) and all(other == places[0] for other in places)
    assert any("attention_paged" in name for name, _ in calls[0])


def test_a_step_is_captured_once_and_replayed(graphs):
    decoder = qf.Decoder(tiny.decoder("llama"), pages=32, page_size=16)
    for _ in range(2):
        result = decoder.generate(tiny.tokens(), tiny.padding("left"), max_new_tokens=NEW)
        assert torch.equal(result.sequences, reference("llama"))
        assert result.is_captured and result.reason == ""
    # The first token comes with the prompt, and the first step of all warms up.
    assert (graphs.captures, graphs.replays) == (1, 2 * (NEW - 1) - 1)


def test_too_few_tokens_for_a_graph(graphs):
    result = generated("llama", max_new_tokens=2)
    assert not result.is_captured and result.reason == decoding.TOO_FEW
    assert generated("llama", max_new_tokens=3).reason == "" and graphs.captures == 1


@pytest.mark.parametrize("family", tiny.DECODERS)
def test_a_graph_serves_all_lengths(family, graphs):
    """What a graph holds is no number that the host knows of a sequence, past a window and into other pages."""
    result = generated(family, max_new_tokens=24)
    assert result.is_captured and torch.equal(result.sequences, reference(family, max_new_tokens=24))


def test_graphs_of_several_batches_share_their_memory(graphs):
    """They take turns in any order."""
    decoder = qf.Decoder(tiny.decoder("mistral"), pages=32, page_size=16)
    for rows in (slice(1), slice(3), slice(2), slice(3), slice(1)):
        got = decoder.generate(tiny.tokens()[rows], tiny.padding("left")[rows], max_new_tokens=NEW)
        assert got.is_captured and torch.equal(got.sequences, reference("mistral", rows))
    assert graphs.captures == 3


def test_a_graph_is_captured_again_with_other_tables(graphs):
    decoder = qf.Decoder(tiny.decoder("llama"), pages=32, page_size=16)
    for _ in range(2):
        result = decoder.generate(tiny.tokens(), tiny.padding("left"), max_new_tokens=NEW)
        assert result.is_captured and torch.equal(result.sequences, reference("llama"))
        (step,) = decoder._steps.values()
        step._tables = None
    assert graphs.captures == 2


@pytest.mark.parametrize("change", ["other weights", "INT8", "moved"])
def test_a_graph_is_captured_again_with_other_weights(change, graphs):
    """It reads them where they were."""
    model, ids = copy.deepcopy(tiny.decoder("llama")), tiny.tokens()
    decoder = qf.Decoder(model, pages=32, page_size=16)
    first = decoder.generate(ids, max_new_tokens=NEW)
    if change == "INT8":
        qf.quantize_linears(model)
    with torch.no_grad():
        for weight in model.parameters():
            if change == "moved":  # as model.to() does
                weight.data = weight.data.clone()
            elif change == "other weights":
                weight.data = weight.data.flip(0)
    second = decoder.generate(ids, max_new_tokens=NEW)
    want = qf.generate(model, ids, max_new_tokens=NEW, page_size=16, capture=False)
    assert first.is_captured and second.is_captured and torch.equal(second.sequences, want.sequences)
    assert graphs.captures == 2 and torch.equal(first.sequences, second.sequences) is (change == "moved")


def test_a_captured_step_draws_the_same_tokens(graphs):
    words = {"do_sample": True, "seed": 5, "top_k": 20}
    captured, drawn = generated("llama", **words), generated("llama", **words, capture=False)
    assert captured.is_captured and not drawn.is_captured
    assert torch.equal(captured.sequences, drawn.sequences)


@pytest.mark.parametrize("words", [{}, {"do_sample": True, "seed": 5}], ids=["greedy", "drawn"])
def test_a_step_that_cannot_be_captured(words, graphs, monkeypatch):
    """The loop goes on without a graph, from the step that failed half-way, and says why."""
    forward = decoding.Decoder.forward

    def looks(self, *arguments):
        logits = forward(self, *arguments)
        assert logits[0, 0].item() < 1e9
        return logits

    want = generated("llama", capture=False, **words)
    monkeypatch.setattr(decoding.Decoder, "forward", looks)
    result = generated("llama", **words)
    assert torch.equal(result.sequences, want.sequences) and not result.is_captured
    reason = "the step was not captured: RuntimeError: CUDA error: operation not permitted when stream is capturing"
    assert result.reason == reason and graphs.replays == 0 and graphs.draws


def test_capture_may_be_left_out(graphs):
    result = generated("llama", capture=False)
    assert (result.is_captured, result.reason) == (False, "capture is False")


def on_gpu(family):
    """A model with its ids and mask."""
    model = copy.deepcopy(tiny.decoder(family)).to("cuda", torch.bfloat16)  # no kernel of a GPU takes pages of float32
    return model, tiny.tokens().cuda(), tiny.padding("left").cuda()


@pytest.mark.gpu
@pytest.mark.parametrize(
    "words", [{}, {"do_sample": True, "seed": 3, "top_k": 20, "top_p": 0.9}], ids=["greedy", "drawn"]
)
@pytest.mark.parametrize("family", tiny.DECODERS)
def test_a_real_graph(family, words):
    model, *prompts = on_gpu(family)
    words = {"max_new_tokens": 40, "page_size": 16} | words
    captured = qf.generate(model, *prompts, **words)
    eager = qf.generate(model, *prompts, **words, capture=False)
    assert captured.is_captured or family == "gpt_oss", captured.reason  # whose experts may look at values
    assert torch.equal(captured.sequences, eager.sequences)


def compare_changed(change, model, ids, mask):
    change(model)
    words = {"max_new_tokens": 24, "page_size": 16, "cache_precision": "int8"}
    captured = qf.generate(model, ids, mask, **words)
    eager = qf.generate(model, ids, mask, **words, capture=False)
    assert captured.is_captured, captured.reason
    assert torch.equal(captured.sequences, eager.sequences)


@pytest.mark.parametrize("change", [qf.fuse_projections, qf.quantize_linears])
def test_a_graph_of_changed_layers(change, graphs):
    compare_changed(change, copy.deepcopy(tiny.decoder("llama")), tiny.tokens(), tiny.padding("left"))


@pytest.mark.gpu
@pytest.mark.parametrize("change", [qf.fuse_projections, qf.quantize_linears])
def test_a_real_graph_of_changed_layers(change):
    compare_changed(change, *on_gpu("llama"))


@pytest.mark.gpu
def test_real_graphs_of_several_batches_in_turns():
    """After weights moved, too, and beside graphs of torch.compile, which takes cuBLAS's memory from everybody."""
    model, ids, mask = on_gpu("mistral")
    qf.generate(model, ids, mask, max_new_tokens=4, page_size=16)  # whose graph is gone
    decoder = qf.Decoder(model, pages=32, page_size=16)
    product = torch.compile(lambda x: x @ x, mode="reduce-overhead")
    for turn in range(2):
        for rows in (slice(1), slice(3), slice(2), slice(3), slice(1)):
            got = decoder.generate(ids[rows], mask[rows], max_new_tokens=NEW)
            want = qf.generate(model, ids[rows], mask[rows], max_new_tokens=NEW, page_size=16, capture=False)
            assert got.is_captured and torch.equal(got.sequences, want.sequences), got.reason
            for _ in range(3):
                product(torch.ones(64 + turn, 64 + turn, device="cuda"))
            torch.cuda.empty_cache()
        for weight in model.parameters():
            weight.data = weight.data.flip(0)


@pytest.mark.gpu
@pytest.mark.parametrize("words", [{}, {"do_sample": True, "seed": 5}], ids=["greedy", "drawn"])
def test_a_real_step_that_cannot_be_captured(words):
    model, *prompts = on_gpu("llama")
    words = {"max_new_tokens": NEW, "page_size": 16} | words
    want = qf.generate(model, *prompts, **words, capture=False)
    model.model.norm.register_forward_hook(lambda module, arguments, out: out[0, 0, 0].item() and None)
    got = qf.generate(model, *prompts, **words)
    assert not got.is_captured and "captur" in got.reason and torch.equal(got.sequences, want.sequences)
    assert torch.rand(3, device="cuda").isfinite().all()  # the default generator draws
    torch.cuda.empty_cache()
