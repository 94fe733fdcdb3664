"""250 runs, the same bits."""

from __future__ import annotations

import numpy as np
import pytest

from qflash import dispatch
from qflash.testing import ContractError, repeat, runner
from qflash.testing.repeat import check_repeats


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", [row.name for row in dispatch.kernels_of("attention", "cuda")])
def test_cuda_kernels(kernel):
    assert check_repeats(kernel, 250) >= 1


@pytest.mark.parametrize("kernel", [row.name for row in dispatch.kernels_of("attention", "cpu")])
def test_cpu_kernels(kernel):
    assert check_repeats(kernel, 5) == len(repeat.REPEATED)


def test_a_bit_that_changes_once_is_noticed(monkeypatch):
    runs = []

    def unsteady(case, inputs, kernel):
        runs.append(kernel)
        out = np.zeros(4, np.float32)
        out[2] = -0.0 if len(runs) == 17 else 0.0
        return out, out

    monkeypatch.setattr(runner, "call", unsteady)
    with pytest.raises(ContractError, match="differs between two runs"):
        check_repeats("cpu", 250)
    assert len(runs) == 17
