"""qflash.parallel.torch: four and eight ranks of gloo on this CPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

ROOT = Path(__file__).resolve().parents[2]


def on_ranks(*words: str, seconds: float) -> None:
    """In a process of its own, so that ranks are started once, and not by every worker of pytest-xdist."""
    path = Path(__file__).with_name("torch_on_four_ranks.py")
    without = [word for plugin in ("cacheprovider", "xdist", "hypothesispytest") for word in ("-p", f"no:{plugin}")]
    command = [sys.executable, "-m", "pytest", "-q", *without, str(path), *words]
    done = subprocess.run(command, capture_output=True, text=True, cwd=path.parent, timeout=seconds)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr


def test_on_four_ranks_and_eight():
    on_ranks(seconds=500)


@pytest.mark.slow
def test_everywhere_on_eight_ranks():
    on_ranks("-m", "slow", seconds=1500)


def test_the_example_on_two_ranks():
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*launch, "examples/context_parallel.py"], capture_output=True, text=True, cwd=ROOT, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 ranks, 64 tokens: loss 0.9" in done.stdout


@pytest.mark.parametrize(
    ("config", "backends"),
    [("cpu:gloo,cuda:nccl", ("gloo", "nccl")), ("cuda:nccl", (None, "nccl")), ("cpu:gloo", ("gloo", None))],
)
def test_what_moves_tensors(monkeypatch, config, backends):
    """By what a group is made of; where it was made with none named, get_backend would say "undefined"."""
    from qflash.parallel import torch as parallel
    from qflash.parallel.torch.groups import Ranks

    monkeypatch.setattr(torch.distributed, "get_backend_config", lambda group: config)
    ranks = Ranks(None, 0, 2)
    assert (ranks.backend("cpu"), ranks.backend("cuda")) == backends
    if backends[0] is None:
        with pytest.raises(ValueError, match="q is on cpu; allowed: cuda, because nothing moves other tensors in this"):
            parallel._check_device(ranks, "cpu")


def test_groups_that_are_none():
    from qflash.parallel import torch as parallel

    x = torch.zeros(1, 8, 2, 16)
    with pytest.raises(ValueError, match=r"group is None and torch.distributed has no default group; allowed: "):
        parallel.attention(x, x, x)
    with pytest.raises(
        TypeError, match=r"group is builtins.str; allowed: None, a process group, or one dimension of a"
    ):
        parallel.shard(x, group="context")
