"""fuse_layers: the same logits and gradients in fewer steps, and layers that are not understood as they were made."""

from __future__ import annotations

import copy
import inspect
import pickle

import pytest

pytest.importorskip("transformers")

import torch
import transformers
from torch import nn
from torch.nn.utils import parametrize
from transformers.models.llama import modeling_llama

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
    mlp.gate_proj = nn.Sequential(mlp.gate_proj, nn.Tanh())
    got = learned(model)
    plain = model_of("llama")
    plain.model.layers[0].mlp.gate_proj = nn.Sequential(plain.model.layers[0].mlp.gate_proj, nn.Tanh())
    check_same(got, learned(plain))


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "twice": lambda model: pickle.loads(pickle.dumps(copy.deepcopy(model))),
}


@pytest.mark.parametrize("how", COPIES)
def test_a_copy_has_weights_of_its_own(how):
    model = model_of("llama")
    qf.fuse_layers(model)
    other, want = COPIES[how](model), learned(model)
    assert type(other.model.norm) is type(model.model.norm)
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


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_compiled_model(backend):
    """Inductor takes longer than all other tests here, and compiles rope, linear and swiglu in tests of their own."""
    torch.compiler.reset()
    model = model_of("llama")
    want = learned(model)[0]
    qf.fuse_layers(model)
    compiled = torch.compile(model, backend=backend)
    torch.testing.assert_close(compiled(tiny.tokens(), use_cache=False).logits, want, **CLOSE)


def test_a_decoder_of_a_fused_model_gives_the_same_tokens():
    model = model_of("llama").eval()
    words = {"max_new_tokens": 8, "page_size": 16, "pad_token_id": 0}
    want = qf.generate(model, tiny.tokens(), **words).new_tokens
    qf.fuse_layers(model)
    assert torch.equal(qf.generate(model, tiny.tokens(), **words).new_tokens, want)


def halves(module):
    """A module as torch.nn.DataParallel copies it, with half of the weights' values."""
    replica = module._replicate_for_data_parallel()
    replica._modules = {name: halves(child) for name, child in module._modules.items()}
    replica._parameters = {
        name: None if x is None else nn.Parameter(x.detach() / 2) for name, x in module._parameters.items()
    }
    return replica


def test_replicas_compute_with_their_own_weights():
    x, angles = torch.randn(2, 5, 32), torch.randn(1, 5, 8).repeat(1, 1, 2)
    words = {"position_embeddings": (angles, angles)}
    model = model_of("llama", "sdpa")
    qf.fuse_layers(model)
    want = halves(model_of("llama", "sdpa").model.layers[0])(x, **words)
    torch.testing.assert_close(halves(model.model.layers[0])(x, **words), want, **CLOSE)


class Doubled(nn.Module):
    def forward(self, x):
        return 2 * x


def gelu(model):
    model.model.layers[0].mlp.act_fn = nn.GELU()


def one_column(model):
    model.model.layers[0].mlp.up_proj = nn.Linear(32, 1)


def one_bias(model):
    model.model.layers[0].mlp.up_proj = nn.Linear(32, 64)


def parametrized(model):
    for module in (model.model.norm, model.model.layers[0].mlp.gate_proj):
        parametrize.register_parametrization(module, "weight", Doubled())


def another_eps(model):
    model.model.norm.variance_epsilon = 1  # no float


def frozen(model):
    model.model.layers[0].mlp.gate_proj.requires_grad_(False)


def double(model):
    model.double()


class Twice(torch.Tensor):
    """A weight that says itself what a product with it is."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            out = func(*args, **(kwargs or {}))
        return 2 * out if func is nn.functional.linear else out


def of_a_subclass(model):
    gate = model.model.layers[0].mlp.gate_proj
    weight = gate._parameters.pop("weight").detach()
    gate.weight = weight.as_subclass(Twice)


CHANGES = (gelu, one_column, one_bias, parametrized, another_eps, frozen, double, of_a_subclass)


@pytest.mark.parametrize("change", CHANGES)
def test_what_somebody_changes_later(change):
    fused, plain = model_of("llama"), model_of("llama", "sdpa")
    fused.set_attn_implementation("sdpa")
    qf.fuse_layers(fused)
    for model in (fused, plain):
        torch.manual_seed(2)
        change(model)
    check_same(learned(fused), learned(plain))


HOOKS = {
    "forward": "register_forward_hook",
    "forward_pre": "register_forward_pre_hook",
    "backward": "register_full_backward_hook",
    "backward_pre": "register_full_backward_pre_hook",
}


@pytest.mark.parametrize("is_before", [True, False])
@pytest.mark.parametrize("child", ["gate_proj", "up_proj", "act_fn"])
@pytest.mark.parametrize("kind", HOOKS)
def test_hooks_into_an_mlp_are_called(kind, child, is_before):
    mlp, calls = modeling_llama.LlamaMLP(tiny.DECODERS["llama"]()), []
    if not is_before:
        qf.fuse_layers(mlp)
    getattr(mlp.get_submodule(child), HOOKS[kind])(lambda *_: calls.append(None))
    if is_before:
        assert qf.fuse_layers(mlp) == {}
    mlp(torch.randn(2, 32, requires_grad=True)).sum().backward()
    assert len(calls) == 1


@pytest.mark.parametrize("name", ["forward", "apply_rotary_pos_emb"])
def test_functions_that_are_replaced_later(name, monkeypatch):
    """As libraries of kernels do it, in a class or a file."""
    model = model_of("llama")
    qf.fuse_layers(model)
    owner = modeling_llama.LlamaMLP if name == "forward" else modeling_llama
    before, calls = getattr(owner, name), []
    monkeypatch.setattr(owner, name, lambda *x, **words: calls.append(None) or before(*x, **words))
    learned(model)
    assert len(calls) == 2


def attention_of(model, tables, dtype=torch.float32):
    """What attention gets by these tables, `[2, 1, T, D]`."""
    x = torch.randn(2, tables.shape[2], 32, generator=torch.Generator().manual_seed(3)).to(dtype)
    seen = []

    def attend(module, q, k, v, *_, **__):
        seen.extend((q, k))
        return torch.cat([v, v], 1).transpose(1, 2), None

    transformers.AttentionInterface.register("seen", attend)
    model.set_attn_implementation("seen")
    model.model.layers[0].self_attn(x, position_embeddings=tuple(tables), attention_mask=None)
    return seen


@pytest.fixture
def rotating():
    """A plain model and a fused one that has rotated before."""
    plain, fused = model_of("llama"), model_of("llama")
    qf.fuse_layers(fused)
    learned(fused)
    return plain, fused


def test_tables_whose_halves_differ_later(rotating, monkeypatch):
    """Nobody looks at those on a GPU."""
    tables = torch.randn(2, 1, 5, 16)
    want, got = (attention_of(model, tables) for model in rotating)
    torch.testing.assert_close(got, want)
    tables[..., 1:8] = tables[..., 9:]
    monkeypatch.setattr(fused_layers, "_has_to_wait", lambda x: True)
    learned(rotating[1])
    qf.fuse_layers(model := model_of("llama"))
    learned(model)
    for got, want in zip(attention_of(model, tables), attention_of(rotating[0], tables), strict=True):
        torch.testing.assert_close(got[..., 1:8], want[..., 1:8])
        torch.testing.assert_close(got[..., 9:], want[..., 9:])
        assert got[..., ::8].isnan().all()


def test_tables_of_another_type(rotating):
    """What q and k become then is for the model to say."""
    half = torch.randn(2, 1, 5, 8)
    tables = torch.cat([half, half], -1)
    plain, fused = (attention_of(model.bfloat16(), tables, torch.bfloat16) for model in rotating)
    assert [x.dtype for x in fused] == [x.dtype for x in plain] == [torch.float32] * 2
    torch.testing.assert_close(fused, plain)


def test_gradients_of_tables(rotating):
    gradients = []
    for model in rotating:
        half = torch.linspace(-2, 2, 80).view(2, 1, 5, 8).requires_grad_()
        sum(x.square().sum() for x in attention_of(model, torch.cat([half, half], -1))).backward()
        gradients.append(half.grad)
    torch.testing.assert_close(*gradients, **CLOSE)


def test_transforms_of_torch_func(rotating):
    """vmap over positions, whose tables nobody can look at, and forward-mode differentiation."""
    x, positions = torch.randn(3, 5, 32), torch.arange(15).view(3, 1, 5)
    results = []
    for model in rotating:
        model.set_attn_implementation("eager")
        layer, tables = model.model.layers[0], model.model.rotary_emb

        def call(x, positions, layer=layer, tables=tables):
            return layer(x[None], position_embeddings=tables(x[None], positions))

        mapped = torch.func.vmap(call)(x, positions)
        results.append((mapped, *torch.func.jvp(lambda x, call=call: call(x, positions[0]), (x[0],), (x[1],))))
    torch.testing.assert_close(*results, **CLOSE)


def test_no_tokens_and_no_values():
    layer = model_of("llama", "eager").model.layers[0]
    qf.fuse_layers(layer)
    rotate = layer.self_attn._qflash_detail.forward.__globals__["apply_rotary_pos_emb"]
    for batch, length in ((0, 5), (2, 0)):
        q, table = torch.ones(batch, 4, length, 16, requires_grad=True), torch.ones(batch, length, 16)
        assert [x.shape for x in rotate(q, q, table, table)] == [q.shape] * 2
        assert layer.mlp(torch.ones(batch, length, 32)).shape == (batch, length, 32)
    x, angles = torch.ones(2, 5, 32, device="meta"), torch.ones(1, 5, 16, device="meta")
    assert layer.to("meta")(x, position_embeddings=(angles, angles)).shape == x.shape


def test_a_norm_under_autocast_has_its_own_type():
    for dtype in (torch.float32, torch.bfloat16):
        plain, x = modeling_llama.LlamaRMSNorm(32).to(dtype), torch.randn(2, 32).to(dtype)
        fused = copy.deepcopy(plain)
        assert qf.fuse_layers(fused) == {"rms_norm": ("",)}
        with torch.autocast("cpu", torch.bfloat16):
            torch.testing.assert_close(fused(x), plain(x))


class Moody(modeling_llama.LlamaRMSNorm):
    """Computes something else in training."""

    def forward(self, hidden_states):
        return super().forward(hidden_states) * (2 if self.training else 1)


def test_layers_that_differ_in_training_stay_as_they_are():
    assert qf.fuse_layers(Moody(8).eval()) == {}


def test_what_fused_modules_are():
    model = model_of("llama")
    signatures = [inspect.signature(module.forward) for module in model.modules()]
    qf.fuse_layers(model)
    assert [inspect.signature(module.forward) for module in model.modules()] == signatures
    norm = model.model.norm
    assert isinstance(norm, modeling_llama.LlamaRMSNorm)
    assert type(norm).__name__ == "LlamaRMSNorm"


def test_a_fused_model_can_still_be_changed():
    fused, plain = (model_of("llama").eval() for _ in range(2))
    qf.fuse_layers(fused)
    decoder = qf.Decoder(fused, pages=8, page_size=16)
    assert {kind: len(found) for kind, found in decoder.fused.items()} == {"rope": 2, "rms_norm": 5}
    assert qf.quantize_linears(fused).names == qf.quantize_linears(plain).names
    with torch.no_grad():
        torch.testing.assert_close(fused(tiny.tokens()).logits, plain(tiny.tokens()).logits, **CLOSE)


def test_what_is_no_model():
    with pytest.raises(TypeError, match=r"model is int; allowed: a torch\.nn\.Module"):
        qf.fuse_layers(3)
