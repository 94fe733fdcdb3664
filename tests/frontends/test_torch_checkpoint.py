"""PyTorch front end under activation checkpointing, whole and selective."""

from __future__ import annotations

import functools

import pytest

import qflash

torch = pytest.importorskip("torch")

from torch.utils.checkpoint import (  # noqa: E402
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

from qflash.testing.torch_math import tensors  # noqa: E402

SINKS = torch.linspace(-1, 2, tensors()[0].shape[2])


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(reentrant):
    def gradients(run):
        leaves = [x.requires_grad_() for x in tensors()] + [SINKS.clone().requires_grad_()]
        run(leaves).square().sum().backward()
        return [x.grad for x in leaves]

    def call(q, k, v, sinks):
        return qflash.attention(q, k, v, causal=True, window=(5, 0), sinks=sinks)

    got = gradients(lambda leaves: checkpoint(call, *leaves, use_reentrant=reentrant))
    for a, b in zip(got, gradients(lambda leaves: call(*leaves)), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("kept", [CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_RECOMPUTE])
def test_selective_checkpointing_keeps_what_its_policy_names(kept):
    """out and lse, which the backward pass otherwise computes again."""

    def policy(_context, op, *_args, **_kwargs):
        return kept if str(op) == "qflash.attention.default" else CheckpointPolicy.PREFER_RECOMPUTE

    def block(q, k, v):
        return qflash.attention(q, k, v, causal=True).sin()

    leaves, plain = ([x.requires_grad_() for x in tensors()] for _ in range(2))
    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    out = checkpoint(block, *leaves, use_reentrant=False, context_fn=contexts)
    with FlopCounterMode(display=False) as counted:
        out.sum().backward()
    ran = {str(op) for op in counted.get_flop_counts()["Global"]}
    again = set() if kept is CheckpointPolicy.MUST_SAVE else {"qflash.attention"}
    assert ran == {"qflash.attention_backward"} | again
    block(*plain).sum().backward()
    for a, b in zip(leaves, plain, strict=True):
        assert torch.equal(a.grad, b.grad)
