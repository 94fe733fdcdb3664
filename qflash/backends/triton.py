"""Triton kernels: which of them serves a Spec, compiled by Triton on first use."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any

from qflash.call.spec import Spec
from qflash.dispatch import Kernel
from qflash.errors import ToolchainError
from qflash.triton.launches import Choice, Launches, Pass


@dataclass(frozen=True)
class Cubin:
    """A pass as it is launched: machine code, or PTX, the kernel in it, bytes of shared memory and threads of a block."""

    image: bytes
    name: str
    shared_bytes: int
    threads: int


def launches(kernel: Kernel, spec: Spec) -> Launches:
    """What calls of `spec` launch: the module of qflash/triton that has the kernel's name says so."""
    try:
        import_module("triton")
    except ImportError as error:
        raise ToolchainError(
            f"kernel {kernel.name!r} is compiled by the package triton, which cannot be imported ({error}): "
            "pip install 'qflash[triton]'"
        ) from None
    found: Launches = import_module(f"qflash.triton.{kernel.name}").launches(spec)
    return found


def compiled(of: Launches, choice: Choice, arch: int) -> list[Any]:
    """What Triton makes of the passes of a choice for GPUs of compute capability `arch`/10. No GPU is needed."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    target = GPUTarget("cuda", arch, 32)
    return [
        triton.compile(
            ASTSource(one.function, _signature(of, one), dict(one.constants), _attributes(choice, of, one)),
            target,
            {"num_warps": one.num_warps, "num_stages": one.num_stages, "enable_fp_fusion": one.fuses},
        )
        for one in choice.passes
    ]


def _signature(of: Launches, one: Pass) -> dict[str, str]:
    names = one.function.arg_names
    return {name: "constexpr" if name in one.constants else of.type_of(name) for name in names}


def _attributes(choice: Choice, of: Launches, one: Pass) -> dict[tuple[int], list[list[Any]]]:
    """What is known of arguments, by their place: what they are multiples of."""
    known = {**choice.multiples, **{region.name: 16 for region in of.regions}}
    names = one.function.arg_names
    return {(at,): [["tt.divisibility", known[name]]] for at, name in enumerate(names) if name in known}
