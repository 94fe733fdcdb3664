"""layout="bhtd": the same numbers with heads before length, in every framework; words where layouts are mixed up."""

from __future__ import annotations

import numpy as np
import pytest

import qflash


def numpy_arrays(q_heads=4, kv_heads=2, q_len=5, k_len=9, dim=16):
    rng = np.random.default_rng(0)
    shapes = ((2, q_len, q_heads, dim), (2, k_len, kv_heads, dim), (2, k_len, kv_heads, dim))
    return [rng.standard_normal(shape).astype(np.float32) for shape in shapes]


def torch_arrays():
    torch = pytest.importorskip("torch")
    return [torch.from_numpy(x) for x in numpy_arrays()]


def jax_arrays():
    jnp = pytest.importorskip("jax.numpy")
    return [jnp.asarray(x) for x in numpy_arrays()]


@pytest.mark.parametrize("make", [numpy_arrays, torch_arrays, jax_arrays], ids=["numpy", "torch", "jax"])
@pytest.mark.parametrize("words", [{}, {"causal": True, "kv_lens": [3, 9]}, {"precision": "int8"}], ids=str)
def test_heads_first(make, words):
    q, k, v = make()
    out, lse = qflash.attention(q, k, v, return_lse=True, **words)
    swapped = [x.swapaxes(1, 2) for x in (q, k, v)]
    got = qflash.attention(*swapped, layout="bhtd", **words)
    assert tuple(got.shape) == (2, 4, 5, 16)
    np.testing.assert_array_equal(np.asarray(got), np.asarray(out).swapaxes(1, 2))
    again, same_lse = qflash.attention(*swapped, layout="bhtd", return_lse=True, **words)
    np.testing.assert_array_equal(np.asarray(again), np.asarray(got))
    np.testing.assert_array_equal(np.asarray(same_lse), np.asarray(lse))
    words.pop("kv_lens", None)
    assert qflash.explain(*swapped, layout="bhtd", **words).spec == qflash.explain(q, k, v, **words).spec


def test_heads_first_has_gradients_and_compiles():
    torch = pytest.importorskip("torch")
    q, k, v = (x.transpose(1, 2).contiguous().requires_grad_() for x in torch_arrays())
    want = torch.autograd.grad(qflash.attention(*(x.transpose(1, 2) for x in (q, k, v))).sum(), (q, k, v))
    call = lambda q, k, v: qflash.attention(q, k, v, layout="bhtd")  # noqa: E731
    for function in (call, torch.compile(call, backend="aot_eager", fullgraph=True)):
        for a, b in zip(torch.autograd.grad(function(q, k, v).sum(), (q, k, v)), want, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_bad_layouts():
    q, k, v = numpy_arrays()
    with pytest.raises(ValueError, match=r"layout is 'bnsd'; allowed: 'bthd', 'bhtd'"):
        qflash.attention(q, k, v, layout="bnsd")
    with pytest.raises(
        ValueError, match=r"q has shape \(5, 4, 16\); allowed: rank 4, \[batch, heads, length, head_dim\]"
    ):
        qflash.attention(q[0], k, v, layout="bhtd")
    with pytest.raises(TypeError, match=r"k is builtins.list"):
        qflash.attention(q, k.tolist(), v, layout="bhtd")
    with pytest.raises(ValueError, match=r"layout is 'bhtd' and q is qflash.Quantized; allowed: 'bthd'"):
        qflash.attention(qflash.quantize(q), qflash.quantize(k), v, layout="bhtd")


def test_mixed_up_layouts_are_suspected():
    q, k, v = (x.swapaxes(1, 2) for x in numpy_arrays())
    with pytest.raises(ValueError, match=r"k has 9 heads; allowed: a divisor of q's 5 heads .layout, 'bthd' or 'bhtd'"):
        qflash.attention(q, k, v)
    x = np.zeros((1, 4, 300, 16), np.float32)
    assert any("300 heads and 4 tokens" in note for note in qflash.explain(x, x, x).notes)
    assert not qflash.explain(x, x, x, layout="bhtd").notes


def test_tables_of_hugging_face():
    q, k, v = numpy_arrays()
    cos, sin = qflash.rope_tables(9, 16)
    want = qflash.attention(q, k, v, rope=qflash.Rope(cos, sin))
    twice = [np.concatenate((x, x), -1) for x in (cos, sin)]
    np.testing.assert_array_equal(qflash.attention(q, k, v, rope=qflash.Rope.from_hf(*twice)), want)
    np.testing.assert_array_equal(qflash.attention(q, k, v, rope=qflash.Rope.from_hf(*(x[None] for x in twice))), want)
    want = qflash.attention(q, k, v, rope=qflash.Rope(cos, sin, interleaved=True))
    pairs = qflash.Rope.from_hf(*(x.repeat(2, -1) for x in (cos, sin)), interleaved=True)
    np.testing.assert_array_equal(qflash.attention(q, k, v, rope=pairs), want)
    with pytest.raises(
        ValueError, match=r"rope.cos has 16 columns; allowed: at most head_dim / 2 = 8 .qflash.Rope.from_hf"
    ):
        qflash.attention(q, k, v, rope=qflash.Rope(*twice))
    with pytest.raises(
        ValueError, match=r"rope.cos has shape .*allowed: .positions, rotary_dim / 2., .* .qflash.Rope.from_hf"
    ):
        qflash.attention(q, k, v, rope=qflash.Rope(*(x[None] for x in twice)))
    with pytest.raises(ValueError, match=r"rope.cos has 16 columns; .*qflash.Rope.from_hf"):
        qflash.quantize(k, rope=qflash.Rope(*twice))
    with pytest.raises(
        ValueError, match=r"cos has shape \(2, 9, 16\); allowed: .positions, rotary_dim. or .1, positions"
    ):
        qflash.Rope.from_hf(*(np.stack((x, x)) for x in twice))
    with pytest.raises(ValueError, match=r"cos has 15 columns; allowed: an even number"):
        qflash.Rope.from_hf(*(x[:, :15] for x in twice))
