"""Gradients of attention in the emulator: a Case on a backward kernel's own source."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from qflash.call.op import Plan
from qflash.dispatch import VARIANTS
from qflash.ops.backward_memory import DEFAULT_BACKWARD_MEMORY
from qflash.testing import compare
from qflash.testing.case import Case
from qflash.testing.emulated_attention import UNTOUCHED
from qflash.testing.emulator import ARCH, MULTIPROCESSORS, Library
from qflash.testing.runner import planned_backward, suited

NAMES = ("dq", "dk", "dv")
Gradients = tuple[np.ndarray, ...]


def with_ds_bytes(plan: Plan, nbytes: int) -> Plan:
    """The plan with this much memory for dS, whether or not that would keep a GPU busy."""
    fields = tuple((name, nbytes if name == "ds_bytes" else value) for name, value in plan.fields)
    return replace(plan, fields=fields)


def run_gradients(
    library: Callable[[str, str, int, int], Library],
    case: Case,
    kernel: str,
    arch: int = ARCH,
    seed: int = 0,
    changes: dict[str, np.ndarray | None] | None = None,
    memory: int = DEFAULT_BACKWARD_MEMORY,
) -> Gradients:
    """(dq, dk, dv) of a case on the tiles that `kernel` has for `arch`. changes: arrays that replace the case's own;
    memory: bytes available for dS.

    library: emulator.kernel_library or its like.
    """
    plan, arrays = planned_backward(case, kernel, "emulated")
    plan = with_ds_bytes(plan, memory)
    arrays |= changes or {}
    results = tuple(np.full(result.shape, UNTOUCHED, result.dtype) for result in plan.results)
    if plan.nothing_to_do:
        return tuple(np.zeros_like(x) for x in results)
    compiled = library(kernel, case.dtype, case.head_dim, arch)
    operands = (arrays[operand.argument] for operand in plan.operands)
    compiled.launch(compiled.prepare(plan, VARIANTS[kernel]), (*operands, *results), seed, MULTIPROCESSORS)
    return results


def check_gradients_of(
    library: Callable[[str, str, int, int], Library],
    case: Case,
    kernel: str,
    arch: int = ARCH,
    seed: int = 1,
    memory: int = DEFAULT_BACKWARD_MEMORY,
) -> None:
    """Check the contract, and that the order of warps and lanes does not matter. The case is adapted to the kernel."""
    case = suited(case, kernel, arch)
    first = run_gradients(library, case, kernel, arch, seed, memory=memory)
    how = f", {kernel!r}, 'emulated', {seed}"
    compare.check_gradients(case, *first, how=how)
    second = run_gradients(library, case, kernel, arch, seed + 1, memory=memory)
    compare.check_same_bits(case, first, second, how, NAMES, "check_backward")
