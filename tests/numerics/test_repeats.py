"""1000 runs under varying load, the same bits."""

from __future__ import annotations

import numpy as np
import pytest

from qflash import dispatch
from qflash.testing import ContractError, repeat, runner
from qflash.testing.repeat import check_repeats

OPS = ("attention", "attention_backward")


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", [row.name for op in OPS for row in dispatch.variants_of(op, "cuda")])
def test_cuda_kernels(kernel):
    torch = pytest.importorskip("torch")
    beside, x = torch.cuda.Stream(), torch.randn(1024, 1024, device="cuda", dtype=torch.float16)

    def load(index: int) -> None:
        """None to six products on another stream, which take their multiprocessors when and where they like."""
        with torch.cuda.stream(beside):
            for _ in range(index % 7):
                torch.mm(x, x)

    assert check_repeats(kernel, 1000, load) >= 1
    torch.cuda.synchronize()


@pytest.mark.parametrize("kernel", [row.name for op in OPS for row in dispatch.variants_of(op, "cpu")])
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
