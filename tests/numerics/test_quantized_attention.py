"""attention on qflash.Quantized, on every device: each mode against what its integers stand for, and against floats."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import qflash
from qflash import dispatch
from qflash.testing import Case, errors, expected
from qflash.testing.compare import INT8
from qflash.testing.quantized import CASES, MODES, QuantizedCase, check_meant
from qflash.testing.runner import to_numpy, to_torch

ON = [
    pytest.param(row.name, marks=pytest.mark.gpu if row.device == "cuda" else ())
    for row in dispatch.variants_of("attention", kv="quantized")
]


def placed(x, kernel: str):
    """An array, or a Quantized of arrays, where the kernel runs."""
    if dispatch.VARIANTS[kernel].device == "cpu" or x is None:
        return x
    if isinstance(x, qflash.Quantized):
        parts = ("values", "scale", "zero_point", "mean", "sums")
        return replace(x, **{part: placed(getattr(x, part), kernel) for part in parts})
    return to_torch(np.asarray(x), "cuda")


def run(case: QuantizedCase, kernel: str) -> tuple[np.ndarray, np.ndarray]:
    q, k, v, kv_lens = (placed(x, kernel) for x in case.inputs())
    words = case.case.options() | {"kernel": dispatch.VARIANTS[kernel].kernel.name}
    out, lse = qflash.attention(q, k, v, kv_lens=kv_lens, **words, return_lse=True)
    return to_numpy(out), to_numpy(lse)


@pytest.mark.parametrize("kernel", ON)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_what_the_integers_stand_for(case, kernel):
    first = run(case, kernel)
    check_meant(case, *first)
    assert all(x.tobytes() == y.tobytes() for x, y in zip(first, run(case, kernel), strict=True))


@pytest.mark.parametrize("kernel", ON)
@pytest.mark.parametrize("shape", [(700, 1100, 64), (513, 513, 128), (300, 2048, 256)])
@pytest.mark.parametrize("mode", MODES)
def test_longer_sequences(mode, shape, kernel):
    q_len, k_len, head_dim = shape
    case = Case("long", q_len, k_len, 2, 1, head_dim, causal=True, dtype="float16", seed=head_dim)
    check_meant(QuantizedCase(case, mode), *run(QuantizedCase(case, mode), kernel))


@pytest.mark.parametrize("kernel", ON)
@pytest.mark.parametrize("data", ["normal", "biased_k"])
def test_groups_keep_the_contract_of_int8(data, kernel):
    """What precision="int8" promises, for arrays quantized by hand the same way."""
    case = Case("by_hand", 256, 256, 2, 2, head_dim=128, data=data, dtype="bfloat16", seed=5)
    out, _ = run(QuantizedCase(case, "groups"), kernel)
    found = errors(out, expected(case, "int8").out)
    assert found.cosine >= (INT8["cosine"] if data == "normal" else INT8["biased_cosine"])
    if data == "normal":
        assert found.relative_l2 <= INT8["l2"]


@pytest.mark.gpu
@pytest.mark.parametrize("words", [{}, {"causal": True}, {"window": (100, 7)}], ids=str)
def test_fa_int8_gives_the_bits_of_arrays_quantized_beforehand(words):
    case = Case("bits", 300, 500, 4, 2, head_dim=128, dtype="bfloat16", seed=6)
    q, k, v, _ = (placed(x, "fa_int8_quantized") for x in QuantizedCase(case, "groups").inputs())
    inputs = case.make_inputs()
    whole = [to_torch(x, "cuda") for x in (inputs.q, inputs.k, inputs.v)]
    got = qflash.attention(q, k, v, **words, kernel="fa_int8")
    want = qflash.attention(*whole, **words, precision="int8", kernel="fa_int8")
    assert to_numpy(got).tobytes() == to_numpy(want).tobytes()


def test_sinks_join_quantized_arrays_as_they_join_floats():
    rng = np.random.default_rng(5)
    q, k, v = (rng.standard_normal((1, 40, heads, 32)).astype(np.float32) for heads in (4, 2, 2))
    sinks = np.linspace(-1, 2, 4)
    quantized = (
        qflash.quantize(q, granularity="token"),
        qflash.quantize(k, granularity="group", group=16, smooth=True),
    )
    out, lse = qflash.attention(*quantized, v, return_lse=True)
    got, got_lse = qflash.attention(*quantized, v, sinks=sinks, return_lse=True)
    np.testing.assert_allclose(got_lse, np.logaddexp(lse, sinks[:, None]), rtol=1e-6, atol=1e-6)
    share = np.exp(lse - got_lse).swapaxes(1, 2)[..., None]
    np.testing.assert_allclose(got, out * share, rtol=1e-5, atol=1e-6)
