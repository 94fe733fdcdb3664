"""Communication between ranks: hops of a ring, and the three collectives.

The collectives are those that torch.compile can trace. An error names the rank that was waited for and the transfer; a
rank that does not answer is an error after the group's timeout, as in torch.distributed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from qflash.parallel.torch.groups import Ranks

Tensor = torch.Tensor

# PyTorch 2.13 has new names, and warns about the old ones.
_gather = getattr(functional, "all_gather_single", None) or functional.all_gather_tensor
_scatter = getattr(functional, "reduce_scatter_single", None) or functional.reduce_scatter_tensor


class Hop:
    """A transfer of tensors to the rank `distance` ahead, and of others from the rank `distance` behind.

    The transfer starts when the Hop is made; tensors being sent must not be written to before `wait` has returned.
    """

    def __init__(self, ranks: Ranks, tensors: Sequence[Tensor], what: str, distance: int) -> None:
        self._ranks, self._what, self._distance = ranks, what, distance
        self._device = tensors[0].device
        sent = [_on_wire(ranks, x.contiguous()) for x in tensors]
        self._received = [torch.empty_like(x) for x in sent]
        to, source = ranks.peer(distance), ranks.peer(-distance)
        operations = [dist.P2POp(dist.isend, x, to, ranks.group) for x in sent]
        operations += [dist.P2POp(dist.irecv, x, source, ranks.group) for x in self._received]
        self._sent = sent  # kept alive until they are sent
        self._works = self._tried(lambda: dist.batch_isend_irecv(operations))

    def wait(self) -> list[Tensor]:
        """The received tensors. On a GPU the stream waits, not the host."""
        for work in self._works:
            self._tried(work.wait)
        self._sent = []
        return [x.to(self._device) for x in self._received]

    def _tried(self, action: Callable[[], Any]) -> Any:
        ranks = self._ranks
        to, source = ((ranks.rank + by) % ranks.size for by in (self._distance, -self._distance))
        lost = f"rank {source}" if source == to else f"rank {source} or {to}"
        try:
            return action()
        except RuntimeError as error:
            raise RuntimeError(
                f"{ranks} lost {lost} during {self._what}: it waited for "
                f"tensors from rank {source} and sent its own to rank {to}. {error}"
            ) from error


class TracedHop:
    """A Hop in a graph of torch.compile, which has no send and receive: an all-to-all that sends all data to one rank.

    The graph waits where `wait` is called, so computation before that overlaps with the transfer.
    """

    def __init__(self, ranks: Ranks, tensors: Sequence[Tensor], distance: int) -> None:
        to, source = ((ranks.rank + by) % ranks.size for by in (distance, -distance))
        self._coming = []
        for x in tensors:
            sent, received = ([x.numel() * (rank == peer) for rank in range(ranks.size)] for peer in (to, source))
            name = ranks.group.group_name
            flat = torch.ops._c10d_functional.all_to_all_single(x.reshape(-1), received, sent, name)
            self._coming.append((flat, x.shape))

    def wait(self) -> list[Tensor]:
        """The received tensors."""
        return [functional.wait_tensor(flat).view(shape) for flat, shape in self._coming]


def start_hop(ranks: Ranks, tensors: Sequence[Tensor], what: str, distance: int = 1) -> Hop | TracedHop:
    """Start the transfer."""
    if torch.compiler.is_compiling():
        return TracedHop(ranks, tensors, distance)
    return Hop(ranks, tensors, what, distance)


def saved_again(x: Tensor, cotangent: Tensor) -> Tensor:
    """x, saved by a forward pass, for the backward pass: values derived from it are recomputed.

    Otherwise a compiler that sees both passes would merge the second transfers into the first, and keep all keys.
    """
    return _after(x, cotangent) if torch.compiler.is_compiling() else x


@torch.library.custom_op("qflash::after", mutates_args=())
def _after(x: Tensor, other: Tensor) -> Tensor:
    """x, but not before the other tensor exists."""
    return x.clone()


@_after.register_fake
def _(x: Tensor, other: Tensor) -> Tensor:
    return torch.empty_like(x)


def all_gather(ranks: Ranks, x: Tensor, what: str) -> Tensor:
    """x of every rank, `[ranks, ...]`."""
    return _collective(ranks, x[None], what, lambda wire: _gather(wire, 0, ranks.group))


def reduce_scatter(ranks: Ranks, x: Tensor, what: str) -> Tensor:
    """The sum over all ranks of row `rank` of x, `[ranks, ...]`."""
    return _collective(ranks, x, what, lambda wire: _scatter(wire, "sum", 0, ranks.group))[0]


def all_to_all(ranks: Ranks, x: Tensor, what: str) -> Tensor:
    """Row `rank` of every rank's x, `[ranks, ...]`."""
    return _collective(ranks, x, what, lambda wire: functional.all_to_all_single(wire, None, None, ranks.group))


def _collective(ranks: Ranks, x: Tensor, what: str, of: Callable[[Tensor], Tensor]) -> Tensor:
    if torch.compiler.is_compiling():
        return of(x.contiguous())
    try:
        return functional.wait_tensor(of(_on_wire(ranks, x.contiguous()))).to(x.device)
    except RuntimeError as error:
        raise RuntimeError(f"{ranks} lost another rank during {what}. {error}") from error


def _on_wire(ranks: Ranks, x: Tensor) -> Tensor:
    """x where the group's backend expects it: gloo, which may be a group's only backend, sends from the host."""
    return x.cpu() if x.is_cuda and ranks.backend("cuda") in ("gloo", None) else x
