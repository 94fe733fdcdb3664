"""What ranks of `processes` run in the tests of qflash.parallel.torch. Every function runs on every rank."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import lru_cache
from importlib import import_module
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import qflash
from qflash.parallel import torch as parallel
from qflash.parallel.torch.groups import ranks_of
from qflash.rotary import Rope
from qflash.testing.case import Case
from qflash.testing.runner import convert, to_numpy, to_torch

Tensor = torch.Tensor


@lru_cache(maxsize=1)
def _mesh() -> Any:
    return init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("data", "context"))


def _impatient(seconds: float) -> Any:
    """A group of all ranks for one test: after an error a group cannot be used again."""
    return dist.new_group(list(range(dist.get_world_size())), timeout=timedelta(seconds=seconds))


def _group(where: str) -> Any:
    """ "world": the default group. "mesh": half of the ranks, twice."""
    return None if where == "world" else _mesh()["context"]


def _own_rope(rope: Rope | None, case: Case, cut: Callable[..., Tensor]) -> Rope | None:
    """Select the rank's own tokens from given positions."""
    if rope is None or rope.positions_q is None:
        return rope
    of_q, of_k = (cut(x, dim=x.dim() - 1).contiguous() for x in (rope.positions_q, rope.positions_k))
    return replace(rope, positions_q=of_q, positions_k=of_k)


def attend(
    rank: int,
    case: Case,
    strategy: str,
    placement: str | None,
    where: str = "world",
    precision: str | None = None,
    device: str = "cpu",
) -> dict[str, Any] | None:
    """A case's full results and, without a precision, gradients, on rank 0 only. Runs twice and compares the bits."""
    group = _group(where)
    how = {"group": group, "causal": case.causal, "placement": placement}

    def cut(x: Tensor, dim: int) -> Tensor:
        return parallel.shard(x, dim=dim, **how)

    def whole(x: Tensor, dim: int) -> np.ndarray:
        return to_numpy(parallel.unshard(x.detach(), dim=dim, **how))

    inputs, dim = convert(case.make_inputs(), "torch" if device == "cpu" else "torch-cuda"), 0 if case.packed else 1
    gradients = [to_torch(x, device) for x in case.make_gradients()]
    words = {**case.options(), "kv_lens": inputs.kv_lens, "rope": _own_rope(inputs.rope, case, cut)}
    if case.packed:
        words |= {"cu_seqlens": inputs.cu_seqlens_q, "max_seqlen": max(case.q_lens)}
    runs = []
    for _ in range(2):
        arrays = [cut(x, dim).clone().requires_grad_(precision is None) for x in (inputs.q, inputs.k, inputs.v)]
        sinks = None if inputs.sinks is None else inputs.sinks.clone().requires_grad_(precision is None)
        out, lse = parallel.attention(
            *arrays, group=group, strategy=strategy, placement=placement, sinks=sinks, precision=precision,
            return_lse=True, **words,
        )  # fmt: skip
        found = {"out": whole(out, dim), "lse": whole(lse, lse.dim() - 1)}
        if precision is None:
            torch.autograd.backward([out, lse], [cut(gradients[0], dim), cut(gradients[1], lse.dim() - 1)])
            found |= {name: whole(x.grad, dim) for name, x in zip(("dq", "dk", "dv"), arrays, strict=True)}
            if sinks is not None:
                total = sinks.grad.clone()
                dist.all_reduce(total, group=group if group is None else group.get_group())
                found["dsinks"] = to_numpy(total)
        runs.append(found)
    same = all(runs[0][name].tobytes() == runs[1][name].tobytes() for name in runs[0])
    return runs[0] | {"same": same} if rank == 0 else None


def what_happens(rank: int, words: dict[str, Any]) -> tuple[list[str], int]:
    """The hops and calls of a ring, in the order in which they start, and the number of bytes that this rank sends."""
    from qflash.parallel import parts
    from qflash.parallel.torch import exchange

    events, sent = [], 0
    make_hop, attend_part = exchange.Hop.__init__, parts.Sequences.attend

    def hop(self: Any, ranks: Any, tensors: Any, *more: Any, **named: Any) -> None:
        nonlocal sent
        sent += sum(x.numel() * x.element_size() for x in tensors)
        events.append("hop")
        make_hop(self, ranks, tensors, *more, **named)

    def attend(*given: Any) -> Any:
        events.append("call")
        return attend_part(*given)

    exchange.Hop.__init__, parts.Sequences.attend = hop, attend
    try:
        x = torch.randn(1, 64, 2, 64, dtype=torch.bfloat16)
        parallel.attention(x, x, x, strategy="ring", **words)
    finally:
        exchange.Hop.__init__, parts.Sequences.attend = make_hop, attend_part
    return events, sent


def there_and_back(rank: int, length: int, dim: int, causal: bool) -> tuple[bool, list[int]]:
    """Whether unshard is the inverse of shard, with gradients; and this rank's positions."""
    shape = [2, 3, 4]
    shape[dim] = length
    x = torch.arange(float(np.prod(shape))).reshape(shape).requires_grad_()
    back = parallel.unshard(parallel.shard(x, dim=dim, causal=causal), dim=dim, causal=causal)
    (back * x.detach()).sum().backward()
    own = parallel.shard(x.detach(), dim=dim, causal=causal)
    mine = parallel.shard(x.grad, dim=dim, causal=causal)
    return bool(torch.equal(back, x) and torch.equal(own, mine)), parallel.positions(length, causal=causal).tolist()


def call(rank: int, shapes: list[list[int]], words: dict[str, Any], of_rank: dict[int, dict[str, Any]]) -> None:
    """A call on zeros; `of_rank` has the differing arguments of some ranks: options, or q, k, v or their shapes."""
    mine = of_rank.get(rank, {})
    arrays = [mine.get(name, shape) for name, shape in zip("qkv", shapes, strict=True)]
    arrays = [torch.zeros(x) if isinstance(x, list) else x for x in arrays]
    if "dtype" in mine:
        arrays = [x.to(mine["dtype"]) for x in arrays]
    given = {name: x for name, x in mine.items() if name not in ("q", "k", "v", "dtype", "grad")}
    for x in arrays:
        x.requires_grad_(mine.get("grad", False))
    parallel.attention(*arrays, **(words | given))


def run_out_of_memory(rank: int) -> None:
    """A call on zeros in which the checks of the last rank fail for lack of memory."""

    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError("nothing is left")

    checks, parallel._check_values = (
        parallel._check_values,
        fail if rank == dist.get_world_size() - 1 else lambda *_: None,
    )
    try:
        parallel.attention(*torch.zeros(3, 1, 8, 4, 16))
    finally:
        parallel._check_values = checks


def call_unshard(rank: int, arrays: dict[int, Any], words: dict[int, dict[str, Any]]) -> None:
    """unshard of zeros; `arrays` (or their shapes) and `words` have the differing arguments of some ranks."""
    x = arrays.get(rank, [1, 8, 4])
    parallel.unshard(torch.zeros(x) if isinstance(x, list) else x, **words.get(rank, {}))


def call_with_positions(rank: int, strategy: str, name: str, bad: int, words: dict[str, Any]) -> None:
    """A call on zeros, with valid positions except for the last one of the last rank."""
    own = torch.arange(8, dtype=torch.int32)
    if rank == dist.get_world_size() - 1:
        own[-1] = bad
    rope = Rope(*(torch.from_numpy(x) for x in qflash.rope_tables(64, 16)), **{name: own})
    parallel.attention(*torch.zeros(3, 1, 8, 4, 16), strategy=strategy, rope=rope, **words)


def call_with_dtensor(rank: int) -> None:
    """A call whose k is a tensor that torch.distributed has already distributed over the ranks."""
    from torch.distributed.tensor import DTensor

    q = torch.zeros(1, 8, 4, 16)
    k = DTensor.from_local(q, init_device_mesh("cpu", (dist.get_world_size(),)))
    parallel.attention(q, k, q)


def differ_in_losses(rank: int, strategy: str) -> float:
    """The difference of q's gradient from that of one process, where rank 0's loss has only lse, the others' out."""
    torch.manual_seed(0)
    ranks = dist.get_world_size()
    whole = torch.randn(1, 8 * ranks, 4, 16)

    def loss(out: Tensor, lse: Tensor) -> Tensor:
        return (lse**2).sum() if rank == 0 else (out**2).sum()

    q = parallel.shard(whole).requires_grad_()
    loss(*parallel.attention(q, q.detach(), q.detach(), strategy=strategy, return_lse=True)).backward()
    own = parallel.shard(whole).requires_grad_()
    loss(*qflash.attention(own, whole, whole, return_lse=True)).backward()
    assert q.grad is not None and own.grad is not None
    return float((q.grad - own.grad).norm() / own.grad.norm())


def transformed(rank: int, strategy: str) -> float:
    """The difference of gradients by torch.func.grad from those of backward()."""
    torch.manual_seed(0)
    q, k, v = (parallel.shard(torch.randn(1, 32, heads, 16), causal=True) for heads in (8, 4, 4))

    def loss(*arrays: Tensor) -> Tensor:
        whole = parallel.unshard(parallel.attention(*arrays, strategy=strategy, causal=True), causal=True)
        return (whole**2).sum()

    found = torch.func.grad(loss, (0, 1, 2))(q, k, v)
    arrays = [x.requires_grad_() for x in (q, k, v)]
    loss(*arrays).backward()
    return max(float((a - b.grad).norm() / b.grad.norm()) for a, b in zip(found, arrays, strict=True))


def second_derivative(rank: int, strategy: str, of: int) -> Tensor:
    """The second derivative of a loss that adds the gradient of q, k or v to a term that has a second derivative."""
    arrays = [torch.randn(1, 8, 4, 16, requires_grad=True) for _ in range(3)]
    loss = (parallel.attention(*arrays, strategy=strategy) ** 2).sum()
    first = torch.autograd.grad(loss, arrays, create_graph=True)[of]
    return torch.autograd.grad((first**2).sum() + (arrays[of] ** 2).sum(), arrays[of])[0]


def of_nothing(rank: int, strategy: str, words: dict[str, Any]) -> list[list[int]]:
    """The shapes of out, of lse and of the gradients of a call on empty sequences."""
    shape = (0, 4, 16) if "cu_seqlens" in words else (1, 0, 4, 16)
    arrays = [torch.zeros(shape, requires_grad=True) for _ in range(3)]
    results = parallel.attention(*arrays, strategy=strategy, return_lse=True, **words)
    return [list(x.shape) for x in (*results, *torch.autograd.grad(results, arrays, [x.detach() for x in results]))]


def ask(rank: int, calls: str, most: int) -> list[int]:
    """How often the ranks have compared their calls, after each of `calls` on a GPU; at most `most` are remembered."""
    module = import_module("qflash.parallel.torch.agree")  # the package has the function of this name
    kept, counts = (module._MOST_KNOWN, module._exchange), []

    def counted(*given: Any) -> Any:
        counts[-1] += 1
        return kept[1](*given)

    module._MOST_KNOWN, module._exchange = most, counted
    try:
        ranks = ranks_of(_impatient(30))
        for text in calls:
            counts.append(counts[-1] if counts else 0)
            module.agree(ranks, text, None, torch.device("cuda"))
    finally:
        module._MOST_KNOWN, module._exchange = kept
    return counts


def mix_up_groups(rank: int, seconds: float) -> None:
    """Rank 0 calls on a group of two, the others on one of all."""
    few = dist.new_group([0, 1], timeout=timedelta(seconds=seconds))
    everyone = _impatient(seconds)
    parallel.attention(*torch.zeros(3, 1, 8, 4, 16), group=few if rank == 0 else everyone)


def strange_groups(rank: int) -> tuple[str, ...]:
    """The errors for a mesh of two dimensions, and for a group and a mesh of the first two ranks."""
    said = []
    for group in (_mesh(), dist.new_group([0, 1]), DeviceMesh("cpu", [0, 1])):
        try:
            parallel.positions(16, group=group)
            said.append("")
        except ValueError as error:
            said.append(str(error))
    return tuple(said)


def compiled(rank: int, strategy: str, precision: str | None = None) -> tuple[list[float], list[str]] | None:
    """The difference of a compiled full-graph call and, without a precision, its gradients, from an eager one, and the
    operations of its graphs, forward and backward. Only on the first ranks of a mesh: compiling takes time on each."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition  # as in inductor

    group = _mesh()["context"]
    if rank >= group.size():
        return None
    torch.compiler.reset()
    torch.manual_seed(0)
    whole = torch.randn(3, 1, 64, 4, 32)
    arrays = [parallel.shard(x, group=group, causal=True).requires_grad_(precision is None) for x in whole]
    graphs = []

    def read(graph: Any, _: Any) -> Any:
        targets = [str(node.target).split(".") for node in graph.graph.nodes if node.op == "call_function"]
        graphs.append(" ".join(target[1] for target in targets if target[0] in ("_c10d_functional", "qflash")))
        return graph

    def step(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        words = {"group": group, "strategy": strategy, "causal": True, "precision": precision}
        out, lse = parallel.attention(q * 2, k, v, return_lse=True, **words)
        return (out**2).sum() + lse.sum()

    backend = aot_autograd(fw_compiler=read, partition_fn=min_cut_rematerialization_partition)
    found = []
    for function in (step, torch.compile(step, fullgraph=True, backend=backend)):
        loss = function(*arrays)
        found.append([loss.detach(), *(torch.autograd.grad(loss, arrays) if precision is None else ())])
    return [float((a - b).norm() / b.norm()) for a, b in zip(found[1], found[0], strict=True)], graphs


def compiled_on_one_tensor(rank: int, strategy: str) -> float:
    """The difference of a compiled full-graph call, with one tensor passed three times, from an eager one."""
    torch.compiler.reset()
    x = torch.randn(1, 8, 4, 16, requires_grad=True)

    def step(x: Tensor) -> Tensor:
        return parallel.attention(x, x, x, strategy=strategy, causal=True)

    found = torch.compile(step, backend="eager", fullgraph=True)(x)
    return float((found - step(x)).detach().abs().max())


def compiled_gradient_of_integers(rank: int) -> str:
    """The error of a compiled full-graph call with a precision whose arrays require gradients."""
    x = torch.zeros(1, 8, 2, 16, requires_grad=True)
    return _said_by_compiler(lambda x: parallel.attention(x, x, x, precision="int8"), x)


def compiled_bad_input(rank: int, strategy: str) -> list[str]:
    """The errors of compiled full-graph calls: for positions of all ranks' tokens, float64, and two dtypes."""
    x, tables = torch.zeros(1, 8, 4, 16), map(torch.from_numpy, qflash.rope_tables(64, 16))
    whole = torch.arange(8 * dist.get_world_size(), dtype=torch.int32)
    rope = Rope(*tables)

    def rotated(x: Tensor, positions: Tensor, name: str) -> Tensor:
        return parallel.attention(x, x, x, strategy=strategy, rope=replace(rope, **{name: positions}))

    def plain(q: Tensor, k: Tensor) -> Tensor:
        return parallel.attention(q, k, k, strategy=strategy)

    said = [_said_by_compiler(rotated, x, whole, name) for name in ("positions_q", "positions_k")]
    return said + [_said_by_compiler(plain, *given) for given in ((x.double(), x.double()), (x, x.bfloat16()))]


def _said_by_compiler(function: Callable[..., Any], *arguments: Any) -> str:
    torch.compiler.reset()
    try:
        torch.compile(function, backend="eager", fullgraph=True)(*arguments)
    except Exception as error:  # Dynamo's error, which contains our text
        return str(error)
    return "nothing"


def wait_for_the_last(rank: int, strategy: str, ends: bool, seconds: float) -> float:
    """The last rank does not call, or exits during a call; the others return how long they took to notice."""
    group = _impatient(seconds)
    q = torch.zeros(1, 8, 4, 16)
    parallel.attention(q, q, q, group=group, strategy=strategy)
    if rank == dist.get_world_size() - 1:
        if ends:
            os._exit(3)
        return 0.0
    begin = time.monotonic()
    try:
        parallel.attention(q, q, q, group=group, strategy=strategy)
    except RuntimeError as error:
        raise RuntimeError(f"after {time.monotonic() - begin:.1f} s: {error}") from error
    return time.monotonic() - begin


def lose_a_hop(rank: int, seconds: float) -> None:
    """The last rank agrees to a call and then does not take part in the ring."""
    from qflash.parallel.torch import exchange

    group = _impatient(seconds)
    if rank == dist.get_world_size() - 1:

        def stop(*_: Any) -> None:
            raise ValueError("this rank has stopped")

        exchange.Hop.__init__, kept = stop, exchange.Hop.__init__
        try:
            parallel.attention(*torch.zeros(3, 1, 8, 4, 16), group=group, strategy="ring")
        finally:
            exchange.Hop.__init__ = kept
    parallel.attention(*torch.zeros(3, 1, 8, 4, 16), group=group, strategy="ring")


def overhead_of_one_rank(rank: int, rounds: int) -> float:
    """Microseconds that a group of one rank adds to plain attention, each from the fastest of many rounds."""
    groups = [dist.new_group([one]) for one in range(dist.get_world_size())]
    q, k, v = torch.randn(3, 1, 4, 2, 16)
    group = groups[rank]

    def timed(function: Callable[[], Any]) -> float:
        begin = time.perf_counter()
        for _ in range(200):
            function()
        return (time.perf_counter() - begin) / 200

    def alone() -> Any:
        return qflash.attention(q, k, v, causal=True)

    def grouped() -> Any:
        return parallel.attention(q, k, v, group=group, causal=True)

    pairs = [(timed(alone), timed(grouped)) for _ in range(rounds)]
    without, with_group = (min(times) for times in zip(*pairs, strict=True))
    return 1e6 * (with_group - without)
