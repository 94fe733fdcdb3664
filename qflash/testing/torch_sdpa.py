"""Shared by the tests of qflash.scaled_dot_product_attention: PyTorch's function, inputs, and a comparison."""

from __future__ import annotations

import torch

import qflash
from qflash.integrations import sdpa
from qflash.testing.compare import FLOAT32_L2, HALF_FACTOR, UNIT_ROUNDOFF

ORIGINAL = torch.nn.functional.scaled_dot_product_attention
ALLOWED = {
    torch.float32: FLOAT32_L2,
    torch.float16: HALF_FACTOR * UNIT_ROUNDOFF["float16"],
    torch.bfloat16: HALF_FACTOR * UNIT_ROUNDOFF["bfloat16"],
}


def tensors(q=(2, 4, 9, 16), k=None, v=None, dtype=torch.float32, grad=False, seed=0):
    generator = torch.Generator().manual_seed(seed)
    k = k or q
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_(grad) for shape in (q, k, v if v else k)]


def relative(got, want):
    return ((got.double() - want).norm() / want.norm()).item()


def check(q, k, v, allowed=None, **words):
    """Our result, checked against PyTorch's in float64, and that PyTorch did not compute it."""
    before = sdpa.totals.served
    got = qflash.scaled_dot_product_attention(q, k, v, **words)
    assert (sdpa.totals.served, sdpa.totals.fallbacks) == (before + 1, {})
    want = ORIGINAL(q.double(), k.double(), v.double(), **words)
    assert (got.shape, got.dtype) == (want.shape, q.dtype)
    if want.numel() and want.any():
        assert relative(got, want) <= (ALLOWED[q.dtype] if allowed is None else allowed)
    else:
        assert not got.any()
    return got


class Block(torch.nn.Module):
    """Attention as written in models."""

    def __init__(self, width=32, heads=4, kv_heads=2):
        super().__init__()
        self.heads, self.kv_heads, self.dim = heads, kv_heads, width // heads
        self.qkv = torch.nn.Linear(width, (heads + 2 * kv_heads) * self.dim)
        self.out = torch.nn.Linear(width, width)

    def forward(self, x, attn_mask=None):
        heads = self.qkv(x).unflatten(-1, (-1, self.dim)).transpose(1, 2)
        q, k, v = heads.split((self.heads, self.kv_heads, self.kv_heads), 1)
        seen = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=attn_mask, is_causal=attn_mask is None, enable_gqa=True
        )
        return self.out(seen.transpose(1, 2).reshape(x.shape))
