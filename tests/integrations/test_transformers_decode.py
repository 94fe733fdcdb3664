"""generate and Decoder: the decode loop over pages, batches of several sizes, what is refused, and what is drawn."""

from __future__ import annotations

import copy
import functools
import gc
import math
import re
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("transformers")

import torch
import transformers

import qflash
import qflash.integrations.transformers as qf
from qflash.integrations.transformers import decoding
from qflash.integrations.transformers.causal_model import CausalModel
from qflash.integrations.transformers.mask import UNPADDED
from qflash.integrations.transformers.sampling import Sampling
from qflash.testing import tiny_models as tiny

NEW = 12


def reference(family, rows=slice(None), padding="left", **words):
    model, mask = tiny.decoder(family), tiny.padding(padding)
    words = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0} | words
    with tiny.attention_by(model, tiny.reference_of(family)):
        return model.generate(tiny.tokens()[rows], attention_mask=mask[rows], **words)


def generated(family, padding="left", **words):
    """What qflash makes of the same batch."""
    words = {"max_new_tokens": NEW, "page_size": 16, "pad_token_id": 0} | words
    return qf.generate(tiny.decoder(family), tiny.tokens(), tiny.padding(padding), **words)


@pytest.mark.parametrize("padding", ["left", "ones"])
@pytest.mark.parametrize("family", tiny.DECODERS)
def test_tokens(family, padding):
    result = generated(family, padding)
    assert torch.equal(result.sequences, reference(family, padding=padding))
    assert torch.equal(result.new_tokens, result.sequences[:, tiny.LENGTH :]) and result.lengths == [NEW] * 3
    assert tiny.decoder(family).config._attn_implementation == "eager"  # as it was
    assert (result.is_captured, result.reason) == (False, "the model is on cpu")


def test_padding_on_the_right():
    """Each prompt goes on where it ends, as it does alone."""
    model, mask, ids = tiny.decoder("mistral"), tiny.padding("right"), tiny.tokens()
    got = qf.generate(model, ids, mask, max_new_tokens=NEW, page_size=16).new_tokens
    for row, length in enumerate(mask.sum(1).tolist()):
        alone = qf.generate(model, ids[row : row + 1, :length], max_new_tokens=NEW, page_size=16).new_tokens
        assert torch.equal(got[row : row + 1], alone)


def test_ends():
    """A sequence that has ended goes on with padding, and all of them end the loop."""
    free = reference("llama")[:, tiny.LENGTH :]
    end = int(free[0, 3])
    want = reference("llama", eos_token_id=end)
    result = generated("llama", eos_token_id=end)
    assert torch.equal(result.sequences, want)
    assert result.lengths[0] == free[0].tolist().index(end) + 1
    ends = [int(row[2]) for row in free]  # one for each: the loop is over early
    result = generated("llama", eos_token_id=ends)
    assert torch.equal(result.sequences, reference("llama", eos_token_id=ends))
    assert result.new_tokens.shape[1] == max(result.lengths) <= 3


def test_ends_are_those_of_the_model(monkeypatch):
    end = int(reference("llama")[1, tiny.LENGTH + 4])
    want = reference("llama", eos_token_id=end)
    monkeypatch.setattr(tiny.decoder("llama").generation_config, "eos_token_id", end)
    assert torch.equal(generated("llama").sequences, want)
    assert generated("llama", eos_token_id=()).lengths == [NEW] * 3


def test_looking_seldom_changes_nothing(monkeypatch):
    """On a GPU the host looks for ends once in a while; what came after an end is cut off."""
    end = [int(row[2]) for row in reference("llama")[:, tiny.LENGTH :]]
    want = generated("llama", eos_token_id=end)
    monkeypatch.setattr(decoding._DecodeStep, "_is_over", lambda self, index, stream: False)
    got = generated("llama", eos_token_id=end)
    assert torch.equal(got.sequences, want.sequences) and got.lengths == want.lengths


def test_stream():
    end = int(reference("llama")[0, tiny.LENGTH + 3])
    steps = []
    result = generated("llama", eos_token_id=end, stream=steps.append)
    for row, length in enumerate(result.lengths):
        told = [step[row] for step in steps]
        assert told[:length] == result.new_tokens[row, :length].tolist() and set(told[length:]) <= {None}
    assert min(result.lengths) < NEW


def test_int8_pages():
    result = qf.generate(
        tiny.decoder("llama"),
        tiny.tokens(),
        tiny.padding("left"),
        max_new_tokens=4,
        cache_precision="int8",
        page_size=16,
    )
    assert result.new_tokens.shape == (3, 4)


# Decoder --------------------------------------------------------------------------------------------------------------


def test_a_decoder_serves_batches_of_several_sizes():
    decoder = qf.Decoder(tiny.decoder("mistral"), pages=32, page_size=16)
    for rows in (slice(1), slice(3), slice(2), slice(3)):
        got = decoder.generate(tiny.tokens()[rows], tiny.padding("left")[rows], max_new_tokens=NEW)
        assert torch.equal(got.sequences, reference("mistral", rows))
        assert decoder.cache.kv.free_pages == 32
    assert len(decoder._steps) == 3


def test_a_batch_that_does_not_fit():
    decoder = qf.Decoder(tiny.decoder("llama"), pages=4, page_size=16)
    with pytest.raises(qflash.OutOfPagesError):  # while tokens are generated
        decoder.generate(tiny.tokens(), max_new_tokens=NEW)
    assert decoder.cache.kv.free_pages == 4
    got = decoder.generate(tiny.tokens()[:2], tiny.padding("left")[:2], max_new_tokens=NEW)
    assert torch.equal(got.sequences, reference("llama", slice(2)))


def test_pages_that_run_out_after_all_have_ended(monkeypatch):
    """On a GPU the host learns of an end some tokens later."""
    end = [int(row[2]) for row in reference("llama")[:, tiny.LENGTH :]]
    decoder, words = qf.Decoder(tiny.decoder("llama"), pages=3, page_size=16), {"max_new_tokens": NEW}
    want = decoder.generate(tiny.tokens(), tiny.padding("left"), **words, eos_token_id=end)
    monkeypatch.setattr(decoding._DecodeStep, "_is_over", lambda self, index, stream: False)
    got = decoder.generate(tiny.tokens(), tiny.padding("left"), **words, eos_token_id=end)
    assert torch.equal(got.sequences, want.sequences)
    with pytest.raises(qflash.OutOfPagesError):
        decoder.generate(tiny.tokens(), tiny.padding("left"), **words, eos_token_id=end[0])


@pytest.mark.parametrize("owner", ["PagedCache", "Decoder", "Batcher"])
def test_pages_are_free_with_their_owner(owner, graphs):
    """At once, and not when the collector comes: they may be most of a GPU's memory. So are graphs."""
    model, ids = tiny.decoder("llama"), tiny.tokens()
    sizes = {"pages": 16, "page_size": 16}
    if owner == "PagedCache":
        qf.register()
        made = qf.PagedCache(model.config, **sizes)
        with tiny.attention_by(model, "qf"), torch.no_grad():
            model(ids, past_key_values=made)
    elif owner == "Decoder":
        made = qf.Decoder(model, **sizes)
        assert made.generate(ids, max_new_tokens=4).is_captured
    else:
        made = qf.Batcher(model, **sizes)
        made.submit(ids[0], max_new_tokens=5)
        made.run()
    cache = made.cache if owner == "Decoder" else made
    watched, captures = weakref.ref(cache.kv), graphs.captures
    gc.collect()
    gc.disable()
    try:
        del made, cache
        assert watched() is None and graphs.held == 0 and captures == (owner != "PagedCache")
    finally:
        gc.enable()


def test_steps_are_bounded(monkeypatch):
    """Each has tables and a graph, and callers may ask for as many temperatures as there are numbers."""
    monkeypatch.setattr(decoding, "MOST_STEPS", 2)
    decoder, ids = qf.Decoder(tiny.decoder("llama"), pages=4, page_size=16), tiny.tokens(1)
    steps = []
    for temperature in (1.0, 2.0, 1.0, 3.0):
        decoder.generate(ids, max_new_tokens=1, do_sample=True, temperature=temperature)
        steps.append(next(reversed(decoder._steps.values())))
    assert steps[2] is steps[0] and list(decoder._steps.values()) == [steps[0], steps[3]]


def test_a_decoder_at_work_refuses_another_call():
    decoder, refusals = qf.Decoder(tiny.decoder("llama"), pages=8, page_size=16), []

    def generates(_):
        with pytest.raises(RuntimeError, match="the Decoder is generating already; allowed: one call at a time"):
            decoder.generate(tiny.tokens(1), max_new_tokens=1)
        refusals.append(1)

    got = decoder.generate(tiny.tokens(), tiny.padding("left"), max_new_tokens=NEW, stream=generates)
    assert torch.equal(got.sequences, reference("llama")) and len(refusals) == NEW


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2"])
def test_a_stream_may_run_the_model(family):
    """What a Decoder leaves out of its own passes is left out of no other: a dynamic cache, which rotates nothing, got
    keys as they were before."""
    model, ids = tiny.decoder(family), tiny.tokens()
    logits = []

    def runs(_):
        with torch.no_grad():
            logits.append(model(ids).logits)

    result = generated(family, stream=runs, max_new_tokens=3)
    assert torch.equal(result.sequences, reference(family, max_new_tokens=3))
    assert family == "gpt2" or len(result.fused["rope"]) == 2
    with tiny.attention_by(model, tiny.reference_of(family)), torch.no_grad():
        want = model(ids).logits
    assert all((got - want).abs().max() <= 1e-5 for got in logits) and len(logits) == 3


def test_inference_mode_does_not_stay():
    """Pages and tables that were made in it serve calls outside."""
    decoder, ids = qf.Decoder(tiny.decoder("llama"), pages=8, page_size=16), tiny.tokens()
    with torch.inference_mode():
        first = decoder.generate(ids, max_new_tokens=3)
    assert torch.equal(decoder.generate(ids, max_new_tokens=3).sequences, first.sequences)
    with tiny.attention_by(tiny.decoder("llama"), "qf") as model:
        cache = qf.PagedCache(model.config, pages=8, page_size=16)
        with torch.inference_mode():
            model(ids, past_key_values=cache)
        with torch.no_grad():
            got, want = model(ids[:, :1], past_key_values=cache).logits, model(torch.cat([ids, ids[:, :1]], 1)).logits
    torch.testing.assert_close(got[:, 0], want[:, -1], atol=1e-5, rtol=0)


def test_gradient_checkpointing_keeps_no_cache():
    model = copy.deepcopy(tiny.decoder("llama"))
    model.gradient_checkpointing_enable()
    assert torch.equal(qf.generate(model, tiny.tokens(), max_new_tokens=1).sequences[:, :-1], tiny.tokens())
    with pytest.raises(NotImplementedError, match=r"LlamaForCausalLM trains with gradient .*; allowed: model\.eval"):
        qf.generate(model.train(), tiny.tokens(), max_new_tokens=2)
    assert model.training and model.config._attn_implementation == "eager"


@pytest.mark.slow
def test_a_model_whose_forward_is_compiled():
    """Its graphs know nothing of forwards that leave the rotation out."""
    model = copy.deepcopy(tiny.decoder("llama"))
    torch.compiler.reset()
    model.forward = torch.compile(model.forward, backend="eager")
    got = qf.generate(model, tiny.tokens(), tiny.padding("left"), max_new_tokens=4, page_size=16)
    assert torch.equal(got.sequences, reference("llama", max_new_tokens=4))


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ({"temperature": 0.0}, r"temperature is 0\.0; allowed: more than 0"),
        ({"top_k": 0}, "top_k is 0"),
        ({"top_p": 1.5}, r"top_p is 1\.5"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"max_new_tokens": -20}, "max_new_tokens is -20"),
        ({"max_new_tokens": 2.0}, r"max_new_tokens is 2\.0; allowed: an int"),
        ({"top_k": 2.5}, r"top_k is 2\.5; allowed: None, or an int"),
        ({"temperature": math.inf}, "temperature is inf; allowed: more than 0 and finite"),
        ({"temperature": None}, "temperature is None; allowed: a number"),
        ({"temperature": True}, "temperature is True; allowed: a number"),
        ({"top_k": True}, "top_k is True; allowed: None, or an int"),
        ({"top_p": "0.9"}, "top_p is '0.9'; allowed: None, or a number"),
        ({"do_sample": "yes"}, "do_sample is 'yes'; allowed: True or False"),
        ({"seed": 1.5}, r"seed is 1\.5; allowed: None, or an int"),
        ({"seed": 2**64}, r"seed is 18446744073709551616; allowed: None, or -2\^63 to"),
        ({"eos_token_id": "</s>"}, "eos_token_id is '</s>'"),
        ({"eos_token_id": 1.5}, r"eos_token_id is 1\.5; allowed: None, an int or several"),
        ({"eos_token_id": [5, 99]}, "eos_token_id is 99; allowed: 0 to 98"),
        ({"pad_token_id": -1}, "pad_token_id is -1; allowed: 0 to 98"),
        ({"pad_token_id": "0"}, "pad_token_id is '0'; allowed: an int, 0 to 98"),
        ({"page_size": 0}, "page_size is 0; allowed: 16, 32, 64, 128, 256"),
        ({"page_size": "16"}, "page_size is '16'; allowed: an int"),
        ({"cache_precision": "int4"}, "cache_precision is 'int4'; allowed: None, 'int8'"),
        ({"stream": 3}, "stream is 3; allowed: None, or a function"),
        ({"capture": "no"}, "capture is 'no'; allowed: True or False"),
        ({"fuse": None}, "fuse is None; allowed: True or False"),
    ],
)
def test_words_out_of_range(words, text):
    with pytest.raises((ValueError, TypeError), match=text):
        qf.generate(tiny.decoder("llama"), tiny.tokens(), **{"max_new_tokens": 2, "do_sample": True} | words)


@pytest.mark.parametrize(
    ("ids", "text"),
    [
        ([[1, 2]], "input_ids is list; allowed: a tensor"),
        (tiny.tokens()[0], r"input_ids has shape \[14\]; allowed: \[batch, length\]"),
        (tiny.tokens()[:, :0], r"input_ids has shape \[3, 0\]"),
        (tiny.tokens()[:0], r"input_ids has shape \[0, 14\]"),
        (tiny.tokens().float(), r"input_ids has dtype torch\.float32; allowed: int64, int32"),
        (torch.tensor([[5, 99], [6, 7]]), r"input_ids\[0, 1\] is 99; allowed: 0 to 98"),
        (torch.tensor([[5, 6], [-100, 7]]), r"input_ids\[1, 0\] is -100; allowed: 0 to 98"),
    ],
    ids=["list", "one dimension", "no tokens", "no sequences", "float", "above", "below"],
)
def test_what_are_no_prompts(ids, text):
    decoder = qf.Decoder(tiny.decoder("llama"), pages=4, page_size=16)
    with pytest.raises((ValueError, TypeError), match=text):
        qf.generate(tiny.decoder("llama"), ids, max_new_tokens=2)
    with pytest.raises((ValueError, TypeError), match=text):
        decoder.generate(ids, max_new_tokens=2)


def test_what_are_no_models():
    for model in (None, "gpt2", torch.nn.Linear(2, 2), tiny.decoder("llama").model, tiny.bert()):
        with pytest.raises(TypeError, match=f"model is {type(model).__name__}; allowed: a model of transformers for"):
            qf.generate(model, tiny.tokens(), max_new_tokens=2)


def test_learned_positions():
    """A token beyond them would be looked up past the end of an embedding; the last one is looked up nowhere."""
    model, ids = tiny.decoder("gpt2"), tiny.tokens()
    room = model.config.n_positions - tiny.LENGTH
    with pytest.raises(ValueError, match=f"max_new_tokens is {room + 2}, .*of 14; allowed: up to {room + 1}, because"):
        qf.generate(model, ids, max_new_tokens=room + 2)
    limits = {family: CausalModel(tiny.decoder(family), fuse=False).learned_positions for family in tiny.DECODERS}
    assert limits == dict.fromkeys(tiny.DECODERS) | {"gpt2": 128}


def test_a_config_whose_padding_is_no_token(monkeypatch):
    """Steps embed what follows an end, so -1, which configs have in the place of none, is passed over."""
    end = int(generated("llama").new_tokens[0, 1])
    want = generated("llama", eos_token_id=end, pad_token_id=end).sequences
    monkeypatch.setattr(tiny.decoder("llama").generation_config, "pad_token_id", -1)
    assert torch.equal(generated("llama", eos_token_id=end, pad_token_id=None).sequences, want)


@pytest.mark.parametrize("shape", [(3, 12), (3, 16), (1, 14), (2, 14), (3, 1, 14, 14)], ids=str)
def test_a_padding_mask_of_another_shape(shape):
    """A narrower one would otherwise drop the last tokens of the prompts in silence."""
    with pytest.raises(ValueError, match=r"attention_mask has shape .* allowed: that of input_ids, \[3, 14\]"):
        qf.generate(tiny.decoder("llama"), tiny.tokens(), torch.ones(shape), max_new_tokens=2)


def test_ids_on_another_device():
    decoder = qf.Decoder(tiny.decoder("llama"), pages=8, page_size=16)
    with pytest.raises(ValueError, match="input_ids is on meta; allowed: the model's device, cpu"):
        decoder.generate(tiny.tokens().to("meta"), max_new_tokens=1)
    with pytest.raises(ValueError, match="attention_mask is on meta; allowed: the device of input_ids, cpu"):
        decoder.generate(tiny.tokens(), tiny.padding("left").to("meta"), max_new_tokens=1)


def test_a_prompt_of_padding_alone():
    mask = tiny.padding("left")
    mask[1] = 0
    with pytest.raises(ValueError, match=r"attention_mask has no token in rows \[1\]"):
        qf.generate(tiny.decoder("llama"), tiny.tokens(), mask, max_new_tokens=2)


def test_whatever_is_not_0_in_a_mask_is_a_token():
    mask = tiny.padding("left") * torch.arange(tiny.LENGTH, 0, -1)
    got = qf.generate(tiny.decoder("llama"), tiny.tokens(), mask, max_new_tokens=NEW, page_size=16)
    assert torch.equal(got.sequences, reference("llama"))


def test_pages_of_another_type():
    """Steps of other batch sizes have tables of pages that are gone, and make new ones."""
    model, ids = copy.deepcopy(tiny.decoder("llama")), tiny.tokens()
    decoder, new = qf.Decoder(model, pages=8, page_size=16), {"max_new_tokens": NEW}
    want = [decoder.generate(ids[:rows], **new).new_tokens for rows in (1, 2)]
    old = weakref.ref(decoder.cache.kv)
    with torch.autocast("cpu", torch.bfloat16):
        for rows in (1, 2):
            assert decoder.generate(ids[:rows], **new).new_tokens.shape == (rows, NEW)
    gc.collect()
    assert old() is None  # no step keeps its memory
    for rows, tokens in zip((2, 1), reversed(want), strict=True):
        assert torch.equal(decoder.generate(ids[:rows], **new).new_tokens, tokens)


def test_autocast():
    """Rotated keys are float32 under autocast and values are not; pages have the type that autocast computes in."""
    with tiny.attention_by(tiny.decoder("llama"), "qf") as model, torch.no_grad():
        with torch.autocast("cpu", torch.bfloat16):
            cache = qf.PagedCache(model.config, pages=8, page_size=16)
            got, want = (model(tiny.tokens(), past_key_values=x).logits.float() for x in (cache, None))
            assert generated("llama").lengths == [NEW] * 3
        exact = model(tiny.tokens()).logits
    assert (got - exact).norm() <= 2 * (want - exact).norm()


def test_threads_share_a_model():
    model, ids = tiny.decoder("llama"), tiny.tokens()
    with ThreadPoolExecutor(3) as pool:
        runs = [pool.submit(qf.generate, model, row[None], max_new_tokens=NEW, page_size=16) for row in ids]
        got = torch.cat([run.result().sequences for run in runs])
    assert model.config._attn_implementation == "eager"  # as it was
    assert torch.equal(got, reference("llama", padding="ones"))


# attn_implementation, during a call and afterwards -------------------------------------------------------------------


@functools.lru_cache(maxsize=1)
def gemma3_with_images():
    """A model of several parts, each of which has an attn_implementation."""
    vision = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2)
    vision = transformers.SiglipVisionConfig(**vision, image_size=16, patch_size=8)
    words = dict(mm_tokens_per_image=4, image_token_index=98, eos_token_id=None, pad_token_id=0)
    config = transformers.Gemma3Config(text_config=tiny.DECODERS["gemma3"](), vision_config=vision, **words)
    torch.manual_seed(1)
    return transformers.Gemma3ForConditionalGeneration(config).eval()


def attention_of(model):
    configs = model.config, model.config.text_config, model.config.vision_config
    return tuple(config._attn_implementation for config in configs)


def set_attention(model, whole, text, vision):
    qf.register()
    model.set_attn_implementation({"": whole, "text_config": text, "vision_config": vision})
    assert attention_of(model) == (whole, text, vision)


# What the model, its text decoder and its part for images have, and what they have meanwhile.
IN_PARTS = {
    ("sdpa", "eager", "sdpa"): ("qf", "qf", "sdpa"),
    ("sdpa", "sdpa", "eager"): ("qf", "qf", "eager"),
    ("sdpa", "qf_int8", "eager"): ("qf", "qf_int8", "eager"),
    ("qf", "sdpa", "eager"): ("qf", "qf", "eager"),
    ("qf_int8", "eager", "qf"): ("qf_int8", "qf", "qf"),
    ("sdpa", "qf", "sdpa"): ("qf", "qf", "sdpa"),
    ("qf", "qf", "sdpa"): ("qf", "qf", "sdpa"),
}


@pytest.mark.parametrize("before", IN_PARTS, ids=str)
def test_a_model_of_several_parts(before):
    """Its text decoder's attention counts, and that of other parts is left alone."""
    model, seen = gemma3_with_images(), set()
    with tiny.attention_by(model, "sdpa"):
        want = model.generate(tiny.tokens(), max_new_tokens=4, do_sample=False)
    set_attention(model, *before)
    batch = qf.Batcher(model, pages=8, page_size=16)
    assert attention_of(model) == before
    request = batch.submit(tiny.tokens()[0], max_new_tokens=4, stream=lambda _: seen.add(attention_of(model)))
    batch.run()
    assert attention_of(model) == before
    words = {"max_new_tokens": 4, "page_size": 16, "stream": lambda _: seen.add(attention_of(model))}
    got = qf.generate(model, tiny.tokens(), **words)
    assert attention_of(model) == before and seen == {IN_PARTS[before]}
    if "int8" not in before[1]:
        assert torch.equal(got.sequences, want) and request.tokens == want[0, tiny.LENGTH :].tolist()


def test_parts_of_a_model_that_users_share():
    """In calls around one another, and in threads: the last one hands back what the first one found."""
    model, ids, before = gemma3_with_images(), tiny.tokens(), ("sdpa", "eager", "sdpa")
    set_attention(model, *before)
    want, seen = qf.generate(model, ids, max_new_tokens=3, page_size=16).sequences, []

    def starts(_):
        seen.append(torch.equal(qf.generate(model, ids, max_new_tokens=3, page_size=16).sequences, want))
        seen.append(attention_of(model) == ("qf", "qf", "sdpa"))

    got = qf.generate(model, ids, max_new_tokens=3, page_size=16, stream=starts)
    assert torch.equal(got.sequences, want) and seen == [True] * 6 and attention_of(model) == before
    with ThreadPoolExecutor(4) as pool:
        runs = [pool.submit(qf.generate, model, ids, max_new_tokens=3, page_size=16) for _ in range(12)]
        assert all(torch.equal(run.result().sequences, want) for run in runs)
    assert attention_of(model) == before


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_attention_that_cannot_be_set_everywhere(error, monkeypatch):
    """The model itself has it already when the text decoder refuses."""
    model, before, found = gemma3_with_images(), ("sdpa", "eager", "sdpa"), []
    set_attention(model, *before)

    def refused(*_, **__):
        found.append(attention_of(model))
        raise error("refused")

    monkeypatch.setattr(type(model.model.language_model), "get_correct_attn_implementation", refused)
    with pytest.raises(error, match="refused"):
        qf.generate(model, tiny.tokens(), max_new_tokens=2)
    assert found == [("qf", "eager", "sdpa")] and attention_of(model) == before
    monkeypatch.undo()
    assert qf.generate(model, tiny.tokens(), max_new_tokens=2).lengths == [2] * 3


@pytest.mark.parametrize("name", ["sdpa", "eager"])
def test_attention_that_is_changed_from_a_stream(name):
    model, text = tiny.decoder("llama"), r"gives its padding mask to pad, and there is none while qflash .*; allowed: "
    with pytest.raises(NotImplementedError, match=text):
        generated("llama", stream=lambda _: model.set_attn_implementation(name))
    assert model.config._attn_implementation == "eager"  # as it was
    batch = qf.Batcher(model, pages=8, page_size=16)
    request = batch.submit([1, 2, 3], max_new_tokens=3, stream=lambda _: model.set_attn_implementation(name))
    batch.run()
    assert model.config._attn_implementation == "eager" and re.search(text, str(request.error))


def test_a_padding_mask_that_is_none():
    with pytest.raises(NotImplementedError, match="the model slices its padding mask, and there is none while"):
        UNPADDED[:, -4:]
    with pytest.raises(AttributeError, match="the model asks for 'dtype' of its padding mask, and there is none"):
        UNPADDED.dtype  # noqa: B018
    for compute in (torch.cumsum, lambda mask, dim: torch.ones(3, 4) * mask):
        with pytest.raises(NotImplementedError, match=r"gives its padding mask to (cumsum|mul), and there is none"):
            compute(UNPADDED, 1)


def test_a_model_with_attention_of_its_own():
    sizes = {"vocab_size": tiny.VOCABULARY, "n_embd": 32, "n_layer": 1, "n_head": 4, "rotary_dim": 8, "n_positions": 64}
    model = transformers.GPTJForCausalLM(transformers.GPTJConfig(**sizes)).eval()
    with pytest.raises(NotImplementedError, match="GPTJForCausalLM has attention of its own, 'eager'"):
        qf.generate(model, tiny.tokens(), max_new_tokens=2)


def test_a_model_with_an_encoder():
    with pytest.raises(NotImplementedError, match="BartForConditionalGeneration has an encoder"):
        qf.generate(tiny.bart(), tiny.tokens(), max_new_tokens=2)


# Sampling -------------------------------------------------------------------------------------------------------------


def test_the_same_seed_draws_the_same():
    decoder = qf.Decoder(tiny.decoder("llama"), pages=32, page_size=16)
    words = {"max_new_tokens": NEW, "do_sample": True, "temperature": 2.0}
    one, same, other = (decoder.generate(tiny.tokens(), **words, seed=seed).new_tokens for seed in (3, 3, 4))
    assert torch.equal(one, same) and not torch.equal(one, other)


def test_the_least_temperature_draws_the_best_token():
    """Logits over it are more than float32 holds."""
    drawn = generated("llama", do_sample=True, temperature=1e-40, max_new_tokens=3)
    assert torch.equal(drawn.sequences, reference("llama", max_new_tokens=3))


def test_one_token_to_choose_from_is_the_best_one():
    want = reference("llama")
    for words in ({"top_k": 1}, {"top_p": 1e-6}, {"top_p": 1e-300}, {"temperature": 1e-4}):
        assert torch.equal(generated("llama", do_sample=True, **words).sequences, want), words


@pytest.mark.parametrize(
    "words", [{"top_k": 7}, {"top_p": 0.6}, {"top_k": 20, "top_p": 0.8}, {"temperature": 0.7}], ids=str
)
def test_tokens_that_are_left_out_are_those_of_transformers(words):
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(2)) * 3
    scores = (
        transformers.TemperatureLogitsWarper(words["temperature"])(None, logits) if "temperature" in words else logits
    )
    scores = transformers.TopKLogitsWarper(words["top_k"])(None, scores) if "top_k" in words else scores
    scores = transformers.TopPLogitsWarper(words["top_p"])(None, scores) if "top_p" in words else scores
    torch.testing.assert_close(Sampling(True, **words).filtered(logits), scores)


def test_draws_follow_the_weights():
    """40000 draws of three tokens: within five standard deviations of what is expected."""
    weights, count = torch.tensor([0.5, 0.3, 0.2]), 40000
    drawn = Sampling(True).choose(weights.log().expand(count, 3), torch.Generator().manual_seed(1))
    for token, weight in enumerate(weights.tolist()):
        expected, deviation = count * weight, math.sqrt(count * weight * (1 - weight))
        assert abs(int((drawn == token).sum()) - expected) < 5 * deviation
