"""What attn_implementation "qf" cannot express raises in the layer that needs it, in eager mode and in torch.compile;
and what it can express compiles without a break."""

from __future__ import annotations

import copy
import re

import pytest

pytest.importorskip("transformers")

import torch
import transformers

import qflash
import qflash.integrations.transformers as qf
from qflash.integrations.transformers.attention import qf_attention
from qflash.integrations.transformers.mask import Mask
from qflash.integrations.transformers.patterns import traced_pattern_of
from qflash.testing import tiny_models as tiny

qf.register()

TOLERANCE = 1e-5


def forward(family, **words):
    with tiny.attention_by(tiny.decoder(family), "qf") as model, torch.no_grad():
        return model(tiny.tokens(), **words).logits


def test_a_dense_mask():
    mask = torch.ones(3, 1, tiny.LENGTH, tiny.LENGTH).tril().bool()
    with pytest.raises(
        NotImplementedError, match=r"LlamaAttention of llama, layer 0: .*dense tensor of shape \[3, 1, 14"
    ):
        forward("llama", attention_mask=mask)


def test_holes_under_a_window():
    """Distances count padding; in eager mode this is seen before anything is computed."""
    words = {"attention_mask": tiny.padding("holes")}
    with pytest.raises(
        NotImplementedError, match=r"MistralAttention of mistral, layer 0: .*holes under a sliding window"
    ):
        forward("mistral", **words)
    cache = qf.PagedCache(tiny.decoder("mistral").config, pages=8, page_size=16)
    with pytest.raises(NotImplementedError, match="holes under a sliding window"):
        forward("mistral", **words, past_key_values=cache)
    assert cache.get_seq_length() == 0 and cache.kv is None


def test_holes_under_a_window_that_hides_nothing(monkeypatch):
    model, mask = tiny.decoder("mistral"), tiny.padding("holes")
    monkeypatch.setattr(model.config, "sliding_window", tiny.LENGTH)
    with tiny.attention_by(model, "sdpa"), torch.no_grad():
        want = model(tiny.tokens(), attention_mask=mask).logits
    got = forward("mistral", attention_mask=mask)
    torch.testing.assert_close(got[mask.bool()], want[mask.bool()], atol=TOLERANCE, rtol=0)


def test_dropout():
    model = tiny.decoder("llama")
    model.train()
    try:
        for layer in model.model.layers:
            layer.self_attn.attention_dropout = 0.1
        with pytest.raises(NotImplementedError, match=r"LlamaAttention of llama, layer 0: dropout is 0\.1; allowed: 0"):
            forward("llama")
    finally:
        tiny.decoder.cache_clear()


def test_a_position_bias():
    sizes = {"vocab_size": tiny.VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
    model = transformers.T5EncoderModel(transformers.T5Config(**sizes)).eval()
    model.set_attn_implementation("qf")
    with pytest.raises(NotImplementedError, match="T5Attention of t5, layer 0: position_bias is given"):
        model(tiny.tokens())


def test_a_mask_function_of_ones_own():
    from transformers.masking_utils import create_causal_mask

    config = transformers.LlamaConfig(attn_implementation="qf")
    mask = create_causal_mask(
        config, torch.zeros(1, 4, 1), None, None, or_mask_function=lambda b, h, q, k: (q < 2) & (k < 2)
    )
    assert isinstance(mask, Mask) and "or_mask" in mask.obstacle


def test_blocks_that_see_both_ways():
    """As images among text: a union of masks."""
    from transformers.masking_utils import create_causal_mask

    config = transformers.LlamaConfig(attn_implementation="qf")
    blocks = torch.tensor([[-1, 0, 0, -1]])
    mask = create_causal_mask(config, torch.zeros(1, 4, 1), None, None, block_sequence_ids=blocks)
    assert "a union of masks" in mask.obstacle


def test_chunks():
    """Where all tokens are in the first chunk the mask is causal; else it has no words."""
    from transformers.masking_utils import create_chunked_causal_mask

    config = transformers.LlamaConfig(attn_implementation="qf")
    config.attention_chunk_size = 8
    mask = create_chunked_causal_mask(config, torch.zeros(1, 8, 1), None, None)
    assert mask.obstacle is None and mask.causal and mask.window is None
    mask = create_chunked_causal_mask(config, torch.zeros(1, 9, 1), None, None)
    assert "chunks of 8 tokens" in mask.obstacle


def test_chunks_of_packed_sequences():
    """Whether chunks are of positions, as from transformers 5.23 on, or of indices: packing is never left out."""
    from transformers import masking_utils

    config = transformers.LlamaConfig(attn_implementation="qf")
    config.attention_chunk_size = 8
    packed = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]])
    mask = masking_utils.create_chunked_causal_mask(config, torch.zeros(1, 8, 1), None, None, packed)
    assert mask.obstacle == "chunks of packed sequences" or mask.cu_seqlens.tolist() == [0, 3, 8]
    # In a graph nobody looks at positions; there the mask function tells where sequences begin.
    segments = masking_utils.packed_sequence_mask_function(torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1]]))
    function = masking_utils.and_masks(masking_utils.causal_mask_function, segments)
    words = {"local_size": 8, "both_ways": False, "config": config, "device": "cpu"}
    assert traced_pattern_of(function, 1, 8, is_plain=True, **words).starts is None
    pattern = traced_pattern_of(function, 1, 8, is_plain=False, **words)
    assert pattern.chunk == 8 and pattern.starts[0].nonzero()[:, 0].tolist() == [0, 3]


def test_a_window_to_both_sides():
    from transformers.masking_utils import create_bidirectional_sliding_window_mask

    config = transformers.LlamaConfig(attn_implementation="qf")
    config.sliding_window = 3
    mask = create_bidirectional_sliding_window_mask(config, torch.zeros(1, 9, 1), None)
    assert mask.obstacle is None and not mask.causal and mask.window == (3, 3)
    mask = create_bidirectional_sliding_window_mask(config, torch.zeros(1, 9, 1), None, torch.zeros(1, 5, 1))
    assert "queries that stand up to key 9, of 5" in mask.obstacle
    mask = create_bidirectional_sliding_window_mask(config, torch.zeros(1, 5, 1), None, torch.zeros(1, 9, 1))
    assert "a window to both sides of queries that stand up to key 5, of 9" in mask.obstacle


def test_a_model_that_slices_its_mask():
    with pytest.raises(NotImplementedError, match="slices its attention mask"):
        Mask(1, 4, 4, 4, True)[:, :, :, :2]


def test_a_model_that_computes_with_its_mask():
    with pytest.raises(AttributeError, match="the model asks for 'dtype' of its attention mask, and attn_implem"):
        Mask(1, 4, 4, 4, True).dtype  # noqa: B018
    for compute in (torch.add, torch.mul, lambda scores, mask: mask + scores):  # as GIT and BigBird Pegasus do
        with pytest.raises(NotImplementedError, match=r"gives its attention mask to (add|mul), and attn_implem"):
            compute(torch.zeros(4, 4), Mask(1, 4, 4, 4, True))


def test_a_window_without_a_mask():
    from types import SimpleNamespace

    q = torch.zeros(1, 2, 9, 16)
    module = SimpleNamespace(is_causal=True, layer_idx=3, config=SimpleNamespace(model_type="some"))
    with pytest.raises(NotImplementedError, match="SimpleNamespace of some, layer 3: sliding_window is 4"):
        qf_attention(module, q, q, q, None, sliding_window=4)


def test_a_mask_for_other_keys():
    from types import SimpleNamespace

    q, k = torch.zeros(1, 2, 3, 16), torch.zeros(1, 2, 9, 16)
    with pytest.raises(NotImplementedError, match=r"there are 3 queries and 9 keys; allowed: .* 3 queries and 7 keys"):
        qf_attention(SimpleNamespace(), q, k, k, Mask(1, 3, 7, 7, True))


def test_weights_are_not_to_be_had(monkeypatch):
    with pytest.raises(NotImplementedError, match="output_attentions is True"):
        forward("llama", output_attentions=True)
    monkeypatch.setattr(tiny.decoder("llama").config, "_output_attentions", True)
    with pytest.raises(NotImplementedError, match="output_attentions is True"):
        forward("llama")


def test_more_queries_than_keys_without_a_mask():
    """PyTorch aligns its causal mask to the first key, which no word says then."""
    q, k = torch.randn(1, 2, 7, 16), torch.randn(1, 2, 4, 16)
    module = torch.nn.Module()
    with pytest.raises(NotImplementedError, match="there are 7 queries and 4 keys and no mask"):
        qf_attention(module, q, k, k, None, is_causal=True)
    got, _ = qf_attention(module, q, k, k, None, is_causal=False)
    want = torch.nn.functional.scaled_dot_product_attention(q, k, k).transpose(1, 2)
    torch.testing.assert_close(got, want, atol=TOLERANCE, rtol=0)


def test_sinks_of_each_query():
    q = torch.randn(1, 2, 3, 16)
    with pytest.raises(NotImplementedError, match="sinks is given"):
        qf_attention(torch.nn.Module(), q, q, q, None, sinks=torch.zeros(1, 2, 3, 1))


def test_a_cache_without_sequences():
    cache = qf.PagedCache(tiny.decoder("llama").config, pages=8, page_size=16)
    with pytest.raises(ValueError, match="the cache has no sequences"):
        cache.advance()
    with pytest.raises(NotImplementedError, match="a PagedCache is not copied"):
        copy.deepcopy(cache)


def test_errors_of_attention_name_the_layer():
    model = tiny.decoder("llama")
    try:
        model.double()
        with pytest.raises(TypeError, match="float64") as caught:
            forward("llama")
    finally:
        tiny.decoder.cache_clear()
    assert caught.value.__notes__ == ["in LlamaAttention of llama, layer 0"]


def test_int8_has_no_gradient():
    refused = pytest.raises(NotImplementedError, match="requires a gradient and kernel 'cpu_int8'")
    with tiny.attention_by(tiny.decoder("llama"), "qf_int8") as model, refused:
        model(tiny.tokens(), labels=tiny.tokens())


def test_pages_are_read_by_qflash_alone():
    model = tiny.decoder("llama")
    cache = qf.PagedCache(model.config, pages=8, page_size=16)
    with (
        tiny.attention_by(model, "sdpa"),
        pytest.raises(AttributeError, match=r"only qflash reads them; allowed: .*'qf'"),
    ):
        model(tiny.tokens(), past_key_values=cache)


def test_what_a_model_may_not_do_with_keys_and_values_in_pages():
    """As DiffLlama, which splits values, DeepSeek V3, which expands what it cached, and Mllama, which looks at a
    layer's."""
    new = torch.zeros(1, 2, 1, 16)
    cache = qf.PagedCache(tiny.decoder("llama").config, pages=4, page_size=16)
    keys, values = cache.update(new, new, 0)
    for use in (lambda x: x.shape, lambda x: x.repeat(1, 2, 1, 1), lambda x: torch.chunk(x, 2, dim=1)):
        for x in (keys, values, cache.layers[0].keys, cache.layers[0].values):
            with pytest.raises((AttributeError, NotImplementedError), match=r"keys and values in pages .*; allowed: "):
                use(x)
    q = torch.zeros(1, 4, 1, 16)
    with pytest.raises(NotImplementedError, match="keys are in pages and values are not"):
        qf_attention(torch.nn.Module(), q, keys, q, Mask(1, 1, 1, 1, True))


def test_a_window_that_is_in_the_config_alone(monkeypatch):
    """transformers' caches forget what is behind it, whatever the mask says (Moshi)."""
    model = tiny.decoder("llama")
    monkeypatch.setattr(model.config, "sliding_window", tiny.WINDOW, raising=False)
    with pytest.raises(NotImplementedError, match=r"config says that .* sliding window, .* its mask has none"):
        forward("llama", past_key_values=qf.PagedCache(model.config, pages=8, page_size=16))


@pytest.mark.parametrize("config", [None, {"num_hidden_layers": 2}, "llama"], ids=["none", "dict", "name"])
def test_what_is_no_config(config):
    with pytest.raises(TypeError, match=f"config is {type(config).__name__}; allowed: the config of a model"):
        qf.PagedCache(config, pages=4)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda cache: cache.crop(2.5), r"tokens_to_remove is 2\.5; allowed: an int"),
        (lambda cache: cache.crop(None), "tokens_to_remove is None; allowed: an int"),
        (lambda cache: cache.reorder_cache([0, 1, 2]), "beam_idx is list; allowed: a tensor of one dimension"),
        (lambda cache: cache.reorder_cache(torch.tensor([0, 0, 3])), r"beam_idx is \[0, 0, 3\]; allowed: .* below 3"),
        (lambda cache: cache.batch_select_indices(torch.tensor([7])), r"indices is \[7\]; allowed: numbers below 3"),
        (
            lambda cache: cache.batch_select_indices(torch.tensor([True])),
            r"indices is \[True\]; allowed: .* or 3 flags",
        ),
        (lambda cache: cache.batch_repeat_interleave(0), "repeats is 0; allowed: 1 and more"),
        (lambda cache: cache.batch_repeat_interleave(1.5), r"repeats is 1\.5; allowed: an int"),
    ],
)
def test_sequences_that_are_not_there(change, text):
    """What is refused leaves the cache as it was."""
    model = tiny.decoder("llama")
    cache = qf.PagedCache(model.config, pages=8, page_size=16)
    forward("llama", past_key_values=cache)
    before = list(cache._sequences)
    with pytest.raises((TypeError, ValueError, IndexError), match=text):
        change(cache)
    assert cache._sequences == before and cache.get_seq_length() == tiny.LENGTH


def test_a_sequence_counted_from_the_end():
    cache = qf.PagedCache(tiny.decoder("llama").config, pages=8, page_size=16)
    forward("llama", past_key_values=cache)
    cache.reorder_cache(torch.tensor([-1, 2, 0]))
    assert len(set(cache._sequences)) == 3  # the one that comes twice is shared, not the same


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ({"pages": 0}, "pages is 0"),
        ({"pages": 4, "page_size": 20}, "page_size is 20; allowed: 16"),
        ({"pages": 4, "precision": "fp8"}, "precision is 'fp8'"),
    ],
)
def test_sizes_of_pages(words, text):
    with pytest.raises(ValueError, match=re.escape(text)):
        qf.PagedCache(tiny.decoder("llama").config, **words)


def test_pages_of_float32_on_a_gpu():
    from torch._subclasses.fake_tensor import FakeTensorMode

    cache = qf.PagedCache(tiny.decoder("llama").config, pages=4, page_size=16)
    with FakeTensorMode(), pytest.raises(NotImplementedError, match=r"keys are torch.float32 on a GPU, .* bfloat16"):
        k = torch.zeros(1, 2, 3, 16, device="cuda")
        cache._allocate(k, k)


def test_layers_that_are_no_attention():
    config = transformers.LlamaConfig()
    config.layer_types = ["linear_attention", "full_attention"]
    with pytest.raises(NotImplementedError, match="config has linear_attention"):
        qf.PagedCache(config, pages=4)


# torch.compile --------------------------------------------------------------------------------------------------------


def compiled(family, **words):
    torch.compiler.reset()
    with tiny.attention_by(tiny.decoder(family), "qf") as model, torch.no_grad():
        return torch.compile(model, fullgraph=True, backend="aot_eager")(use_cache=False, **words).logits


@pytest.mark.parametrize("family", ["llama", pytest.param("mistral", marks=pytest.mark.slow), "gemma3", "gpt2"])
def test_compiled(family):
    """Nobody looks at a mask while a graph is made, so one graph serves padding of every kind."""
    model, ids = tiny.decoder(family), tiny.tokens()
    torch.compiler.reset()
    graph = torch.compile(model, fullgraph=True, backend="aot_eager")
    for kind in ("none", "left", "right", "ones"):
        mask = tiny.padding(kind)
        words = {"attention_mask": mask, "position_ids": tiny.positions(mask), "use_cache": False}
        with torch.no_grad():
            with tiny.attention_by(model, "sdpa"):
                want = model(ids, **words).logits
            with tiny.attention_by(model, "qf"):
                got = graph(ids, **words).logits
        real = slice(None) if mask is None else mask.bool()
        torch.testing.assert_close(got[real], want[real], atol=TOLERANCE, rtol=0, msg=f"padding {kind}")


def test_a_graph_with_a_growing_cache():
    """Lengths as symbols: a prompt, and tokens one by one."""
    model, ids = tiny.decoder("mistral"), tiny.tokens()
    torch.compiler.reset()
    logits = {}
    for name in ("sdpa", "qf"):
        cache = transformers.DynamicCache(config=model.config)
        with tiny.attention_by(model, name), torch.no_grad():
            call = torch.compile(model, fullgraph=True, backend="eager") if name == "qf" else model
            parts = [ids[:, :6], *ids[:, 6:].split(1, 1)]
            logits[name] = torch.cat([call(part, past_key_values=cache).logits for part in parts], 1)
    torch.testing.assert_close(logits["qf"], logits["sdpa"], atol=TOLERANCE, rtol=0)


def test_a_compiled_encoder():
    model, mask = tiny.bert(), tiny.padding("both")
    torch.compiler.reset()
    with tiny.attention_by(model, "sdpa"), torch.no_grad():
        want = model(tiny.tokens(), attention_mask=mask).last_hidden_state
    with tiny.attention_by(model, "qf"), torch.no_grad():
        got = torch.compile(model, fullgraph=True, backend="aot_eager")(tiny.tokens(), attention_mask=mask)
    torch.testing.assert_close(got.last_hidden_state, want, atol=TOLERANCE, rtol=0)


def test_compiled_gradients():
    model, ids, mask = tiny.decoder("llama"), tiny.tokens(), tiny.padding("right")
    labels = ids.masked_fill(mask == 0, -100)
    torch.compiler.reset()

    def gradient(name, call):
        model.zero_grad()
        with tiny.attention_by(model, name):
            call(ids, attention_mask=mask, labels=labels, use_cache=False).loss.backward()
        return model.model.layers[0].self_attn.k_proj.weight.grad.clone()

    want = gradient("sdpa", model)
    got = gradient("qf", torch.compile(model, fullgraph=True, backend="aot_eager"))
    assert (got - want).norm() <= 1e-5 * want.norm()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["none", "left"])
def test_pages_beside_a_graph(kind):
    """A compiled model reserves and reads pages between its graphs."""
    model, mask, ids = tiny.decoder("mistral"), tiny.padding(kind), tiny.tokens()
    words = {"attention_mask": mask, "position_ids": tiny.positions(mask)}
    torch.compiler.reset()
    with tiny.attention_by(model, "qf"), torch.no_grad():
        call = torch.compile(model, backend="eager")
        cache = qf.PagedCache(model.config, pages=8, page_size=16)
        got, want = call(ids, past_key_values=cache, **words).logits, model(ids, **words).logits
    real = slice(None) if mask is None else mask.bool()
    torch.testing.assert_close(got[real], want[real], atol=TOLERANCE, rtol=0)


def test_packed_sequences_in_a_graph():
    """They raise where they come, unless the lengths come with them."""
    ids = tiny.tokens(1)
    packed = torch.cat([torch.arange(n) for n in (4, 8, 2)])[None]
    with pytest.raises(RuntimeError, match="position_ids are packed, in a graph; allowed: cu_seq_lens_q"):
        compiled("llama", input_ids=ids, position_ids=packed)
    starts = torch.tensor([0, 4, 12, 14], dtype=torch.int32)
    got = compiled("llama", input_ids=ids, position_ids=packed, cu_seq_lens_q=starts, max_length_q=8)
    with tiny.attention_by(tiny.decoder("llama"), "sdpa") as model, torch.no_grad():
        want = model(ids, position_ids=packed, use_cache=False).logits
    torch.testing.assert_close(got, want, atol=TOLERANCE, rtol=0)


def test_holes_under_a_window_in_a_graph():
    with pytest.raises(RuntimeError, match="holes under a sliding window"):
        compiled("mistral", input_ids=tiny.tokens(), attention_mask=tiny.padding("holes"))


def test_a_graph_of_a_mask_of_ones_own():
    from transformers.masking_utils import create_causal_mask

    config = transformers.LlamaConfig(attn_implementation="qf")
    obstacles = []

    def make(x):
        blocks = torch.zeros(1, 4, dtype=torch.int64)
        obstacles.append(create_causal_mask(config, x, None, None, block_sequence_ids=blocks).obstacle)
        return x + 1

    torch.compile(make, fullgraph=True, backend="eager")(torch.zeros(1, 4, 1))
    assert "or_mask" in obstacles[0]


def test_the_error_of_a_kernel_is_qflashs_own():
    """head_dim 320: a head that no kernel serves."""
    config = transformers.LlamaConfig(
        vocab_size=9, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=1, head_dim=320
    )
    model = transformers.LlamaForCausalLM(config).eval()
    model.set_attn_implementation("qf")
    with pytest.raises((ValueError, qflash.NoKernelError), match="head_dim"):
        model(torch.ones(1, 3, dtype=torch.int64))
