"""The test material itself: cases that say what they are, and a contract that catches what it should."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from qflash import reference
from qflash.reference import sm90_quantize
from qflash.testing import (
    CASES,
    Case,
    ContractError,
    Inputs,
    Rotary,
    cases,
    check,
    compare,
    errors,
    expected,
    judge,
    oracle,
    repro,
    runner,
)
from qflash.testing.case import DATA, LAYOUTS
from qflash.testing.random_cases import random_cases

SMALL = Case("small", 40, 50, 3, 1, head_dim=16, causal=True)


def result(case: Case) -> tuple[np.ndarray, np.ndarray]:
    """The oracle's own answer, rounded to the types a kernel returns."""
    want = expected(case)
    return want.out.astype(case.dtype), want.lse.astype(np.float32)


@pytest.mark.parametrize(
    ("kernel", "arch", "case", "dtype", "head_dim"),
    [
        ("fa", 90, Case(head_dim=3), "float32", 3),
        ("fa_mma", 90, Case(head_dim=3), "float16", 3),
        ("fa_mma", 90, Case(head_dim=3, seed=1), "bfloat16", 3),
        ("fa_mma", 75, Case(head_dim=3, seed=1, dtype="bfloat16"), "float16", 3),
        ("sm90_fwd", 90, Case(head_dim=100, dtype="bfloat16"), "bfloat16", 104),
        ("sm90_fwd", 90, Case(head_dim=255, seed=1), "bfloat16", 256),
        ("sm90_fwd", 120, Case(head_dim=100), "float32", 100),
    ],
)
def test_cases_are_made_to_suit_a_kernel(kernel: str, arch: int, case: Case, dtype: str, head_dim: int) -> None:
    assert runner.suited(case, kernel, arch) == replace(case, dtype=dtype, head_dim=head_dim)


def test_names_are_unique_and_tags_known() -> None:
    assert len({case.name for case in CASES}) == len(CASES)
    assert {tag for case in CASES for tag in case.tags} == {"quick", "full", "large"}
    assert set(cases("quick")) < set(cases("full"))
    with pytest.raises(ValueError, match="tag is 'slow'"):
        cases("slow")


def test_a_case_prints_as_what_builds_it() -> None:
    for case in [*CASES, *random_cases(50)]:
        assert "\n" not in repr(case)
        assert eval(repr(case)) == case
    line = repro(SMALL)
    assert line.startswith("from qflash.testing import *; check(Case(") and "batch" not in line


def test_equal_cases_have_equal_bits() -> None:
    for case in cases("quick"):
        a, b = case.make_inputs(), case.make_inputs()
        assert all(x.tobytes() == y.tobytes() for x, y in zip((a.q, a.k, a.v), (b.q, b.k, b.v), strict=True))
    assert list(random_cases(5, seed=3)) == list(random_cases(5, seed=3))
    assert list(random_cases(5, seed=3)) != list(random_cases(5, seed=4))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_have_the_same_values_under_other_strides(layout: str) -> None:
    case = Case(q_len=6, k_len=6, q_heads=4, batch=3, head_dim=5, layout=layout)
    got, plain = case.make_inputs(), replace(case, layout="bthd").make_inputs()
    for name in "qkv":
        a, b = getattr(got, name), getattr(plain, name)
        assert a.shape == b.shape and a.strides[-1] == a.itemsize
        assert (a == (b[:1] if layout == "one_batch" else b)).all()
        assert (a.strides == b.strides) == (layout == "bthd")
    if layout == "one_batch":
        assert got.q.strides[0] == 0


@pytest.mark.parametrize("data", DATA)
def test_distributions_are_known(data: str) -> None:
    assert np.isfinite(Case(data=data).make_inputs().k).all()


def test_large_scores_are_large() -> None:
    inputs = Case(data="large").make_inputs()
    scores = np.einsum("bqhd,bkhd->bhqk", inputs.q, inputs.k) / 8
    assert 5e3 < scores.std() < 2e4


@pytest.mark.parametrize("data", ["rising", "hills"])
def test_scores_of_some_rows_climb_past_what_weights_can_hold(data: str) -> None:
    """From one tile of 64 keys to the next float16 ends 15 powers of two above 1, float32 128; other rows stay."""
    inputs = Case(q_len=100, k_len=400, data=data).make_inputs()
    scores = np.einsum("bqhd,bkhd->bhqk", inputs.q, inputs.k) / (8 * np.log(2))
    highest = scores.reshape(*scores.shape[:-1], -1, 50).max(-1)
    most, least = (edge(np.diff(highest), -1) for edge in (np.max, np.min))
    assert (most > 128).any() and ((most > 10) & (most < 15)).any() and (most < 5).any()
    assert (least < -128).any()


def test_the_oracles_own_answer_passes() -> None:
    for case in cases("full"):
        assert judge(case, *result(case)).failures == []


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda out, lse: out.__setitem__((0, 20, 1), np.nan), "NaN in other places"),
        (lambda out, lse: out.__setitem__((0, 20, 1, 3), np.inf), "+Inf in other places"),
        (lambda out, lse: out.__setitem__((0, 20, 1), out[0, 21, 1]), "row [0, 1, 20]"),
        (lambda out, lse: out.__imul__(np.array(1.02, out.dtype)), "relative L2"),
        (lambda out, lse: lse.__setitem__((0, 1, 20), 0.0), "lse at [0, 1, 20]"),
        (lambda out, lse: lse.__setitem__((0, 1, 20), -np.inf), "lse has -Inf"),
    ],
    ids=["nan", "inf", "one_row", "scaled", "lse", "lse_inf"],
)
def test_damage_is_seen(dtype: str, damage, says: str) -> None:
    case = replace(SMALL, dtype=dtype)
    out, lse = result(case)
    damage(out, lse)
    assert any(says in failure for failure in judge(case, out, lse).failures)


def test_a_masked_key_that_leaks_is_seen() -> None:
    case = replace(SMALL, q_len=200, k_len=200)
    inputs = case.make_inputs()
    out, lse = reference.attention(inputs.q, inputs.k, inputs.v, window=(-1, 1))
    assert not judge(case, out.astype(np.float32), lse.astype(np.float32)).ok


def test_shapes_and_dtypes_are_judged() -> None:
    out, lse = result(SMALL)
    assert "out has shape" in judge(SMALL, out[:, 1:], lse).failures[0]
    assert any("out has dtype float64" in f for f in judge(SMALL, out.astype(np.float64), lse).failures)
    assert any("lse is float64" in f for f in judge(SMALL, out, lse.astype(np.float64)).failures)


def test_a_row_that_sees_nothing_must_be_zero() -> None:
    case = Case(q_len=30, k_len=10, causal=True)
    out, lse = result(case)
    out[0, 3, 0, 0] = 1e-30
    assert not judge(case, out, lse).ok


def test_quantization_noise_is_not_native() -> None:
    case = Case(q_len=128, k_len=128)
    inputs = case.make_inputs()
    q = np.round(inputs.q * 32) / 32
    out, lse = (x.astype(np.float32) for x in reference.attention(q, inputs.k, inputs.v))
    assert not judge(case, out, lse).ok
    assert judge(case, out, lse, "int8").ok
    coarse = np.round(inputs.q * 2) / 2
    out, lse = (x.astype(np.float32) for x in reference.attention(coarse, inputs.k, inputs.v))
    assert not judge(case, out, lse, "int8").ok


def test_e4m3_noise_is_not_int8() -> None:
    """What rounding weights and values to E4M3 costs passes for "int8_fp8" alone; twice as much does not."""
    case = Case(q_len=128, k_len=128)
    out, lse = result(case)
    size = np.linalg.norm(out) / np.sqrt(out.size)
    noisy, noisier = ((out + noise * size * _signs(out.shape)).astype(np.float32) for noise in (0.04, 0.08))
    assert judge(case, noisy, lse, "int8_fp8").ok and not judge(case, noisy, lse, "int8").ok
    assert len(judge(case, noisier, lse, "int8_fp8").failures) == 2  # cosine and relative L2


def test_few_values_are_not_judged_by_the_error_of_e4m3() -> None:
    few = Case(q_len=4, k_len=40)
    assert np.prod(few._shapes()[0]) < compare.INT8_FP8["values"]
    out, lse = result(few)
    damaged = out + np.float32(0.1) * np.abs(out).max()
    assert judge(few, damaged, lse, "int8_fp8").ok and not judge(few, damaged, lse, "int8").ok


def test_infinite_values_count_as_nan_where_they_become_e4m3() -> None:
    case = Case(q_len=8, k_len=8, causal=True, plant=(("v", (0, 3, 0, 1), "inf"),))
    want = {precision: compare.expected(case, precision).out for precision in ("native", "int8", "int8_fp8")}
    assert np.isinf(want["int8"]).sum() == np.isinf(want["native"]).sum() == 5 == np.isnan(want["int8_fp8"]).sum()
    assert not np.isinf(want["int8_fp8"]).any() and not np.isnan(want["int8"]).any()


def test_integers_after_a_hadamard_matrix_share_an_outlier() -> None:
    """Sixteen channels take their part of one that is large, and its step is a quarter; half of the noise is k's."""
    case = Case("outlier", 40, 40, 1, 1, 32, plant=(("q", (0, 5, 0, 1), "90"),))
    plain, mixed = (oracle.score_noise(case, oracle.Integers(block=block))[0, 0] for block in (1, 16))
    assert mixed[5] / plain[5] < 0.6 and 0.5 < np.median(mixed / plain) < 1.5
    x = np.random.default_rng(0).standard_normal((3, 40))
    np.testing.assert_allclose(np.linalg.norm(oracle._mixed(x, 16), axis=-1), np.linalg.norm(x, axis=-1))
    theirs = sm90_quantize.hadamard(x.astype(np.float32))  # four times as large
    np.testing.assert_allclose(oracle._mixed(x, 16), theirs / 4, atol=1e-5)


def test_a_sample_tells_the_mean_of_keys() -> None:
    """256 of 600 keys: one that is not among them may be anything, as far as smoothing goes."""
    case = Case(q_len=8, k_len=600, q_heads=1, kv_heads=1, plant=(("k", (0, 1), "900"),), window=(300, 0))
    plain, sampled = (oracle.score_noise(case, oracle.Integers(sampled=n)).max() for n in (None, 256))
    assert sampled < 0.8 * plain


def test_keys_that_share_a_scale_are_as_coarse_as_the_largest() -> None:
    """Key 5 is large; rows see one key each, and those of its group of 16 are allowed more, as far as lse goes."""
    case = Case("outlier", 40, 40, 1, 1, 8, window=(0, 0), plant=(("k", (0, 5, 0, 1), "90"),))
    alone, shared = (oracle.quantized_strength(case, oracle.Integers(group))[0, 0] for group in (1, 16))
    assert np.array_equal(alone, compare.expected(case, "int8").strength[0, 0])
    changed = np.flatnonzero(alone != shared)
    assert 5 not in changed and set(range(16)) - {5} <= set(changed) and (shared >= alone).all()
    np.testing.assert_array_less(shared[16:], 2.5 * alone[16:])
    np.testing.assert_array_less(4 * alone[6], shared[6])
    out, lse = result(case)
    lse[0, 0, 6] += np.float32(8e-3 * shared[6] * 0.9)
    assert judge(case, out, lse, "int8", oracle.Integers(16)).ok and not judge(case, out, lse, "int8").ok


def test_biased_keys_are_judged_by_the_noise_that_rope_leaves_them() -> None:
    """A tenth of what is allowed without rope; with it, what smoothing cannot take off counts."""
    case = Case(q_len=20, k_len=65, head_dim=100, data="biased_k", seed=233)
    rotated = replace(case, rope=Rotary(100, True, "shared"))
    noise, more = (2 * oracle.score_noise(x, oracle.PLAIN_INTEGERS).max() ** 2 for x in (case, rotated))
    assert noise < 1e-3 < more < 0.05
    out, lse = result(rotated)
    out = out + np.sqrt(2 * 1.5 * more) * np.linalg.norm(out) / np.sqrt(out.size) * _signs(out.shape)
    assert any("cosine" in failure for failure in judge(rotated, out.astype(np.float32), lse, "int8").failures)


def _signs(shape: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng(0).choice([-1.0, 1.0], shape)


def test_contract_errors_carry_the_repro() -> None:
    out, lse = result(SMALL)
    out[0, 0, 0, 0] += 1
    with pytest.raises(ContractError) as raised:
        compare.check_contract(SMALL, out, lse, how=", 'cpu'")
    assert str(raised.value).splitlines()[-1].endswith(f"check({SMALL!r}, 'cpu')")


def test_gradients_are_judged() -> None:
    grads = [x.astype(np.float32) for x in compare.expected_gradients(SMALL)]
    compare.check_gradients(SMALL, *grads)
    grads[1][0, 7, 0, 3] += 1e-2
    with pytest.raises(ContractError, match="dk"):
        compare.check_gradients(SMALL, *grads)


def test_small_gradients_may_be_as_far_off_as_float16_rounds(monkeypatch) -> None:
    case = replace(SMALL, dtype="float16")
    step = np.float16(2.0**-24)  # between neighbours there
    grads = [np.full(x.shape, 16 * step) for x in compare.expected_gradients(case)]
    for off, allowed in ((0.5, True), (2.0, False)):  # steps: 3 and 12 % of the gradient
        wants = [x.astype(np.float64) + off * float(step) for x in grads]
        monkeypatch.setattr(compare, "expected_gradients", lambda _, wants=wants: wants)
        if allowed:
            compare.check_gradients(case, *grads)
        else:
            with pytest.raises(ContractError, match="dk"):
                compare.check_gradients(case, *grads)


def test_a_gradient_that_vanishes_may_keep_what_float32_rounds_off(monkeypatch) -> None:
    """One key has all the weight: dq and dk are 0 beside a dv of ordinary size."""
    wants = [np.zeros_like(x) for x in compare.expected_gradients(SMALL)[:2]]
    wants.append(compare.expected_gradients(SMALL)[2])
    monkeypatch.setattr(compare, "expected_gradients", lambda _: wants)
    off = compare.CANCELLED * np.linalg.norm(wants[2]) / np.sqrt(wants[0].size)
    compare.check_gradients(SMALL, *(x.astype(np.float32) for x in (wants[0] + 0.9 * off, *wants[1:])))
    with pytest.raises(ContractError, match="dq"):
        compare.check_gradients(SMALL, *(x.astype(np.float32) for x in (wants[0] + 1.1 * off, *wants[1:])))


def test_rounded_rotations_of_strong_scores_leave_the_size_of_a_small_gradient_open(monkeypatch) -> None:
    """A softcap's slopes fall off exponentially, and rounding moves scores of ten thousand by several."""
    case = replace(SMALL, dtype="float16", rope=Rotary(8), softcap=1.0, data="large")
    wants = [0 * x for x in compare.expected_gradients(case)[:2]] + [compare.expected_gradients(case)[2]]
    monkeypatch.setattr(compare, "expected_gradients", lambda _: wants)
    off = np.linalg.norm(wants[2]) / np.sqrt(wants[0].size)
    grads = [x.astype(np.float16) for x in (wants[0] + off, *wants[1:])]
    compare.check_gradients(case, *grads)
    with pytest.raises(ContractError, match="dq"):
        compare.check_gradients(replace(case, rope=None), *grads)


def test_bits_are_compared() -> None:
    out, lse = result(SMALL)
    compare.check_same_bits(SMALL, (out, lse), (out.copy(), lse))
    other = out.copy()
    other[0, 20, 0, 0] = np.nextafter(other[0, 20, 0, 0], np.float32(9))
    with pytest.raises(ContractError, match="out differs between two runs"):
        compare.check_same_bits(SMALL, (out, lse), (other, lse))


def test_errors_figures() -> None:
    want = np.array([3.0, 4.0])
    figures = errors(want * 1.1, want)
    assert figures.relative_l2 == pytest.approx(0.1)
    assert figures.relative_l1 == pytest.approx(0.1)
    assert figures.cosine == pytest.approx(1.0)
    assert figures.max_abs == pytest.approx(0.4)
    assert figures.rmse == pytest.approx(0.5 / np.sqrt(2))
    assert errors(np.zeros(3), np.zeros(3)).relative_l2 == 0
    assert errors(np.ones(3), np.zeros(3)).relative_l2 == np.inf
    assert errors(np.array([1.0, np.nan]), np.array([1.0, np.nan])).relative_l2 == 0


def test_guards_notice_a_write_past_the_end() -> None:
    guarded = runner._Guarded((2, 3), "float16")
    assert np.isnan(guarded.array).all()
    assert guarded.checked("out") is guarded.array
    np.lib.stride_tricks.as_strided(guarded.array, (7,), (2,))[6] = 0
    with pytest.raises(ContractError, match="memory after out"):
        guarded.checked("out")


def test_check_names_the_kernel_it_ran() -> None:
    assert runner.default_kernel(SMALL) == "cpu"
    assert check(SMALL).relative_l2 <= compare.FLOAT32_L2
    with pytest.raises(ValueError, match="framework is 'tf'"):
        check(SMALL, "cpu", "tf")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("causal", [False, True])
def test_the_rounding_model_is_what_torch_does(dtype: str, causal: bool) -> None:
    """The bar for 16 bits, twice the model's error, is twice the error of PyTorch's math path."""
    torch = pytest.importorskip("torch")
    from torch.nn.attention import SDPBackend, sdpa_kernel

    case = Case(q_len=130, k_len=130, dtype=dtype, causal=causal)
    q, k, v = (runner.to_torch(x).transpose(1, 2) for x in (lambda i: (i.q, i.k, i.v))(case.make_inputs()))
    with sdpa_kernel(SDPBackend.MATH):
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
    want = expected(case)
    theirs = errors(runner.to_numpy(out.transpose(1, 2)), want.out).relative_l2
    assert errors(want.rounded, want.out).relative_l2 <= 1.001 * theirs


def test_tensors_keep_strides_and_values() -> None:
    pytest.importorskip("torch")
    for layout in LAYOUTS:
        for dtype in ("float32", "bfloat16"):
            inputs = Case(q_len=6, k_len=6, batch=2, head_dim=5, layout=layout, dtype=dtype).make_inputs()
            tensors = runner.convert(inputs, "torch")
            for name in "qkv":
                x, tensor = getattr(inputs, name), getattr(tensors, name)
                assert [s * x.itemsize for s in tensor.stride()] == list(x.strides)
                assert runner.to_numpy(tensor).tobytes() == x.tobytes()


def test_convert_leaves_nothing_behind() -> None:
    torch = pytest.importorskip("torch")
    case = Case(q_lens=(3, 4), k_lens=(5, 0), kv_lens=(2, 0), rope=Rotary(8, positions="per_batch"))
    tensors = runner.convert(case.make_inputs(), "torch")
    assert isinstance(tensors, Inputs)
    given = [tensors.kv_lens, tensors.cu_seqlens_q, tensors.cu_seqlens_k, tensors.rope.cos, tensors.rope.positions_k]
    assert all(isinstance(x, torch.Tensor) for x in given)


def _power_of_two(x: float) -> str:
    return "2" + str(round(np.log2(x))).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))


def test_the_published_figures_are_the_tested_ones() -> None:
    page = Path(__file__).parents[2] / "docs" / "numerics.md"
    if not page.exists():
        pytest.skip("docs/numerics.md is not part of an installed package")
    table = page.read_text().partition("## Bounds")[2].partition("## precision")[0]
    figures = [
        f"relative L2 ≤ {compare.FLOAT32_L2:.0e} · condition",
        f"error ≤ {compare.FLOAT32_ROW:.0e} · condition · weight",
        f"error ≤ {compare.LSE:.0e} · (condition + abs(lse))",
        f"≤ {compare.HALF_FACTOR:g} × that of PyTorch's math",
        f"+ {compare.HALF_FACTOR:g}u · weight",
        f"≤ {compare.FLOAT16_ABSOLUTE:.0e} absolute",
        f"cosine ≥ {compare.INT8['cosine']} and relative L2 ≤ {compare.INT8['l2']:.0e}",
        f"cosine ≥ {compare.INT8['biased_cosine']} |",
        f"+ {compare.INT8['lse']:.0e} · strength",
        f"cosine ≥ {compare.INT8_FP8['cosine']} and relative L2 ≤ {compare.INT8_FP8['l2']:.1e}",
        f"fewer than {compare.INT8_FP8['values']} values",
        f"relative L2 ≤ {compare.REPLAY:.0e} against its replay",
        f"≤ {compare.GRADIENT_L2['float32']:.0e} (float32) or 4u",
        f"{_power_of_two(compare.CANCELLED)} · condition of the largest of the three",
        f"strength / {compare.PLAIN_STRENGTH:g}",
        f"fewer than {compare.ENOUGH_VALUES} values",
    ]
    text = table.replace("e-0", "e-")
    assert [figure for figure in figures if figure.replace("e-0", "e-") not in text] == []
    for dtype in ("float16", "bfloat16"):
        assert compare.GRADIENT_L2[dtype] == 4 * compare.UNIT_ROUNDOFF[dtype]


def test_ties_of_e4m3_excuse_one_row_in_a_hundred() -> None:
    want = np.random.default_rng(0).standard_normal((1, 200, 1, 64))
    one = want.copy()
    one[0, 17] *= 1.06  # a weight on another side
    assert compare._without_ties(one, want) == 0.0
    assert 0.009 < compare._without_ties(want * 1.01, want) < 0.011  # all of them: no tie
    several = want.copy()
    several[0, :9] *= 1.06
    assert compare._without_ties(several, want) > compare.REPLAY
