"""What users of PyTorch bring along: autocast, profilers, FLOP counts, lists of lengths, NumPy scalars."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

import qflash

torch = pytest.importorskip("torch")

from torch.nn.functional import scaled_dot_product_attention as sdpa  # noqa: E402
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

from qflash.testing.torch_math import packed, tables, tensors  # noqa: E402


@pytest.fixture(autouse=True)
def nothing_compiled():
    torch._dynamo.reset()


def same(a, b):
    torch.testing.assert_close(a, b, rtol=0, atol=0)


# Autocast


def heads_first(*xs):
    return (x.transpose(1, 2) for x in xs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("cast", [torch.bfloat16, torch.float16])
def test_autocast_casts_what_sdpa_casts(dtype, cast):
    q, k, v = (x.to(dtype) for x in tensors(q_len=7, k_len=7, q_heads=2, kv_heads=2))
    with torch.autocast("cpu", cast):
        want = sdpa(*heads_first(q, k, v)).dtype
        if dtype is torch.float64:  # which neither casts
            assert want is torch.float64
            with pytest.raises(TypeError, match="q has dtype float64"):
                qflash.attention(q, k, v)
            return
        got = qflash.attention(q, k, v)
        assert qflash.explain(q, k, v).spec.dtype == str(cast).removeprefix("torch.")
    assert got.dtype is want is cast
    same(got, qflash.attention(*(x.to(cast) for x in (q, k, v))))


def test_autocast_of_mixed_dtypes_and_of_gradients():
    q, k, v = tensors(grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        out = qflash.attention(q, k.bfloat16(), v)
        gradients = torch.autograd.grad(out.float().sum(), (q, k, v))
    assert [g.dtype for g in gradients] == [torch.float32] * 3
    halves = [x.detach().bfloat16().requires_grad_() for x in (q, k, v)]
    want = torch.autograd.grad(qflash.attention(*halves).float().sum(), halves)
    for a, b in zip(gradients, want, strict=True):
        same(a, b.float())


def test_autocast_that_is_off_or_of_another_device():
    q, k, v = tensors()
    with torch.autocast("cpu", torch.bfloat16), torch.autocast("cpu", enabled=False):
        assert qflash.attention(q, k, v).dtype is torch.float32
    with torch.autocast("cuda", torch.bfloat16):
        assert qflash.attention(q, k, v).dtype is torch.float32


def test_autocast_of_packed_and_of_compiled_calls():
    q, k, v, cu_q, cu_k = packed([tensors(batch=1)] * 2)
    with torch.autocast("cpu", torch.bfloat16):
        assert qflash.attention_varlen(q, k, v, cu_q, cu_k, 9, 13).dtype is torch.bfloat16
        q, k, v = tensors()
        compiled = torch.compile(qflash.attention, backend="aot_eager", fullgraph=True)
        same(compiled(q, k, v), qflash.attention(q, k, v))


# Profilers and FLOP counters


def names_in_profile(call) -> set[str]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        call()
    return {event.key for event in profile.key_averages()}


def test_eager_calls_are_in_profiles():
    q, k, v = tensors(grad=True)
    assert "qflash::attention" in names_in_profile(lambda: qflash.attention(q.detach(), k.detach(), v.detach()))
    both = names_in_profile(lambda: qflash.attention(q, k, v).sum().backward())
    assert {"qflash::attention", "qflash::attention_backward"} <= both
    assert "qflash::softmax" in names_in_profile(lambda: qflash.softmax(q.detach()))


def flops(call) -> int:
    with FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops()


def test_flops_are_those_of_the_products():
    q, k, v = tensors(grad=True)
    batch, q_len, heads, dim = q.shape
    products = 2 * batch * heads * q_len * k.shape[1] * dim
    assert flops(lambda: qflash.attention(q.detach(), k.detach(), v.detach(), causal=True)) == 2 * products
    assert flops(lambda: qflash.attention(q, k, v).sum().backward()) == (2 + 5) * products


def test_flops_of_packed_calls_count_each_sequence():
    sequences = [tensors(batch=1, q_len=q_len, k_len=k_len) for q_len, k_len in ((5, 9), (1, 30))]
    q, k, v, cu_q, cu_k = packed(sequences)
    want = 4 * q.shape[1] * q.shape[2] * (5 * 9 + 1 * 30)
    assert flops(lambda: qflash.attention_varlen(q, k, v, cu_q, cu_k, 5, 30)) == want


def test_flops_of_integer_products():
    a, b = torch.ones(3, 5, dtype=torch.int8), torch.ones(5, 7, dtype=torch.int8)
    assert flops(lambda: qflash.int8_matmul(a, b)) == 2 * 3 * 5 * 7
    q, k, v = tensors()
    quantized = [qflash.quantize(x) for x in (q, k)]
    want = flops(lambda: qflash.attention(q, k, v))
    assert flops(lambda: qflash.attention(*quantized, v)) == want


FIRST_CALL_COUNTED = """
import torch, qflash
from torch.utils.flop_counter import FlopCounterMode
q = torch.ones(1, 2, 1, 8)
with FlopCounterMode(display=False) as counter:
    qflash.attention(q, q, q)
assert counter.get_total_flops() == 4 * 2 * 2 * 8, counter.get_total_flops()
"""


def test_a_counter_that_watches_the_very_first_call():
    """The front end is loaded by the first call, when the counter has its formulas already."""
    done = subprocess.run([sys.executable, "-c", FIRST_CALL_COUNTED], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# Lengths and positions

LENS = [3, 13]
FORMS = {
    "list": lambda x: x,
    "tuple": tuple,
    "numpy int64": lambda x: np.array(x),
    "int64": lambda x: torch.tensor(x),
    "int16": lambda x: torch.tensor(x, dtype=torch.int16),
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_lengths_in_every_form(form):
    q, k, v = tensors()
    want = qflash.attention(q, k, v, kv_lens=torch.tensor(LENS, dtype=torch.int32))
    same(qflash.attention(q, k, v, kv_lens=form(LENS)), want)
    same(qflash.attention(q.requires_grad_(), k, v, kv_lens=form(LENS)), want)
    compiled = torch.compile(qflash.attention, backend="aot_eager", fullgraph=True)
    same(compiled(q, k, v, kv_lens=form(LENS)), want)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_positions_and_packed_lengths_in_every_form(form):
    q, k, v, cu_q, cu_k = packed([tensors(batch=1)] * 2)
    rope = tables()
    at_q, at_k = list(range(q.shape[0])), list(range(k.shape[0]))
    exact = [torch.tensor(x, dtype=torch.int32) for x in (at_q, at_k)]
    want = qflash.attention_varlen(q, k, v, cu_q, cu_k, 9, 13, rope=qflash.Rope(rope.cos, rope.sin, False, *exact))
    rope = qflash.Rope(rope.cos, rope.sin, False, form(at_q), form(at_k))
    got = qflash.attention_varlen(q, k, v, form(cu_q.tolist()), form(cu_k.tolist()), 9, 13, rope=rope)
    same(got, want)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_lengths_of_operations_in_every_form(form):
    q, k, v = tensors()
    want = qflash.quantize(k, lens=torch.tensor(LENS, dtype=torch.int32))
    same(qflash.quantize(k, lens=form(LENS)).values, want.values)
    quantized = qflash.quantize(q), qflash.quantize(k)
    want = qflash.attention(*quantized, v, kv_lens=torch.tensor(LENS, dtype=torch.int32))
    same(qflash.attention(*quantized, v, kv_lens=form(LENS)), want)


def test_a_longest_sequence_that_is_a_bound():
    q, k, v, cu_q, cu_k = packed([tensors(batch=1, q_len=n, k_len=n + 4) for n in (3, 9)])
    want = qflash.attention_varlen(q, k, v, cu_q, cu_k, 9, 13, causal=True, return_lse=True)
    for bound in (10, 12, 17, 4096, 2**31 - 1):
        got = qflash.attention_varlen(
            q, k, v, cu_q, cu_k, bound, bound + 4 if bound < 4096 else bound, causal=True, return_lse=True
        )
        for a, b in zip(got, want, strict=True):
            same(a, b)


def test_explain_of_packed_calls():
    q, k, v, cu_q, cu_k = packed([tensors(batch=1)] * 2)
    words = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "max_seqlen_q": 9, "max_seqlen_k": 13}
    explanation = qflash.explain(q, k, v, causal=True, **words)
    assert (explanation.kernel, explanation.spec.packed) == ("cpu", True)
    with pytest.raises(TypeError, match="max_seqlen_k missing; allowed: all of cu_seqlens_q"):
        qflash.explain(q, k, v, **{**words, "max_seqlen_k": None})
    with pytest.raises(ValueError, match="layout is 'bhtd' and cu_seqlens_q is given"):
        qflash.explain(q, k, v, layout="bhtd", **words)


# Lazily negated gradients


def test_a_lazily_negated_gradient_of_lse():
    q, k, v = tensors(grad=True)
    out, lse = qflash.attention(q, k, v, return_lse=True)
    weights = torch.randn(lse.shape)
    negated = torch.complex(weights, weights).conj().imag  # -weights, unresolved
    assert negated.is_neg()
    got = torch.autograd.grad((out, lse), (q, k, v), (torch.zeros_like(out), negated))
    out, lse = qflash.attention(q, k, v, return_lse=True)
    want = torch.autograd.grad((out, lse), (q, k, v), (torch.zeros_like(out), -weights))
    for a, b in zip(got, want, strict=True):
        same(a, b)


# NumPy scalars and bad words in code that torch.compile traces

SCALARS = {
    "scale": {"scale": 1 / np.sqrt(64)},
    "float32": {"scale": np.float32(0.3)},
    "float16": {"scale": np.float16(0.3)},
    "softcap": {"softcap": np.float64(3.0)},
    "causal": {"causal": np.True_},
    "not causal": {"causal": np.False_},
    "window": {"window": (np.int64(3), np.int32(1))},
}


def some_of_them(*names):
    """Words of these names; those of the others are among the slow tests."""
    marks = {name: () if name in names else (pytest.mark.slow,) for name in SCALARS}
    return [pytest.param(words, id=name, marks=marks[name]) for name, words in SCALARS.items()]


@pytest.mark.parametrize("words", some_of_them("scale"))
def test_numpy_scalars_in_traced_code(words):
    """Which "aot_eager" traces the same way, before it differentiates."""
    check_numpy_scalars(words, "eager")


@pytest.mark.parametrize("words", SCALARS.values(), ids=SCALARS)
def test_numpy_scalars_in_compiled_code(words):
    check_numpy_scalars(words, "aot_eager")


def check_numpy_scalars(words, backend):
    q, k, v = tensors(grad=True)
    compiled = torch.compile(lambda q, k, v: qflash.attention(q, k, v, **words), backend=backend, fullgraph=True)
    got, want = compiled(q, k, v), qflash.attention(q, k, v, **words)
    same(got, want)
    for a, b in zip(*(torch.autograd.grad(out.sum(), (q, k, v)) for out in (got, want)), strict=True):
        same(a, b)


@pytest.mark.parametrize("words", some_of_them("scale", "causal", "window"))  # a float, a bool, ints
def test_numpy_scalars_in_code_that_may_break(words):
    """Without fullgraph Dynamo gives up at a value it does not know, and must not trace the checks by themselves."""
    q, k, v = tensors()
    compiled = torch.compile(lambda words: qflash.attention(q, k, v, **words), backend="aot_eager")
    same(compiled(words), qflash.attention(q, k, v, **words))


def test_calls_that_are_converted_first_are_planned_once(monkeypatch):
    from qflash.frontends.torch import launch

    made, make = [], launch.make_ready
    monkeypatch.setattr(launch, "make_ready", lambda *call: made.append(call) or make(*call))
    q, k, v = tensors(q_len=11)
    with torch.autocast("cpu", torch.bfloat16):
        for _ in range(3):
            qflash.attention(q, k, v)
    for _ in range(3):
        qflash.attention(q, k, v, kv_lens=LENS)
        qflash.attention(q, k, v, kv_lens=torch.tensor(LENS), window=[2, 3])
    assert len(made) == 3


def test_a_counter_sees_the_gradient_of_a_call_it_did_not_see():
    q, k, v = tensors(grad=True)
    out = qflash.attention(q, k, v)
    batch, q_len, heads, dim = q.shape
    assert flops(lambda: out.sum().backward()) == 5 * 2 * batch * heads * q_len * k.shape[1] * dim


@pytest.mark.parametrize("words", SCALARS.values(), ids=SCALARS)
def test_numpy_scalars_through_the_dispatcher(words):
    q, k, v = tensors()
    parameter = torch.nn.Parameter(q, requires_grad=False)
    same(qflash.attention(parameter, k, v, **words), qflash.attention(q, k, v, **words))


def test_numpy_scalars_of_operations_in_compiled_code():
    x = torch.randn(4, 64)
    targets = torch.arange(4)
    scale, eps, smoothing, ignored, seed = np.float64(0.3), np.float32(1e-3), np.float64(0.1), np.int64(2), np.int64(7)
    for call in (
        lambda x: qflash.softmax(x, scale=scale),
        lambda x: qflash.layer_norm(x, eps=eps),
        lambda x: qflash.cross_entropy(x, targets, label_smoothing=smoothing, ignore_index=ignored),
        lambda x: qflash.quantize(x, rounding="stochastic", seed=seed).values,
    ):
        same(torch.compile(call, backend="aot_eager", fullgraph=True)(x), call(x))


def test_a_number_that_changes_is_compiled_for_once():
    q, k, v = tensors()
    counter = torch._dynamo.testing.CompileCounter()
    compiled = torch.compile(lambda scale: qflash.attention(q, k, v, scale=scale), backend=counter, fullgraph=True)
    for scale in np.linspace(0.1, 0.9, 5):
        same(compiled(scale), qflash.attention(q, k, v, scale=scale))
    assert counter.frame_count == 1


REFUSED = {
    "causal": {"causal": 2},
    "scale": {"scale": True},
    "softcap": {"softcap": False},
    "window bool": {"window": (True, 0)},
    "window range": {"window": range(2)},
    "window long": {"window": (1, 2, 3)},
    "window low": {"window": (-2, 0)},
    "scale text": {"scale": "big"},
    "scale huge": {"scale": 10**400},
}


@pytest.mark.parametrize("words", REFUSED.values(), ids=REFUSED)
def test_compiled_code_refuses_what_eager_calls_refuse(words):
    q, k, v = tensors()
    (name,) = words
    with pytest.raises((TypeError, ValueError), match=name):
        qflash.attention(q, k, v, **words)
    with pytest.raises(Exception, match=name):  # Dynamo wraps the refusal in an error of its own
        torch.compile(lambda q: qflash.attention(q, k, v, **words), backend="eager", fullgraph=True)(q)


def test_a_symbolic_number_is_checked_when_the_program_runs():
    q, k, v = tensors()
    compiled = torch.compile(lambda scale: qflash.attention(q, k, v, scale=scale), backend="aot_eager", fullgraph=True)
    compiled(np.float64(0.5))
    with pytest.raises(ValueError, match="scale is nan; allowed: a finite number"):
        compiled(np.float64("nan"))
