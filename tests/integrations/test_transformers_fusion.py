"""generate(fuse=True): the same tokens and logits in fewer launches, and modules that are not understood as made."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
import textwrap
from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("transformers")

import torch
import torch.nn.functional as F
import transformers
from torch import nn
from transformers.models.llama import modeling_llama

import qflash.integrations.transformers as qf
from qflash.integrations.transformers import fusion, rotations
from qflash.integrations.transformers.fusion import Fusion
from qflash.integrations.transformers.stand_ins import is_tanh_gelu
from qflash.testing import tiny_models as tiny

NEW = 10
_SIZES = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=99)
_IDS = dict(pad_token_id=0, eos_token_id=None, bos_token_id=None)
_GROUPED = dict(num_key_value_heads=2, head_dim=16)

# Models whose rotation is not the one of qflash, or with something between it and attention.
OTHERS = {
    "gpt_neox": lambda: transformers.GPTNeoXConfig(**_SIZES, **_IDS, rotary_pct=0.5, initializer_range=0.2),
    "phi": lambda: transformers.PhiConfig(**_SIZES, **_IDS, partial_rotary_factor=0.5, initializer_range=0.2),
    "stablelm": lambda: transformers.StableLmConfig(**_SIZES, **_IDS, num_key_value_heads=2, initializer_range=0.2),
    "glm": lambda: transformers.GlmConfig(**_SIZES, **_IDS, **_GROUPED, initializer_range=0.2),
    "cohere": lambda: transformers.CohereConfig(**_SIZES, **_IDS, initializer_range=0.2),
    "hunyuan": lambda: transformers.HunYuanDenseV1Config(**_SIZES, **_IDS, **_GROUPED, initializer_range=0.2),
}
ROTATED = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "gpt_oss")


def other(family):
    torch.manual_seed(1)
    config = OTHERS[family]()
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()


def llama(**words):
    """One that a test may change."""
    torch.manual_seed(1)
    config = tiny.DECODERS["llama"]()
    for name, value in words.items():
        setattr(config, name, value)
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="qf").eval()


def generated(model, fuse=True, padding="left", **words):
    words = {"max_new_tokens": NEW, "page_size": 16, "pad_token_id": 0} | words
    return qf.generate(model, tiny.tokens(), tiny.padding(padding), fuse=fuse, **words)


def logits(model, monkeypatch, **words):
    """Those of every step, of both ways, given the tokens of the second."""
    steps, tokens = [], generated(model, fuse=False, **words).new_tokens
    forward = qf.Decoder.forward

    def kept(self, ids, positions, mask):
        steps[-1].append(forward(self, ids, positions, mask))
        return F.one_hot(tokens[:, len(steps[-1]) - 1], tiny.VOCABULARY).float()

    with monkeypatch.context() as patch:
        patch.setattr(qf.Decoder, "forward", kept)
        for fuse in (True, False):
            steps.append([])
            generated(model, fuse=fuse, **words)
    return [torch.stack(found).float() for found in steps]


@pytest.mark.parametrize("padding", ["none", "left", "right"])
@pytest.mark.parametrize("family", tiny.DECODERS)
def test_tokens(family, padding):
    model = tiny.decoder(family)
    result, plain = generated(model, padding=padding), generated(model, fuse=False, padding=padding)
    assert torch.equal(result.sequences, plain.sequences) and plain.fused == {}


@pytest.mark.parametrize("family", tiny.DECODERS)
def test_logits(family, monkeypatch):
    fused, plain = logits(tiny.decoder(family), monkeypatch)
    torch.testing.assert_close(fused, plain, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3", "gemma3"])
def test_16_bit_is_as_near_to_float32(family, monkeypatch):
    """Of two ways to round, the fused one is not the worse by more than a little."""
    exact, _ = logits(tiny.decoder(family), monkeypatch)
    fused, plain = logits(copy.deepcopy(tiny.decoder(family)).to(torch.bfloat16), monkeypatch)
    # The tokens of bfloat16 may be others after the first, whose input is the prompt.
    errors = [(found[0] - exact[0]).norm() / exact[0].norm() for found in (fused, plain)]
    assert errors[0] < 1.25 * errors[1] + 1e-3, errors
    assert (fused - plain).norm() / plain.norm() < 3e-2


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_int8_pages(family, monkeypatch):
    fused, plain = logits(tiny.decoder(family), monkeypatch, cache_precision="int8")
    # A key that lies between two steps of int8 may be rounded to either.
    assert (fused - plain).norm() / plain.norm() < 1e-2


def test_scaled_tables(monkeypatch):
    """YaRN scales cosines and sines, so they are those of no angle."""
    scaling = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16}
    model = llama(rope_parameters=scaling)
    assert len(generated(model).fused["rope"]) == 2
    fused, plain = logits(model, monkeypatch)
    torch.testing.assert_close(fused, plain, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ROTATED)
def test_what_is_fused(family):
    fused = generated(tiny.decoder(family)).fused
    assert [name.split(".")[-1] for name in fused["rope"]] == ["self_attn"] * 2
    norms = {"gemma2": 9, "gemma3": 13, "qwen3": 9}.get(family, 5)  # before and after layers, of q and of k
    assert len(fused["rms_norm"]) == norms


def test_gelu_is_recognised_whatever_the_default_dtype_is():
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert is_tanh_gelu(tiny.decoder("gpt2").transformer.h[0].mlp.act)
    finally:
        torch.set_default_dtype(torch.float32)


def test_gpt2_has_only_gelu():
    fused = generated(tiny.decoder("gpt2")).fused
    assert fused == {"gelu": ("transformer.h.0.mlp.act", "transformer.h.1.mlp.act")}


@pytest.mark.parametrize("family", OTHERS)
def test_other_rotations_run_as_made(family):
    model = other(family)
    result, plain = generated(model), generated(model, fuse=False)
    assert "rope" not in result.fused and torch.equal(result.sequences, plain.sequences)
    with tiny.attention_by(model, "sdpa"):
        words = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
        want = model.generate(tiny.tokens(), attention_mask=tiny.padding("left"), **words)
    assert torch.equal(result.sequences, want)


# Modules written so that leaving a rotation out would be wrong -------------------------------------------------------


def attention_with(monkeypatch, source, replacement):
    """A Llama whose attention has a line of its source replaced."""
    text = textwrap.dedent(inspect.getsource(modeling_llama.LlamaAttention.forward))
    assert source in text
    names = vars(modeling_llama)
    scope = {}
    exec(compile(text.replace(source, replacement), "<changed>", "exec"), names, scope)
    monkeypatch.setattr(modeling_llama.LlamaAttention, "forward", scope["forward"])
    return llama()


ROTATE = "query_states, key_states = apply_rotary_pos_emb(query_states, key_states, cos, sin)\n"
INDENT = "    "
CHANGES = {
    "scaled after": "query_states = query_states * 1.5",
    "scaled in place": "query_states.mul_(torch.linspace(1, 2, query_states.shape[-1]))",
    "used beside": "value_states = value_states + key_states",
    "used in a list": "value_states = torch.stack([value_states, key_states]).sum(0)",
    "rotated twice": ROTATE.strip(),
    "another order": "query_states, key_states = query_states.flip(-1), key_states.flip(-1)",
}


@pytest.mark.parametrize("change", CHANGES)
def test_more_than_a_rotation(change, monkeypatch):
    model = attention_with(monkeypatch, ROTATE, ROTATE + INDENT + CHANGES[change] + "\n")
    result, plain = generated(model), generated(model, fuse=False)
    assert "rope" not in result.fused and torch.equal(result.sequences, plain.sequences)
    fused, plain = logits(model, monkeypatch)
    torch.testing.assert_close(fused, plain, rtol=1e-4, atol=1e-4)


def test_looks_at_shapes_are_no_use(monkeypatch):
    model = attention_with(monkeypatch, ROTATE, ROTATE + INDENT + "assert key_states.shape[1] == key_states.size(1)\n")
    assert len(generated(model).fused["rope"]) == 2


def test_another_function_of_that_name(monkeypatch):
    def interleaved(q, k, cos, sin):
        cos, sin = (x[:, None, :, : x.shape[-1] // 2].repeat_interleave(2, -1) for x in (cos, sin))
        rotated = [torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2) for x in (q, k)]
        return q * cos + rotated[0] * sin, k * cos + rotated[1] * sin

    monkeypatch.setattr(modeling_llama, rotations.NAME, interleaved)
    model = llama()
    result = generated(model)
    assert "rope" not in result.fused
    assert torch.equal(result.sequences, generated(model, fuse=False).sequences)


def test_mixed_angles(monkeypatch):
    """Tables whose halves differ are turned by the model, and nobody looks at them twice."""
    forward = modeling_llama.LlamaRotaryEmbedding.forward

    def mixed(self, x, position_ids):
        cos, sin = forward(self, x, position_ids)
        return torch.cat([cos[..., :8], cos[..., 8:].flip(-1)], -1), sin

    monkeypatch.setattr(modeling_llama.LlamaRotaryEmbedding, "forward", mixed)
    looks, equal = [], torch.equal
    model = llama()
    plain = generated(model, fuse=False)
    monkeypatch.setattr(torch, "equal", lambda *x: looks.append(1) or equal(*x))
    result = generated(model)
    assert "rope" not in result.fused and equal(result.sequences, plain.sequences) and len(looks) == 2


class GatedNorm(nn.Module):
    """With an argument more than it needs."""

    def __init__(self, size):
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.rand(size)), 1e-5

    def forward(self, x, gate=None):
        x = x if gate is None else x * F.silu(gate)
        return self.weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.variance_epsilon))


def test_norms():
    """What is not x alone, of the weight's type and width, is the module's own affair."""
    x, gate = torch.randn(2, 3, 16), torch.randn(2, 3, 16)
    module = GatedNorm(16)
    want = [module(x), module(x, gate), module(x, gate=gate), module(x=x), module(x.double())]
    holder = nn.ModuleDict({"norm": module})
    with Fusion(holder).applied():
        assert type(module) is not GatedNorm
        got = [module(x), module(x, gate), module(x, gate=gate), module(x=x), module(x.double())]
    for found, wanted in zip(got, want, strict=True):
        torch.testing.assert_close(found, wanted)


def test_gemma_norm_keeps_float32():
    """1 + w, with w too small for bfloat16 to tell from 1."""
    norm = tiny.decoder("gemma2").model.norm
    module = copy.deepcopy(norm).to(torch.bfloat16)
    module.weight.data.normal_(std=2e-3)
    x = torch.randn(4, 32, dtype=torch.bfloat16)
    want = module(x)
    with Fusion(nn.ModuleDict({"norm": module})).applied():
        torch.testing.assert_close(module(x), want, rtol=2**-8, atol=0)


# The model afterwards ------------------------------------------------------------------------------------------------


def own_forwards(model):
    return [name for name, module in model.named_modules() if "forward" in vars(module)]


def state(model):
    """What a model is made of, but for its tensors."""
    return [(name, type(module), list(vars(module))) for name, module in model.named_modules()]


def test_model_is_left_as_found(monkeypatch):
    model = llama()
    before = state(model)

    def interrupted(tokens):
        assert state(model) != before
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        generated(model, stream=interrupted)
    assert state(model) == before
    monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        generated(model)
    assert state(model) == before and getattr(rotations._of_thread, "record", None) is None


def test_an_interrupt_while_forwards_are_placed(monkeypatch):
    model = llama()
    before, places = state(model), fusion._for_a_while

    def interrupted(made):
        if made is modeling_llama.LlamaRMSNorm:
            raise KeyboardInterrupt
        return places(made)

    monkeypatch.setattr(fusion, "_for_a_while", interrupted)
    with pytest.raises(KeyboardInterrupt):
        generated(model)
    assert state(model) == before and not fusion._forwards


def test_forwards_of_somebody_else_stay():
    """Also those that came after the Decoder."""
    model = llama()
    decoder = qf.Decoder(model, pages=8, page_size=16)
    norm, calls = model.model.norm, []

    def counted(x):
        calls.append(1)
        return type(norm).forward(norm, x)

    norm.forward = counted
    result = decoder.generate(tiny.tokens(), max_new_tokens=3, eos_token_id=())
    assert len(calls) == 3 and norm.forward is counted and own_forwards(model) == ["model.norm"]
    again = qf.Decoder(model, pages=8, page_size=16).generate(tiny.tokens(), max_new_tokens=3, eos_token_id=())
    assert "model.norm" not in again.fused["rms_norm"] and torch.equal(again.sequences, result.sequences)


def test_with_joined_and_int8_linears():
    model = llama()
    want = generated(model, fuse=False).sequences
    assert qf.fuse_projections(model)
    result = generated(model)
    assert torch.equal(result.sequences, want) and len(result.fused["rope"]) == 2
    qf.quantize_linears(model)
    assert torch.equal(generated(model).sequences, generated(model, fuse=False).sequences)


# Copies that are made meanwhile --------------------------------------------------------------------------------------


def saved(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def shallow(model):
    """Modules of which `copy.copy` makes another, with the same weights."""
    other = copy.copy(model)
    other._modules = {name: shallow(module) for name, module in model._modules.items()}
    return other


WAYS = {
    "deepcopy": copy.deepcopy,
    "copy": lambda model: copy.deepcopy(shallow(model)),
    "save": saved,
    **{f"pickle {n}": lambda model, n=n: pickle.loads(pickle.dumps(model, n)) for n in (0, 2, pickle.HIGHEST_PROTOCOL)},
}


def generating(model, stream):
    generated(model, max_new_tokens=3, stream=stream)


def batching(model, stream):
    batch = qf.Batcher(model, pages=8, page_size=16)
    request = batch.submit(tiny.tokens()[0], max_new_tokens=3, stream=stream)
    batch.run()
    assert request.error is None


def logits_of(model, name="sdpa"):
    with tiny.attention_by(model, name), torch.no_grad():
        return model(tiny.tokens()).logits


def check_copies(model, copies, before):
    """They are the model that it was before, of its classes, and have weights of their own."""
    want, fused = logits_of(model), generated(model).fused
    for weights in model.parameters():
        weights.data.zero_()
    for other in copies:
        assert state(other) == before == state(model)
        assert torch.equal(logits_of(other), want) and generated(other).fused == fused


@pytest.mark.parametrize("work", [generating, batching])
@pytest.mark.parametrize("way", WAYS)
def test_a_copy_from_a_stream(way, work):
    model, copies = llama(), []
    before = state(model)
    work(model, lambda _: copies.append(WAYS[way](model)))
    assert len(copies) == 3
    check_copies(model, copies, before)


@pytest.mark.parametrize("family", ["gpt2", "qwen3", "gemma3"])
def test_a_copy_of_another_family(family):
    model, copies = tiny.new_decoder(family), []
    before = state(model)
    generating(model, lambda _: copies.extend(make(model) for make in (copy.deepcopy, saved)))
    want = logits_of(model)
    for weights in model.parameters():
        weights.data.zero_()
    for other in copies:
        assert state(other) == before and torch.equal(logits_of(other), want)


def test_a_copy_of_layers_that_are_fused_for_good():
    model, copies = llama(), []
    qf.fuse_layers(model)
    before = state(model)
    generating(model, lambda _: copies.extend(make(model) for make in (copy.deepcopy, saved)))
    check_copies(model, copies, before)


def test_copies_by_another_thread():
    """It copies while forwards come and go."""
    model, is_done = llama(), []
    before, copies = state(model), []
    with ThreadPoolExecutor(1) as pool:

        def copying():
            while not is_done:
                copies[3:] = [copy.deepcopy(model)]

        others = pool.submit(copying)
        try:
            while len(copies) < 4 and not others.done():
                generated(model, max_new_tokens=2)
            for _ in range(5):
                generated(model, max_new_tokens=2)
        finally:
            is_done.append(True)
        others.result()
    check_copies(model, copies, before)


def test_replicas():
    """As those of torch.nn.DataParallel, which have the classes and no weights of the model."""
    norm = copy.deepcopy(tiny.decoder("llama").model.norm)
    x, weight = torch.randn(2, 3, 32), torch.rand(32)
    with Fusion(nn.ModuleDict({"norm": norm})).applied():
        replica = norm._replicate_for_data_parallel()
        replica.weight = weight
        got = replica(x)
    torch.testing.assert_close(got, F.rms_norm(x, (32,), weight, norm.variance_epsilon))


def test_a_decoder_made_while_another_is_at_work():
    """It recognises what runs by the forwards of the other one, and goes on when that has left."""
    model, inner = llama(), []
    before, want = state(model), generated(model, fuse=False).sequences

    def starts(_):
        if not inner:
            inner.append(qf.Decoder(model, pages=16, page_size=16))
            inner.append(inner[0].generate(tiny.tokens(), tiny.padding("left"), max_new_tokens=NEW, pad_token_id=0))

    outer = generated(model, stream=starts)
    inner.append(inner[0].generate(tiny.tokens(), tiny.padding("left"), max_new_tokens=NEW, pad_token_id=0))
    for result in (outer, *inner[1:]):
        assert torch.equal(result.sequences, want) and result.fused == outer.fused
    assert state(model) == before


def test_threads_that_come_and_go():
    model = llama()
    before, want = state(model), generated(model, fuse=False, max_new_tokens=3).sequences
    with ThreadPoolExecutor(4) as pool:
        runs = [pool.submit(generated, model, max_new_tokens=3) for _ in range(16)]
        assert all(torch.equal(run.result().sequences, want) for run in runs)
    assert state(model) == before and not fusion._forwards


@pytest.mark.slow
@pytest.mark.parametrize("part", ["input_layernorm", "self_attn", ""])
def test_layers_that_are_compiled(part):
    """No graph is made again for another call, nor when the model is used outside."""
    model, graphs = llama(), []
    want, logits = generated(model, fuse=False, max_new_tokens=3).sequences, logits_of(model)
    torch.compiler.reset()

    def counted(graph, _):
        graphs.append(graph)
        return graph.forward

    for layer in model.model.layers:
        layer.get_submodule(part).compile(backend=counted)
    counts = []
    for _ in range(3):
        assert torch.equal(generated(model, max_new_tokens=3).sequences, want)
        torch.testing.assert_close(logits_of(model), logits)
        counts.append(len(graphs))
    assert counts[0] > 0 and counts[1] == counts[2]
