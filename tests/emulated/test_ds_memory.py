"""The memory that dS takes: C asks for what Python says, and heads in turns have the same bits as all at once."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from qflash.dispatch import VARIANTS, kernels_of
from qflash.ops import attention
from qflash.ops.backward_memory import kept_ds
from qflash.testing import Case
from qflash.testing.compare import check_same_bits
from qflash.testing.emulated_backward import NAMES, check_gradients_of, run_gradients, with_ds_bytes
from qflash.testing.runner import problem_of

KERNELS = [row.name for row in kernels_of("attention_backward") if row.drops_ds is not None]
MIB = 1 << 20
LENGTHS = [(1, 1), (64, 64), (65, 1), (300, 500), (500, 300), (640, 640), (700, 640)]
WINDOWS = [(-1, -1), (-1, 0), (-1, 100), (0, 0), (70, 20), (200, -1)]
MASKS = {"full": {}, "causal": {"causal": True}, "window": {"window": (70, 20)}, "left": {"window": (40, -1)}}


def bytes_of_pair(case: Case) -> int:
    """dS of one sequence and KV head."""
    problem = problem_of(case, case.make_inputs(), None, "cuda")
    kept = kept_ds(attention.scores_of(problem), 1 << 40)
    assert kept is not None
    return kept.nbytes // kept.pairs


@pytest.mark.parametrize("kernel", KERNELS)
def test_python_and_c_say_the_same(library, kernel):
    compiled = library(kernel, "bfloat16", 128, 90)

    def workspace(problem, memory: int) -> int:
        plan = with_ds_bytes(attention.plan_of_backward(problem, (), False), memory)
        return compiled.prepare(plan, VARIANTS[kernel]).workspace_bytes

    for (q_len, k_len), window in product(LENGTHS, WINDOWS):
        case = Case("sizes", q_len, k_len, 6, 2, 128, batch=3, dtype="bfloat16", window=window)
        problem = problem_of(case, case.make_inputs(), None, "cuda")
        for memory in (1, MIB, 3 * MIB, 1 << 30):
            kept = kept_ds(attention.scores_of(problem), memory)
            grown = workspace(problem, memory) - workspace(problem, 0) - (kept.nbytes if kept else 0)
            assert 0 <= grown < 1024, (q_len, k_len, window, memory)  # what aligns it


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("kernel", KERNELS)
def test_heads_in_turns(library, kernel, mask):
    """Five pairs, two at a time: the last section has one."""
    case = Case("turns", 130, 200, 10, 5, 128, dtype="bfloat16", seed=4, **MASKS[mask])
    want = run_gradients(library, case, kernel)
    got = run_gradients(library, case, kernel, seed=3, memory=2 * bytes_of_pair(case) + 5)
    check_same_bits(case, want, got, names=NAMES)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("kernel", KERNELS)
def test_too_little_memory_for_one_head(library, kernel, mask):
    case = Case("none", 130, 200, 4, 2, 128, dtype="bfloat16", seed=5, **MASKS[mask])
    check_gradients_of(library, case, kernel, memory=bytes_of_pair(case) - 1)


@pytest.mark.parametrize("data", ["normal", "large"])
@pytest.mark.parametrize("head_dim", [128, 256])
@pytest.mark.parametrize("kernel", KERNELS)
def test_what_stands_behind_the_last_key(library, kernel, head_dim, data):
    """Nothing of it reaches dQ, neither NaN nor scores that overflow."""
    words = {"batch": 3, "kv_lens": (131, 2, 64), "dtype": "bfloat16" if head_dim == 128 else "float16"}
    case = Case("behind", 150, 200, 2, 1, head_dim, data=data, seed=7, **words)
    inputs = case.make_inputs()
    spoiled = {name: getattr(inputs, name).copy() for name in "kv"}
    for b, length in enumerate(case.kv_lens):
        for x in spoiled.values():
            x[b, length:] = np.nan
    want = run_gradients(library, case, kernel)
    check_same_bits(case, want, run_gradients(library, case, kernel, changes=spoiled), names=NAMES)
    check_gradients_of(library, case, kernel)


@pytest.mark.parametrize("kernel", KERNELS)
def test_lengths_shorter_than_memory_was_planned_for(library, kernel):
    """kv_lens move the diagonal: fewer tiles are kept than the strips have room for."""
    case = Case("lens", 300, 400, 2, 1, 128, batch=3, dtype="float16", kv_lens=(400, 130, 0), causal=True, seed=6)
    check_gradients_of(library, case, kernel)
