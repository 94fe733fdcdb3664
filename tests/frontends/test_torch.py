"""PyTorch front end, eager: values and gradients against plain float64 math and torch's own attention."""

from __future__ import annotations

import numpy as np
import pytest

import qflash
from qflash.testing.concurrency import check_threads_share_plans

torch = pytest.importorskip("torch")

from qflash.call import cache  # noqa: E402
from qflash.frontends.torch import launch  # noqa: E402
from qflash.ops.attention import ATTENTION  # noqa: E402
from qflash.testing.compare import HALF_FACTOR, INT8, LSE  # noqa: E402
from qflash.testing.torch_math import ALLOWED, ALLOWED_GRADIENT, OPTIONS, packed, plain, relative, tables, tensors  # noqa: E402

F = torch.nn.functional


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_forward_and_backward_match_plain_math(options):
    q, k, v = tensors(grad=True)
    out, lse = qflash.attention(q, k, v, return_lse=True, **options)
    want, want_lse = plain(q, k, v, **options)
    assert relative(out, want) < ALLOWED[torch.float32]
    torch.testing.assert_close(lse.double(), want_lse, rtol=LSE, atol=LSE)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    dlse = dlse.where(lse > -torch.inf, 0)
    grads = torch.autograd.grad((out, lse), (q, k, v), (dout, dlse))
    seen_lse = torch.where(lse > -torch.inf, want_lse, 0)
    want_grads = torch.autograd.grad((want, seen_lse), (q, k, v), (dout.double(), dlse.double()))
    for got, expected in zip(grads, want_grads, strict=True):
        assert relative(got, expected.double()) < ALLOWED_GRADIENT


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_matches_torch_attention(dtype, causal):
    q, k, v = tensors(q_len=33, k_len=33, dtype=dtype)
    theirs = [x.transpose(1, 2) for x in (q, k, v)]
    want, _ = plain(q, k, v, causal=causal)
    ours = qflash.attention(q, k, v, causal=causal)
    sdpa = F.scaled_dot_product_attention(*theirs, is_causal=causal, enable_gqa=True).transpose(1, 2)
    assert ours.dtype == dtype
    assert relative(ours, want) <= max(HALF_FACTOR * relative(sdpa, want), ALLOWED[torch.float32])


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (2, 1), "softcap": 3.0}, {"rope": tables()}])
def test_packed_matches_one_sequence_at_a_time(options):
    pieces = [tensors(batch=1, q_len=n, k_len=m, grad=True, seed=n) for n, m in ((5, 5), (0, 3), (7, 11), (2, 1))]
    q, k, v, cu_q, cu_k = packed(pieces)
    out, lse = qflash.attention_varlen(q, k, v, cu_q, cu_k, 7, 11, return_lse=True, **options)
    dout = torch.randn_like(out)
    grads = torch.autograd.grad(out, (q, k, v), dout)
    for b, piece in enumerate(pieces):
        rows, keys = slice(cu_q[b], cu_q[b + 1]), slice(cu_k[b], cu_k[b + 1])
        want, want_lse = qflash.attention(*piece, return_lse=True, **options)
        torch.testing.assert_close(out[rows], want[0])
        torch.testing.assert_close(lse[:, rows], want_lse[0])
        want_grads = torch.autograd.grad(want, piece, dout[None, rows])
        for got, expected, part in zip(grads, want_grads, (rows, keys, keys), strict=True):
            torch.testing.assert_close(got[part], expected[0])


def test_strided_views_are_taken_as_they_are():
    q, k, v = tensors()
    want = qflash.attention(q, k, v)
    heads_first = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    torch.testing.assert_close(qflash.attention(*heads_first), want, rtol=0, atol=0)
    fused = torch.cat((k, v), -1)  # as a fused projection leaves them
    torch.testing.assert_close(qflash.attention(q, fused[..., :16], fused[..., 16:]), want, rtol=0, atol=0)
    assert qflash.attention(*heads_first).is_contiguous()


def test_gradient_of_expanded_keys():
    q, k, v = tensors(batch=1, grad=True)
    one = qflash.attention(q, k, v)
    many = qflash.attention(q.expand(3, -1, -1, -1), k.expand(3, -1, -1, -1), v.expand(3, -1, -1, -1))
    want = torch.autograd.grad(one.sum() * 3, (q, k, v))  # a gradient with stride 0, too
    for got, expected in zip(torch.autograd.grad(many.sum(), (q, k, v)), want, strict=True):
        torch.testing.assert_close(got, expected)


def test_gradient_of_lse_alone_and_of_one_input():
    q, k, v = tensors()
    k.requires_grad_()
    _, lse = qflash.attention(q, k, v, return_lse=True)
    _, want = plain(q, k, v)
    got_grad, want_grad = torch.autograd.grad(lse.sum(), k)[0], torch.autograd.grad(want.sum(), k)[0]
    assert relative(got_grad, want_grad.double()) < ALLOWED_GRADIENT


def test_second_derivative_is_refused():
    q, k, v = tensors(grad=True)
    (dq,) = torch.autograd.grad(qflash.attention(q, k, v).square().sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="no second derivative"):
        dq.sum().backward()


def test_a_tensor_changed_before_backward_is_noticed():
    q, k, v = tensors(grad=True)
    lens = torch.tensor([13, 4], dtype=torch.int32)
    out = qflash.attention(q, k, v, kv_lens=lens)
    lens += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_forward_mode_is_refused():
    q, k, v = tensors()
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(q, torch.ones_like(q))
        with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
            qflash.attention(dual, k, v)
        assert qflash.attention(q, k, v).shape == q.shape


def test_int8_has_no_gradient_and_says_what_to_do():
    q, k, v = tensors(grad=True)
    with pytest.raises(NotImplementedError, match=r"no backward pass.*torch\.no_grad\(\).*detach\(\)"):
        qflash.attention(q, k, v, precision="int8")
    with torch.no_grad():
        out = qflash.attention(q, k, v, precision="int8")
    assert relative(out, plain(q, k, v)[0]) < INT8["l2"]


def test_rope_tables_are_constants():
    q, k, v = tensors()
    rope = tables()
    rope.cos.requires_grad_()
    with pytest.raises(NotImplementedError, match=r"rope\.cos requires a gradient"):
        qflash.attention(q, k, v, rope=rope)
    with torch.no_grad():
        assert qflash.attention(q, k, v, rope=rope).shape == q.shape


@pytest.mark.parametrize("inference", [False, True])
def test_converted_rope_tables_follow_changes(inference):
    q, k, v = tensors()
    with torch.inference_mode(inference):
        exact = tables()
        half = qflash.Rope(exact.cos.bfloat16(), exact.sin.bfloat16())
        for _ in range(3):
            wide = qflash.Rope(half.cos.float(), half.sin.float())
            want = qflash.attention(q, k, v, rope=wide)
            torch.testing.assert_close(qflash.attention(q, k, v, rope=half), want, rtol=0, atol=0)
            half.cos.mul_(0.5)  # in place: the copy kept from the last call is stale now


@pytest.mark.parametrize("make", [lambda x: x.bfloat16(), lambda x: x.repeat(1, 2)[:, ::2]], ids=["16 bits", "strided"])
def test_rope_tables_changed_behind_autograd(make):
    """Writes through .data raise no version counter."""
    q, k, v = tensors()
    rope = tables()
    rope = qflash.Rope(make(rope.cos), make(rope.sin))
    qflash.attention(q, k, v, rope=rope)
    rope.cos.data.mul_(0.5)
    rope.sin.data.mul_(0.5)
    want = qflash.attention(q, k, v, rope=qflash.Rope(rope.cos.float().contiguous(), rope.sin.float().contiguous()))
    torch.testing.assert_close(qflash.attention(q, k, v, rope=rope), want, rtol=0, atol=0)


def test_strided_rope_tables():
    q, k, v = tensors()
    rope = tables()
    spun = torch.complex(rope.cos, rope.sin).conj()  # its imaginary part is a lazily negated, strided view
    assert spun.imag.is_neg()
    got = qflash.attention(q, k, v, rope=qflash.Rope(spun.real, spun.imag))
    want = qflash.attention(q, k, v, rope=qflash.Rope(rope.cos, -rope.sin))
    torch.testing.assert_close(got, want, rtol=0, atol=0)


def test_lazily_negated_tensors():
    q, k, v = tensors(dim=1)
    negated = torch.complex(k, q[:, :1, :2].expand_as(k) * 0 + v).conj().imag  # -v, unresolved
    assert negated.is_neg()
    torch.testing.assert_close(qflash.attention(q, k, negated), qflash.attention(q, k, -v), rtol=0, atol=0)


def test_index_tensors_need_not_be_contiguous():
    q, k, v = tensors()
    lens = torch.tensor([[13, 0], [4, 0]], dtype=torch.int32)[:, 0]
    want = qflash.attention(q, k, v, kv_lens=lens.clone())
    torch.testing.assert_close(qflash.attention(q, k, v, kv_lens=lens), want, rtol=0, atol=0)


def test_parameters_subclasses_and_modes():
    q, k, v = tensors()
    want = qflash.attention(q, k, v)

    class Named(torch.Tensor):
        pass

    parameter = torch.nn.Parameter(q)
    out = qflash.attention(parameter, k, v)
    torch.testing.assert_close(out, want, rtol=0, atol=0)
    out.sum().backward()
    assert parameter.grad is not None
    named = qflash.attention(*(x.as_subclass(Named) for x in (q, k, v)))
    assert type(named) is Named
    torch.testing.assert_close(named.as_subclass(torch.Tensor), want, rtol=0, atol=0)
    with torch.inference_mode():
        assert qflash.attention(q, k, v).is_inference()


def test_empty_and_unseen():
    q, k, v = tensors(k_len=0)
    out, lse = qflash.attention(q, k, v, return_lse=True)
    assert out.eq(0).all() and lse.eq(-torch.inf).all()
    q, k, v = tensors(batch=0, grad=True)
    out = qflash.attention(q, k, v)
    assert out.shape == q.shape
    assert [g.shape for g in torch.autograd.grad(out.sum(), (q, k, v))] == [q.shape, k.shape, v.shape]


def test_threads_share_plans():
    check_threads_share_plans(tensors, torch.equal)


def test_the_engine_runs_on_torchs_threads(monkeypatch):
    q, k, v = tensors()
    words = (False, None, None, None, None, None, False, False, False, 0, 0, qflash.get_backward_memory())
    plan = launch.find_ready(ATTENTION, (q, k, v, *[None] * (len(ATTENTION.arrays) - 3)), words)
    engine, counts = plan.call, []

    def counting(*addresses):
        counts.append(addresses[-1])
        engine(*addresses)

    monkeypatch.setattr(plan, "call", counting)
    before = torch.get_num_threads()
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            qflash.attention(q, k, v)
    finally:
        torch.set_num_threads(before)
    assert counts == [1, 3]


def test_explain_takes_tensors():
    q, k, v = tensors()
    explanation = qflash.explain(q, k, v, causal=True, rope=tables())
    assert explanation.kernel == "cpu"
    assert (explanation.spec.device, explanation.spec.arch, explanation.spec.rope) == ("cpu", 0, "half")
    assert "unfused" in str(explanation)


def test_plan_cache_is_bounded(monkeypatch):
    monkeypatch.setattr(cache, "LIMIT", 4)
    for n in range(1, 12):
        qflash.attention(*tensors(q_len=n))
        assert len(cache._plans) <= 4


def test_numpy_and_torch_agree():
    q, k, v = tensors()
    arrays = [x.numpy() for x in (q, k, v)]
    np.testing.assert_array_equal(qflash.attention(q, k, v).numpy(), qflash.attention(*arrays))
