"""What `make sanitize` gives the kernels. initcheck does not see what PyTorch's own write, so none of them may run."""

from __future__ import annotations

import pytest

from qflash.testing.op_cases import CASES
from qflash.testing.sanitize import ready_arrays


@pytest.mark.parametrize("name", CASES)
def test_the_front_end_converts_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    import qflash.frontends.torch as frontend
    from qflash.frontends.torch import launch

    run, seen = launch.launch, []

    def watched(op, ready, arrays):
        seen.append(
            [operand.argument for _, operand in ready.converted if not _may_only_be_negated(operand, arrays, op)]
        )
        return run(op, ready, arrays)

    def scalar(value, like):
        raise AssertionError(f"{value} becomes a tensor")

    monkeypatch.setattr(launch, "launch", watched)
    monkeypatch.setattr(frontend, "scalar", scalar)
    CASES[name].call(**{key: torch.from_numpy(x) for key, x in ready_arrays(CASES[name]).items()})
    assert seen and not any(seen)


def _may_only_be_negated(operand, arrays, op) -> bool:
    """Whether the front end looks at the operand, because its strides are even, and then hands it on as it is."""
    from qflash.frontends.torch import launch

    x = arrays[op.arrays.index(operand.argument)]
    return launch._converted(operand, x).data_ptr() == x.data_ptr()
