"""What one call costs before any arithmetic: tiny arrays, every front end, beside the frameworks' own attention.

`qflash bench cpu-overhead cuda-overhead` measures it. On CUDA it is the host's time: launches are not waited for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import qflash
from bench.peers import Arrays, Unavailable, flash_attn_3, load
from qflash import planning
from qflash.testing import Case
from qflash.testing.runner import arch_of


@dataclass(frozen=True)
class Way:
    """One way of calling. Times are compared with those of the way called `peer`."""

    name: str
    framework: str
    call: Callable[[], Any]
    kernel: str | None = None  # of qflash; None for peers
    peer: str | None = None


def ways(case: Case, device: str) -> Iterator[Way]:
    """Every way this machine has; frameworks that are not installed are left out."""
    arrays = Arrays(case, device)
    cuda = device == "cuda"
    for more in (_torch_ways, _fa3_ways) if cuda else (_numpy_ways, _torch_ways, _torch_train_ways, _jax_ways):
        try:
            yield from more(arrays)
        except Unavailable:
            continue


def _numpy_ways(arrays: Arrays) -> Iterator[Way]:
    q, k, v = arrays.numpy
    yield Way("qflash, NumPy", "numpy", lambda: qflash.attention(q, k, v), "cpu")


def _torch_ways(arrays: Arrays) -> Iterator[Way]:
    torch = load("torch")
    sdpa = torch.nn.functional.scaled_dot_product_attention
    q, k, v = arrays.torch
    theirs = arrays.torch_bhtd
    yield Way("torch SDPA", "torch", lambda: sdpa(*theirs))

    from qflash.frontends import torch as frontend
    from qflash.ops.problem import Options

    prepared = planning.prepare(frontend.problem_of(q, k, v, Options()), arch_of(arrays.device))
    kernel = prepared.kernel.name
    out = torch.empty_like(q)
    workspace = torch.empty(prepared.workspace_bytes, dtype=torch.uint8, device=q.device)
    stream = torch.cuda.current_stream().cuda_stream if q.is_cuda else 0
    # Absent between out and the workspace, in order: see AttnCall in csrc/bindings/native.cc. On the CPU, one thread.
    addresses = [x.data_ptr() for x in (q, k, v, out)] + [0] * 8 + [workspace.data_ptr(), stream, 1]

    def compiled(keep_alive=(q, k, v, out, workspace)) -> None:
        prepared.call(*addresses)

    yield Way("the compiled call alone", "torch", compiled, kernel, "torch SDPA")

    lens = torch.tensor([arrays.case.k_len] * arrays.case.batch, dtype=torch.int32, device=q.device)
    words: dict[str, dict[str, Any]] = {
        "": {},
        ", causal": {"causal": True},
        ", return_lse": {"return_lse": True},
        ", kv_lens": {"kv_lens": lens},
        ", rope": {"rope": arrays.torch_rope},
    }
    for name, options in words.items():
        run = lambda options=options: qflash.attention(q, k, v, **options)  # noqa: E731
        yield Way(f"qflash, PyTorch{name}", "torch", run, kernel, "torch SDPA")


def _fa3_ways(arrays: Arrays) -> Iterator[Way]:
    peer = flash_attn_3()
    yield Way(peer.name, "torch", peer.make(arrays))


def _torch_train_ways(arrays: Arrays) -> Iterator[Way]:
    torch = load("torch")
    sdpa = torch.nn.functional.scaled_dot_product_attention
    q, k, v = arrays.torch
    theirs = arrays.torch_bhtd
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    their_leaves = [x.detach().clone().requires_grad_() for x in theirs]
    grad = torch.autograd.grad
    yield Way("torch SDPA, forward and backward", "torch", lambda: grad(sdpa(*their_leaves), their_leaves, theirs[0]))
    both = lambda: grad(qflash.attention(*leaves), leaves, q)  # noqa: E731
    yield Way("qflash, PyTorch, forward and backward", "torch", both, "cpu", "torch SDPA, forward and backward")


def _jax_ways(arrays: Arrays) -> Iterator[Way]:
    jax = load("jax")
    theirs = jax.jit(jax.nn.dot_product_attention)
    ours = jax.jit(lambda q, k, v: qflash.attention(q, k, v))
    yield Way("jax.nn, jitted", "jax", lambda: jax.block_until_ready(theirs(*arrays.jax)))
    waited = lambda: jax.block_until_ready(ours(*arrays.jax))  # noqa: E731
    yield Way("qflash, JAX, jitted", "jax", waited, "cpu", "jax.nn, jitted")
