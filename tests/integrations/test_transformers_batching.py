"""Batcher: tokens of requests that come and go are those of each alone; who gets slots and pages; what fails alone."""

from __future__ import annotations

import doctest
import logging
import random
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache

import pytest

pytest.importorskip("transformers")

import torch
import transformers

import qflash
import qflash.integrations.transformers as qf
from qflash.testing import tiny_models as tiny

NEW = 12
PAGE = 16
LENGTHS = (40, 3, 17, 1, 33)
FAMILIES = ("llama", "gpt2", "mistral", "gemma2", "gemma3", "gpt_oss")


@lru_cache(maxsize=1)
def prompts():
    """Prompts of many lengths, without a page in common."""
    return [row[:length].tolist() for row, length in zip(tiny.tokens(5, 40), LENGTHS, strict=True)]


@lru_cache(maxsize=256)
def alone(family, prompt, new=NEW):
    """What `generate` makes of a prompt by itself."""
    ids = torch.tensor([prompt])
    return qf.generate(tiny.decoder(family), ids, max_new_tokens=new, page_size=PAGE).new_tokens[0].tolist()


def batcher(family="llama", **words):
    return qf.Batcher(tiny.decoder(family), **{"pages": 32, "page_size": PAGE, "slots": 4} | words)


def submitted(batch, new=NEW, **words):
    return [batch.submit(prompt, max_new_tokens=new, **words) for prompt in prompts()]


def are_alone(requests, family="llama"):
    """Whether all requests are done, with the tokens of each alone."""
    return all(r.is_done and r.error is None and r.tokens == alone(family, r.ids, r.max_new_tokens) for r in requests)


def are_pages_free(batch):
    batch.forget_prefixes()
    return batch.kv.free_pages == batch.kv.pages


# Tokens ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens(family):
    """More requests than slots, prompts in chunks, and requests that come while others run."""
    batch = batcher(family, prefill_tokens=20)
    requests = submitted(batch)
    for round in range(8):
        assert batch.step()
        if round % 3 == 0:
            requests.append(batch.submit(torch.tensor(prompts()[2][round:]), max_new_tokens=5))
    batch.run()
    assert are_alone(requests, family) and are_pages_free(batch) and not batch.step()
    assert tiny.decoder(family).config._attn_implementation == "eager"  # as it was


def test_the_reference_is_that_of_transformers():
    prompt = prompts()[2]
    with tiny.attention_by(tiny.decoder("llama"), "sdpa") as model:
        want = model.generate(torch.tensor([prompt]), max_new_tokens=NEW, do_sample=False, pad_token_id=0)
    assert want[0, len(prompt) :].tolist() == alone("llama", tuple(prompt))


@pytest.mark.parametrize(
    "words",
    [
        {"fuse": False},
        {"share_prefixes": False},
        {"slots": 1},
        {"prefill_tokens": 1},
        {"slots": 5, "prefill_tokens": 7},
    ],
    ids=str,
)
def test_words_that_change_no_token(words):
    batch = batcher(**words)
    requests = submitted(batch)
    batch.run()
    assert are_alone(requests) and are_pages_free(batch)
    assert bool(batch.fused) == words.get("fuse", True)


def test_ends():
    end = alone("llama", tuple(prompts()[0]))[3]
    batch = batcher()
    ended, free = submitted(batch, eos_token_id=[end, 98]), submitted(batch, eos_token_id=())
    batch.run()
    for request, other in zip(ended, free, strict=True):
        length = next((at + 1 for at, token in enumerate(other.tokens) if token in (end, 98)), NEW)
        assert request.tokens == other.tokens[:length]
    assert len(ended[0].tokens) < NEW == len(free[0].tokens)


def test_ends_are_those_of_the_model(monkeypatch):
    end = alone("llama", tuple(prompts()[0]))[3]
    monkeypatch.setattr(tiny.decoder("llama").generation_config, "eos_token_id", end)
    batch = batcher()
    ended, free = (batch.submit(prompts()[0], max_new_tokens=NEW, eos_token_id=eos) for eos in (None, ()))
    batch.run()
    assert ended.tokens[-1] == end and len(ended.tokens) < len(free.tokens) == NEW


def test_one_token_is_wanted():
    batch = batcher()
    requests = submitted(batch, new=1)
    batch.run()
    assert are_alone(requests) and are_pages_free(batch)


def test_int8_pages():
    batch = batcher(cache_precision="int8")
    requests = submitted(batch, new=4)
    batch.run()
    assert [len(request.tokens) for request in requests] == [4] * 5 and batch.kv.precision == "int8"


def test_a_batcher_that_was_made_in_inference_mode():
    with torch.inference_mode():
        batch = batcher()
        requests = submitted(batch)
        batch.step()
    batch.run()
    assert are_alone(requests)


def test_the_example_of_the_docstring():
    runner = doctest.DocTestRunner()
    (example,) = doctest.DocTestFinder(recurse=False).find(qf.Batcher, "Batcher")
    assert runner.run(example).attempted and not runner.failures


# Draws ----------------------------------------------------------------------------------------------------------------

DRAWN = {"do_sample": True, "temperature": 2.0, "top_k": 50, "top_p": 0.95}


def test_draws_do_not_depend_on_the_others():
    """Alone, among others, and in chunks."""
    drawn = []
    for others, words in ((0, {}), (3, {}), (4, {"prefill_tokens": 5})):
        batch = batcher(**words)
        for prompt in prompts()[:others]:
            batch.submit(prompt, max_new_tokens=NEW, do_sample=True)
        drawn.append(batch.submit(prompts()[4], max_new_tokens=NEW, seed=5, **DRAWN))
        batch.run()
    assert all(request.tokens == drawn[0].tokens for request in drawn)
    batch = batcher()
    other, unseeded, same = (batch.submit(prompts()[4], max_new_tokens=NEW, seed=s, **DRAWN) for s in (6, None, 5))
    batch.run()
    assert same.tokens == drawn[0].tokens != other.tokens != unseeded.tokens


def test_draws_after_pages_were_taken_are_those_that_came_before():
    batch, roomy = batcher(pages=8), batcher()
    for prompt in (prompts()[1], prompts()[3]):  # which grow to four pages each
        batch.submit(prompt, max_new_tokens=60)
    preempted, free = (each.submit(prompts()[4], max_new_tokens=60, seed=5, **DRAWN) for each in (batch, roomy))
    batch.run()
    roomy.run()
    assert preempted.preempted > 0 and preempted.tokens == free.tokens


@pytest.mark.parametrize("words", [{"temperature": 1e-300}, {"temperature": 10**400}, {"top_p": 1e-300}], ids=str)
def test_numbers_that_float32_does_not_have(words):
    """The nearest that it has: the best token, or any, and no error among the tokens of others."""
    batch = batcher()
    drawn = batch.submit(prompts()[0], max_new_tokens=4, do_sample=True, seed=1, **words)
    greedy = batch.submit(prompts()[1], max_new_tokens=4)
    batch.run()
    is_hot = words.get("temperature", 0) > 1
    assert drawn.error is None and len(drawn.tokens) == 4 and are_alone([greedy] if is_hot else [greedy, drawn])


def test_rows_that_draw_leave_the_others_alone():
    batch = batcher()
    greedy = batch.submit(prompts()[0], max_new_tokens=NEW)
    best = batch.submit(prompts()[1], max_new_tokens=NEW, do_sample=True, top_k=1, temperature=3.0)
    batch.submit(prompts()[2], max_new_tokens=NEW, **DRAWN)
    batch.run()
    assert are_alone([greedy, best])


# Slots and pages ------------------------------------------------------------------------------------------------------


def test_requests_are_admitted_in_the_order_they_came():
    """A short one does not overtake a long one that waits for pages."""
    batch = batcher(pages=6, share_prefixes=False)
    first = batch.submit(prompts()[0], max_new_tokens=NEW)  # three of the pages, and soon four
    long, short = batch.submit(prompts()[4], max_new_tokens=NEW), batch.submit(prompts()[1], max_new_tokens=NEW)
    while not first.is_done:
        batch.step()
        assert not long.tokens and not short.tokens
    batch.run()
    assert are_alone([first, long, short]) and are_pages_free(batch)


def test_the_youngest_gives_its_pages_back():
    batch = batcher(pages=6, share_prefixes=False)
    requests = [batch.submit(prompt[:14], max_new_tokens=40) for prompt in (prompts()[i] for i in (0, 2, 4))]
    batch.run()
    assert are_alone(requests) and are_pages_free(batch)
    assert requests[0].preempted == 0 < requests[2].preempted


def test_what_can_never_fit():
    batch = batcher(pages=4)
    text = "ids has 40 tokens and max_new_tokens is 26, which needs 5 pages of 16 tokens; .* batcher's 4 pages"
    with pytest.raises(ValueError, match=text):
        batch.submit(prompts()[0], max_new_tokens=26)
    largest = batch.submit(prompts()[0], max_new_tokens=25)  # the last token goes into no page
    batch.run()
    assert are_alone([largest])


def test_pages_that_somebody_else_took():
    """Nobody is left to give pages back: the request fails that needs them, and those after it are served."""
    batch = batcher(pages=4)
    taken = batch.kv.open()
    batch.kv.extend([taken], 30)
    large, small = batch.submit(prompts()[0], max_new_tokens=2), batch.submit(prompts()[1], max_new_tokens=2)
    batch.run()
    assert isinstance(large.error, qflash.OutOfPagesError) and large.is_done and large.tokens == []
    assert are_alone([small])
    batch.kv.close(taken)
    assert are_pages_free(batch)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_more_positions_than_the_model_has(family):
    batch = batcher(family, pages=200)
    most = tiny.decoder(family).config.max_position_embeddings
    with pytest.raises(ValueError, match=rf"needs {most + 1} positions; allowed: up to {most}, the model's"):
        batch.submit([1] * 40, max_new_tokens=most - 38)


def test_a_rotation_that_one_long_sequence_would_change_for_all():
    factors = {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 32, **factors}
    config = tiny.DECODERS["llama"]()
    config.rope_parameters = rope
    batch = qf.Batcher(transformers.LlamaForCausalLM(config).eval(), pages=32, page_size=PAGE)
    with pytest.raises(ValueError, match="needs 33 positions; allowed: up to 32"):
        batch.submit([1] * 30, max_new_tokens=4)


# Prefixes -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def prefilled(monkeypatch):
    """How many tokens each pass of prompts computed."""
    counted = []
    prefill = qf.passes.Passes.prefill

    def counting(self, step, requests, counts):
        counted.append(sum(counts))
        return prefill(self, step, requests, counts)

    monkeypatch.setattr(qf.passes.Passes, "prefill", counting)
    return counted


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_prompts_that_begin_alike_share_pages(family, prefilled):
    """They come at once: the first one computes the pages, and the others wait for them."""
    batch = batcher(family)
    system = prompts()[0][:35]
    requests = [batch.submit([*system, 7 * i, 3], max_new_tokens=NEW) for i in range(1, 4)]
    batch.step()
    batch.step()
    pages = [batch.kv.pages_of(request.sequence) for request in requests]
    assert pages[0][:2] == pages[1][:2] == pages[2][:2] and len({tuple(x) for x in pages}) == 3
    batch.run()
    assert are_alone(requests, family) and prefilled == [37, 5 + 5] and are_pages_free(batch)


def test_a_prefix_is_kept_until_its_pages_are_needed(prefilled):
    batch = batcher(pages=8)
    first = batch.submit(prompts()[0], max_new_tokens=NEW)
    batch.run()
    follow_up = prompts()[0] + first.tokens + [5, 6]
    again, longer = batch.submit(prompts()[0], max_new_tokens=NEW), batch.submit(follow_up, max_new_tokens=NEW)
    batch.run()
    # 51 tokens were written, three pages of them whole: two of the prompt, one with what came after it.
    assert prefilled == [40, 8 + 54 - 48] and are_alone([first, again, longer])
    assert batch.kv.free_pages == 4  # the longest has those of all others
    large = batch.submit(tiny.tokens(1, 110)[0].flip(0), max_new_tokens=NEW)
    batch.run()
    assert are_alone([large]) and prefilled[-1] == 110 and are_pages_free(batch)


def test_prefixes_may_be_left_alone(prefilled):
    batch = batcher(share_prefixes=False)
    requests = [batch.submit(prompts()[0], max_new_tokens=NEW) for _ in range(2)]
    batch.run()
    assert are_alone(requests) and prefilled == [80] and batch.kv.free_pages == batch.kv.pages


# What ends a request alone --------------------------------------------------------------------------------------------


def test_stream_and_cancel():
    batch, seen = batcher(), []
    requests = submitted(batch)
    watched = batch.submit(prompts()[1], max_new_tokens=NEW, stream=seen.append)
    never = batch.submit(prompts()[1], max_new_tokens=NEW)
    never.cancel()
    for _ in range(3):
        batch.step()
    requests[0].cancel()
    assert not requests[0].is_done and batch.step() and requests[0].is_done
    batch.run()
    assert requests[0].is_cancelled and requests[0].tokens == alone("llama", requests[0].ids)[: len(requests[0].tokens)]
    assert never.is_done and never.tokens == [] and requests[0].error is None and 0 < len(requests[0].tokens) < NEW
    assert are_alone([*requests[1:], watched]) and seen == watched.tokens and are_pages_free(batch)
    requests[1].cancel()
    assert not requests[1].is_cancelled  # it was over


def test_the_last_token_comes_before_a_cancel():
    batch = batcher()
    request = batch.submit(prompts()[0], max_new_tokens=1, stream=lambda token: request.cancel())
    batch.run()
    assert not request.is_cancelled and are_alone([request])


def test_a_stream_that_raises(caplog):
    batch = batcher()

    def raises(token):
        raise OSError("the client has gone")

    failed, *others = batch.submit(prompts()[0], max_new_tokens=NEW, stream=raises), *submitted(batch)
    with caplog.at_level(logging.WARNING):
        batch.run()
    assert isinstance(failed.error, OSError) and failed.is_done and len(failed.tokens) == 1
    assert "a request failed: OSError: the client has gone" in caplog.text
    assert are_alone(others) and are_pages_free(batch)


def test_a_stream_may_submit_and_cancel_and_may_not_step():
    batch, more = batcher(), []

    def stream(token):
        if not more:
            more.append(batch.submit(prompts()[1], max_new_tokens=NEW))
            request.cancel()
        with pytest.raises(RuntimeError, match="a round is computed already"):
            batch.step()

    request = batch.submit(prompts()[0], max_new_tokens=NEW, stream=stream)
    batch.run()
    assert request.is_cancelled and len(request.tokens) < NEW and are_alone(more)


@pytest.mark.parametrize("at", [1, 3], ids=["prompts", "decoding"])
def test_an_exception_inside_the_model(at, monkeypatch):
    """The requests of that pass fail with it, their pages are free, and those that come later are served."""
    batch = batcher(slots=2)
    requests = submitted(batch)
    mlp, calls = tiny.decoder("llama").model.layers[1].mlp, []
    forward = mlp.forward

    def fails(x):
        calls.append(x)
        if len(calls) == at:
            raise RuntimeError("out of memory")
        return forward(x)

    monkeypatch.setattr(mlp, "forward", fails)
    batch.run()
    assert [type(request.error) for request in requests] == [RuntimeError] * 2 + [type(None)] * 3
    assert are_alone(requests[2:]) and are_pages_free(batch)


@pytest.mark.parametrize("at", [1, 2, 5])
def test_an_interrupt(at, monkeypatch):
    """Nothing is lost: the same requests go on in the next round."""
    batch = batcher()
    requests, seen = submitted(batch), []
    watched = batch.submit(prompts()[1], max_new_tokens=NEW, stream=lambda token: interrupting(seen, token))
    mlp, calls = tiny.decoder("llama").model.layers[1].mlp, []
    forward = mlp.forward

    def interrupting(calls, x):
        calls.append(x)
        if len(calls) == at:
            raise KeyboardInterrupt
        return x

    monkeypatch.setattr(mlp, "forward", lambda x: forward(interrupting(calls, x)))
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            batch.run()
    batch.run()
    assert are_alone([*requests, watched]) and seen == watched.tokens and are_pages_free(batch)


@pytest.mark.parametrize("at", [1, 5])
@pytest.mark.parametrize(
    ("part", "name"),
    [("kv", "truncate"), ("kv", "extend"), ("kv", "close"), ("", "_promised"), ("", "_end"), ("_prefixes", "keep")],
)
def test_an_interrupt_while_pages_change_hands(part, name, at, monkeypatch):
    """No request is lost, no token is told twice, and all pages come back."""
    batch = batcher(pages=5, prefill_tokens=24)
    owner = getattr(batch, part) if part else batch
    function, calls = getattr(owner, name), []

    def interrupted(*args, **words):
        result = function(*args, **words)
        calls.append(result)
        if len(calls) == at:
            raise KeyboardInterrupt
        return result

    monkeypatch.setattr(owner, name, interrupted)
    ids, seen = prompts()[0], [[] for _ in range(6)]
    lengths = ((3, 60), (20, 50), (20, 8), (33, 40), (5, 60), (33, 1))
    requests = [
        batch.submit(ids[:n], max_new_tokens=new, stream=told.append)
        for (n, new), told in zip(lengths, seen, strict=True)
    ]
    with pytest.raises(KeyboardInterrupt):
        batch.run()
    batch.run()
    assert are_alone(requests) and seen == [request.tokens for request in requests] and are_pages_free(batch)
    assert any(request.preempted for request in requests)


# Threads, and many requests -------------------------------------------------------------------------------------------


def test_threads_submit_while_rounds_are_computed():
    batch = batcher()
    with ThreadPoolExecutor(4) as pool:
        sent = [pool.submit(batch.submit, prompt, max_new_tokens=NEW) for prompt in prompts() * 4]
        while batch.step() or not all(future.done() for future in sent):
            pass
        assert not batch.step() or batch.run() is None
    assert are_alone([future.result() for future in sent]) and are_pages_free(batch)


def test_two_threads_with_a_batcher_each_over_one_model():
    """The model keeps qflash's attention until both have left it; the first one leaves while the other is in a pass."""
    model, one, other = tiny.decoder("llama"), batcher(), batcher()
    first, second = one.submit(prompts()[0], max_new_tokens=NEW), other.submit(prompts()[2], max_new_tokens=NEW)
    embed, left = model.get_input_embeddings(), []

    def leave_and_look(*_):
        if not left:
            left.append(True)
            with ThreadPoolExecutor(1) as pool:
                pool.submit(one.run).result()
            left.append(model.config._attn_implementation)

    with ThreadPoolExecutor(1) as pool:
        hook = embed.register_forward_hook(leave_and_look)
        try:
            pool.submit(other.run).result()
        finally:
            hook.remove()
    assert are_alone([first, second]) and left == [True, "qf"] and model.config._attn_implementation == "eager"


def test_two_hundred_requests_that_come_and_go():
    """Arrivals, lengths, streams that raise and cancels are seeded; pages are too few for all of them."""
    dice = random.Random(3)
    batch = batcher(pages=8, slots=6, prefill_tokens=24)
    choices = [tuple(prompt[:n]) for prompt in prompts() for n in (5, 20, 37)]
    requests, left = [], 200
    while batch.step() or left:
        for _ in range(min(left, dice.choice((0, 0, 1, 5)))):
            stream = (lambda token: 1 / (token % 5)) if dice.random() < 0.05 else None
            requests.append(
                batch.submit(list(dice.choice(choices)), max_new_tokens=dice.choice((1, 4, 7, 30)), stream=stream)
            )
            left -= 1
        if requests and dice.random() < 0.2:
            dice.choice(requests[-8:]).cancel()
    assert len(requests) == 200 and all(request.is_done for request in requests)
    for request in requests:
        whole = alone("llama", request.ids, 30)[: request.max_new_tokens]
        is_whole = request.error is None and not request.is_cancelled
        assert request.tokens == (whole if is_whole else whole[: len(request.tokens)])
        assert request.error is None or isinstance(request.error, ZeroDivisionError)
    for happened in ("preempted", "is_cancelled", "error"):
        assert any(getattr(request, happened) for request in requests), happened
    assert are_pages_free(batch)
