"""fuse_layers: the same logits and gradients in fewer steps, and layers that are not understood as they were made."""

from __future__ import annotations

import copy

import pytest

pytest.importorskip("transformers")

import torch
import transformers

import qflash.integrations.transformers as qf
from qflash.integrations.transformers import fused_layers
from qflash.testing import tiny_models as tiny

CLOSE = {"rtol": 1e-4, "atol": 1e-5}
KINDS = {
    "llama": {"rope": 2, "swiglu": 2, "rms_norm": 5},
    "mistral": {"rope": 2, "swiglu": 2, "rms_norm": 5},
    "qwen2": {"rope": 2, "swiglu": 2, "rms_norm": 5},
    "qwen3": {"rope": 2, "swiglu": 2, "rms_norm": 9},
    "gemma2": {"rope": 2, "rms_norm": 9},  # its MLP is one of GeLU
    "gpt2": {},
}


def model_of(family: str, attention: str = "qf"):
    torch.manual_seed(1)
    qf.register()
    config = tiny.DECODERS[family]()
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention).train()


def learned(model, ids=None, **words):
    """The logits, and every gradient of their sum of squares, by name."""
    model.zero_grad()
    logits = model(tiny.tokens() if ids is None else ids, use_cache=False, **words).logits
    logits.square().mean().backward()
    return logits.detach(), {name: x.grad for name, x in model.named_parameters() if x.grad is not None}


def check_same(got, want):
    torch.testing.assert_close(got[0], want[0], **CLOSE)
    assert got[1].keys() == want[1].keys()
    for name, gradient in got[1].items():
        torch.testing.assert_close(gradient, want[1][name], **CLOSE, msg=name)


@pytest.mark.parametrize("family", KINDS)
def test_logits_and_gradients(family):
    model = model_of(family)
    want, names = learned(model), list(model.state_dict())
    fused = qf.fuse_layers(model)
    assert {kind: len(found) for kind, found in fused.items()} == KINDS[family]
    check_same(learned(model), want)
    assert list(model.state_dict()) == names
    assert qf.fuse_layers(model) == {}  # what has a forward of its own is left alone


def test_positions_that_differ_by_sequence():
    model, positions = model_of("llama"), torch.stack([torch.arange(tiny.LENGTH) + start for start in (0, 3, 50)])
    mask = torch.ones(3, tiny.LENGTH, dtype=torch.long)
    want = learned(model, position_ids=positions, attention_mask=mask)
    qf.fuse_layers(model)
    check_same(learned(model, position_ids=positions, attention_mask=mask), want)


def test_what_runs(monkeypatch):
    """qflash's own operations do: without them these models fail."""
    model = model_of("llama")
    qf.fuse_layers(model)
    for name in ("rope", "swiglu"):
        with monkeypatch.context() as patch:
            patch.setattr(fused_layers.qflash, name, None)
            with pytest.raises(TypeError, match="not callable"):
                learned(model)


def test_autocast_and_other_types_run_as_they_were_made():
    model = model_of("llama", "sdpa")
    with torch.autocast("cpu", torch.bfloat16):
        want = learned(model)
        qf.fuse_layers(model)
        check_same(learned(model), want)


def test_layers_that_are_replaced_later():
    """As adapters do. The whole of a fused MLP runs as it was made then."""
    model = model_of("llama")
    qf.fuse_layers(model)
    mlp = model.model.layers[0].mlp
    mlp.gate_proj = torch.nn.Sequential(mlp.gate_proj, torch.nn.Tanh())
    got = learned(model)
    plain = model_of("llama")
    plain.model.layers[0].mlp.gate_proj = torch.nn.Sequential(plain.model.layers[0].mlp.gate_proj, torch.nn.Tanh())
    check_same(got, learned(plain))


def test_a_copy_has_weights_of_its_own():
    model = model_of("llama")
    qf.fuse_layers(model)
    other, want = copy.deepcopy(model), learned(model)
    with torch.no_grad():
        for x in model.parameters():
            x.zero_()
    check_same(learned(other), want)


def test_joined_projections():
    model = model_of("llama")
    want = learned(model)[0]
    qf.fuse_projections(model)
    assert "rope" in qf.fuse_layers(model)
    torch.testing.assert_close(learned(model)[0], want, **CLOSE)


def test_checkpointed_layers():
    model = model_of("llama")
    want = learned(model)
    qf.fuse_layers(model)
    model.gradient_checkpointing_enable()
    check_same(learned(model), want)


def test_a_compiled_model():
    model = model_of("llama")
    want = learned(model)[0]
    qf.fuse_layers(model)
    torch.testing.assert_close(torch.compile(model)(tiny.tokens(), use_cache=False).logits, want, **CLOSE)


def test_a_decoder_of_a_fused_model_gives_the_same_tokens():
    model = model_of("llama").eval()
    words = {"max_new_tokens": 8, "page_size": 16, "pad_token_id": 0}
    want = qf.generate(model, tiny.tokens(), **words).new_tokens
    qf.fuse_layers(model)
    assert torch.equal(qf.generate(model, tiny.tokens(), **words).new_tokens, want)


def test_what_is_no_model():
    with pytest.raises(TypeError, match=r"model is int; allowed: a torch\.nn\.Module"):
        qf.fuse_layers(3)
