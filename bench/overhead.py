"""What one call costs before any arithmetic: tiny arrays, every front end, beside the frameworks' own attention."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import qflash
from bench.peers import Arrays, Unavailable, load
from qflash import planning
from qflash.testing import Case
from qflash.testing.runner import to_torch


@dataclass(frozen=True)
class Way:
    """One way of calling. Times are compared with those of the way called `peer`."""

    name: str
    framework: str
    call: Callable[[], Any]
    peer: str | None = None  # None: this is one of the peers, or has none

    @property
    def kernel(self) -> str | None:
        """The qflash kernel behind it."""
        return "cpu" if self.peer or self.name.startswith("qflash") else None


def ways(case: Case) -> Iterator[Way]:
    """Every way this machine has; frameworks that are not installed are left out."""
    arrays = Arrays(case, "cpu")
    yield from _numpy_ways(arrays)
    for more in (_torch_ways, _jax_ways):
        try:
            yield from more(arrays)
        except Unavailable:
            continue


def _numpy_ways(arrays: Arrays) -> Iterator[Way]:
    q, k, v = arrays.numpy
    yield Way("qflash, NumPy", "numpy", lambda: qflash.attention(q, k, v))


def _torch_ways(arrays: Arrays) -> Iterator[Way]:
    torch = load("torch")
    sdpa = torch.nn.functional.scaled_dot_product_attention
    q, k, v = arrays.torch
    theirs = arrays.torch_bhtd
    yield Way("torch SDPA", "torch", lambda: sdpa(*theirs))

    from qflash.frontends import torch as frontend
    from qflash.problem import Options

    call = planning.prepare(frontend.problem_of(q, k, v, Options())).call
    out = torch.empty_like(q)
    # Everything after the four arrays is absent, on one thread: see AttnCall in csrc/bindings/native.cc.
    addresses = [x.data_ptr() for x in (q, k, v, out)] + [0] * 10 + [1]

    def compiled(keep_alive=(q, k, v, out)) -> None:
        call(*addresses)

    yield Way("the compiled call alone", "torch", compiled, "torch SDPA")

    lens = torch.tensor([arrays.case.k_len] * arrays.case.batch, dtype=torch.int32)
    tables = qflash.rope_tables(arrays.case.k_len, arrays.case.head_dim)
    rope = qflash.Rope(*(to_torch(table) for table in tables))
    words: dict[str, dict[str, Any]] = {
        "": {},
        ", causal": {"causal": True},
        ", return_lse": {"return_lse": True},
        ", kv_lens": {"kv_lens": lens},
        ", rope": {"rope": rope},
    }
    for name, options in words.items():
        run = lambda options=options: qflash.attention(q, k, v, **options)  # noqa: E731
        yield Way(f"qflash, PyTorch{name}", "torch", run, "torch SDPA")

    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    their_leaves = [x.detach().clone().requires_grad_() for x in theirs]
    grad = torch.autograd.grad
    yield Way("torch SDPA, forward and backward", "torch", lambda: grad(sdpa(*their_leaves), their_leaves, theirs[0]))
    both = lambda: grad(qflash.attention(*leaves), leaves, q)  # noqa: E731
    yield Way("qflash, PyTorch, forward and backward", "torch", both, "torch SDPA, forward and backward")


def _jax_ways(arrays: Arrays) -> Iterator[Way]:
    jax = load("jax")
    theirs = jax.jit(jax.nn.dot_product_attention)
    ours = jax.jit(lambda q, k, v: qflash.attention(q, k, v))
    yield Way("jax.nn, jitted", "jax", lambda: jax.block_until_ready(theirs(*arrays.jax)))
    yield Way("qflash, JAX, jitted", "jax", lambda: jax.block_until_ready(ours(*arrays.jax)), "jax.nn, jitted")
