"""Participants: a process group, or a dimension of a DeviceMesh, as numbered ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True, slots=True, eq=False)
class Ranks:
    """The ranks of a group, and which of them this process is."""

    group: Any
    rank: int
    size: int

    def __str__(self) -> str:
        """This rank, for errors. The group's members identify it better than its size, if groups were mixed up."""
        if self.group is dist.group.WORLD:
            return f"rank {self.rank} of {self.size}"
        members = ", ".join(map(str, dist.get_process_group_ranks(self.group)))
        return f"rank {self.rank} of {self.size} (the group of ranks {members})"

    def backend(self, device: str) -> str | None:
        """The backend for tensors of a device type between these ranks; None: there is none."""
        of_devices = dict(pair.split(":") for pair in dist.get_backend_config(self.group).split(","))
        return of_devices.get(device)

    def peer(self, distance: int) -> int:
        """The number in the default group of the rank `distance` after this one."""
        return dist.get_global_rank(self.group, (self.rank + distance) % self.size)


def group_of(group: Any) -> Any:
    """The process group of a user's `group` argument."""
    if group is None:
        if not dist.is_initialized():
            raise ValueError(
                "group is None and torch.distributed has no default group; allowed: a process group or a dimension of "
                "a DeviceMesh, or None after torch.distributed.init_process_group()"
            )
        return dist.group.WORLD
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            names = group.mesh_dim_names or tuple(range(group.ndim))
            raise ValueError(
                f"group is a DeviceMesh of {group.ndim} dimensions, {names}; allowed: one of them, such as "
                f"mesh[{names[-1]!r}]"
            )
        if group.get_coordinate() is None:
            raise _stranger("a DeviceMesh")
        return group.get_group()
    if isinstance(group, dist.ProcessGroup):
        return group
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise _stranger("a group")
    kind = f"{type(group).__module__}.{type(group).__qualname__}"
    raise TypeError(f"group is {kind}; allowed: None, a process group, or one dimension of a DeviceMesh")


def _stranger(kind: str) -> ValueError:
    return ValueError(
        f"group does not have this process, rank {dist.get_rank()} of the default group; allowed: {kind} that has it"
    )


def ranks_of(group: Any) -> Ranks:
    """The ranks of `group_of(group)`."""
    found = group_of(group)
    return Ranks(found, found.rank(), found.size())
