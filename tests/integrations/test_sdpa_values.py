"""qflash.scaled_dot_product_attention gives what PyTorch's gives: values, gradients, layouts."""

from __future__ import annotations

import pytest

import qflash
from qflash.integrations import sdpa
from qflash.testing.compare import GRADIENT_L2

torch = pytest.importorskip("torch")

from torch.nn.attention.bias import causal_lower_right, causal_upper_left  # noqa: E402

from qflash.integrations import sdpa_torch  # noqa: E402
from qflash.ops.problem import MAX_HEAD_DIM  # noqa: E402
from qflash.testing.torch_sdpa import ALLOWED, ORIGINAL, check, relative, tensors  # noqa: E402

pytestmark = pytest.mark.usefixtures("pytorch_is_as_it_was")


@pytest.mark.parametrize("dtype", ALLOWED)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("lengths", [(33, 33), (1, 40), (40, 1), (7, 50), (50, 7)], ids=str)
def test_lengths_masks_and_dtypes(dtype, is_causal, lengths):
    shapes = [(2, 3, length, 16) for length in lengths]
    check(*tensors(*shapes, dtype=dtype), is_causal=is_causal)


@pytest.mark.parametrize("dim", [1, 3, 64, MAX_HEAD_DIM])
def test_head_dims(dim):
    check(*tensors((2, 2, 40, dim)), is_causal=True)


@pytest.mark.parametrize("scale", [0.3, -0.2, 0, 2])
def test_scale(scale):
    check(*tensors((2, 2, 40, 16)), scale=scale)


def test_scale_and_gqa_by_position():
    q, k, v = tensors((2, 4, 5, 16), (2, 2, 5, 16))
    got = qflash.scaled_dot_product_attention(q, k, v, None, 0.0, True, 0.5, True)
    torch.testing.assert_close(got, ORIGINAL(q, k, v, is_causal=True, scale=0.5, enable_gqa=True))


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(
    ("q", "kv"),
    [
        ((2, 6, 20, 16), (2, 2, 30, 16)),
        ((2, 6, 30, 16), (2, 1, 20, 16)),
        ((6, 20, 16), (3, 20, 16)),
        ((2, 3, 6, 20, 16), (2, 3, 2, 20, 16)),
        ((2, 6, 20, 16), (1, 2, 20, 16)),
        ((2, 6, 20, 16), (2, 20, 16)),
    ],
    ids=str,
)
def test_grouped_queries(q, kv, is_causal):
    check(*tensors(q, kv), is_causal=is_causal, enable_gqa=True)


def test_more_dimensions_that_begin_alike():
    check(*tensors((2, 2, 20, 16), (2, 2, 2, 16, 16)))
    check(*tensors((2, 2, 2, 16, 16), (2, 2, 20, 16)))


SHAPES = [
    ((20, 16), (30, 16), (30, 16)),
    ((3, 20, 16), (3, 30, 16), (3, 30, 16)),
    ((2, 3, 2, 20, 16), (2, 3, 2, 30, 16), (2, 3, 2, 30, 16)),
    # broadcast
    ((4, 3, 20, 16), (1, 3, 30, 16), (1, 3, 30, 16)),
    ((4, 3, 20, 16), (4, 1, 30, 16), (4, 1, 30, 16)),
    ((4, 3, 20, 16), (4, 3, 30, 16), (1, 3, 30, 16)),
    ((4, 3, 20, 16), (4, 3, 30, 16), (4, 1, 30, 16)),
    ((1, 1, 20, 16), (4, 3, 30, 16), (4, 3, 30, 16)),
    ((4, 1, 20, 16), (1, 3, 30, 16), (4, 1, 30, 16)),
    ((4, 3, 20, 16), (3, 30, 16), (30, 16)),
    ((3, 20, 16), (4, 3, 30, 16), (4, 3, 30, 16)),
    ((3, 20, 16), (30, 16), (30, 16)),
    ((2, 1, 3, 20, 16), (5, 1, 30, 16), (30, 16)),
    # empty
    ((2, 3, 0, 16), (2, 3, 30, 16), (2, 3, 30, 16)),
    ((2, 3, 20, 16), (2, 3, 0, 16), (2, 3, 0, 16)),
    ((0, 3, 20, 16), (0, 3, 30, 16), (0, 3, 30, 16)),
    ((0, 20, 16), (0, 30, 16), (0, 30, 16)),
    ((0, 20, 16), (1, 30, 16), (1, 30, 16)),
    ((2, 0, 3, 20, 16), (2, 0, 3, 30, 16), (2, 0, 3, 30, 16)),
]


@pytest.mark.parametrize("shapes", SHAPES, ids=str)
@pytest.mark.parametrize("is_causal", [False, True])
def test_ranks_broadcasting_and_nothing(shapes, is_causal):
    check(*tensors(*shapes), is_causal=is_causal)


def test_one_shared_head_is_not_multiplied(monkeypatch):
    seen = []
    monkeypatch.setattr(
        sdpa_torch, "attention", lambda q, k, v, **words: seen.append(k.shape) or qflash.attention(q, k, v, **words)
    )
    check(*tensors((2, 4, 20, 16), (2, 1, 20, 16)))
    assert seen == [(2, 20, 1, 16)]


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(
    "shapes", [((2, 6, 9, 16), (2, 6, 13, 16)), ((2, 6, 13, 16), (2, 6, 9, 16)), *SHAPES[:1], *SHAPES[3:13]], ids=str
)
def test_gradients(shapes, is_causal):
    q, k, v = tensors(*shapes, grad=True)
    out = check(q, k, v, is_causal=is_causal)
    want = ORIGINAL(q.double(), k.double(), v.double(), is_causal=is_causal)
    dout = torch.randn(out.shape)
    got = torch.autograd.grad(out, (q, k, v), dout)
    for ours, theirs in zip(got, torch.autograd.grad(want, (q, k, v), dout.double()), strict=True):
        assert ours.shape == theirs.shape
        assert relative(ours, theirs.double()) < GRADIENT_L2["float32"]


def test_strides():
    q, k, v = tensors((2, 3, 20, 16))
    want = qflash.scaled_dot_product_attention(q, k, v)
    length_first = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    fused = torch.stack((q, k, v), -2).flatten(-2)  # [..., 48], as one projection leaves them
    for other in (length_first, fused.unflatten(-1, (3, 16)).unbind(-2), [x.mT.contiguous().mT for x in (q, k, v)]):
        assert torch.equal(check(*other), want)


def test_layout_of_the_result():
    """That of PyTorch's memory-efficient kernel, whatever the query's: a model's next step copies nothing."""
    for q in (tensors()[0], tensors()[0].transpose(1, 2).contiguous().transpose(1, 2)):
        out = qflash.scaled_dot_product_attention(q, q, q)
        rows = out.transpose(1, 2).reshape(2, 9, 64)
        assert rows.data_ptr() == out.data_ptr()
    for q in (tensors((5, 9, 16))[0], tensors((9, 16))[0]):
        assert qflash.scaled_dot_product_attention(q, q, q).is_contiguous()


@pytest.mark.parametrize("bias", [causal_lower_right, causal_upper_left])
@pytest.mark.parametrize("lengths", [(9, 13), (13, 9), (9, 9)], ids=str)
@pytest.mark.filterwarnings("ignore:Lower right causal bias")
def test_causal_biases_of_pytorch(bias, lengths):
    q, k, v = tensors(*((2, 4, length, 16) for length in lengths))
    words = {"attn_mask": bias(*lengths)}
    got = qflash.scaled_dot_product_attention(q, k, v, **words)
    assert sdpa.totals.served == 1
    torch.testing.assert_close(got, ORIGINAL(q, k, v, **words))
