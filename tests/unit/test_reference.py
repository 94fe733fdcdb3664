"""The oracle itself: against its definition written as scalar loops, PyTorch in float64, and finite differences."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import pytest

from qflash import Rope, reference, rope_tables
from qflash.reference import blocks, sm90_quantize


def arrays(seed=0, batch=2, q_len=7, k_len=9, q_heads=4, kv_heads=2, head_dim=6):
    rng = np.random.default_rng(seed)
    q = rng.standard_normal((batch, q_len, q_heads, head_dim))
    k, v = rng.standard_normal((2, batch, k_len, kv_heads, head_dim))
    return q, k, v


def by_hand(q, k, v, b, i, h, left=-1, right=-1, length=None, softcap=0.0, scale=None):
    """out[b, i, h] and lse[b, h, i], one number at a time."""
    len_q, len_k = q.shape[1], k.shape[1] if length is None else length
    kv_head = h // (q.shape[2] // k.shape[2])
    scale = 1 / math.sqrt(q.shape[3]) if scale is None else scale
    weights = {}
    for j in range(len_k):
        distance = j - (i + len_k - len_q)
        if (left >= 0 and distance < -left) or (right >= 0 and distance > right):
            continue
        score = scale * sum(float(x) * float(y) for x, y in zip(q[b, i, h], k[b, j, kv_head], strict=True))
        weights[j] = math.exp(softcap * math.tanh(score / softcap) if softcap else score)
    if not weights:
        return np.zeros(q.shape[3]), -math.inf
    total = sum(weights.values())
    out = sum(weight / total * v[b, j, kv_head] for j, weight in weights.items())
    return out, math.log(total)


@pytest.mark.parametrize(
    ("words", "hand"),
    [
        ({}, {}),
        ({"causal": True}, {"right": 0}),
        ({"window": (2, 1)}, {"left": 2, "right": 1}),
        ({"window": (0, 0)}, {"left": 0, "right": 0}),
        ({"causal": True, "window": (3, 4)}, {"left": 3, "right": 0}),
        ({"softcap": 0.7}, {"softcap": 0.7}),
        ({"scale": -0.4}, {"scale": -0.4}),
        ({"scale": 0.0}, {"scale": 0.0}),
    ],
)
@pytest.mark.parametrize("lengths", [(7, 9), (9, 4), (1, 5)])
def test_definition(words: dict, hand: dict, lengths: tuple[int, int]) -> None:
    q, k, v = arrays(q_len=lengths[0], k_len=lengths[1])
    out, lse = reference.attention(q, k, v, **words)
    for b, i, h in np.ndindex(q.shape[:3]):
        want, want_lse = by_hand(q, k, v, b, i, h, **hand)
        assert np.allclose(out[b, i, h], want, atol=1e-14)
        assert lse[b, h, i] == want_lse or abs(lse[b, h, i] - want_lse) < 1e-13


def test_kv_lens_takes_the_place_of_the_key_length() -> None:
    q, k, v = arrays(batch=3)
    lens = np.array([0, 5, 9], np.int32)
    out, lse = reference.attention(q, k, v, causal=True, kv_lens=lens)
    for b, i, h in np.ndindex(q.shape[:3]):
        want, want_lse = by_hand(q, k, v, b, i, h, right=0, length=int(lens[b]))
        assert np.allclose(out[b, i, h], want, atol=1e-14)
        assert lse[b, h, i] == want_lse or abs(lse[b, h, i] - want_lse) < 1e-13


def test_against_torch_in_float64() -> None:
    torch = pytest.importorskip("torch")
    q, k, v = arrays(q_len=20, k_len=20, head_dim=16)
    tensors = [torch.from_numpy(x).transpose(1, 2).requires_grad_() for x in (q, k, v)]
    want = torch.nn.functional.scaled_dot_product_attention(*tensors, is_causal=True, enable_gqa=True)
    out, _ = reference.attention(q, k, v, causal=True)
    assert np.allclose(out, want.detach().transpose(1, 2).numpy(), atol=1e-14)
    dout = np.random.default_rng(1).standard_normal(q.shape)
    want.backward(torch.from_numpy(dout).transpose(1, 2))
    for got, tensor in zip(reference.attention_backward(q, k, v, dout, causal=True), tensors, strict=True):
        assert np.allclose(got, tensor.grad.transpose(1, 2).numpy(), atol=1e-13)


@pytest.mark.parametrize(
    "words",
    [
        {},
        {"causal": True},
        {"window": (2, 1), "softcap": 0.9},
        {"kv_lens": np.array([3, 9], np.int32), "scale": 0.7},
        {"rope": Rope(*rope_tables(9, 4)), "causal": True},
        {"rope": Rope(*rope_tables(9, 6), True), "kv_lens": np.array([0, 4], np.int32)},
    ],
)
def test_gradients_are_derivatives(words: dict) -> None:
    q, k, v = arrays()
    rng = np.random.default_rng(2)
    dout, dlse = rng.standard_normal(q.shape), rng.standard_normal((2, 4, 7))

    def loss(q, k, v) -> float:
        out, lse = reference.attention(q, k, v, **words)
        return float((out * dout).sum() + (np.where(np.isfinite(lse), lse, 0.0) * dlse).sum())

    grads = reference.attention_backward(q, k, v, dout, dlse, **words)
    for which, grad in enumerate(grads):
        direction = rng.standard_normal(grad.shape)
        moved = [[x + step * direction if i == which else x for i, x in enumerate((q, k, v))] for step in (1e-5, -1e-5)]
        slope = (loss(*moved[0]) - loss(*moved[1])) / 2e-5
        assert abs(slope - (grad * direction).sum()) < 1e-7 * max(1, abs(slope))


def test_packed_sequences_are_separate() -> None:
    rng = np.random.default_rng(3)
    lens_q, lens_k = (3, 0, 6, 2), (5, 4, 0, 2)
    cu_q, cu_k = (np.concatenate([[0], np.cumsum(x)]).astype(np.int32) for x in (lens_q, lens_k))
    q, k, v = rng.standard_normal((11, 4, 8)), *rng.standard_normal((2, 11, 2, 8))
    rope = Rope(*rope_tables(6, 8))
    dout, dlse = rng.standard_normal(q.shape), rng.standard_normal((4, 11))
    out, lse = reference.attention_varlen(q, k, v, cu_q, cu_k, causal=True, rope=rope)
    grads = reference.attention_varlen_backward(q, k, v, cu_q, cu_k, dout, dlse, causal=True, rope=rope)
    for b in range(4):
        rows, keys = slice(cu_q[b], cu_q[b + 1]), slice(cu_k[b], cu_k[b + 1])
        one = [x[None] for x in (q[rows], k[keys], v[keys])]
        want, want_lse = reference.attention(*one, causal=True, rope=rope)
        assert np.array_equal(out[rows], want[0]) and np.array_equal(lse[:, rows], want_lse[0])
        wants = reference.attention_backward(*one, dout[None, rows], dlse[None, :, rows], causal=True, rope=rope)
        for got, want, where in zip(grads, wants, (rows, keys, keys), strict=True):
            assert np.array_equal(got[where], want[0])


@pytest.mark.parametrize("interleaved", [False, True])
def test_rope_rotates_pairs(interleaved: bool) -> None:
    cos, sin = rope_tables(50, 6)
    x = np.random.default_rng(4).standard_normal((5, 1, 8))
    positions = np.array([0, 1, 7, 49, -3])
    got = reference.apply_rope(x, positions, Rope(cos, sin, interleaved))
    for t, position in enumerate(positions):
        for p in range(3):
            a, b = (2 * p, 2 * p + 1) if interleaved else (p, p + 3)
            rotated = complex(x[t, 0, a], x[t, 0, b]) * complex(
                cos[abs(position), p], math.copysign(1, position) * sin[abs(position), p]
            )
            assert abs(complex(got[t, 0, a], got[t, 0, b]) - rotated) < 1e-12
    assert np.array_equal(got[..., 6:], x[..., 6:])
    back = reference.apply_rope(got, positions, Rope(cos, sin, interleaved), inverse=True)
    assert np.allclose(back, x, atol=1e-6)


def test_rope_depends_on_distance_only() -> None:
    """Scores of rotated q and k are the same when both move along together, also through zero."""
    q, k, v = arrays(q_len=5, k_len=5)
    tables = rope_tables(64, 6)
    here = np.arange(5, dtype=np.int32)
    results = [
        reference.attention(q, k, v, rope=Rope(*tables, False, here + shift, here + shift))[0]
        for shift in (0, 40, -2, -50)
    ]
    for result in results[1:]:
        assert np.allclose(result, results[0], atol=1e-5)


def test_implied_positions() -> None:
    q, k, v = arrays(batch=2, q_len=4, k_len=9)
    tables = rope_tables(9, 6)
    lens = np.array([9, 6], np.int32)
    implied = reference.attention(q, k, v, kv_lens=lens, rope=Rope(*tables))
    positions_q = np.stack([np.arange(4) + 5, np.arange(4) + 2]).astype(np.int32)
    explicit = Rope(*tables, False, positions_q, np.arange(9, dtype=np.int32))
    for a, b in zip(implied, reference.attention(q, k, v, kv_lens=lens, rope=explicit), strict=True):
        assert np.array_equal(a, b)


def test_a_row_that_sees_nothing_is_zeros_and_minus_inf() -> None:
    q, k, v = arrays(q_len=9, k_len=4)
    q[:, 0] = np.nan
    out, lse = reference.attention(q, k, v, causal=True)
    assert (out[:, :5] == 0).all() and (lse[..., :5] == -np.inf).all()
    assert np.isfinite(out).all() and np.isfinite(lse[..., 5:]).all()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("which", ["k", "v"])
def test_what_is_not_seen_takes_no_part(which: str, value: float) -> None:
    q, k, v = arrays(q_len=9)
    clean, clean_lse = reference.attention(q, k, v, causal=True)
    (k if which == "k" else v)[0, 6, 0, 2] = value
    out, lse = reference.attention(q, k, v, causal=True)
    assert np.array_equal(out[:, :6], clean[:, :6]) and np.array_equal(lse[..., :6], clean_lse[..., :6])
    assert np.array_equal(out[:, :, 2:], clean[:, :, 2:])
    assert not np.isfinite(out[0, 6:, :2] if which == "k" and value != value else out[0, 6:, :2, 2]).all()


def test_non_finite_scores() -> None:
    one = np.ones((1, 1, 1, 1))
    for score, out, lse in ((np.nan, np.nan, np.nan), (np.inf, np.nan, np.nan), (-np.inf, np.nan, np.nan)):
        got = reference.attention(one, one * score, one)
        assert np.array_equal(got[0].ravel(), [out], equal_nan=True)
        assert np.array_equal(got[1].ravel(), [lse], equal_nan=True)
    keys = np.array([1.0, -np.inf]).reshape(1, 2, 1, 1)
    out, lse = reference.attention(one, keys, np.array([5.0, 7.0]).reshape(1, 2, 1, 1))
    assert (out.item(), lse.item()) == (5.0, 1.0)


def test_blocks_of_rows_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = arrays(q_len=30, k_len=30)
    whole = reference.attention(q, k, v, window=(4, 2))
    monkeypatch.setattr(blocks, "BLOCK_SCORES", 70)
    for a, b in zip(whole, reference.attention(q, k, v, window=(4, 2)), strict=True):
        assert np.allclose(a, b, rtol=1e-13)


def test_bad_values_are_refused() -> None:
    q, k, v = arrays()
    with pytest.raises(ValueError, match=r"kv_lens\[1\] is 10; allowed: 0 to 9"):
        reference.attention(q, k, v, kv_lens=np.array([1, 10]))
    with pytest.raises(ValueError, match="position 9 of row 2"):
        reference.attention(q[:, :3], k, v, rope=Rope(*rope_tables(9, 6), False, np.array([0, 1, 9])))
    with pytest.raises(ValueError, match="cu_seqlens_q"):
        reference.attention_varlen(q[0], k[0], v[0], np.array([0, 5]), np.array([0, 9]))


REPLAYS = {
    "int8": reference.attention_int8,
    "fa_int8": reference.attention_fa_int8,
    "sm90_int8": reference.attention_sm90_int8,
    "sm90_int8_fp8": partial(reference.attention_sm90_int8, precision="int8_fp8"),
}


@pytest.mark.parametrize("replay", REPLAYS.values(), ids=REPLAYS)
def test_replays_of_packed_sequences_are_those_of_each(replay) -> None:
    """Of several lengths, one of them without keys, one shorter than its place, at positions of their own."""
    rng = np.random.default_rng(7)
    q, k, v = (rng.standard_normal((length, heads, 16), np.float32) for length, heads in ((40, 4), (150, 2), (150, 2)))
    cu_q, cu_k, lens = np.array([0, 9, 9, 30, 40]), np.array([0, 70, 80, 80, 150]), np.array([70, 10, 0, 33])
    rope = Rope(*rope_tables(200, 16), False, np.arange(40) + 3, np.arange(150) + 1)
    out, lse = replay(q, k, v, cu_seqlens=(cu_q, cu_k), kv_lens=lens, causal=True, rope=rope)
    assert (out[9:30] == 0).all() and (lse[:, 9:30] == -np.inf).all()
    for b in range(4):
        rows, keys = slice(*cu_q[b : b + 2]), slice(*cu_k[b : b + 2])
        own = Rope(rope.cos, rope.sin, False, rope.positions_q[rows], rope.positions_k[keys])
        one = replay(q[None, rows], k[None, keys], v[None, keys], kv_lens=lens[b : b + 1], causal=True, rope=own)
        np.testing.assert_array_equal(out[rows], one[0][0])
        np.testing.assert_array_equal(lse[:, rows], one[1][0])


def test_shapes_without_sequences() -> None:
    q, k = np.zeros((0, 5, 4, 16), np.float32), np.zeros((0, 9, 2, 16), np.float32)
    for attend in (reference.attention, *REPLAYS.values()):
        assert [x.shape for x in attend(q, k, k)] == [(0, 5, 4, 16), (0, 4, 5)]
    assert [x.shape for x in reference.attention_backward(q, k, k, q)] == [q.shape, k.shape, k.shape]
    kv = sm90_quantize.quantize_kv(k, k)
    assert [kv.k.shape, kv.k_scale.shape, kv.v.shape] == [(0, 9, 2, 16), (0, 2, 1), (0, 2, 16, 128)]
