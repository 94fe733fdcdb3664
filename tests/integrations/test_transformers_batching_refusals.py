"""What a Batcher refuses: prompts, words of a request, sizes of its own, and models that it cannot serve."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")

import torch
import transformers

import qflash.integrations.transformers as qf
from qflash.testing import tiny_models as tiny

PAGE = 16


def batcher(**words):
    return qf.Batcher(tiny.decoder("llama"), **{"pages": 32, "page_size": PAGE, "slots": 4} | words)


@pytest.mark.parametrize(
    ("ids", "text"),
    [
        ("text", "ids is str; allowed: a tensor"),
        ([], "ids is empty"),
        (torch.ones(1, 4, dtype=torch.int64), r"ids has shape \[1, 4\]; allowed: \[length\]"),
        (torch.ones(4), r"ids has dtype torch\.float32"),
        ([1, 2.0], r"ids\[1\] is 2\.0; allowed: ints"),
        ([1, True], r"ids\[1\] is True"),
        ([1, 99], r"ids\[1\] is 99; allowed: 0 to 98"),
        ([-1], r"ids\[0\] is -1"),
    ],
    ids=str,
)
def test_what_is_no_prompt(ids, text):
    batch = batcher()
    with pytest.raises((ValueError, TypeError), match=text):
        batch.submit(ids, max_new_tokens=2)
    assert not batch.step()


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"top_p": 0.0}, r"top_p is 0\.0"),
        ({"seed": -1}, "seed is -1; allowed: 0 to"),
        ({"seed": 0.5}, r"seed is 0\.5; allowed: None, or an int"),
        ({"eos_token_id": "</s>"}, "eos_token_id is '</s>'"),
        ({"stream": 3}, "stream is 3; allowed: None, or a function"),
    ],
    ids=str,
)
def test_words_out_of_range(words, text):
    with pytest.raises((ValueError, TypeError), match=text):
        batcher().submit([1, 2], **{"max_new_tokens": 2, "do_sample": True} | words)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ({"slots": 0}, "slots is 0; allowed: 1 and more"),
        ({"prefill_tokens": 2.5}, r"prefill_tokens is 2\.5; allowed: an int"),
        ({"page_size": 17}, "page_size is 17"),
        ({"pages": 0}, "pages is 0"),
        ({"cache_precision": "fp8"}, "cache_precision is 'fp8'; allowed: None, 'int8'"),
        ({"share_prefixes": "no"}, "share_prefixes is 'no'; allowed: True or False"),
        ({"capture": None}, "capture is None"),
        ({"fuse": 2}, "fuse is 2"),
    ],
    ids=str,
)
def test_sizes_out_of_range(words, text):
    with pytest.raises((ValueError, TypeError), match=text):
        batcher(**words)


def test_models_that_are_not_served():
    sizes = {"vocab_size": tiny.VOCABULARY, "n_embd": 32, "n_layer": 1, "n_head": 4, "rotary_dim": 8, "n_positions": 64}
    model = transformers.GPTJForCausalLM(transformers.GPTJConfig(**sizes)).eval()
    with pytest.raises(NotImplementedError, match="GPTJForCausalLM has attention of its own"):
        qf.Batcher(model, pages=4)
    with pytest.raises(NotImplementedError, match="BartForConditionalGeneration has an encoder"):
        qf.Batcher(tiny.bart(), pages=4)


def test_a_window_that_the_model_does_not_make_a_mask_of():
    config = tiny.DECODERS["llama"]()
    config.layer_types = ["full_attention", "sliding_attention"]  # Llama makes one mask for all layers
    model = transformers.LlamaForCausalLM(config).eval()
    with pytest.raises(NotImplementedError, match="config says that the layer has a sliding window"):
        qf.Batcher(model, pages=4)


def test_a_layer_that_has_no_part_in_the_cache(monkeypatch):
    layer = tiny.decoder("llama").model.layers[1].self_attn
    forward = layer.forward
    monkeypatch.setattr(layer, "forward", lambda *args, past_key_values, **words: forward(*args, **words))
    with pytest.raises(NotImplementedError, match=r"layers \[1\] did not hand keys to the cache"):
        batcher()


def test_a_model_that_attention_cannot_serve_is_refused_before_any_request():
    config = tiny.DECODERS["llama"]()
    config.head_dim = 24
    model = transformers.LlamaForCausalLM(config).eval()
    with pytest.raises(ValueError, match="head_dim is 24; allowed: a multiple of 16 with precision 'int8'"):
        qf.Batcher(model, pages=4, page_size=PAGE, cache_precision="int8")
    assert model.config._attn_implementation != "qf"
