"""What `make sanitize` gives the kernels. initcheck does not see what PyTorch's own write, so none of them may run."""

from __future__ import annotations

import pytest

from qflash.testing.op_cases import CASES
from qflash.testing.sanitize import ready_arrays


@pytest.mark.parametrize("name", CASES)
def test_the_front_end_converts_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    from qflash.frontends import torch_op_launch, torch_op_library

    convert, seen = torch_op_launch._ready, []

    def ready(operand, x):
        seen.append(operand.argument)
        assert convert(operand, x) is x, f"{operand.argument} is converted"
        return x

    def scalar(value, like):
        raise AssertionError(f"{value} becomes a tensor")

    monkeypatch.setattr(torch_op_launch, "_ready", ready)
    monkeypatch.setattr(torch_op_library, "scalar", scalar)
    CASES[name].call(**{key: torch.from_numpy(x) for key, x in ready_arrays(CASES[name]).items()})
    assert seen
