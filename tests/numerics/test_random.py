"""Random problems against the oracle. A failure prints the line that repeats it.

QFLASH_HYPOTHESIS_EXAMPLES sets how many are tried; without it the choice is fixed, so that CI is repeatable.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from qflash import dispatch
from qflash.ops.backward_memory import DEFAULT_BACKWARD_MEMORY
from qflash.testing import Case, check, check_backward, repro
from qflash.testing.random_cases import random_case, random_cases
from qflash.testing.runner import arch_of, refusals, suited

EXAMPLES = int(os.environ.get("QFLASH_HYPOTHESIS_EXAMPLES", "200"))
CPU_KERNELS = [row.name for kv in ("arrays", "pages") for row in dispatch.variants_of("attention", "cpu", kv)]
CUDA_KERNELS = [kernel.name for kernel in dispatch.variants_of("attention", "cuda")]
CUDA_BACKWARD = [row.name for row in dispatch.variants_of("attention_backward", "cuda")]


def for_random_cases(holds: Callable[[Case], Any]) -> None:
    """Try `holds` on cases that hypothesis makes; it shrinks a failing one to the simplest it can find."""
    hypothesis = pytest.importorskip("hypothesis")
    st = hypothesis.strategies

    class Drawn:
        def __init__(self, draw: Callable[[Any], Any]):
            self._draw = draw

        def integer(self, low: int, high: int) -> int:
            return self._draw(st.integers(low, high))

        def choice(self, options: Sequence[Any]) -> Any:
            return self._draw(st.sampled_from(options))

    @hypothesis.settings(
        max_examples=EXAMPLES,
        derandomize="QFLASH_HYPOTHESIS_EXAMPLES" not in os.environ,
        database=None,
        deadline=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(st.composite(lambda draw: random_case(Drawn(draw)))())
    def try_one(case: Case) -> None:
        try:
            holds(case)
        except Exception as error:
            error.add_note(f"repro: {repro(case)}")
            raise

    try_one()


@pytest.mark.parametrize("kernel", CPU_KERNELS)
def test_random_problems(kernel: str) -> None:
    for_random_cases(lambda case: check(case, kernel))


def test_random_gradients() -> None:
    for_random_cases(check_backward)


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", CUDA_KERNELS)
def test_random_problems_cuda(kernel: str) -> None:
    """Seeded rather than shrunk: the GPU machine need not have hypothesis."""
    arch = arch_of("cuda")
    for case in (suited(case, kernel, arch) for case in random_cases(EXAMPLES, seed=len(kernel))):
        if not refusals(case, kernel, arch):
            check(case, kernel, "native-cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", CUDA_BACKWARD)
def test_random_gradients_cuda(kernel: str) -> None:
    """Every other problem without memory for dS."""
    arch = arch_of("cuda")
    for i, case in enumerate(random_cases(EXAMPLES, seed=len(kernel))):
        memory = DEFAULT_BACKWARD_MEMORY if i % 2 else 0
        check_backward(suited(case, kernel, arch), kernel, "native-cuda", memory=memory)
