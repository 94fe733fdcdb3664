"""From a Plan to something that launches: choose the kernel, load or compile it, bind the call. Cached."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from qflash import _native, backends, dispatch
from qflash.backends import Entry, Launch
from qflash.call.op import Plan


@dataclass(frozen=True, slots=True)
class Prepared:
    """A plan with its kernel. `call` takes only addresses (operands, results, workspace, stream, threads); threads may
    share it."""

    plan: Plan
    kernel: dispatch.Kernel
    call: Callable[..., None]
    workspace_bytes: int = 0
    launch: Launch | None = None  # (operands, results, stream): instead of `call`, for a kernel that takes arrays


@lru_cache(maxsize=4096)
def prepare(plan: Plan, arch: int = 0) -> Prepared:
    """Choose the kernel, load or compile it, bind the call. `arch`: compute capability times ten; 0 is the CPU."""
    spec = plan.spec(arch)
    kernel = dispatch.choose(spec, plan.kernel)
    if plan.nothing_to_do:
        return Prepared(plan, kernel, _nothing)
    entry = backends.load(kernel, spec)
    if not isinstance(entry, Entry):
        return Prepared(plan, kernel, _nothing, launch=entry(plan))
    return bind(plan, kernel, entry)


def bind(plan: Plan, kernel: dispatch.Kernel, entry: Entry) -> Prepared:
    """The plan with the C functions that execute it."""
    functions = (entry.address, entry.status_text, entry.workspace, entry.context)
    call = _native.Call(plan.struct, plan.params(), list(plan.pointers), *functions)
    return Prepared(plan, kernel, call, call.workspace_bytes)


def _nothing(*addresses: int) -> None:
    pass
