"""quantize_linears and fuse_projections: what becomes of a model's layers, and what stays as it was."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("transformers")

import torch
import transformers
from torch import nn
from torch._dynamo.backends.common import aot_autograd

import qflash
import qflash.integrations.transformers as qf
from qflash.integrations.transformers.int8_linears import Int8Swiglu
from qflash.integrations.transformers.joined import Joined, JoinedLinear, JoinedPart
from qflash.testing import tiny_models as tiny

QKV, GATE_UP = "self_attn.q_proj+k_proj+v_proj", "mlp.gate_proj+up_proj"
# Of logits, relative L2. Layers of 32 inputs with weights of 0.2 are worse than those of a real model. GPT-OSS has a
# router behind them, which chooses another expert where two are about as good.
LARGEST_ERROR = dict.fromkeys(tiny.DECODERS, 6e-2) | {"gpt_oss": 0.4}


def model_of(family):
    return copy.deepcopy(tiny.decoder(family))


def logits(model):
    with torch.no_grad():
        return model(tiny.tokens()).logits


def distance(got, want):
    return float((got - want).norm() / want.norm())


# INT8 -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", tiny.DECODERS)
def test_logits(family):
    model = model_of(family)
    want = logits(model)
    layers = qf.quantize_linears(model)
    assert 0 < distance(logits(model), want) < LARGEST_ERROR[family]
    left = {name for name, module in model.named_modules() if type(module) in (nn.Linear, transformers.Conv1D)}
    assert left == set(layers.skipped) == {"lm_head"}
    assert layers.bytes_after < 0.31 * layers.bytes_before  # a byte for four; small layers have many scales


@pytest.mark.parametrize(
    ("family", "names"),
    [
        ("llama", {"mlp", QKV, "self_attn.o_proj"}),
        ("qwen2", {"mlp", QKV, "self_attn.o_proj"}),
        ("gemma3", {GATE_UP, "mlp.down_proj", QKV, "self_attn.o_proj"}),  # whose activation is GeLU
        ("gpt2", {"attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"}),
    ],
)
def test_names(family, names):
    layers = qf.quantize_linears(model_of(family))
    prefix = "transformer.h" if family == "gpt2" else "model.layers"
    assert set(layers.names) == {f"{prefix}.{index}.{name}" for index in (0, 1) for name in names}


@pytest.mark.parametrize("has_bias", [False, True])
def test_a_layer_is_qflash_linear(has_bias):
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(48, 24, bias=has_bias)), torch.randn(2, 5, 48)
    weight, bias = model[0].weight.detach(), model[0].bias
    want = qflash.linear(x, qflash.quantize_linear(weight.T), None if bias is None else bias.detach())
    layers = qf.quantize_linears(model)
    assert layers.names == ("0",) and torch.equal(model[0](x), want)


def test_joined_layers_have_the_bits_of_single_ones():
    """A scale of each output channel does not know of the others."""
    one, all_of_them = model_of("qwen2"), model_of("qwen2")
    attention = one.model.layers[0].self_attn
    for name in ("q_proj", "k_proj", "v_proj"):
        layer = getattr(attention, name)
        setattr(attention, name, qf.Int8Linear(layer.weight.T, layer.bias))
    qf.quantize_linears(all_of_them)
    x = torch.randn(3, 4, 32)
    for name in ("q_proj", "k_proj", "v_proj"):
        got = getattr(all_of_them.model.layers[0].self_attn, name)(x)
        assert torch.equal(got, getattr(attention, name)(x))


def test_an_mlp_is_one_swiglu():
    model = model_of("llama")
    mlp, x = copy.deepcopy(model.model.layers[1].mlp), torch.randn(2, 3, 32)
    qf.quantize_linears(model)
    assert isinstance(model.model.layers[1].mlp, Int8Swiglu)
    weights = [qflash.quantize_linear(layer.weight.detach().T) for layer in (mlp.gate_proj, mlp.up_proj, mlp.down_proj)]
    with torch.no_grad():
        assert torch.equal(model.model.layers[1].mlp(x), qflash.linear(qflash.swiglu(x, *weights[:2]), weights[2]))


def test_an_mlp_that_only_looks_like_one_stays_an_mlp():
    class Other(type(tiny.decoder("llama").model.layers[0].mlp)):
        def forward(self, x):
            return self.down_proj(self.act_fn(self.up_proj(x)) * self.gate_proj(x))

    model = model_of("llama")
    model.model.layers[0].mlp.__class__ = Other
    want = logits(model)
    layers = qf.quantize_linears(model)
    assert f"model.layers.0.{GATE_UP}" in layers.names and "model.layers.1.mlp" in layers.names
    assert distance(logits(model), want) < LARGEST_ERROR["llama"]


def test_tied_weights():
    """The embedding keeps its weight; the layer that shared it has a copy in INT8, where it is asked for."""
    config = transformers.LlamaConfig(**tiny.DECODERS["llama"]().to_dict() | {"tie_word_embeddings": True})
    model = transformers.LlamaForCausalLM(config).eval()
    assert model.lm_head.weight is model.model.embed_tokens.weight
    embedding, want = model.model.embed_tokens.weight.clone(), logits(model)
    assert qf.quantize_linears(model).skipped == ("lm_head",)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    layers = qf.quantize_linears(model, skip=())
    assert layers.names == ("lm_head",) and isinstance(model.lm_head, qf.Int8Linear)
    assert torch.equal(model.model.embed_tokens.weight, embedding)
    assert distance(logits(model), want) < LARGEST_ERROR["llama"]


def test_skip():
    model = model_of("llama")
    layers = qf.quantize_linears(model, skip=["down_proj", "model.layers.0.self_attn.k_proj"])
    assert set(layers.skipped) == {f"model.layers.{index}.mlp.down_proj" for index in (0, 1)} | {
        "model.layers.0.self_attn.k_proj"
    }
    assert "lm_head" in layers.names
    first = {f"model.layers.0.self_attn.{name}" for name in ("q_proj", "v_proj", "o_proj")}
    assert first < set(layers.names) and f"model.layers.1.{QKV}" in layers.names


@pytest.mark.parametrize(
    ("words", "kind", "text"),
    [
        ({"precision": "int4"}, ValueError, "precision is 'int4'; allowed: 'int8'"),
        ({"skip": "lm_head"}, TypeError, "skip is 'lm_head'; allowed: None, or a list of names"),
        ({"skip": ["lm_heads"]}, ValueError, "skip has 'lm_heads', which no linear layer is called"),
    ],
)
def test_bad_words(words, kind, text):
    with pytest.raises(kind, match=text):
        qf.quantize_linears(model_of("llama"), **words)


def test_models_without_layers():
    with pytest.raises(ValueError, match="model is Sequential without a layer to quantize"):
        qf.quantize_linears(nn.Sequential(nn.Embedding(3, 4)))
    with pytest.raises(TypeError, match=r"model is dict; allowed: a torch\.nn\.Module"):
        qf.quantize_linears({})


def test_an_error_names_the_layer():
    model = nn.ModuleDict({"odd": nn.Linear(4, 4, dtype=torch.float64)})
    with pytest.raises(TypeError) as caught:
        qf.quantize_linears(model)
    assert caught.value.__notes__ == ["in layer odd"]


def test_gradients_are_refused():
    model = model_of("llama")
    qf.quantize_linears(model)
    with pytest.raises(NotImplementedError, match=r"Int8Linear is forward only; allowed: a call under torch\.no_grad"):
        model(tiny.tokens())
    model.requires_grad_(False)
    assert model(tiny.tokens()).logits.shape[-1] == tiny.VOCABULARY


def test_other_dtypes_leave_scales_alone():
    model = nn.Sequential(nn.Linear(32, 16))
    qf.quantize_linears(model)
    scale = model[0].scale.clone()
    model.to(torch.bfloat16)
    assert model[0].scale.dtype == torch.float32 and torch.equal(model[0].scale, scale)
    assert model[0].bias.dtype == torch.bfloat16 and model[0].values.dtype == torch.int8
    assert model(torch.randn(2, 32, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_state_and_copies():
    model, other = model_of("llama"), model_of("llama")
    qf.quantize_linears(model)
    for weight in other.parameters():
        weight.data.normal_()
    qf.quantize_linears(other)
    other.load_state_dict(model.state_dict())
    want = logits(model)
    assert torch.equal(logits(other), want) and torch.equal(logits(copy.deepcopy(model)), want)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_generation(family):
    """The decode loop and transformers' own come to the same tokens."""
    model, mask = model_of(family), tiny.padding("left")
    qf.quantize_linears(model)
    words = {"max_new_tokens": 8, "pad_token_id": 0}
    with tiny.attention_by(model, "sdpa"):
        want = model.generate(tiny.tokens(), attention_mask=mask, do_sample=False, **words)
    got = qf.generate(model, tiny.tokens(), mask, page_size=16, **words)
    assert torch.equal(got.sequences, want)


@pytest.mark.parametrize(
    "change",
    [lambda model: model, lambda model: model.model, copy.deepcopy],
    ids=["whole", "inner model", "copy"],
)
def test_save_pretrained_refuses(change, tmp_path):
    """from_pretrained would draw INT8 layers anew."""
    model = model_of("llama")
    qf.quantize_linears(model)
    with pytest.raises(NotImplementedError, match=r"allowed: save_pretrained before quantize_linears, or torch\.save"):
        change(model).save_pretrained(tmp_path)
    assert not list(tmp_path.iterdir())


# One product for several layers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", [name for name in tiny.DECODERS if name != "gpt2"])
def test_joined_logits(family):
    model = model_of(family)
    want, parameters = logits(model), sum(x.numel() for x in model.parameters())
    names = qf.fuse_projections(model)
    inner = [QKV] if family == "gpt_oss" else [QKV, GATE_UP]
    assert set(names) == {f"model.layers.{index}.{name}" for index in (0, 1) for name in inner}
    torch.testing.assert_close(logits(model), want, rtol=1e-5, atol=1e-5)
    assert sum(x.numel() for x in model.parameters()) == parameters
    assert qf.fuse_projections(model) == ()


def test_nothing_to_join():
    assert qf.fuse_projections(model_of("gpt2")) == ()
    assert qf.fuse_projections(copy.deepcopy(tiny.bart())) == ()  # cross attention reads two inputs


def test_layers_that_stay():
    model = model_of("llama")
    first, second = (layer.self_attn for layer in model.model.layers)
    first.q_proj.register_forward_hook(lambda *_: None)
    second.k_proj.weight = model.model.layers[0].self_attn.k_proj.weight
    assert set(qf.fuse_projections(model)) == {f"model.layers.{index}.{GATE_UP}" for index in (0, 1)}


def test_joined_gradients():
    model, want = model_of("qwen2"), model_of("qwen2")
    qf.fuse_projections(model)
    for one in (model, want):
        one(tiny.tokens(), labels=tiny.tokens()).loss.backward()
    attention, joined = want.model.layers[0].self_attn, model.model.layers[0].self_attn.q_proj.joined.product
    parts = [getattr(attention, name).weight.grad for name in ("q_proj", "k_proj", "v_proj")]
    torch.testing.assert_close(joined.weight.grad, torch.cat(parts), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt_oss"])  # without and with biases, and tied weights
def test_joined_save_and_load(family, tmp_path):
    """The names are those of a model that was not changed, to transformers and in a state_dict, both ways."""
    model, plain = model_of(family), model_of(family)
    qf.fuse_projections(model)
    want, state = plain.state_dict(), model.state_dict()
    assert state.keys() == want.keys() and all(torch.equal(state[name], want[name]) for name in want)
    first = model.model.layers[0].self_attn
    assert state["model.layers.0.self_attn.k_proj.weight"].untyped_storage().data_ptr() == (
        first.q_proj.joined.product.weight.untyped_storage().data_ptr()
    )
    model.save_pretrained(tmp_path)
    again, info = type(plain).from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values())
    assert all(torch.equal(x, want[name]) for name, x in again.state_dict().items())
    for weight in model.parameters():
        weight.data.normal_()
    model.load_state_dict(want)
    torch.testing.assert_close(logits(model), logits(plain), rtol=1e-5, atol=1e-5)
    for weight in plain.parameters():
        weight.data.normal_()
    plain.load_state_dict(model.state_dict())
    assert all(torch.equal(x, plain.state_dict()[name]) for name, x in model.state_dict().items())


@pytest.mark.filterwarnings("ignore:for .* copying from a non-meta parameter")
def test_what_a_joined_layer_does_not_load():
    model, key = model_of("qwen2"), "model.layers.0.self_attn.k_proj.weight"
    qf.fuse_projections(model)
    state = {name: x.clone() for name, x in model.state_dict().items()}
    missing = {name: x for name, x in state.items() if name != key}
    with pytest.raises(RuntimeError, match=f'Missing key.*"{key}"'):
        model.load_state_dict(missing)
    assert model.load_state_dict(missing, strict=False).missing_keys == [key]
    for odd in (key.replace("weight", "scale"), "model.layers.0.self_attn.q_proj.joined.product.weight"):
        with pytest.raises(RuntimeError, match=f'Unexpected key.*"{odd}"'):
            model.load_state_dict({**state, odd: state[key]})
    with pytest.raises(RuntimeError, match=rf"{key} has shape \[1, 2\]; allowed: \[32, 32\]"):
        model.load_state_dict({**state, key: torch.ones(1, 2)})
    with pytest.raises(RuntimeError, match=f"{key} is list; allowed: a tensor"):
        model.load_state_dict({**state, key: [1.0]})
    with pytest.raises(RuntimeError, match=f"{key} is to be assigned.*allowed: a copy into memory"):
        model.load_state_dict(state, assign=True)
    with pytest.raises(RuntimeError, match=f"{key} is on the meta device"):
        model.to("meta").load_state_dict(state)


def test_a_joined_state_has_gradients_where_asked_for():
    model = model_of("qwen2")
    qf.fuse_projections(model)
    name = "model.layers.0.self_attn.v_proj.bias"
    assert not model.state_dict()[name].requires_grad and model.state_dict(keep_vars=True)[name].requires_grad


def test_joined_layers_become_int8():
    model, want = model_of("llama"), model_of("llama")
    qf.fuse_projections(model)
    assert len(qf.quantize_linears(model).names) == 8  # in each layer two products, o_proj and down_proj
    assert not any(type(module) is JoinedLinear for module in model.modules())
    qf.quantize_linears(want)
    other = model_of("llama")
    qf.fuse_projections(other)
    qf.quantize_linears(other)
    other.load_state_dict(model.state_dict())
    assert torch.equal(logits(other), logits(model))
    assert distance(logits(model), logits(want)) < 1e-5


class Counting(nn.Linear):
    calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x)


@pytest.fixture
def parts():
    """Three layers of 2, 3 and 4 outputs."""
    joined = Joined(Counting(8, 9), [2, 3, 4])
    return [JoinedPart(joined, index) for index in range(3)]


def test_one_product_serves_all_parts(parts):
    product, x = parts[0].joined.product, torch.randn(5, 8)
    for _ in range(2):
        got = torch.cat([part(x) for part in parts], -1)
    assert product.calls == 2 and torch.equal(got, nn.functional.linear(x, product.weight, product.bias))
    assert not parts[0].joined._left  # nothing is kept once all have taken theirs


def test_parts_in_any_order_and_of_other_inputs(parts):
    product = parts[0].joined.product
    x, y = torch.randn(2, 5, 8).unbind()
    want = {id(z): nn.functional.linear(z, product.weight, product.bias).split([2, 3, 4], -1) for z in (x, y)}
    for index, z in ((2, x), (0, y), (1, x), (1, x), (0, x), (2, y)):
        assert torch.equal(parts[index](z), want[id(z)][index])


@pytest.mark.parametrize("inference", [False, True])
def test_an_input_that_was_written_to(parts, inference):
    x = torch.randn(5, 8)
    with torch.inference_mode(inference), torch.no_grad():
        parts[0](x)
        x.mul_(2)
        want = nn.functional.linear(x, parts[0].joined.product.weight, parts[0].joined.product.bias)
        assert torch.equal(parts[1](x), want[:, 2:5])


def test_threads(parts):
    inputs = torch.randn(40, 5, 8).unbind()
    product = parts[0].joined.product
    with ThreadPoolExecutor(4) as pool:
        got = list(pool.map(lambda x: torch.cat([part(x) for part in parts], -1), inputs))
    want = [nn.functional.linear(x, product.weight, product.bias) for x in inputs]
    assert all(map(torch.equal, got, want))


@pytest.mark.parametrize(
    ("change", "name", "products"),
    [(qf.quantize_linears, "linear_int8", 6), (qf.fuse_projections, "mm", 9)],
    ids=["int8", "joined"],
)
def test_compiled(change, name, products):
    """In one graph, in which a product that serves several layers stands once."""
    model, counts = model_of("llama"), []
    change(model)
    want = logits(model)

    def count(graph, _):
        found = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
        counts.append(sum(target.split(".")[1] == name for target in found if "." in target))
        return graph

    backend = aot_autograd(fw_compiler=count)
    with torch.no_grad():
        got = torch.compile(model, fullgraph=True, backend=backend)(tiny.tokens()).logits
    torch.testing.assert_close(got, want)
    # Of each layer qkv, o and down; gate and up, where they are no swiglu; and the logits, where they are no INT8.
    assert counts == [products]


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_on_a_gpu(family):
    model = model_of(family).to("cuda", torch.bfloat16)
    ids = tiny.tokens().cuda()
    with torch.no_grad():
        want = model(ids).logits.float()
        qf.quantize_linears(model)
        assert distance(model(ids).logits.float(), want) < LARGEST_ERROR[family]
    result = qf.generate(model, ids, max_new_tokens=20, page_size=16)
    assert result.is_captured, result.reason


def test_models_that_read_a_weight_themselves():
    """Its dtype (HunYuan's router), or all of it (Mamba)."""
    linear = nn.Linear(32, 8).bfloat16()
    want = linear.weight.detach()
    weight = qf.Int8Linear(want.T, linear.bias).weight
    assert weight.dtype is torch.bfloat16 and weight.shape == want.shape
    assert distance(weight.float(), want.float()) < 1e-2


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: qf.fuse_projections("gpt2"), "model is str; allowed: a torch.nn.Module"),
        (lambda: qf.quantize_linears(nn.Sequential(nn.Linear(4, 4)), skip=5), "skip is 5; allowed: None, or a list"),
        (lambda: qf.Int8Linear(3, 4), r"weight is int; allowed: a tensor \[K, N\]"),
    ],
)
def test_what_is_not_served(call, text):
    with pytest.raises(TypeError, match=text):
        call()
