"""The CPU engine's own promises: instruction sets, threads, forks, memory, bits, bad values, NaN placement."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import threading
from dataclasses import replace

import numpy as np
import pytest

import qflash
from qflash import reference
from qflash.testing import Case, check
from qflash.testing.runner import run_case

ISAS = ("generic", "avx2", "avx512", "amx")  # each includes the ones before it


def python(code: str, **environment: str) -> subprocess.CompletedProcess:
    """Run `code` in a fresh interpreter, because the engine reads the environment once, at load."""
    return subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **environment}, capture_output=True, text=True, timeout=300
    )


def arrays(*shape: int, seed: int = 0, kv_len: int | None = None, kv_heads: int | None = None):
    rng = np.random.default_rng(seed)
    batch, length, heads, dim = shape
    kv = (batch, kv_len or length, kv_heads or heads, dim)
    return (rng.standard_normal(s, np.float32) for s in (shape, kv, kv))


def usable_isas() -> list[str]:
    """Every instruction set up to the one this machine runs by default."""
    best = python("from qflash import _native; print(_native.cpu_isa())", QFLASH_CPU_ISA="").stdout.strip()
    return list(ISAS[: ISAS.index(best) + 1])


@pytest.mark.process
class TestInstructionSets:
    def test_each_one_keeps_the_contract(self):
        code = (
            "from qflash import _native; from qflash.testing import cases, check\n"
            "for case in cases('quick'): check(case, 'cpu')\n"
            "print(_native.cpu_isa())"
        )
        for isa in usable_isas():
            done = python(code, QFLASH_CPU_ISA=isa)
            assert done.returncode == 0, done.stderr
            assert done.stdout.strip() == isa

    def test_unknown_name_is_refused_at_the_first_call(self):
        done = python(
            "import numpy as np, qflash; q = np.ones((1, 1, 1, 8), 'f'); qflash.attention(q, q, q)",
            QFLASH_CPU_ISA="mmx",
        )
        assert "ValueError: QFLASH_CPU_ISA is 'mmx'; allowed: generic, avx2, avx512, amx" in done.stderr

    def test_missing_one_is_refused_not_run(self):
        missing = ISAS[len(usable_isas()) :]
        if not missing:
            pytest.skip("this machine has every instruction set")
        done = python(
            "import numpy as np, qflash; q = np.ones((1, 1, 1, 8), 'f'); qflash.attention(q, q, q)",
            QFLASH_CPU_ISA=missing[0],
        )
        assert "which this machine lacks" in done.stderr


class TestThreads:
    @pytest.mark.process
    def test_number_comes_from_the_environment(self):
        done = python("import qflash; print(qflash.get_num_threads())", QFLASH_NUM_THREADS="3")
        assert done.stdout.strip() == "3"

    @pytest.mark.process
    def test_default_is_what_the_process_may_use(self):
        done = python("import qflash; print(qflash.get_num_threads())", QFLASH_NUM_THREADS="")
        assert int(done.stdout) == len(os.sched_getaffinity(0))

    @pytest.mark.process
    def test_a_bad_number_is_named(self):
        done = python("import qflash; print(qflash.get_num_threads())", QFLASH_NUM_THREADS="two")
        assert int(done.stdout) == len(os.sched_getaffinity(0))
        assert "QFLASH_NUM_THREADS is 'two'; allowed: 1 or more" in done.stderr

    def test_many_callers_at_once(self):
        q, k, v = arrays(2, 150, 4, 32)
        want = qflash.attention(q, k, v, causal=True)
        wrong = []

        def call():
            for _ in range(20):
                if not np.array_equal(qflash.attention(q, k, v, causal=True), want):
                    wrong.append(threading.get_ident())

        callers = [threading.Thread(target=call) for _ in range(8)]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join(timeout=120)
            assert not caller.is_alive()
        assert not wrong

    @pytest.mark.parametrize(
        "case",
        [
            Case("rows", q_len=500, k_len=700, q_heads=4, kv_heads=2, causal=True),
            Case("window", q_len=400, k_len=400, window=(70, 9), kv_lens=(400, 333), batch=2),
            Case("decode", q_len=1, k_len=5000, q_heads=8, kv_heads=2),
            Case("few_rows", q_len=30, k_len=3000, q_heads=2, causal=True),
        ],
        ids=lambda case: case.name,
    )
    def test_bits_do_not_depend_on_their_number(self, case):
        want = run_case(case, "cpu", num_threads=1)
        for threads in (2, 3, 8, 64):
            for got, first in zip(run_case(case, "cpu", num_threads=threads), want, strict=True):
                assert got.tobytes() == first.tobytes(), threads


def _attend_in_child(queue, q, k, v):
    queue.put(qflash.attention(q, k, v))


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*fork.*:RuntimeWarning")
def test_forked_child_computes_and_so_does_the_parent_afterwards():
    q, k, v = arrays(1, 300, 4, 64)
    want = qflash.attention(q, k, v)  # the parent's threads exist before the fork
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    children = [context.Process(target=_attend_in_child, args=(queue, q, k, v)) for _ in range(3)]
    for child in children:
        child.start()
    results = [queue.get(timeout=120) for _ in children]
    for child in children:
        child.join(timeout=120)
        assert child.exitcode == 0
    for result in (*results, qflash.attention(q, k, v)):
        np.testing.assert_array_equal(result, want)


@pytest.mark.process
def test_memory_is_linear_in_length():
    """T = 131072 under a window, so that it takes a second; scratch does not know about windows."""
    code = """
import resource
import numpy as np, qflash
q = np.ones((1, 131072, 1, 64), np.float32)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
out = qflash.attention(q, q, q, window=(64, 64))
after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
assert np.array_equal(out, q)
print((after - before) * 1024 - out.nbytes)
"""
    done = python(code)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 2**30


class TestBadValues:
    q = np.ones((4, 64, 1, 8), np.float32)
    rope = qflash.Rope(np.ones((64, 4), np.float32), np.zeros((64, 4), np.float32))

    def refuses(self, message: str, **words):
        with pytest.raises(ValueError) as error:
            qflash.attention(self.q, self.q, self.q, **words)
        assert str(error.value) == message

    def test_kv_lens(self):
        self.refuses("kv_lens[3] is 70; allowed: 0 to 64", kv_lens=np.array([0, 64, 1, 70], np.int32))
        self.refuses("kv_lens[1] is -1; allowed: 0 to 64", kv_lens=np.array([0, -1, 1, 70], np.int32))

    @pytest.mark.parametrize("position", [64, -64])
    def test_positions(self, position):
        positions = np.zeros(64, np.int32)
        positions[5] = position
        for name in ("positions_q", "positions_k"):
            self.refuses(
                f"rope.{name}[5] is {position}; allowed: -63 to 63, the rows of rope.cos",
                rope=replace(self.rope, **{name: positions}),
            )

    @pytest.mark.parametrize(
        ("cu_q", "message"),
        [
            ([1, 5, 10], "cu_seqlens_q[0] is 1; allowed: 0"),
            ([0, 6, 5], "cu_seqlens_q[2] is 5; allowed: 6 or more, what cu_seqlens_q[1] is"),
            ([0, 9, 10], "cu_seqlens_q[1] - cu_seqlens_q[0] is 9; allowed: 0 to 6, max_seqlen_q"),
            ([0, 4, 9], "cu_seqlens_q[2] is 9; allowed: 10, the number of rows"),
        ],
    )
    def test_cu_seqlens(self, cu_q, message):
        x = np.ones((10, 1, 8), np.float32)
        with pytest.raises(ValueError) as error:
            qflash.attention_varlen(x, x, x, np.array(cu_q, np.int32), np.array([0, 4, 10], np.int32), 6, 6)
        assert str(error.value) == message


class TestNonFinite:
    """NaN and infinity land where the oracle has them, in every path: packed tiles, single rows, splits."""

    @pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
    @pytest.mark.parametrize("poisoned", ["q", "k", "v"])
    @pytest.mark.parametrize(("q_len", "k_len"), [(300, 300), (20, 2000), (1, 2000)], ids=["tiles", "few", "decode"])
    def test_one_bad_number(self, q_len, k_len, poisoned, value):
        q, k, v = arrays(1, q_len, 2, 16, kv_len=k_len, seed=3)
        {"q": q, "k": k, "v": v}[poisoned][0, 0 if poisoned == "q" else k_len - max(q_len // 2, 1), 1, 3] = value
        self.matches(q, k, v, causal=True)
        self.matches(q, k, v, window=(5, 0))

    def test_keys_past_kv_lens_do_not_exist(self):
        q, k, v = arrays(2, 140, 1, 16)
        k[:, 100:] = np.nan
        v[:, 100:] = np.nan
        out = qflash.attention(q, k, v, kv_lens=np.array([100, 37], np.int32))
        assert np.isfinite(out).all()

    def test_scores_of_minus_infinity_alone_give_nan_and_nothing_seen_gives_zero(self):
        q, k, v = arrays(1, 4, 1, 8)
        k[:] = -np.inf
        q[:] = 1.0
        out, lse = qflash.attention(q, k, v, return_lse=True)
        assert np.isnan(out).all() and np.isnan(lse).all()
        out, lse = qflash.attention(q, k, v, kv_lens=np.zeros(1, np.int32), return_lse=True)
        assert (out == 0).all() and (lse == -np.inf).all()

    @staticmethod
    def matches(q, k, v, **words):
        out, lse = qflash.attention(q, k, v, return_lse=True, **words)
        with np.errstate(invalid="ignore"):
            want_out, want_lse = reference.attention(q, k, v, **words)
        for got, want in ((out, want_out), (lse, want_lse)):
            np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
            np.testing.assert_array_equal(np.isinf(got), np.isinf(want))
            seen = np.isfinite(want)
            np.testing.assert_allclose(got[seen], want[seen], rtol=1e-4, atol=1e-5)


def test_scores_too_large_for_their_difference_from_a_rounded_product():
    """Scores of 1e30: one ulp is far more than any exponent, the largest weight must still be exactly 1."""
    q, k, v = arrays(1, 8, 1, 16)
    check(Case("large", q_len=8, k_len=8, scale=0.25), "cpu")
    out = qflash.attention(q * np.float32(1e15), k * np.float32(1e15), v)
    want, _ = reference.attention(q * np.float32(1e15), k * np.float32(1e15), v)
    np.testing.assert_allclose(out, want, rtol=1e-6)


@pytest.mark.parametrize("scale", [0.0, -0.5])
def test_scale_may_be_zero_or_negative(scale):
    check(Case("scale", q_len=130, k_len=200, scale=scale, causal=True, seed=5), "cpu")
