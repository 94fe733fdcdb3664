"""Attention in the emulator: a problem or a Case on a kernel's own source."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from qflash.dispatch import VARIANTS
from qflash.ops import attention
from qflash.ops.attention import ATTENTION
from qflash.ops.problem import Problem
from qflash.testing import compare, kept, paged
from qflash.testing.case import Case
from qflash.testing.compare import Errors
from qflash.testing.emulator import ARCH, MULTIPROCESSORS, Library
from qflash.testing.oracle import integers_of, replayed, weights_dtype
from qflash.testing.runner import planned, problem_of, refusals, suited

UNTOUCHED = 12345.0  # fills results before a call: no kernel writes it
# The emulator takes seconds for a thousand keys; this many are several tiles of any kernel, too.
FEW_KEYS = 300


def with_few_keys(case: Case) -> Case:
    """The case with few enough keys for the emulator."""
    return replace(case, k_len=min(case.k_len, FEW_KEYS))


def call(
    library: Library,
    kernel: str,
    problem: Problem,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    kv_lens: np.ndarray | None = None,
    cu_q: np.ndarray | None = None,
    cu_k: np.ndarray | None = None,
    rope=None,
    sinks: np.ndarray | None = None,
    seed: int = 0,
    out: np.ndarray | None = None,
    wants_lse: bool = True,
    multiprocessors: int = MULTIPROCESSORS,
) -> tuple[np.ndarray, np.ndarray]:
    """(out, lse) of a checked problem. out: a contiguous array to write to."""
    out = np.empty(q.shape, q.dtype) if out is None else out
    out[:] = UNTOUCHED
    lse = np.full(attention.lse_shape(problem), UNTOUCHED, np.float32)
    tables = [None] * 4
    if rope is not None:
        tables = [np.ascontiguousarray(x, np.float32) for x in (rope.cos, rope.sin)]
        tables += [None if x is None else np.ascontiguousarray(x) for x in (rope.positions_q, rope.positions_k)]
    named = dict(zip(ATTENTION.arrays, (q, k, v, kv_lens, cu_q, cu_k, *tables, sinks), strict=True))
    given = {name for name, x in named.items() if x is not None}
    variant = VARIANTS[kernel]
    plan = attention.plan_of(replace(problem, precision=variant.precision), given, wants_lse)
    results = (out, lse) if wants_lse else (out,)
    arrays = (*(named[operand.argument] for operand in plan.operands), *results)
    library.launch(library.prepare(plan, variant), arrays, seed, multiprocessors)
    return out, lse


def run_case(
    library: Callable[[str, str, int, int], Library],
    case: Case,
    kernel: str,
    arch: int = ARCH,
    seed: int = 0,
    wants_lse: bool = True,
    multiprocessors: int = MULTIPROCESSORS,
) -> tuple[np.ndarray, np.ndarray]:
    """(out, lse) of a case on the tiles that `kernel` has for `arch`. library: emulator.kernel_library or its like."""
    inputs = case.make_inputs()
    variant = VARIANTS[kernel]
    if paged.is_paged(kernel) or kept.is_kept(kernel):
        plan, arrays = planned(case, inputs, kernel, "cpu")
        results = [np.full(result.shape, UNTOUCHED, result.dtype) for result in plan.results]
        compiled = library(kernel, case.dtype, case.head_dim, arch)
        operands = (arrays[operand.argument] for operand in plan.operands)
        compiled.launch(compiled.prepare(plan, variant), (*operands, *results), seed, multiprocessors)
        return results[0], results[1]
    problem = problem_of(case, inputs, None, "cpu")
    extras = (inputs.kv_lens, inputs.cu_seqlens_q, inputs.cu_seqlens_k, inputs.rope, inputs.sinks)
    compiled = library(kernel, case.dtype, problem.head_dim, arch)
    words = {"wants_lse": wants_lse, "multiprocessors": multiprocessors}
    return call(compiled, kernel, problem, inputs.q, inputs.k, inputs.v, *extras, seed, **words)


def check_kernel(
    library: Callable[[str, str, int, int], Library], case: Case, kernel: str, arch: int = ARCH, seed: int = 1
) -> Errors | None:
    """Check the contract, the replay of a quantized kernel, and that the order of warps and lanes does not matter.
    Returns the error figures, or None if dispatch rejects the case. The case is changed to what the kernel supports."""
    case = suited(case, kernel, arch)
    if refusals(case, kernel, arch):
        assert case.packed or case.rope or case.sinks, "what else a rung refuses, `suited` takes out of a case"
        return None
    first = run_case(library, case, kernel, arch, seed)
    how = f", {kernel!r}, 'emulated', {seed}"
    variant = VARIANTS[kernel]
    errors = compare.check_contract(
        *(case, *first, variant.contract, how, integers_of(kernel)),
        hides_masked_nonfinite_v=variant.kernel.hides_masked_nonfinite_v,
    )
    replay = paged.replayed(case, kernel) if paged.is_paged(kernel) else replayed(case, kernel)
    if replay is not None:
        compare.check_replay(case, *first, replay, how, weights_dtype(case, kernel))
    compare.check_same_bits(case, first, run_case(library, case, kernel, arch, seed + 1), how)
    return errors
