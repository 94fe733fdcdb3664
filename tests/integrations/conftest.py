"""PyTorch as it was before a test that puts qflash in its place."""

from __future__ import annotations

import pytest


@pytest.fixture
def pytorch_is_as_it_was():
    import torch

    from qflash.integrations import sdpa, sdpa_torch
    from qflash.testing.torch_sdpa import ORIGINAL

    sdpa.totals.served = 0
    sdpa.totals.fallbacks.clear()
    yield
    assert torch.nn.functional.scaled_dot_product_attention is ORIGINAL
    assert torch.backends.mha.get_fastpath_enabled()
    assert sdpa_torch._replacements == []


@pytest.fixture
def graphs(monkeypatch):
    """Models on the CPU are captured, in graphs that stand in for those of CUDA."""
    from qflash.testing.torch_graphs import StandIn

    with StandIn().installed(monkeypatch) as found:
        yield found
