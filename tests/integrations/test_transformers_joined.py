"""fuse_projections: parts of a product that somebody replaces or freezes, and what changes between two of them."""

from __future__ import annotations

import copy
import pickle
import weakref

import pytest

pytest.importorskip("transformers")

import torch
from torch import nn

import qflash.integrations.transformers as qf
from qflash.integrations.transformers.joined import Joined, JoinedLinear
from qflash.testing import tiny_models as tiny

# A part that is replaced, and the others of its product, of the attention or the MLP of a layer.
REPLACED = {
    "q_proj": ("self_attn", ("k_proj", "v_proj")),
    "k_proj": ("self_attn", ("q_proj", "v_proj")),
    "gate_proj": ("mlp", ("up_proj",)),
    "up_proj": ("mlp", ("gate_proj",)),
}


def model_of(family="llama"):
    return tiny.new_decoder(family)


def joined_model(change=qf.fuse_projections, family="llama"):
    model = model_of(family)
    change(model)
    return model


def logits(model):
    with torch.no_grad():
        return model(tiny.tokens()).logits


def replace(model, name, layer=0):
    """Give a model another layer, of the same sizes."""
    plain = tiny.decoder("llama").model.layers[layer].get_submodule(f"{REPLACED[name][0]}.{name}")
    parent = model.model.layers[layer].get_submodule(REPLACED[name][0])
    torch.manual_seed(3)
    setattr(parent, name, nn.Linear(plain.in_features, plain.out_features, bias=False))


# Parts that are replaced ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", REPLACED)
def test_parts_that_are_left_keep_their_weights(name):
    """Parameters of the model, which an optimizer trains and `to` moves."""
    model, plain = joined_model(), model_of()
    replace(model, name)
    replace(plain, name)
    torch.testing.assert_close(logits(model), logits(plain), rtol=1e-5, atol=1e-5)
    before = {one: x.clone() for one, x in model.state_dict().items()}
    model(tiny.tokens(), labels=tiny.tokens()).loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    prefix = f"model.layers.0.{REPLACED[name][0]}"
    assert not any(
        torch.equal(model.state_dict()[f"{prefix}.{one}.weight"], before[f"{prefix}.{one}.weight"])
        for one in REPLACED[name][1]
    )
    model.to(torch.bfloat16)
    assert {x.dtype for x in model.parameters()} == {torch.bfloat16} and logits(model).isfinite().all()


@pytest.mark.parametrize("change", [qf.fuse_projections, qf.quantize_linears])
@pytest.mark.parametrize("name", ["q_proj", "v_proj"])
def test_names_and_sizes(change, name):
    """A product is listed once, however many parts have it, and whoever asks."""
    model = joined_model(change)
    joined = [one for one, module in model.named_modules(remove_duplicate=False) if isinstance(module, Joined)]
    places = ["self_attn.q_proj.joined"] + ["mlp.gate_proj.joined"] * (change is qf.fuse_projections)
    assert joined == [f"model.layers.{layer}.{place}" for layer in (0, 1) for place in places]
    for words in ({}, {"remove_duplicate": False}):
        parameters = [x for _, x in model.named_parameters(**words)]
        assert len(parameters) == len(set(map(id, parameters)))
    numbers = sum(x.numel() for x in model.parameters())
    if change is qf.fuse_projections:
        assert numbers == sum(x.numel() for x in model_of().parameters())
        assert "model.layers.0.self_attn.q_proj.joined.product.weight" in dict(model.named_parameters())
    attention = model.model.layers[0].self_attn
    setattr(attention, name, nn.Identity())
    assert sum(x.numel() for x in model.parameters()) == numbers
    first = "k_proj" if name == "q_proj" else "q_proj"
    names = [one for one, module in attention.named_modules(remove_duplicate=False) if isinstance(module, Joined)]
    assert names == [f"{first}.joined"]


def test_a_state_without_one_part():
    """Both ways, of models that were changed and of ones that were not."""
    model, plain = joined_model(), model_of()
    replace(model, "q_proj")
    replace(plain, "q_proj")
    assert model.state_dict().keys() == plain.state_dict().keys()
    for weight in plain.parameters():
        weight.data.normal_()
    model.load_state_dict(plain.state_dict())
    assert all(torch.equal(x, plain.state_dict()[name]) for name, x in model.state_dict().items())


@pytest.mark.parametrize("name", ["q_proj", "k_proj", None])
def test_an_int8_state(name):
    """A product in INT8 is saved once, by the name of the first part that is left, and has to be there."""
    model, other = joined_model(qf.quantize_linears), model_of()
    for weight in other.parameters():
        weight.data.normal_()
    qf.quantize_linears(other)
    for one in (model, other):
        if name is not None:
            replace(one, name)
    state, first = model.state_dict(), "k_proj" if name == "q_proj" else "q_proj"
    prefix = f"model.layers.0.self_attn.{first}.joined.product."
    ours = [one for one in state if "layers.0.self_attn" in one and "joined" in one]
    assert ours == [prefix + one for one in ("values", "scale")]
    assert list(model.state_dict()) == list(state)  # as often as one asks
    nested = nn.ModuleDict({"inner": model}).state_dict()
    assert list(nested) == [f"inner.{one}" for one in state] and list(model.state_dict()) == list(state)
    for _ in range(2):
        other.load_state_dict(state)
    assert torch.equal(logits(other), logits(model))
    del state[prefix + "scale"]
    with pytest.raises(RuntimeError, match=rf'Missing key\(s\) in state_dict: "{prefix}scale"\. $'):
        other.load_state_dict(state)
    assert other.load_state_dict(state, strict=False).missing_keys == [prefix + "scale"]


COPIES = {"deepcopy": copy.deepcopy, "pickle": lambda model: pickle.loads(pickle.dumps(model))}


@pytest.mark.parametrize("how", COPIES)
def test_copies_share_no_weights(how):
    model = joined_model()
    replace(model, "gate_proj")
    other, want = COPIES[how](model), logits(model)
    for weight in model.parameters():
        weight.data.zero_()
    assert torch.equal(logits(other), want)
    attention = other.model.layers[0].self_attn
    assert attention.q_proj.joined is attention.k_proj.joined is attention.v_proj.joined


def test_wrapped_parts():
    """As an adapter wraps them: the product stays one, and its weights are those of the model."""

    class Wrapped(nn.Module):
        def __init__(self, base):
            super().__init__()
            self.base, self.more = base, nn.Linear(32, base.out_features, bias=False)

        def forward(self, x):
            return self.base(x) + self.more(x)

    model, plain = joined_model(), model_of()
    for one in (model, plain):
        torch.manual_seed(0)
        attention = one.model.layers[0].self_attn
        attention.q_proj, attention.v_proj = Wrapped(attention.q_proj), Wrapped(attention.v_proj)
    torch.testing.assert_close(logits(model), logits(plain), rtol=1e-5, atol=1e-5)
    assert model.state_dict().keys() == plain.state_dict().keys()
    assert sum(x.numel() for x in model.parameters()) == sum(x.numel() for x in plain.parameters())


def test_a_model_without_one_part_becomes_int8():
    model = joined_model()
    replace(model, "q_proj")
    names = qf.quantize_linears(model).names
    assert "model.layers.0.self_attn.k_proj.joined.product" in names and len(names) == len(set(names)) == 9
    assert not any(
        type(module) in (JoinedLinear, nn.Linear) for name, module in model.named_modules() if "lm" not in name
    )


def test_sharded_files(tmp_path):
    model, plain = joined_model(), model_of()
    model.save_pretrained(tmp_path, max_shard_size="10KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    again, info = type(plain).from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values())
    assert all(torch.equal(x, plain.state_dict()[name]) for name, x in again.state_dict().items())


# Parts that are frozen ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["q_proj", "k_proj", "v_proj"])
def test_a_part_alone_is_not_frozen(name):
    model = joined_model()
    attention = model.model.layers[0].self_attn
    part = attention.get_submodule(name)
    with pytest.raises(
        NotImplementedError, match=r"requires_grad_\(False\) of part \d of 3 of a joined layer.*allowed:"
    ):
        part.requires_grad_(False)
    assert all(x.requires_grad for x in model.parameters())
    assert part.requires_grad_() is part  # which changes nothing
    part.joined.requires_grad_(False)
    assert not attention.k_proj.joined.product.weight.requires_grad and attention.o_proj.weight.requires_grad
    with pytest.raises(NotImplementedError, match=r"requires_grad_\(True\)"):
        part.requires_grad_(True)


def test_what_has_all_parts_is_frozen():
    """By what is around them, and by those who go over all modules."""
    ways = (
        lambda model: model.requires_grad_(False),
        lambda model: model.apply(lambda module: module.requires_grad_(False)),
        lambda model: [module.requires_grad_(False) for module in model.modules()],
    )
    for freeze in ways:
        model = joined_model()
        freeze(model)
        assert not any(x.requires_grad for x in model.parameters())
    model = joined_model()
    attention = model.model.layers[0].self_attn
    attention.requires_grad_(False)
    assert {x.requires_grad for x in attention.parameters()} == {False} and model.lm_head.weight.requires_grad
    qf.quantize_linears(model)
    attention.k_proj.requires_grad_(False)  # nothing of INT8 has a gradient


# What changes between two parts ---------------------------------------------------------------------------------------


@pytest.fixture
def mlp():
    return joined_model(family="gemma3").model.layers[0].mlp


@pytest.fixture
def x():
    return torch.randn(5, 32)


def up_of(mlp, x):
    """What up_proj gives, without a first part before it."""
    return copy.deepcopy(mlp).up_proj(x)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_gradients_after_a_look_without(mlp, x, context):
    with context():
        mlp.gate_proj(x)
    got = mlp.up_proj(x)
    assert got.requires_grad and not got.is_inference()
    got.sum().backward()
    assert mlp.up_proj.joined.product.weight.grad.abs().sum() > 0
    mlp.gate_proj(x)
    mlp.up_proj(x)
    mlp.gate_proj(x)
    with torch.no_grad():
        assert not mlp.up_proj(x).requires_grad


def test_other_weights_between_parts(mlp, x):
    state = {name: torch.randn_like(weight) for name, weight in mlp.state_dict().items()}
    with torch.no_grad():
        mlp.gate_proj(x)
        mlp.load_state_dict(state)
        got = mlp.up_proj(x)
        torch.testing.assert_close(got, x @ state["up_proj.weight"].T)
        mlp.gate_proj(x)
        mlp.up_proj.joined.product.weight = nn.Parameter(2 * mlp.up_proj.joined.product.weight)
        torch.testing.assert_close(mlp.up_proj(x), 2 * got)


def test_a_step_of_an_optimizer_between_parts(mlp, x):
    mlp.gate_proj(x).sum().backward()
    torch.optim.SGD(mlp.parameters(), lr=1.0).step()
    torch.testing.assert_close(mlp.up_proj(x), up_of(mlp, x))


def test_weights_of_another_type_or_device_between_parts(mlp, x):
    with torch.no_grad():
        mlp.gate_proj(x)
        mlp.to(torch.float64)
        with pytest.raises(RuntimeError, match="dtype"):  # as of a layer that was not joined
            mlp.up_proj(x)


def test_int8_between_parts(x):
    model = joined_model(family="gemma3")
    mlp = model.model.layers[0].mlp
    with torch.no_grad():
        mlp.gate_proj(x)
        weight = weakref.ref(mlp.gate_proj.joined.product.weight)
        qf.quantize_linears(model)
        assert weight() is None  # columns that nobody took keep no memory of weights
        assert torch.equal(mlp.up_proj(x), up_of(mlp, x))


def test_autocast_between_parts(mlp, x):
    with torch.no_grad():
        mlp.gate_proj(x)
        for dtype in (torch.bfloat16, torch.float16):
            with torch.autocast("cpu", dtype):
                assert mlp.up_proj(x).dtype == dtype
                mlp.gate_proj(x)
                mlp.gate_proj(x)
        assert mlp.up_proj(x).dtype == torch.float32


def test_requires_grad_between_parts(mlp, x):
    mlp.requires_grad_(False)
    mlp.gate_proj(x)
    x.requires_grad_()
    assert mlp.up_proj(x).requires_grad
    x.requires_grad_(False)
    mlp.gate_proj(x)
    mlp.requires_grad_()
    assert mlp.up_proj(x).requires_grad


def test_weights_of_a_functional_call(mlp, x):
    weights = {name: 2 * weight.detach() for name, weight in mlp.named_parameters()}
    want = 2 * up_of(mlp, x)

    class Up(nn.Module):
        def __init__(self):
            super().__init__()
            self.mlp = mlp

        def forward(self, x):
            return self.mlp.up_proj(x)

    mlp.gate_proj(x)
    got = torch.func.functional_call(Up(), {f"mlp.{name}": weight for name, weight in weights.items()}, (x,))
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("how", COPIES)
def test_a_copy_after_an_error_between_parts(how, x):
    model = joined_model()
    mlp = model.model.layers[0].mlp
    want = logits(model)
    mlp.gate_proj(x)  # and the other part is never called
    assert mlp.gate_proj.joined._left
    other = COPIES[how](model)
    assert not other.model.layers[0].mlp.gate_proj.joined._left and mlp.gate_proj.joined._left
    assert torch.equal(logits(other), want)


def test_on_the_meta_device():
    """Which has no autocast."""
    model = joined_model().to("meta")
    assert model(tiny.tokens().to("meta")).logits.is_meta


def test_modes_in_one_graph(mlp, x):
    """Under torch.compile, too, parts in different modes have a product each."""

    def looks(x):
        with torch.no_grad():
            gate = mlp.gate_proj(x)
        with torch.autocast("cpu", torch.bfloat16):
            cast = mlp.up_proj(x)
        up = mlp.up_proj(x)
        return gate, cast, up, mlp.gate_proj(x)

    want = looks(x)
    got = torch.compile(looks, fullgraph=True, backend="eager")(x)
    assert [(y.dtype, y.requires_grad) for y in got] == [(y.dtype, y.requires_grad) for y in want]
    assert [y.requires_grad for y in got] == [False, True, True, True] and got[1].dtype == torch.bfloat16
    torch.testing.assert_close(got, want)
    assert not mlp.gate_proj.joined._left


def test_compiled_without_one_part():
    model = joined_model()
    replace(model, "q_proj")
    want = logits(model)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    for _ in range(3):
        torch.testing.assert_close(logits(compiled), want)
