"""Logits and gradients of tiny models of transformers with attn_implementation "qf", against transformers' own."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("transformers")

import torch

import qflash.integrations.transformers as qf
from qflash.integrations.transformers.attention import qf_attention
from qflash.testing import tiny_models as tiny

qf.register()

TOLERANCE = 1e-5
MASKS = ("none", "ones", "left", "right", "both")


def logits(model, name, **words):
    with tiny.attention_by(model, name), torch.no_grad():
        return model(**words).logits


def decoder_words(kind):
    mask = tiny.padding(kind)
    return {"input_ids": tiny.tokens(), "attention_mask": mask, "position_ids": tiny.positions(mask)}


def exist(kind):
    """Which tokens are no padding, whose logits mean something."""
    mask = tiny.padding(kind)
    return torch.ones(3, tiny.LENGTH, dtype=torch.bool) if mask is None else mask.bool()


@pytest.mark.parametrize("family", tiny.DECODERS)
def test_decoders(family):
    model = tiny.decoder(family)
    for kind in MASKS:
        words = decoder_words(kind)
        got, want = logits(model, "qf", **words), logits(model, tiny.reference_of(family), **words)
        torch.testing.assert_close(got[exist(kind)], want[exist(kind)], atol=TOLERANCE, rtol=0, msg=f"padding {kind}")


@pytest.mark.parametrize("family", tiny.DECODERS)
def test_a_key_more_or_less_would_be_seen(family):
    """What the comparisons above would notice: padding that is looked at moves logits by far more than they allow."""
    words = decoder_words("left")
    got = logits(tiny.decoder(family), "qf", **words)
    other = logits(tiny.decoder(family), "qf", **words | {"attention_mask": torch.ones_like(words["attention_mask"])})
    assert (got - other)[exist("left")].abs().max() > 1000 * TOLERANCE


@pytest.mark.parametrize("family", ["mistral", "gemma3"])
def test_a_window_counts_its_tokens(family, monkeypatch):
    """A window of one token less or more is told apart."""
    model, ids = tiny.decoder(family), tiny.tokens()
    want = logits(model, "sdpa", input_ids=ids)
    for window in (tiny.WINDOW - 1, tiny.WINDOW + 1):
        monkeypatch.setattr(model.config, "sliding_window", window)
        other = logits(model, "qf", input_ids=ids)
        assert (other - want).abs().max() > 100 * TOLERANCE
        torch.testing.assert_close(other, logits(model, "sdpa", input_ids=ids), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_padding_with_holes(family):
    words = decoder_words("holes")
    got, want = (logits(tiny.decoder(family), name, **words) for name in ("qf", "sdpa"))
    torch.testing.assert_close(got[exist("holes")], want[exist("holes")], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "gemma3"])
def test_packed_position_ids(family):
    """Two to three sequences in a row, one of them longer than the window, and a row that is one sequence."""
    model, ids = tiny.decoder(family), tiny.tokens()
    lengths = ((4, 8, 2), (13, 1), (14,))
    packed = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])
    words = {"input_ids": ids, "position_ids": packed, "use_cache": False}
    got, want = logits(model, "qf", **words), logits(model, "sdpa", **words)
    torch.testing.assert_close(got, want, atol=TOLERANCE, rtol=0)
    alone = logits(model, "qf", input_ids=ids[:1, 4:12], use_cache=False)
    torch.testing.assert_close(got[:1, 4:12], alone, atol=TOLERANCE, rtol=0)


def test_packed_by_cu_seq_lens():
    """What DataCollatorWithFlattening gives beside position_ids; "sdpa" does not look at it."""
    model, ids = tiny.decoder("llama"), tiny.tokens(1)
    packed = torch.cat([torch.arange(n) for n in (4, 8, 2)])[None]
    starts = torch.tensor([0, 4, 12, 14], dtype=torch.int32)
    words = {"input_ids": ids, "position_ids": packed, "use_cache": False}
    lengths = {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts, "max_length_q": 8, "max_length_k": 8}
    got = logits(model, "qf", **words, **lengths, attention_mask=torch.ones_like(ids))
    torch.testing.assert_close(got, logits(model, "sdpa", **words), atol=TOLERANCE, rtol=0)
    # Those of keys alone, where they are others, count for keys.
    with pytest.raises(ValueError, match=r"cu_seqlens_k"):
        others = lengths | {"cu_seq_lens_k": torch.tensor([0, 4, 20])}
        logits(model, "qf", **words, **others, attention_mask=torch.ones_like(ids))
    with pytest.raises(TypeError, match="cu_seq_lens_q is list; allowed: None, or a tensor of int32 or int64"):
        logits(model, "qf", input_ids=ids, use_cache=False, cu_seq_lens_q=[0, 4, 14], max_length_q=10)
    cache = qf.PagedCache(model.config, pages=4, page_size=16)
    with pytest.raises(NotImplementedError, match="cu_seq_lens_q is given with padding, a cache or cross attention"):
        logits(model, "qf", input_ids=ids, past_key_values=cache, **lengths)


@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("family", ["llama", "mistral", "gpt2"])
def test_chunks_of_a_prompt_into_a_cache(family, kind):
    """Several queries that begin in the middle, with padding on both sides of a row."""
    import transformers

    model, mask = tiny.decoder(family), tiny.padding("left" if family == "mistral" else "both")
    where = tiny.positions(mask)

    def run(name):
        if kind == "dynamic":
            cache = transformers.DynamicCache(config=model.config)
        else:
            cache = transformers.StaticCache(config=model.config, max_cache_len=tiny.LENGTH + 5)
        parts = []
        for first, last in ((0, 8), (8, 9), (9, tiny.LENGTH)):
            words = {"attention_mask": mask[:, :last], "position_ids": where[:, first:last], "past_key_values": cache}
            parts.append(logits(model, name, input_ids=tiny.tokens()[:, first:last], **words))
        return torch.cat(parts, 1)[mask.bool()]

    torch.testing.assert_close(run("qf"), run("sdpa"), atol=TOLERANCE, rtol=0)


def hidden_states(model, name, *inputs, **words):
    with tiny.attention_by(model, name), torch.no_grad():
        return model(*inputs, **words).last_hidden_state


@pytest.mark.parametrize("kind", ["none", "left", "right", "both", "holes"])
def test_bert(kind):
    """Where nothing is aligned padding may look at what exists, too, and does."""
    words = {"input_ids": tiny.tokens(), "attention_mask": tiny.padding(kind)}
    got, want = (hidden_states(tiny.bert(), name, **words) for name in ("qf", "sdpa"))
    torch.testing.assert_close(got, want, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("kind", MASKS)
def test_windows_to_both_sides(kind):
    words = {"input_ids": tiny.tokens(), "attention_mask": tiny.padding(kind)}
    got, want = (hidden_states(tiny.modernbert(), name, **words)[exist(kind)] for name in ("qf", "sdpa"))
    torch.testing.assert_close(got, want, atol=TOLERANCE, rtol=0)


def test_vit():
    images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(3))
    got, want = (hidden_states(tiny.vit(), name, images) for name in ("qf", "sdpa"))
    torch.testing.assert_close(got, want, atol=TOLERANCE, rtol=0)


def test_whisper():
    sound = torch.randn(3, 8, 40, generator=torch.Generator().manual_seed(3))
    words = {"input_features": sound, "decoder_input_ids": tiny.tokens()}
    got, want = (logits(tiny.whisper(), name, **words) for name in ("qf", "sdpa"))
    torch.testing.assert_close(got, want, atol=TOLERANCE, rtol=0)


def test_cross_attention_to_a_padded_encoder():
    words = {
        "input_ids": tiny.tokens(),
        "attention_mask": tiny.padding("both"),
        "decoder_input_ids": tiny.tokens()[:, :5],
    }
    got, want = (logits(tiny.bart(), name, **words) for name in ("qf", "sdpa"))
    torch.testing.assert_close(got, want, atol=TOLERANCE, rtol=0)


def test_no_mask_means_from_the_first_key_on():
    """As transformers calls a static cache that is empty: keys past the queries do not exist yet."""
    random = torch.Generator().manual_seed(5)
    q, k, v = (torch.randn(2, 4, length, 16, generator=random) for length in (5, 9, 9))
    out, _ = qf_attention(SimpleNamespace(is_causal=True), q, k, v, None)
    want = torch.nn.functional.scaled_dot_product_attention(q, k[:, :, :5], v[:, :, :5], is_causal=True)
    torch.testing.assert_close(out.transpose(1, 2), want, atol=TOLERANCE, rtol=0)
    for words in ({"is_causal": False}, {}):
        out, _ = qf_attention(
            SimpleNamespace(is_causal=not words), q[:, :, :1] if not words else q, k, v, None, **words
        )
        want = torch.nn.functional.scaled_dot_product_attention(q[:, :, :1] if not words else q, k, v)
        torch.testing.assert_close(out.transpose(1, 2), want, atol=TOLERANCE, rtol=0)


def test_values_narrower_than_keys():
    """As in models that compress keys and values into a latent space."""
    random = torch.Generator().manual_seed(5)
    q, k = torch.randn(2, 2, 4, 9, 24, generator=random)
    v = torch.randn(2, 4, 9, 16, generator=random)
    for values in (v, torch.randn(2, 4, 9, 40, generator=random)):
        out, _ = qf_attention(SimpleNamespace(is_causal=True), q, k, values, None)
        want = torch.nn.functional.scaled_dot_product_attention(q, k, values, is_causal=True)
        torch.testing.assert_close(out.transpose(1, 2), want, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("kind", ["none", "left", "right"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "gpt_oss"])
def test_gradients(family, kind):
    """Of all weights, sinks among them. Rows of padding predict nothing: what they see is not defined."""
    model, words = tiny.decoder(family), decoder_words(kind)
    labels = torch.where(exist(kind), words["input_ids"], -100)
    if kind == "left":
        labels[0, 5] = labels[2, 1] = -100

    def gradients(name):
        model.zero_grad()
        with tiny.attention_by(model, name):
            model.train()(**words, labels=labels).loss.backward()
        model.eval()
        return {name: weights.grad for name, weights in model.named_parameters() if weights.grad is not None}

    want = gradients(tiny.reference_of(family))
    got = gradients("qf")
    assert set(got) == set(want)
    for name, expected in want.items():
        assert (got[name] - expected).norm() <= 1e-5 * expected.norm() + 1e-12, name


def test_gradient_checkpointing():
    model, ids = tiny.decoder("mistral"), tiny.tokens()
    losses = []
    with tiny.attention_by(model, "qf"):
        for enable in (False, True):
            model.gradient_checkpointing_enable() if enable else model.gradient_checkpointing_disable()
            model.zero_grad()
            loss = model.train()(ids, attention_mask=tiny.padding("left"), labels=ids).loss
            loss.backward()
            losses.append((loss.detach(), model.model.layers[0].self_attn.q_proj.weight.grad.clone()))
    model.gradient_checkpointing_disable()
    model.eval()
    torch.testing.assert_close(losses[0], losses[1])


@pytest.mark.parametrize("kind", ["none", "left"])
def test_int8(kind):
    """Precision "int8" quantizes scores: within 2e-2, the bound that docs/numerics.md has for one attention."""
    words = decoder_words(kind)
    got, want = (logits(tiny.decoder("llama"), name, **words)[exist(kind)] for name in ("qf_int8", "sdpa"))
    error = float((got - want).norm() / want.norm())
    assert 1e-5 < error < 2e-2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits(dtype):
    model = tiny.decoder("llama")
    try:
        words = decoder_words("left")
        want = logits(model, "sdpa", **words)[exist("left")]
        model.to(dtype)
        got, other = (logits(model, name, **words)[exist("left")].float() for name in ("qf", "sdpa"))
    finally:
        tiny.decoder.cache_clear()
    assert (got - want).norm() <= 2 * (other - want).norm()


def test_importing_qflash_imports_no_transformers():
    import subprocess
    import sys

    code = "import sys, qflash, qflash.integrations; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
