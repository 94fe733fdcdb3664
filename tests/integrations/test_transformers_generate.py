"""Text generated with attn_implementation "qf": token for token what transformers' own attention generates."""

from __future__ import annotations

import copy
import doctest
import inspect

import pytest

pytest.importorskip("transformers")

import torch
import transformers

import qflash
import qflash.integrations.transformers as qf
from qflash.testing import tiny_models as tiny

qf.register()

NEW = 12  # tokens, which takes every sequence past the window


def generated(model, name, padding="left", **words):
    mask = tiny.padding(padding)
    with tiny.attention_by(model, name):
        words = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0} | words
        return model.generate(tiny.tokens(), attention_mask=mask, **words)


def pages(model, count=32, **words):
    return qf.PagedCache(model.config, pages=count, page_size=16, **words)


@pytest.mark.parametrize("padding", ["left", "ones"])
@pytest.mark.parametrize("family", tiny.DECODERS)
def test_every_cache(family, padding):
    model = tiny.decoder(family)
    want = generated(model, tiny.reference_of(family), padding)
    assert torch.equal(generated(model, "qf", padding), want), "dynamic cache"
    static = {"cache_implementation": "static", "disable_compile": True}
    assert torch.equal(generated(model, "qf", padding, **static), want), "static cache"
    assert torch.equal(generated(model, "qf", padding, past_key_values=pages(model)), want), "pages"


@pytest.mark.parametrize("family", tiny.DECODERS)
def test_beams(family):
    """Beams share pages until their tokens differ."""
    model = tiny.decoder(family)
    words = {"num_beams": 3, "num_return_sequences": 2}
    want = generated(model, tiny.reference_of(family), **words)
    assert torch.equal(generated(model, "qf", **words), want)
    cache = pages(model)
    assert torch.equal(generated(model, "qf", **words, past_key_values=cache), want)
    cache.reset()
    assert cache.kv.free_pages == 32


def test_a_static_cache_in_a_compiled_step():
    model = tiny.decoder("llama")
    want = generated(model, "sdpa")
    torch.compiler.reset()
    config = transformers.CompileConfig(fullgraph=True, backend="aot_eager", mode=None)
    config._compile_all_devices = True
    got = generated(model, "qf", cache_implementation="static", compile_config=config)
    assert torch.equal(got, want)


def test_right_padding_and_then_more():
    """Padding in the middle, once tokens have followed; PagedCache leaves it out."""
    model, mask, ids = tiny.decoder("llama"), tiny.padding("right"), tiny.tokens()
    longer = torch.cat([mask, torch.ones(3, 4, dtype=torch.int64)], 1)
    where = tiny.positions(longer)

    def run(name, cache):
        with tiny.attention_by(model, name), torch.no_grad():
            model(ids, attention_mask=mask, position_ids=where[:, :-4], past_key_values=cache)
            words = {"attention_mask": longer, "position_ids": where[:, -4:], "past_key_values": cache}
            return model(ids[:, :4], **words).logits

    want = run("sdpa", transformers.DynamicCache(config=model.config))
    torch.testing.assert_close(run("qf", transformers.DynamicCache(config=model.config)), want, atol=1e-5, rtol=0)
    torch.testing.assert_close(run("qf", pages(model)), want, atol=1e-5, rtol=0)


def test_whisper():
    model, sound = tiny.whisper(), torch.randn(2, 8, 40, generator=torch.Generator().manual_seed(3))
    words = {"max_new_tokens": 8, "do_sample": False}
    with tiny.attention_by(model, "sdpa"):
        want = model.generate(sound, **words)
    with tiny.attention_by(model, "qf"):
        assert torch.equal(model.generate(sound, **words), want)
        cache = transformers.EncoderDecoderCache(pages(model), transformers.DynamicCache())
        assert torch.equal(model.generate(sound, **words, past_key_values=cache), want)


@pytest.mark.parametrize("name", ["PagedCache", "generate", "register"])
def test_the_example_is_true(name):
    text = inspect.getdoc(getattr(qf, name))
    example = doctest.DocTestParser().get_doctest(text, {}, name, None, None)
    said: list[str] = []
    results = doctest.DocTestRunner().run(example, out=said.append)
    assert results.attempted and not results.failed, "".join(said)


# PagedCache -----------------------------------------------------------------------------------------------------------


def prefilled(model, **words):
    cache = pages(model, **words)
    mask = tiny.padding("left")
    with tiny.attention_by(model, "qf"), torch.no_grad():
        model(tiny.tokens(), attention_mask=mask, position_ids=tiny.positions(mask), past_key_values=cache)
    return cache, mask


def next_logits(model, cache, mask, ids):
    """Logits of one token more, by pages and by a dynamic cache that has the whole prompt."""
    longer = torch.cat([mask, torch.ones(len(mask), 1, dtype=torch.int64)], 1)
    words = {"attention_mask": longer, "position_ids": tiny.positions(longer)[:, -1:], "past_key_values": cache}
    with tiny.attention_by(model, "qf"), torch.no_grad():
        return model(ids, **words).logits[:, -1]


def whole_logits(model, ids, mask):
    with tiny.attention_by(model, "sdpa"), torch.no_grad():
        return model(ids, attention_mask=mask, position_ids=tiny.positions(mask)).logits[:, -1]


def test_padding_takes_no_place():
    cache, mask = prefilled(tiny.decoder("llama"))
    assert cache.get_seq_length() == tiny.LENGTH and cache.batch_size == 3
    assert [cache.kv.length(s) for s in cache._sequences] == mask.sum(1).tolist()


def test_layers_that_have_not_written():
    """While a pass is under way, a layer counts what it has seen itself."""
    cache, _ = prefilled(tiny.decoder("llama"))
    cache.advance()
    assert [cache.get_seq_length(layer) for layer in (0, 1)] == [tiny.LENGTH] * 2
    cache._written.add(0)
    assert [cache.get_seq_length(layer) for layer in (0, 1)] == [tiny.LENGTH + 1, tiny.LENGTH]


@pytest.mark.parametrize("tokens", [-3, 11])
def test_crop(tokens):
    """A negative number is how many tokens go, a positive one how many stay."""
    model = tiny.decoder("llama")
    cache, mask = prefilled(model)
    cache.crop(tokens)
    assert cache.get_seq_length() == 11
    got = next_logits(model, cache, mask[:, :11], torch.full((3, 1), 5))
    ids = torch.cat([tiny.tokens()[:, :11], torch.full((3, 1), 5)], 1)
    want = whole_logits(model, ids, torch.cat([mask[:, :11], torch.ones(3, 1, dtype=torch.int64)], 1))
    torch.testing.assert_close(got, want, atol=1e-5, rtol=0)


def test_crop_into_the_padding():
    cache, _ = prefilled(tiny.decoder("llama"))
    cache.crop(-(tiny.LENGTH - 3))
    assert cache.get_seq_length() == 3 and [cache.kv.length(s) for s in cache._sequences] == [0, 3, 2]
    cache.crop(-100)
    assert cache.get_seq_length() == 0


@pytest.mark.parametrize(
    ("change", "rows"),
    [
        (lambda cache: cache.reorder_cache(torch.tensor([2, 2, 0])), [2, 2, 0]),
        (lambda cache: cache.batch_select_indices(torch.tensor([2, 0])), [2, 0]),
        (lambda cache: cache.batch_select_indices(torch.tensor([False, True, True])), [1, 2]),
        (lambda cache: cache.batch_repeat_interleave(2), [0, 0, 1, 1, 2, 2]),
    ],
    ids=["reorder", "select", "flags", "repeat"],
)
def test_sequences_change_places(change, rows):
    model = tiny.decoder("llama")
    cache, mask = prefilled(model)
    change(cache)
    new = torch.arange(20, 20 + len(rows))[:, None]  # another token for each, so that shared pages part
    got = next_logits(model, cache, mask[rows], new)
    longer = torch.cat([mask[rows], torch.ones(len(rows), 1, dtype=torch.int64)], 1)
    want = whole_logits(model, torch.cat([tiny.tokens()[rows], new], 1), longer)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=0)


def test_a_cache_again():
    model = tiny.decoder("llama")
    cache = pages(model)
    first = generated(model, "qf", past_key_values=cache)
    cache.reset()
    assert cache.get_seq_length() == 0 and cache.kv.free_pages == 32
    assert torch.equal(generated(model, "qf", past_key_values=cache), first)


def test_pages_of_another_type_come_with_an_empty_cache():
    """Of a Decoder, too, whose model was moved. Where tokens are in the pages they are said to hold another type."""
    model = copy.deepcopy(tiny.decoder("llama"))
    cache, decoder = pages(model), qf.Decoder(model, pages=32, page_size=16)
    first = generated(model, "qf", past_key_values=cache)
    assert torch.equal(decoder.generate(tiny.tokens(), max_new_tokens=2).sequences[:, : tiny.LENGTH], tiny.tokens())
    model.to(torch.bfloat16)
    with pytest.raises(TypeError, match=r"keys are torch.bfloat16 on cpu; allowed: what its pages hold, torch.float32"):
        next_logits(model, cache, tiny.padding("left"), first[:, -1:])
    cache.reset()
    with tiny.attention_by(model, "qf"), torch.no_grad():
        got = model(tiny.tokens(), past_key_values=cache).logits[:, -1]
    assert cache.kv.dtype == torch.bfloat16
    assert torch.isfinite(got).all()
    assert decoder.generate(tiny.tokens(), max_new_tokens=2).sequences.shape == (3, tiny.LENGTH + 2)


def test_a_cache_of_another_models_config():
    model = tiny.decoder("llama")
    config = copy.deepcopy(model.config)
    config.num_hidden_layers = 1
    cache = qf.PagedCache(config, pages=8, page_size=16)
    with (
        tiny.attention_by(model, "qf"),
        torch.no_grad(),
        pytest.raises(ValueError, match="the model has a layer 1, and the cache was made for 1 layers"),
    ):
        model(tiny.tokens(), past_key_values=cache)


def test_assisted_generation():
    """Drafts from the prompt, of which the cache forgets those that are rejected."""
    model = tiny.decoder("llama")
    ids = tiny.tokens(1).repeat(1, 3)
    words = {"max_new_tokens": 16, "do_sample": False, "prompt_lookup_num_tokens": 4}
    with tiny.attention_by(model, "sdpa"):
        want = model.generate(ids, **words)
    with tiny.attention_by(model, "qf"):
        assert torch.equal(model.generate(ids, **words, past_key_values=pages(model)), want)


def test_out_of_pages():
    """The pass that finds no page raises; the cache is what it was, and goes on where there is room."""
    model = tiny.decoder("llama")
    cache = pages(model, count=2)
    with pytest.raises(qflash.OutOfPagesError, match="3 more pages"):
        generated(model, "qf", past_key_values=cache)
    assert cache.batch_size == -1 and cache.get_seq_length() == 0  # a smaller batch may come
    with tiny.attention_by(model, "qf"), torch.no_grad():
        model(tiny.tokens(2), past_key_values=cache)
    assert cache.kv.free_pages == 0
    cache, mask = prefilled(model, count=4)
    cache.kv.open()
    other = cache.kv.open()
    step = cache.kv.extend([other], 16)
    assert cache.kv.free_pages == 0 and step.total == 16
    token, longer = torch.full((3, 1), 5), mask
    for _ in range(2):
        next_logits(model, cache, longer, token)
        longer = torch.cat([longer, torch.ones(3, 1, dtype=torch.int64)], 1)
    with pytest.raises(qflash.OutOfPagesError):
        next_logits(model, cache, longer, token)  # the second sequence has 16 tokens
    assert cache.get_seq_length() == tiny.LENGTH + 2
    cache.kv.close(other)
    got = next_logits(model, cache, longer, token)
    ids = torch.cat([tiny.tokens(), token, token, token], 1)
    want = whole_logits(model, ids, torch.cat([longer, torch.ones(3, 1, dtype=torch.int64)], 1))
    torch.testing.assert_close(got, want, atol=1e-5, rtol=0)


def test_a_mask_that_hides_what_is_in_pages():
    model = tiny.decoder("llama")
    cache, mask = prefilled(model)
    mask[1, 3] = 0
    with pytest.raises(ValueError, match=r"attention_mask\[1, 3\] says padding, which was a token when it came"):
        next_logits(model, cache, mask, torch.full((3, 1), 5))
    assert cache.get_seq_length() == tiny.LENGTH


def test_a_mask_that_hides_another_token_and_shows_padding():
    """As many tokens as there are in the pages, and not the same ones."""
    model = tiny.decoder("llama")
    cache, mask = prefilled(model)
    mask[0, 0], mask[0, 9] = 1, 0
    with pytest.raises(ValueError, match=r"attention_mask\[0, 0\] says a token, which was padding when it came"):
        next_logits(model, cache, mask, torch.full((3, 1), 5))
    assert cache.get_seq_length() == tiny.LENGTH


def test_another_batch_size():
    model = tiny.decoder("llama")
    cache, mask = prefilled(model)
    with pytest.raises(ValueError, match="there are 2 sequences; allowed: as many as the cache has, 3"):
        next_logits(model, cache, mask[:2], torch.full((2, 1), 5))


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "gpt_oss"])
def test_int8_pages(family):
    """Logits within 3e-2 of those of 16-bit pages, relative L2, as the guide says; tokens may differ."""
    model = tiny.decoder(family)
    logits = []
    for precision in (None, "int8"):
        cache, mask = prefilled(model, precision=precision)
        logits.append(next_logits(model, cache, mask, torch.full((3, 1), 5)))
    error = float((logits[1] - logits[0]).norm() / logits[0].norm())
    assert 1e-5 < error < 3e-2
    assert generated(model, "qf", past_key_values=pages(model, precision="int8")).shape == (3, tiny.LENGTH + NEW)
