"""The CPU engine below the front ends: its memory, its threads, what it refuses when nobody else has."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest

import qflash
from qflash import _native
from qflash.errors import NoKernelError
from qflash.ops import attention
from qflash.testing import runner
from qflash.testing.case import Case


@pytest.mark.parametrize("precision", [None, "int8"])
def test_no_keys_in_a_thread_that_never_used_scratch(precision: str | None) -> None:
    q, k = np.ones((1, 500, 2, 16), np.float32), np.ones((1, 0, 2, 16), np.float32)
    with ThreadPoolExecutor(1) as fresh:
        out = fresh.submit(qflash.attention, q, k, k, precision=precision).result()
    assert not out.any()


@pytest.mark.parametrize("entry", ["cpu", "cpu_int8", "cpu_bwd"])
@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"head_dim": 257}, "head_dim is 257; allowed: 1 to 256"),
        ({"head_dim": 0}, "head_dim is 0; allowed: 1 to 256"),
        ({"q_heads": 0}, "q has 0 heads and k has 2"),
        ({"kv_heads": 0}, "q has 4 heads and k has 0"),
        ({"kv_heads": 3}, "q has 4 heads and k has 3"),
    ],
)
def test_shapes_the_engine_cannot_hold_are_refused_before_any_read(entry: str, changes: dict, text: str) -> None:
    case = Case(q_len=3, k_len=3, q_heads=4, kv_heads=2, head_dim=16)
    problem = replace(runner.problem_of(case, case.make_inputs(), "cpu", "cpu"), **changes)  # as no front end would
    addresses = _native.cpu_entries
    plan = attention.plan_of_backward(problem, (), True) if entry == "cpu_bwd" else attention.plan_of(problem, (), True)
    call = _native.Call(plan.struct, plan.params(), list(plan.pointers), addresses[entry], addresses["status_text"], 0)
    with pytest.raises(NoKernelError, match=text):
        call(*[0] * len(plan.pointers), 0, 0, 1)


_DENORMALS = """
import numpy as np, torch
import qflash
q, k = np.zeros((1, 600, 4, 16), np.float32), np.zeros((1, 64, 4, 16), np.float32)
v = np.full(k.shape, 1e-40, np.float32)
def run(threads):
    qflash.set_num_threads(threads)
    return qflash.attention(q, k, v)
torch.set_flush_denormal(True)
run(4)  # starts the workers
torch.set_flush_denormal(False)
alone = run(1)
assert alone.all()
for _ in range(20):
    assert run(4).tobytes() == alone.tobytes()
"""


def test_workers_take_the_callers_treatment_of_denormals() -> None:
    torch = pytest.importorskip("torch")
    if not torch.set_flush_denormal(False):
        pytest.skip("this processor cannot flush denormals")
    done = subprocess.run([sys.executable, "-c", _DENORMALS], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
