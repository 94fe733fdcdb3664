"""The cost of one call without its arithmetic: tiny arrays, every front end, next to the frameworks' own attention.

`qflash bench cpu-overhead cuda-overhead` measures it. On CUDA it is the host's time: launches are not waited for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

import qflash
from bench import rows
from bench.arrays import Arrays, load
from bench.peers import flash_attn_3
from bench.presets import OVERHEAD, Preset
from bench.run import Candidate, Row, Suite, Unavailable, set_threads
from qflash.dispatch import kernels_of, variants_of
from qflash.testing import Case
from qflash.testing.runner import to_torch
from qflash.testing.timing import Call, Clock, Comparison, HostClock, WallClock

SDPA = "torch SDPA"


@dataclass(frozen=True)
class Way(Candidate):
    """One way of calling. Times are compared with those of the way called `peer`."""

    framework: str = "torch"
    peer: str | None = None
    precision: str | None = None


class Overhead(Suite):
    """The ways of a preset, with one thread each: waking a second one is not part of the cost in question."""

    def __init__(self, preset: Preset):
        self.name, self.device, self.cases = preset.name, preset.device, preset.cases

    def arrays(self, case: Case) -> Arrays:
        return Arrays(case, self.device)

    def candidates(self, arrays: Arrays) -> Iterator[Way]:
        return ways(arrays)

    def problem(self, arrays: Arrays) -> Row:
        return rows.problem(arrays.case, OVERHEAD) | {"threads": 1}

    def row(self, arrays: Arrays, way: Way, checked: None, timing: Comparison) -> Row:
        about = {"candidate": way.name, "framework": way.framework, "kernel": way.kernel, "precision": way.precision}
        return about | {"us": timing.stats[way.name].as_dict(), "rel_l2": None}

    def rivals(self, candidate: Way) -> tuple[str, ...]:
        return (candidate.peer,) if candidate.peer else ()

    def clock(self) -> tuple[Clock, float]:
        # Calls follow each other without a pause, as in a loop over layers.
        return HostClock() if self.device == "cuda" else WallClock(settle=0), 1e-3

    def time(self, calls: Mapping[str, Call], **options: Any) -> Comparison:
        threads = qflash.get_num_threads()
        set_threads(1)
        try:
            return super().time(calls, **options)
        finally:
            set_threads(threads)


def ways(arrays: Arrays) -> Iterator[Way]:
    """Every way that this machine supports; frameworks that are not installed are omitted."""
    on_cuda = (_torch_ways, _paged_ways, _kv_ways, _fa3_ways)
    on_cpu = (_numpy_ways, _torch_ways, _paged_ways, _torch_train_ways, _jax_ways)
    for more in on_cuda if arrays.device == "cuda" else on_cpu:
        try:
            yield from more(arrays)
        except Unavailable:
            continue


def _lens(case: Case) -> np.ndarray:
    return np.full(case.batch, case.k_len, np.int32)


def _numpy_ways(arrays: Arrays) -> Iterator[Way]:
    q, k, v = arrays.numpy
    words = {"": {}, ", kv_lens": {"kv_lens": _lens(arrays.case)}, ", rope": {"rope": arrays.rope}}
    for name, options in words.items():
        run = partial(qflash.attention, q, k, v, **options)
        yield Way(f"qflash, NumPy{name}", lambda _, run=run: run, "cpu", "numpy")


def _torch_ways(arrays: Arrays) -> Iterator[Way]:
    torch = load("torch")
    sdpa = torch.nn.functional.scaled_dot_product_attention
    q, k, v = arrays.torch
    theirs = arrays.torch_bhtd
    yield Way(SDPA, lambda _: lambda: sdpa(*theirs))

    from qflash.frontends.torch import launch
    from qflash.ops.attention import ATTENTION

    words = (False, None, None, None, None, None, False, False, False, 0, 0, qflash.get_backward_memory())
    prepared = launch.find_ready(ATTENTION, (q, k, v, *[None] * (len(ATTENTION.arrays) - 3)), words).prepared
    kernel = prepared.kernel.name
    out = torch.empty_like(q)
    workspace = torch.empty(prepared.workspace_bytes, dtype=torch.uint8, device=q.device)
    stream = torch.cuda.current_stream().cuda_stream if q.is_cuda else 0
    addresses = [x.data_ptr() for x in (q, k, v, out, workspace)] + [stream, 1]  # on the CPU, one thread

    def compiled(keep_alive=(q, k, v, out, workspace)) -> None:
        prepared.call(*addresses)

    yield Way("the compiled call alone", lambda _: compiled, kernel, peer=SDPA)

    options_of: dict[str, dict[str, Any]] = {
        "": {},
        ", causal": {"causal": True},
        ", return_lse": {"return_lse": True},
        ", kv_lens": {"kv_lens": to_torch(_lens(arrays.case), arrays.device)},
        ", rope": {"rope": arrays.torch_rope},
    }
    for name, options in options_of.items():
        run = lambda options=options: qflash.attention(q, k, v, **options)  # noqa: E731
        yield Way(f"qflash, PyTorch{name}", lambda _, run=run: run, kernel, peer=SDPA)


def _paged_ways(arrays: Arrays) -> Iterator[Way]:
    """A decode step of one layer: write a token's keys and values to its page, attend to all tokens with one query."""
    load("torch")
    (q, k, v), case = arrays.torch, arrays.case
    cache = qflash.KVCache(
        layers=1, kv_heads=case.kv_heads, head_dim=case.head_dim, pages=case.batch, dtype=q.dtype, device=arrays.device
    )  # fmt: skip
    kv = cache.extend([cache.open() for _ in range(case.batch)], [case.k_len] * case.batch).write(0, k, v)
    query, *token = (x[:, -1:] for x in (q, k, v))
    attend, write = partial(qflash.attention, query, kv, causal=True), partial(qflash.paged_write, kv, *token)
    kernel = qflash.explain(query, kv, causal=True).kernel
    yield Way("qflash, PyTorch, PagedKV", lambda _: attend, kernel, peer=SDPA)
    writer = kernels_of("kv_write", arrays.device)[0].name
    yield Way("qflash, PyTorch, paged_write", lambda _: write, writer, peer=SDPA)


def _kv_ways(arrays: Arrays) -> Iterator[Way]:
    """Attention on keys and values that were quantized beforehand. If no kernel supports them, the way reports that."""
    load("torch")
    q, k, v = arrays.torch
    for row in variants_of("attention", arrays.device, "kept"):
        if row.kernel.few_rows:
            continue

        def make(_: Arrays, precision: str = row.precision, kernel: str = row.kernel.name) -> Call:
            kv = qflash.quantize_kv(k, v, precision=precision)
            return lambda: qflash.attention(q, kv, kernel=kernel)

        name = f"qflash, PyTorch, QuantizedKV of {row.precision}"
        yield Way(name, make, row.name, peer=SDPA, precision=row.precision)


def _fa3_ways(arrays: Arrays) -> Iterator[Way]:
    peer = flash_attn_3()
    yield Way(peer.name, peer.make)


def _torch_train_ways(arrays: Arrays) -> Iterator[Way]:
    torch = load("torch")
    sdpa = torch.nn.functional.scaled_dot_product_attention
    q, k, v = arrays.torch
    theirs = arrays.torch_bhtd
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    their_leaves = [x.detach().clone().requires_grad_() for x in theirs]
    grad, peer = torch.autograd.grad, f"{SDPA}, forward and backward"
    yield Way(peer, lambda _: lambda: grad(sdpa(*their_leaves), their_leaves, theirs[0]))
    both = lambda: grad(qflash.attention(*leaves), leaves, q)  # noqa: E731
    yield Way("qflash, PyTorch, forward and backward", lambda _: both, "cpu", peer=peer)


def _jax_ways(arrays: Arrays) -> Iterator[Way]:
    jax = load("jax")
    attend = qflash.attention

    def waited(call: Callable[..., Any], *more: np.ndarray) -> Call:
        jitted, given = jax.jit(call), (*arrays.jax, *jax.device_put(more, arrays.jax[0].device))
        return lambda: jax.block_until_ready(jitted(*given))

    peer, tables = "jax.nn, jitted", (arrays.rope.cos, arrays.rope.sin)
    yield Way(peer, lambda _: waited(jax.nn.dot_product_attention), framework="jax")
    for name, call, more in (
        ("", attend, ()),
        (", kv_lens", lambda q, k, v, lens: attend(q, k, v, kv_lens=lens), (_lens(arrays.case),)),
        (", rope", lambda q, k, v, *tables: attend(q, k, v, rope=qflash.Rope(*tables)), tables),
    ):
        make = lambda _, call=call, more=more: waited(call, *more)  # noqa: E731
        yield Way(f"qflash, JAX, jitted{name}", make, "cpu", "jax", peer)
