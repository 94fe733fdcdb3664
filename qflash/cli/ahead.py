"""Compiles the CUDA libraries that a command will use before it starts: several at a time, with their total number.

On first use they would be compiled one at a time when needed, and the number of remaining ones would be unknown.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from rich.console import Console

from qflash import machine
from qflash.backends import cuda
from qflash.backends.arch import arch_for
from qflash.cli.console import steps
from qflash.dispatch import Variant, reasons
from qflash.errors import ToolchainError
from qflash.jit import toolchain
from qflash.jit.cache import Cache
from qflash.jit.compiler import Unit, is_compiled
from qflash.jit.prebuild import prebuild

if TYPE_CHECKING:
    from qflash.testing import Case


def compile_ahead(console: Console, work: Iterable[tuple[Variant, Case]]) -> None:
    """Compile the libraries that `work`, kernels and the cases they will run, needs and the cache lacks.

    Does nothing without a compiler or a GPU: what a kernel lacks is then reported when it is called.
    """
    gpus, _ = machine.gpus()
    if not gpus:
        return
    try:
        toolchain.find()
    except ToolchainError:
        return
    kept = Cache()
    missing = [unit for unit in units_of(work, arch_for(gpus[0].arch)) if not is_compiled(unit, kept)]
    if not missing:
        return
    with steps(console, len(missing)) as progress:
        progress.describe("compiling CUDA kernels for this GPU, once")
        prebuild(missing, kept, progress=lambda unit, done, total: progress.advance())


def units_of(work: Iterable[tuple[Variant, Case]], arch: int) -> list[Unit]:
    """The libraries that kernels need for cases, each once."""
    found: dict[Unit, None] = {}
    for variant, case in work:
        if variant.kernel.backend != "cuda":
            continue
        plain_scores = not case.softcap and (case.scale is None or case.scale > 0)
        spec = replace(variant.spec(arch, case.dtype, case.head_dim), plain_scores=plain_scores)
        if not reasons(variant.kernel, spec):
            found[cuda.unit(variant.kernel, spec)] = None
    return list(found)
