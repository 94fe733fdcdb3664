"""precision="int8" on the CPU: the pipeline's own promises, beyond the case list that every kernel is held against."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest

import qflash
from qflash import _native, reference
from qflash.reference import int8 as replay
from qflash.testing import cases, errors
from qflash.testing.oracle import replayed
from qflash.testing.runner import run_case

ISAS = ("generic", "avx2", "avx512", "amx")
RUNNABLE = ISAS[: ISAS.index(_native.cpu_isa()) + 1]
# With bfloat16 weights, one that falls exactly between two of them may be rounded the other way.
TO_REPLAY = {"float32": 2e-6, "bfloat16": 5e-5}


def pv() -> str:
    return "bfloat16" if _native.cpu_isa() == "amx" else "float32"


def random(shape, seed=0, dtype="float32"):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def inputs(length=300, heads=2, head_dim=64, seed=0, dtype="float32"):
    return [random((1, length, heads, head_dim), 3 * seed + i, dtype) for i in range(3)]


def int8(*arrays, **words):
    return qflash.attention(*arrays, precision="int8", return_lse=True, **words)


def assert_replayed(q, k, v, **words):
    out, lse = int8(q, k, v, **words)
    want, want_lse = replay.attention_int8(q, k, v, pv=pv(), **words)
    assert np.array_equal(np.isnan(out), np.isnan(want))
    assert errors(out, want).relative_l2 <= TO_REPLAY[pv()] + np.finfo(q.dtype).eps
    finite = np.isfinite(want_lse)
    assert np.array_equal(np.isfinite(lse), finite)
    np.testing.assert_allclose(lse[finite], want_lse[finite], rtol=2e-6, atol=2e-6)
    return out, lse


@pytest.mark.parametrize("case", [c for c in cases("full") if c.dtype == "float32"], ids=lambda case: case.name)
def test_replay_is_exact_up_to_the_last_sums(case):
    out, _ = run_case(case, "cpu_int8")
    want, _ = replayed(case, "cpu_int8")
    assert errors(out, want).relative_l2 <= TO_REPLAY[pv()]


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("causal", [False, True])
def test_contract_on_normal_inputs(head_dim, causal):
    q, k, v = inputs(512, head_dim=head_dim)
    found = errors(int8(q, k, v, causal=causal)[0], reference.attention(q, k, v, causal=causal)[0])
    assert found.cosine >= 0.9995
    assert found.relative_l2 <= 1.2e-2


@pytest.mark.parametrize("head_dim", [64, 128])
def test_smoothing_saves_biased_keys(head_dim):
    q, k, v = inputs(512, head_dim=head_dim)
    rng = np.random.default_rng(9)
    k += np.where(rng.random((2, head_dim)) < 0.1, rng.normal(0, 8, (2, head_dim)), 0).astype(np.float32)
    found = errors(int8(q, k, v)[0], reference.attention(q, k, v)[0])
    assert found.cosine >= 0.999
    assert found.relative_l2 <= 1.2e-2  # as good as without the bias


def test_a_constant_added_to_keys_only_moves_lse():
    q, k, v = inputs()
    offset = np.float32(32.0) * random((1, 1, 2, 64), 7)
    out, lse = int8(q, k, v)
    moved, moved_lse = int8(q, k + offset, v)
    assert errors(moved, out).relative_l2 <= 1e-3  # k + offset was rounded to float32
    np.testing.assert_allclose(
        moved_lse, lse + np.einsum("bthd,bxhd->bht", q, offset) / np.sqrt(64), rtol=1e-4, atol=1e-3
    )


def test_outliers():
    q, k, v = inputs(512)
    rng = np.random.default_rng(5)
    for x in (q, k, v):
        x += np.where(rng.random(x.shape) < 0.001, rng.normal(0, 10, x.shape), 0).astype(np.float32)
    found = errors(int8(q, k, v)[0], reference.attention(q, k, v)[0])
    assert found.cosine >= 0.9995
    assert found.relative_l2 <= 3e-2


def test_constant_and_zero_keys_give_the_mean_of_values():
    q, k, v = inputs()
    mean = np.broadcast_to(v.astype(np.float64).mean(1, keepdims=True), v.shape)
    for keys in (np.zeros_like(k), np.full_like(k, 3.25), np.broadcast_to(k[:, :1], k.shape)):
        out, lse = int8(q, keys, v)
        assert errors(out, mean).relative_l2 <= (4e-3 if pv() == "bfloat16" else 2e-6)
        _, want = reference.attention(q, keys, v)
        np.testing.assert_allclose(lse, want, rtol=2e-6, atol=2e-5)


def test_zero_queries_and_scale_zero():
    q, k, v = inputs()
    for out in (int8(np.zeros_like(q), k, v)[0], int8(q, k, v, scale=0.0)[0]):
        mean = np.broadcast_to(v.astype(np.float64).mean(1, keepdims=True), v.shape)
        assert errors(out, mean).relative_l2 <= (4e-3 if pv() == "bfloat16" else 2e-6)


@pytest.mark.parametrize("scale", [1e-40, 1e-32, 1e-20])
def test_tiny_values(scale):
    q, k, v = inputs(70)
    assert_replayed(q, k * np.float32(scale), v)
    assert_replayed(q * np.float32(scale), k, v)


def test_values_at_the_float16_limit():
    limit = 65504.0
    q, k, v = (np.full((1, 40, 1, 64), limit, "float16") for _ in range(3))
    out, lse = int8(q, k, v)
    assert (out == np.float16(limit)).all()
    assert np.isfinite(lse).all()
    signs = np.sign(random((1, 40, 1, 64), 3)).astype("float16")
    out, lse = assert_replayed(q * signs, k * signs[:, ::-1], v * signs)
    assert np.isfinite(out.astype(np.float32)).all()


def test_the_largest_bfloat16_values_stay_finite():
    largest = float(ml_dtypes.finfo(ml_dtypes.bfloat16).max) / 64
    q, k, v = inputs(40, dtype=ml_dtypes.bfloat16)
    v = np.full(v.shape, largest, ml_dtypes.bfloat16)
    out = int8(q, k, v)[0].astype(np.float32)
    np.testing.assert_allclose(out, largest, rtol=2**-7)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("which", ["k", "v"])
def test_what_no_row_sees_changes_no_bit(which, bad):
    """A key past the causal edge may be anything that is not finite: not its mean, not a scale, not a 0 · NaN leaks."""
    q, k, v = inputs(200)
    arrays = {"q": q, "k": k, "v": v}
    arrays[which][0, 150, 1, 5] = bad
    out, lse = int8(q, k, v, causal=True)
    arrays[which][0, 150, 1, :] = np.nan
    again, lse_again = int8(q, k, v, causal=True)
    assert out[:, :150].tobytes() == again[:, :150].tobytes()
    assert lse[:, :, :150].tobytes() == lse_again[:, :, :150].tobytes()
    assert np.isfinite(out[:, :, 0]).all()
    assert np.isfinite(out[0, :150]).all()


def test_a_bad_key_makes_exactly_the_rows_that_see_it_nan():
    q, k, v = inputs(200)
    k[0, 60, 0, 3] = np.inf
    out, lse = int8(q, k, v, window=(10, 0))
    bad = np.zeros((200, 2), bool)
    bad[60:71, 0] = True
    assert np.array_equal(np.isnan(out[0]).all(-1), bad)
    assert np.array_equal(np.isnan(out[0]).any(-1), bad)
    assert np.array_equal(np.isnan(lse[0]).T, bad)


def test_infinite_values_stay_in_their_channel():
    q, k, v = inputs(200)
    v[0, 20, 0, 3], v[0, 50, 0, 3], v[0, 30, 1, 9] = np.inf, -np.inf, np.nan
    out, _ = int8(q, k, v, causal=True)
    want, _ = reference.attention(q, k, v, causal=True)
    for test in (np.isnan, np.isposinf, np.isneginf):
        assert np.array_equal(test(out), test(want))


@pytest.mark.parametrize("words", [{}, {"causal": True}, {"window": (700, 0)}, {"softcap": 3.0}], ids=str)
@pytest.mark.parametrize("rows", [1, 3, 40])
def test_splits_over_keys(rows, words):
    """Few rows, many keys: the shares of the keys are merged."""
    k, v = random((2, 5000, 2, 64), 1), random((2, 5000, 2, 64), 2)
    assert_replayed(random((2, rows, 4, 64)), k, v, **words)


def test_same_bits_for_any_number_of_threads():
    before = _native.get_num_threads()
    long = [random((2, n, h, 64), s) for s, (n, h) in enumerate(((1, 8), (9000, 2), (9000, 2)))]
    try:
        for arrays, words in ((inputs(700), {"causal": True}), (long, {})):
            results = set()
            for threads in (1, 2, 5):
                _native.set_num_threads(threads)
                results.add(b"".join(x.tobytes() for x in int8(*arrays, **words)))
            assert len(results) == 1
    finally:
        _native.set_num_threads(before)


def test_quantize_rounds_to_nearest_even_and_spans_the_range():
    x = np.array([[127.0, 0.5, 1.5, 2.5, -0.5, -3.5], [0.0] * 6, [np.nan, *[1.0] * 5], [1e-31] * 6], np.float32)
    integers, scales = replay.quantize(x)
    assert integers[0].tolist() == [127, 0, 2, 2, 0, -4]
    assert not integers[1:].any()
    assert scales[0] == 1 and scales[1] == 0 and np.isnan(scales[2]) and scales[3] == 0
    rows = random((1000, 64), 4) * np.exp(8 * random((1000, 1), 5))
    assert (np.abs(replay.quantize(rows)[0]).max(-1) == 127).all()


def test_exp2_polynomial():
    x = np.linspace(-124, 0, 100001, dtype=np.float32)
    relative = replay.exp2(x) / np.exp2(x.astype(np.float64)) - 1
    assert np.abs(relative).max() <= 3e-6


_SCRIPT = """
import json, sys
import numpy as np
from qflash import _native
from qflash.testing import BY_NAME
from qflash.testing.compare import errors
from qflash.testing.oracle import replayed
from qflash.testing.runner import check, run_case
found = {}
for name in json.loads(sys.argv[1]):
    check(BY_NAME[name], "cpu_int8")
    got, want = run_case(BY_NAME[name], "cpu_int8"), replayed(BY_NAME[name], "cpu_int8")
    found[name] = errors(got[0], want[0]).relative_l2
print(json.dumps({"isa": _native.cpu_isa(), "errors": found}))
"""


@pytest.mark.parametrize("isa", RUNNABLE)
def test_every_instruction_set_matches_the_replay(isa):
    names = [case.name for case in cases("quick") if case.dtype == "float32"]
    names += ["dim_3", "dim_100", "dim_255", "rope_padding", "scale_negative", "large", "decode", "decode_window"]
    ran = subprocess.run(
        [sys.executable, "-c", _SCRIPT, json.dumps(names)],
        env={**os.environ, "QFLASH_CPU_ISA": isa},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr
    report = json.loads(ran.stdout)
    assert report["isa"] == isa
    bound = TO_REPLAY["bfloat16" if isa == "amx" else "float32"]
    assert {name: error for name, error in report["errors"].items() if not error <= bound} == {}


@pytest.mark.parametrize("isa", ["sse9", *ISAS[len(RUNNABLE) :]])
def test_an_instruction_set_that_cannot_run_is_refused(isa):
    script = (
        "import numpy as np, qflash\n"
        "x = np.zeros((1, 2, 1, 4), np.float32)\n"
        "try: qflash.attention(x, x, x, precision='int8')\n"
        "except (ValueError, qflash.NoKernelError) as error: print(error)\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", script], env={**os.environ, "QFLASH_CPU_ISA": isa}, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
    assert f"QFLASH_CPU_ISA is '{isa}'" in ran.stdout
