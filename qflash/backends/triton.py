"""Triton kernels: chooses the one that serves a Spec; Triton compiles it when a call first needs it.

The result is launched like the kernels of csrc/, by C functions that take the operation's struct, and not by Triton, so
it also runs in JAX programs, and a call has the usual overhead. Triton stores what it compiled in its own cache
(TRITON_CACHE_DIR).
"""

from __future__ import annotations

import threading
from functools import lru_cache, partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from qflash import _native
from qflash.backends import Entry
from qflash.backends.arch import asked
from qflash.call.spec import Spec
from qflash.dispatch import Kernel
from qflash.errors import CompileError, ToolchainError
from qflash.triton.launches import HAS, Choice, Launches, Pass, Size

_WARP = 32
_compiling = threading.Lock()  # Triton does not document that several threads may compile


def why_not() -> str:
    """Why no kernel can be compiled here; empty if they can. Imports nothing."""
    return "" if find_spec("triton") else "the package triton is not installed: pip install 'qflash[triton]'"


def launches(kernel: Kernel, spec: Spec) -> Launches:
    """What calls of `spec` launch, as specified by the module of qflash/triton with the kernel's name."""
    if problem := why_not():
        raise ToolchainError(f"kernel {kernel.name!r} is written in Triton, and {problem}")
    found: Launches = import_module(f"qflash.triton.{kernel.name}").launches(spec)
    return found


@lru_cache(maxsize=1024)
def entry(kernel: Kernel, spec: Spec) -> Entry:
    """The functions that launch the kernel for `spec`."""
    return entry_of(launches(kernel, spec), spec.arch)


def entry_of(of: Launches, arch: int) -> Entry:
    """The functions that launch these passes on GPUs of compute capability `arch`/10."""
    cubins = _native.Cubins(
        of.struct,
        [([_code(of, one) for one in of.conditions(choice)], [_pass_code(of, one) for one in choice.passes])
         for choice in of.choices],
        [_code(of, at) for at in of.offsets().values()],
        partial(_machine_code, of, arch),
    )  # fmt: skip
    _kept.append(cubins)
    address, status_text, workspace, context = cubins.functions
    return Entry(address, status_text, workspace if of.regions else 0, context)


_kept: list[_native.Cubins] = []  # for the lifetime of the process: XLA programs contain their addresses


def compiled(of: Launches, choice: Choice, arch: int) -> list[Any]:
    """The passes of a choice compiled by Triton for GPUs of compute capability `arch`/10. Needs no GPU."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    found = []
    for one in choice.passes:
        source = ASTSource(one.function, _signature(of, choice, one), dict(one.constants), _attributes(of, choice, one))
        options = {"num_warps": one.num_warps, "num_stages": one.num_stages, "enable_fp_fusion": one.fuses}
        with _compiling:
            found.append(triton.compile(source, GPUTarget("cuda", arch, _WARP), options))
    return found


def _machine_code(of: Launches, arch: int, index: int) -> list[tuple[bytes, str, int, int]]:
    """(machine code, kernel, bytes of shared memory, threads per block) of each pass of choice `index`. For the
    architecture of QFLASH_CUDA_ARCH it is PTX, as for CUDA kernels."""
    found = []
    for one in compiled(of, of.choices[index], arch):
        facts = one.metadata
        if facts.num_ctas != 1 or facts.global_scratch_size or facts.profile_scratch_size:
            raise CompileError(f"Triton made {facts.name} for a cluster or with scratch memory; allowed: neither")
        image = one.asm["ptx"].encode() if arch == asked() else one.asm["cubin"]
        found.append((image, facts.name, facts.shared, _WARP * facts.num_warps))
    return found


def _code(of: Launches, size: Size) -> list[tuple[str, int]]:
    """A Size as _native takes it: fields are identified by their offset."""
    return [
        (operation, _offset(of, str(operand)) if operation == "field" else int(operand))
        for operation, operand in size.code
    ]


def _pass_code(of: Launches, one: Pass) -> tuple[list[tuple[str, int]], list[tuple[str, int]]]:
    """A pass as _native takes it: its grid, and the sources of its arguments."""
    regions = [region.name for region in of.regions]
    arguments = []
    for name in one.parameters:
        if name in regions:
            arguments.append(("region", regions.index(name)))
        elif name.startswith(HAS):
            arguments.append(("has", _offset(of, of.field(name.removeprefix(HAS)))))
        else:
            arguments.append(("field", _offset(of, of.field(name))))
    return _code(of, one.grid), arguments


def _offset(of: Launches, field: str) -> int:
    return _native.op_layouts[of.struct][1][field][0]


def _signature(of: Launches, choice: Choice, one: Pass) -> dict[str, str]:
    names = one.function.arg_names
    return {name: "constexpr" if name in one.constants else of.type_of(name, choice) for name in names}


def _attributes(of: Launches, choice: Choice, one: Pass) -> dict[tuple[int], list[list[Any]]]:
    """The known divisibility of arguments, by index."""
    known = {**choice.multiples, **{region.name: 16 for region in of.regions}}
    names = one.function.arg_names
    return {(at,): [["tt.divisibility", known[name]]] for at, name in enumerate(names) if name in known}
