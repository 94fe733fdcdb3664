"""The pipeline of sm90_int8, both precisions: its replay keeps the contract, and what quantize_kv keeps is its bits."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import qflash
from qflash.reference import sm90_quantize
from qflash.testing import Case, cases, check, check_contract, errors, expected, repeat, runner
from qflash.testing.compare import check_same_bits
from qflash.testing.oracle import integers_of, replayed
from qflash.testing.runner import suited

KERNELS = {"sm90_int8": "int8", "sm90_int8_fp8": "int8_fp8"}
# Heads of zeros, a constant k or v (less their means they are zero), scales that underflow, the largest numbers of
# float16, and those of bfloat16 that a few hundred weights may add up to.
EXTREMES = [
    Case(name, 70, 200, 2, 2, head_dim=128, dtype="bfloat16" if "huge" in name else "float16", plant=plant)
    for name, plant in {
        "zeros": (("q", (0,), "0"), ("k", (0,), "0"), ("v", (0,), "0")),
        "constant_k": (("k", (0,), "3.5"),),
        "underflow": (("q", (0,), "1e-7"), ("k", (0,), "1e-7")),
        "large_k": (("k", (0,), "65504"),),
        "large_v": (("v", (0, 3), "65504"), ("v", (0, 4), "-65504"), ("v", (0, 150), "65504")),
        "constant_v": (("v", (0,), "-7.25"),),
        "huge_v": (("v", (0,), "-2e35"), ("v", (0, 131), "1e37")),
        "large_scores": (("q", (0,), "65504"), ("k", (0,), "-65504")),
    }.items()
]


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("case", cases("full"), ids=lambda case: case.name)
def test_the_replay_keeps_the_contract(case: Case, kernel: str) -> None:
    """On the cases as sm90_fwd takes them, whose limits are the same. Kernels must then match the replay to 2e-3."""
    case = suited(case, "sm90_fwd", 90)
    out, lse = replayed(case, kernel)
    check_contract(case, out.astype(case.dtype), lse.astype(np.float32), KERNELS[kernel], integers=integers_of(kernel))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("case", EXTREMES, ids=lambda case: case.name)
def test_extreme_numbers(case: Case, kernel: str) -> None:
    out, lse = replayed(case, kernel)
    check_contract(case, out.astype(case.dtype), lse.astype(np.float32), KERNELS[kernel], integers=integers_of(kernel))


@pytest.mark.parametrize(("kernel", "bound"), [("sm90_int8", 0.012), ("sm90_int8_fp8", 0.0405)])
@pytest.mark.parametrize("data", ["normal", "biased_k", "outlier"])
def test_errors_do_not_depend_on_the_kind_of_numbers(data: str, kernel: str, bound: float) -> None:
    """What the Hadamard matrix (outliers) and smoothing (bias) are for."""
    case = Case(q_len=256, k_len=1024, q_heads=2, kv_heads=2, head_dim=128, dtype="bfloat16", data=data)
    out, _ = replayed(case, kernel)
    assert errors(out, expected(case, KERNELS[kernel]).out).relative_l2 <= bound


@pytest.mark.parametrize("causal", [False, True])
def test_a_mean_of_v_adds_no_error(causal: bool) -> None:
    """What is rounded is what is left without it: the error in absolute terms is that of values around zero."""
    case = Case(q_len=1024, k_len=1024, q_heads=2, kv_heads=2, head_dim=128, dtype="bfloat16", causal=causal)
    absolute = []
    for data in ("normal", "biased_v"):
        out, _ = replayed(replace(case, data=data), "sm90_int8_fp8")
        absolute.append(np.linalg.norm(out - expected(replace(case, data=data), "int8_fp8").out))
    assert absolute[1] <= 1.05 * absolute[0]


# On a GPU: what quantize_kv leaves is the replay's to the bit, and attention on it gives the bits of attention.

UNPACKED = [case for case in cases("full") if not case.packed and case.k_len]  # without a key nothing is computed
BITS = {**KERNELS, "sm90_int8 stochastic": "int8", "sm90_int8_fp8 stochastic": "int8_fp8"}


def kept(case: Case, precision: str, **words):
    """(inputs on the GPU, quantize_kv of them)."""
    inputs = runner.convert(case.make_inputs(), "torch-cuda")
    words = {"precision": precision, "rope": inputs.rope, "lens": inputs.kv_lens, **words}
    return inputs, qflash.quantize_kv(inputs.k, inputs.v, **words)


@pytest.mark.gpu
@pytest.mark.parametrize("name", BITS)
@pytest.mark.parametrize("case", UNPACKED, ids=lambda case: case.name)
def test_quantize_kv_gives_the_replays_bits(case: Case, name: str) -> None:
    case = suited(case, "sm90_int8", 90)
    random = {"rounding": "stochastic", "seed": 5} if "stochastic" in name else {}
    _, kv = kept(case, BITS[name], **random)
    inputs = case.make_inputs()
    values = inputs.v if BITS[name] == "int8_fp8" else None
    words = {"kv_lens": inputs.kv_lens, "rope": inputs.rope, "seed": random.get("seed")}
    want = sm90_quantize.quantize_kv(inputs.k, values, **words)
    for part in (*sm90_quantize.OF_KEYS, *(sm90_quantize.OF_VALUES if values is not None else ())):
        np.testing.assert_array_equal(runner.to_numpy(getattr(kv, part)), getattr(want, part), err_msg=part)


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("case", UNPACKED, ids=lambda case: case.name)
def test_attention_on_what_quantize_kv_left_gives_the_same_bits(case: Case, kernel: str) -> None:
    case = suited(case, kernel, 90)
    inputs, kv = kept(case, KERNELS[kernel])
    words = {**case.options(), "rope": inputs.rope, "sinks": inputs.sinks, "return_lse": True}
    got = qflash.attention(inputs.q, kv, **words, kernel="sm90_int8")
    want = runner.call(case, inputs, kernel)
    check_same_bits(case, *(tuple(runner.to_numpy(x) for x in pair) for pair in (got, want)))


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", KERNELS)
def test_many_runs_on_a_kept_kv_give_the_same_bits(kernel: str) -> None:
    case = suited(repeat.REPEATED[0], kernel, 90)
    inputs, kv = kept(case, KERNELS[kernel])
    first = None
    for _ in range(250):
        out = runner.to_numpy(qflash.attention(inputs.q, kv, **case.options()))
        first = out if first is None else first
        check_same_bits(case, (first,), (out,), names=("out",))


@pytest.mark.gpu
@pytest.mark.parametrize("precision", KERNELS.values())
def test_fewer_keys_than_were_kept(precision: str) -> None:
    """A cache may hold more than a call sees: kv_lens cuts it, to the accuracy of the precision."""
    case = Case(q_len=64, k_len=500, q_heads=4, kv_heads=2, head_dim=128, batch=2, dtype="bfloat16", kv_lens=(500, 131))
    inputs, kv = kept(replace(case, kv_lens=None), precision)
    lens = runner.convert(case.make_inputs(), "torch-cuda").kv_lens
    out, lse = qflash.attention(inputs.q, kv, kv_lens=lens, return_lse=True)
    check_contract(case, runner.to_numpy(out), None, precision)
    assert lse.isfinite().all()


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("case", EXTREMES, ids=lambda case: case.name)
def test_extreme_numbers_on_the_gpu(case: Case, kernel: str) -> None:
    check(case, kernel, "native-cuda")
