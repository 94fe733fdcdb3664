"""`fa_int8_quantized` run on the CPU, thread by thread, against float64 attention on the arrays its integers stand for.

Sums of integers are exact, so what separates the two is what 16 bits take off weights and results.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from qflash import NoKernelError
from qflash.dispatch import VARIANTS
from qflash.frontends.numpy import describe
from qflash.ops.attention_kv import ATTENTION_QUANTIZED, quantized_call
from qflash.testing import Case
from qflash.testing.emulated_attention import run_case
from qflash.testing.quantized import CASES, FEW, QuantizedCase, check_meant

KERNEL = "fa_int8_quantized"


def run(library, case: QuantizedCase, arch: int = 90, seed: int = 0, change=(), without="", lse=True):
    """[out, lse if wanted], full of a value no kernel writes before the call. `change`, `without`: fields to spoil."""
    q, k, v, kv_lens = case.inputs()
    arrays, words = quantized_call(q, k, v, case.options, kv_lens, None, None, lse)
    described = [
        None if x is None else describe(name, x) for name, x in zip(ATTENTION_QUANTIZED.arrays, arrays, strict=True)
    ]
    plan = ATTENTION_QUANTIZED.plan(*described, *words)
    plan = replace(
        plan,
        fields=tuple({**dict(plan.fields), **dict(change)}.items()),
        operands=tuple(operand for operand in plan.operands if operand.field != without),
    )
    by_name = dict(zip(ATTENTION_QUANTIZED.arrays, arrays, strict=True))
    results = [np.full(result.shape, 12345.0, result.dtype) for result in plan.results]
    operands = [
        np.ascontiguousarray(by_name[x.argument]) if x.contiguous else by_name[x.argument] for x in plan.operands
    ]
    compiled = library(KERNEL, case.case.dtype, case.case.head_dim, arch)
    compiled.launch(compiled.prepare(plan, VARIANTS[KERNEL]), (*operands, *results), seed)
    return results


def check(library, case: QuantizedCase, arch: int = 90) -> None:
    first = run(library, case, arch, seed=1)
    check_meant(case, *first)
    second = run(library, case, arch, seed=2)
    assert all(x.tobytes() == y.tobytes() for x, y in zip(first, second, strict=True))


@pytest.mark.parametrize("case", FEW, ids=str)
def test_modes(library, case):
    check(library, case)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_mode_on_every_problem(library, case):
    check(library, case)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_a_key_that_is_not_finite_is_found_wherever_it_stands_in_a_tile(library, head_dim):
    """Head h has one, key 64 + h, in a tile that every row sees. The last head has none, and keeps its row."""
    plant = tuple(("k", (0, 64 + head, head, head % head_dim), "nan") for head in range(64))
    case = QuantizedCase(Case("nonfinite", 1, 128, 65, 65, head_dim, dtype="float16", plant=plant, seed=16), "groups")
    out, lse = run(library, case)
    check_meant(case, out, lse)
    assert np.isnan(lse[0, :64]).all() and np.isfinite(lse[0, 64]).all()


def test_what_is_not_finite_in_keys_and_in_values_of_the_same_tiles(library):
    """Of K and V the barrier says only that something is odd."""
    plant = (("k", (0, 150, 0, 3), "inf"), ("v", (0, 180, 0, 1), "nan"), ("v", (0, 170, 1, 2), "inf"))
    case = Case("odd", 70, 200, 3, 3, dtype="float16", causal=True, plant=plant, seed=17)
    check(library, QuantizedCase(case, "groups"))


@pytest.mark.parametrize("mode", ["groups", "zero_points_smooth"])
@pytest.mark.parametrize("words", [{}, {"softcap": 5.0}, {"scale": -0.2}], ids=str)
def test_out_is_the_same_whether_lse_is_wanted_or_not(library, mode, words):
    """What rows have in common is computed only where something reads it."""
    case = QuantizedCase(Case("row_bias", 40, 70, 2, 1, dtype="float16", causal=True, seed=18, **words), mode)
    (with_lse, _), (without,) = run(library, case), run(library, case, lse=False)
    np.testing.assert_allclose(with_lse.astype(float), without.astype(float), rtol=0, atol=2e-3)


def test_fa_int8_gives_the_bits_of_arrays_quantized_beforehand(library):
    case = Case("bits", 40, 70, 4, 2, dtype="float16", causal=True, seed=6)
    out, _ = run(library, QuantizedCase(case, "groups"))
    want, _ = run_case(library, case, "fa_int8")
    assert out.tobytes() == want.tobytes()


def test_what_the_kernel_does_not_serve_is_refused(library):
    """By the C entry too: a stored program may come past the front ends."""
    case = QuantizedCase(Case("refused", 8, 40, 1, 1, dtype="float16"), "wide_groups")
    with pytest.raises(NoKernelError):
        run(library, case, change={"kv.k_scales.group": 24})
    with pytest.raises(NoKernelError):
        run(library, replace(case, mode="zero_points"), without="kv.k_scales.sums")
    for kind in (0, 2, 3):  # of the other library, of another kernel, of none
        with pytest.raises(NoKernelError):
            run(library, case, change={"kv.kind": kind})
