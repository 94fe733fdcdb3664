"""Shared by the PyTorch tests: inputs, option mixes, and the definition of attention, differentiable in float64."""

from __future__ import annotations

import math

import torch

import qflash
from qflash.testing.compare import FLOAT32_L2, GRADIENT_L2, HALF_FACTOR, UNIT_ROUNDOFF

# Relative L2 errors that the numerics contract allows; for 16 bits they follow from rounding the exact result.
ALLOWED = {
    torch.float32: FLOAT32_L2,
    torch.float16: HALF_FACTOR * UNIT_ROUNDOFF["float16"],
    torch.bfloat16: HALF_FACTOR * UNIT_ROUNDOFF["bfloat16"],
}
ALLOWED_GRADIENT = GRADIENT_L2["float32"]


def rotate(x, cos, sin, positions, interleaved):
    """Rotary embedding of x [B, T, H, D] at integer positions [B, T]; plain differentiable math."""
    half = cos.shape[1]
    sign = torch.where(positions < 0, -1.0, 1.0).to(x.dtype)[:, :, None, None]
    c, s = (table.to(x.dtype)[positions.abs()][:, :, None, :] for table in (cos, sin))
    s = s * sign
    rot, rest = x[..., : 2 * half], x[..., 2 * half :]
    a, b = (rot[..., 0::2], rot[..., 1::2]) if interleaved else (rot[..., :half], rot[..., half:])
    a, b = a * c - b * s, a * s + b * c
    rot = torch.stack((a, b), -1).flatten(-2) if interleaved else torch.cat((a, b), -1)
    return torch.cat((rot, rest), -1)


def plain(q, k, v, *, causal=False, window=None, kv_lens=None, softcap=None, scale=None, rope=None):
    """(out, lse) by the definition, in float64, differentiable; the tests' reference for every option."""
    q, k, v = q.double(), k.double(), v.double()
    batch, q_len, q_heads, dim = q.shape
    k_len, kv_heads = k.shape[1:3]
    lens = torch.full((batch,), k_len) if kv_lens is None else kv_lens.long()
    i, j = torch.arange(q_len), torch.arange(k_len)
    diagonal = i[None, :] + (lens - q_len)[:, None]  # [B, Tq]
    if rope is not None:
        at_q = diagonal if rope.positions_q is None else rope.positions_q.long().expand(batch, q_len)
        at_k = (j if rope.positions_k is None else rope.positions_k.long()).expand(batch, k_len)
        q = rotate(q, rope.cos, rope.sin, at_q, rope.interleaved)
        k = rotate(k, rope.cos, rope.sin, at_k, rope.interleaved)
    k, v = (x.repeat_interleave(q_heads // kv_heads, 2) for x in (k, v))
    s = torch.einsum("bihd,bjhd->bhij", q, k) * (1 / math.sqrt(dim) if scale is None else scale)
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    left, right = window or (-1, -1)
    right = 0 if causal else right
    seen = (j < lens[:, None, None]).expand(batch, q_len, k_len)
    if left >= 0:
        seen = seen & (j >= diagonal[..., None] - left)
    if right >= 0:
        seen = seen & (j <= diagonal[..., None] + right)
    s = s.masked_fill(~seen[:, None], -torch.inf)
    lse = torch.logsumexp(s, -1)
    p = torch.where(seen[:, None], torch.exp(s - lse.clamp(min=-1e300)[..., None]), 0.0)
    return torch.einsum("bhij,bjhd->bihd", p, v), lse


def tensors(batch=2, q_len=9, k_len=13, q_heads=4, kv_heads=2, dim=16, dtype=torch.float32, grad=False, seed=0):
    gen = torch.Generator().manual_seed(seed)

    def one(length, heads):
        return torch.randn(batch, length, heads, dim, generator=gen).to(dtype).requires_grad_(grad)

    return one(q_len, q_heads), one(k_len, kv_heads), one(k_len, kv_heads)


def stacked(count=3, **kw):
    """q, k, v of several seeds, with an additional leading dimension."""
    return [torch.stack(x) for x in zip(*(tensors(seed=s, **kw) for s in range(count)), strict=True)]


def packed(pieces):
    """Batches of one, concatenated: q, k, v leaves that require gradients if the pieces do, and cu_seqlens."""
    q, k, v = (
        torch.cat([p[i][0].detach() for p in pieces]).requires_grad_(pieces[0][i].requires_grad) for i in range(3)
    )
    lengths = [[0, *(p[i].shape[1] for p in pieces)] for i in (0, 1)]
    return q, k, v, *(torch.tensor(n).cumsum(0).int() for n in lengths)


def tables(rows=32, half=4, **kw):
    cos, sin = (torch.from_numpy(t) for t in qflash.rope_tables(rows, 2 * half))
    return qflash.Rope(cos, sin, **kw)


def relative(got, want):
    return ((got.double() - want).norm() / want.norm()).item()


OPTIONS = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window": (3, 2), "scale": 0.3},
    "softcap": {"softcap": 2.0, "causal": True},
    "kv_lens": {"kv_lens": torch.tensor([13, 4], dtype=torch.int32), "causal": True},
    "rope": {"rope": tables()},
    "rope-interleaved": {"rope": tables(interleaved=True), "window": (4, 0)},
    "rope-positions": {
        "rope": tables(
            positions_q=torch.arange(9, dtype=torch.int32) * 2 - 5,
            positions_k=torch.stack([torch.arange(13), 20 - torch.arange(13)]).int(),
        )
    },
}
