"""qflash.scaled_dot_product_attention on a GPU."""

from __future__ import annotations

import pytest

import qflash
from qflash.integrations import sdpa
from qflash.testing.compare import GRADIENT_L2

torch = pytest.importorskip("torch")

from qflash.testing.torch_sdpa import ALLOWED, ORIGINAL, check, relative, tensors  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("pytorch_is_as_it_was")]


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("lengths", [(128, 128), (1, 200), (70, 300), (300, 70)], ids=str)
def test_values_on_a_gpu(is_causal, lengths):
    shapes = [(2, heads, length, 64) for heads, length in zip((8, 2), lengths, strict=True)]
    check(*(x.cuda() for x in tensors(*shapes, dtype=torch.bfloat16)), is_causal=is_causal, enable_gqa=True)


@pytest.mark.parametrize("compiled", [False, True])
def test_gradients_on_a_gpu_are_served_or_handed_to_pytorch(compiled):
    torch.compiler.reset()
    q, k, v = (x.cuda().requires_grad_() for x in tensors((2, 4, 128, 64), dtype=torch.bfloat16))

    def call(q, k, v):
        return qflash.scaled_dot_product_attention(q, k, v, is_causal=True, fallback=True)

    call = torch.compile(call, fullgraph=True, backend="aot_eager") if compiled else call
    want = ORIGINAL(q.double(), k.double(), v.double(), is_causal=True)
    assert relative(call(q, k, v), want) <= ALLOWED[torch.bfloat16]
    got = torch.autograd.grad(call(q, k, v).float().sum(), (q, k, v))
    for ours, theirs in zip(got, torch.autograd.grad(want.sum(), (q, k, v)), strict=True):
        assert relative(ours, theirs.double()) < GRADIENT_L2["bfloat16"]
    assert sdpa.totals.served + sdpa.totals.fallbacks.total() >= 1
