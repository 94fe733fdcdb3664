"""The CPU engine's gradients beyond the case list: its tiles, its threads, its instruction sets, other definitions."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from multiprocessing import get_context

import numpy as np
import pytest

from qflash import _native, reference
from qflash.call.prepare import Prepared, prepare
from qflash.ops import attention
from qflash.testing import compare, oracle, runner
from qflash.testing.case import Case, Inputs, Rotary
from qflash.testing.cases import FEW_KEYS, ONE_HOT, cases

NAMES = ("dq", "dk", "dv")
ISAS = ("amx", "avx512", "avx2", "generic")

# Lengths around the 96 rows and keys of a tile, with masks that cut tiles in every way.
TILES = [
    Case("tile_exact", 192, 192, head_dim=32, causal=True, seed=1),
    Case("tile_one_less", 95, 191, head_dim=32, seed=2),
    Case("tile_one_more", 97, 193, head_dim=48, causal=True, seed=3),
    Case("tile_single_head", 600, 600, 1, 1, head_dim=16, causal=True, seed=4),
    Case("tile_long_k", 100, 700, 4, 2, head_dim=24, causal=True, seed=5),
    Case("tile_long_q", 700, 100, 4, 2, head_dim=24, causal=True, seed=6),
    Case("tile_flat_cap", 1, 65, 2, 1, head_dim=2, batch=2, softcap=1.0, rope=Rotary(dim=2), data="large"),
    Case("tile_narrow_window", 500, 500, 1, 1, head_dim=20, window=(7, 3), seed=7),
    Case("tile_wide_window", 500, 450, 2, 1, head_dim=20, window=(150, 110), seed=8),
    Case("tile_left_window", 300, 420, 2, 2, head_dim=20, window=(100, -1), seed=9),
    Case("tile_window_past_k", 420, 90, 2, 2, head_dim=20, window=(3, 3), seed=10),
    Case("tile_padding", 200, 300, 4, 2, head_dim=36, batch=3, kv_lens=(300, 96, 97), causal=True, seed=11),
    Case("tile_packed", q_lens=(150, 0, 97, 1), k_lens=(200, 96, 97, 300), q_heads=6, kv_heads=2, causal=True, seed=12),
    Case("tile_softcap", 200, 200, 2, 2, softcap=3.0, causal=True, seed=13),
    Case("tile_rope", 200, 250, 2, 1, head_dim=40, rope=Rotary(32, True, "negative"), causal=True, seed=14),
    Case("tile_half", 200, 200, 4, 2, dtype="float16", causal=True, rope=Rotary(64), seed=15),
    Case("tile_nan_out_of_sight", 300, 300, 1, 1, causal=True, plant=(("q", (0, 20, 0, 3), "nan"),), seed=16),
    Case("tile_inf_in_k", 300, 300, 1, 1, window=(40, 40), plant=(("k", (0, 250, 0, 3), "inf"),), seed=17),
]
QUICK = [case for case in TILES + cases("quick") if case.dtype != "bfloat16"]


def ids(case: Case) -> str:
    return case.name


def gradients(case: Case, dout: np.ndarray, dlse: np.ndarray | None, num_threads: int = 0) -> tuple[np.ndarray, ...]:
    """The engine's gradients for a given dout and dlse, from the oracle's out and lse, in poisoned buffers."""
    inputs = case.make_inputs()
    want = oracle.expected(case)
    out, lse = want.out.astype(case.dtype), want.lse.astype(np.float32)
    grads = tuple(np.full(x.shape, np.nan, x.dtype) for x in (inputs.q, inputs.k, inputs.v))
    arrays = runner.arrays_of(inputs) | {"out": out, "lse": lse, "dout": dout, "dlse": dlse}
    runner.launch(prepared_backward(case, inputs, dlse is not None), arrays, grads, num_threads)
    return grads


def prepared_backward(case: Case, inputs: Inputs, dlse: bool) -> Prepared:
    problem = runner.problem_of(case, inputs, "cpu", "cpu")
    return prepare(attention.plan_of_backward(problem, runner.arrays_of(inputs), dlse))


def assert_same_bits(first: tuple[np.ndarray, ...], second: tuple[np.ndarray, ...], what: str) -> None:
    for name, a, b in zip(NAMES, first, second, strict=True):
        assert a.tobytes() == b.tobytes(), f"{name} differs {what}"


@pytest.mark.parametrize("case", ONE_HOT, ids=ids)
def test_what_lse_rounds_off_is_no_gradient(case: Case) -> None:
    dout, _ = case.make_gradients()
    dq, dk, _ = gradients(case, dout, None)
    inputs = case.make_inputs()
    words = {**case.options(), "kv_lens": inputs.kv_lens, "sinks": inputs.sinks}
    wants = reference.attention_backward(inputs.q, inputs.k, inputs.v, dout, **words)
    for got, want in zip((dq, dk), wants, strict=False):
        assert np.linalg.norm(got - want) <= 1e-3 * np.linalg.norm(wants[2])


@pytest.mark.parametrize("case", TILES + FEW_KEYS + [case for case in cases("full") if not case.finite], ids=ids)
def test_matches_the_oracle(case: Case) -> None:
    compare.check_gradients(case, *runner.run_backward(case))


@pytest.mark.parametrize("case", QUICK, ids=ids)
def test_same_bits_for_any_number_of_threads(case: Case) -> None:
    alone = runner.run_backward(case, num_threads=1)
    for num_threads in (2, 3, 7):
        assert_same_bits(alone, runner.run_backward(case, num_threads=num_threads), f"with {num_threads} threads")


def test_agrees_with_torch_autograd_in_float64() -> None:
    torch = pytest.importorskip("torch")
    case = Case(q_len=130, k_len=130, q_heads=4, kv_heads=2, head_dim=40, causal=True, seed=5)
    inputs = case.make_inputs()
    dout, dlse = case.make_gradients()
    q, k, v = (torch.from_numpy(x).double().transpose(1, 2).requires_grad_() for x in (inputs.q, inputs.k, inputs.v))
    s = q @ k.repeat_interleave(2, 1).transpose(-1, -2) * 40**-0.5
    s = s.masked_fill(~torch.ones(130, 130, dtype=torch.bool).tril(), -torch.inf)
    out = torch.softmax(s, -1) @ v.repeat_interleave(2, 1)
    tops = (torch.from_numpy(dout).double().transpose(1, 2), torch.from_numpy(dlse).double())
    wants = torch.autograd.grad((out, torch.logsumexp(s, -1)), (q, k, v), tops)
    for name, got, want in zip(NAMES, runner.run_backward(case), wants, strict=True):
        error = compare.errors(got, want.transpose(1, 2).numpy()).relative_l2
        assert error <= compare.GRADIENT_L2["float32"], f"{name} is off by {error:.3g}"


def test_is_the_slope_of_the_forward_pass() -> None:
    """Central differences of the oracle's forward pass: nothing here knows a formula for a gradient."""
    case = Case(q_len=4, k_len=5, q_heads=2, kv_heads=1, head_dim=4, causal=True, softcap=2.0, rope=Rotary(4), seed=3)
    inputs = case.make_inputs()
    dout, dlse = case.make_gradients()
    arrays = {name: getattr(inputs, name).astype(np.float64) for name in "qkv"}

    def loss() -> float:
        out, lse = reference.attention(**arrays, causal=True, softcap=2.0, rope=inputs.rope)
        return float((out * dout).sum() + (lse * dlse).sum())

    step = 1e-5
    for name, got in zip("qkv", gradients(case, dout, dlse), strict=True):
        want = np.empty(got.shape)
        for index in np.ndindex(got.shape):
            value = arrays[name][index]
            ends = []
            for sign in (1, -1):
                arrays[name][index] = value + sign * step
                ends.append(loss())
            arrays[name][index] = value
            want[index] = (ends[0] - ends[1]) / (2 * step)
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5, err_msg=f"d{name}")


def test_gradient_of_lse() -> None:
    """With dout = 0, d lse_i / d q_i is the average key; without dlse everything is zero."""
    case = Case(q_len=120, k_len=110, q_heads=2, kv_heads=2, head_dim=16, causal=True, seed=8)
    dout, dlse = case.make_gradients()
    dq, dk, dv = gradients(case, np.zeros_like(dout), dlse)
    inputs = case.make_inputs()
    average_key, _ = reference.attention(inputs.q, inputs.k, inputs.k, causal=True)
    want = average_key * dlse.swapaxes(1, 2)[..., None] / 4
    assert compare.errors(dq, want).relative_l2 <= compare.GRADIENT_L2["float32"]
    assert not dv.any()
    assert dk.any()
    assert not any(grad.any() for grad in gradients(case, np.zeros_like(dout), None))
    assert_same_bits(gradients(case, dout, None), gradients(case, dout, np.zeros_like(dlse)), "from dlse = 0")


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_what_is_not_seen_gets_exactly_zero(dtype: str) -> None:
    # Query i stands at i + 130 - 300: the first 170 see nothing. Keys past 130 are padding.
    case = Case(q_len=300, k_len=200, q_heads=4, kv_heads=2, kv_lens=(130,), causal=True, dtype=dtype, seed=9)
    dq, dk, dv = runner.run_backward(case)
    assert not dq[:, :170].any()
    assert not dk[:, 130:].any()
    assert not dv[:, 130:].any()
    assert (np.abs(dq[:, 171:].astype(np.float32)).max(-1) > 0).all()
    assert (np.abs(dv[:, :130].astype(np.float32)).max(-1) > 0).all()


def test_bad_values_are_refused() -> None:
    case = Case(q_len=8, k_len=8, kv_lens=(8,), seed=1)
    dout, dlse = case.make_gradients()
    gradients(case, dout, dlse)
    too_long = replace(case, kv_lens=(9,))
    inputs = too_long.make_inputs()
    prepared = prepared_backward(too_long, inputs, True)
    arrays = runner.arrays_of(inputs) | {"out": dout, "lse": dlse, "dout": dout, "dlse": dlse}
    with pytest.raises(ValueError, match=r"kv_lens\[0\] is 9; allowed: 0 to 8"):
        runner.launch(prepared, arrays, [dout] * 3)
    arrays |= {"lse": None, "kv_lens": case.make_inputs().kv_lens}
    with pytest.raises(ValueError, match="lse is missing"):
        runner.launch(prepared, arrays, [dout] * 3)


def test_concurrent_calls() -> None:
    case = Case(q_len=300, k_len=300, q_heads=2, kv_heads=1, head_dim=32, causal=True, seed=6)
    alone = runner.run_backward(case, num_threads=1)
    with ThreadPoolExecutor(4) as pool:
        for result in pool.map(lambda n: runner.run_backward(case, num_threads=n), [1, 2, 3, 4] * 5):
            assert_same_bits(alone, result, "among concurrent calls")


def _in_child(case: Case) -> tuple[np.ndarray, ...]:
    return runner.run_backward(case, num_threads=3)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_after_fork() -> None:
    case = Case(q_len=300, k_len=300, q_heads=1, kv_heads=1, head_dim=32, seed=7)
    before = runner.run_backward(case, num_threads=3)
    with get_context("fork").Pool(2) as pool:
        for result in pool.map(_in_child, [case] * 4):
            assert_same_bits(before, result, "in a forked process")


_CHECK = """
import sys
from qflash import _native
from qflash.testing import compare, runner
from qflash.testing.case import Case, Inputs, Rotary
assert _native.cpu_isa() == sys.argv[1], _native.cpu_isa()
for line in sys.stdin:
    case = eval(line)
    compare.check_gradients(case, *runner.run_backward(case, num_threads=2))
"""


@pytest.mark.parametrize("isa", ISAS)
def test_every_instruction_set(isa: str) -> None:
    if ISAS.index(_native.cpu_isa()) > ISAS.index(isa):
        pytest.skip(f"this machine, or QFLASH_CPU_ISA, has no {isa}")
    lines = "\n".join(repr(case) for case in TILES + cases("quick"))
    # One BLAS thread: the oracle's small products in spinning threads would take the time of this test.
    environment = {**os.environ, "QFLASH_CPU_ISA": isa, "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", _CHECK, isa], input=lines, text=True, capture_output=True, env=environment, timeout=300
    )
    assert done.returncode == 0, done.stderr
