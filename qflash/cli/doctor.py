"""`qflash doctor`: what this machine has, which kernels it can run, and why it cannot run the others."""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence

import click
from rich.table import Table
from rich.text import Text

import qflash
from qflash import _native, machine
from qflash.backends import arch
from qflash.cli import cuda, environment
from qflash.cli.console import make_console
from qflash.cli.usable import Usable, usable_kernels
from qflash.errors import ToolchainError
from qflash.jit import runtime, toolchain
from qflash.jit.cache import Cache

FRAMEWORKS = ("numpy", "ml_dtypes", "torch", "jax", "jaxlib", "triton")


def hardware() -> list[tuple[str, str]]:
    """Processor, memory and GPUs."""
    facts = [
        ("processor", machine.cpu_name()),
        ("cores", f"{machine.cores()} usable, qflash runs {qflash.get_num_threads()} threads"),
        ("vector extensions", " ".join(machine.cpu_flags()) or "none that qflash knows"),
        ("CPU engine", _cpu_engine()),
        ("memory", f"{machine.memory_gib():.0f} GiB"),
    ]
    gpus, none_because = machine.gpus()
    for index, gpu in enumerate(gpus):
        text = f"{gpu.name}, compute capability {gpu.arch / 10}, {gpu.memory_mib / 1024:.0f} GiB, driver {gpu.driver}"
        facts.append((f"GPU {index}", text))
    if not gpus:
        facts.append(("GPU", f"none: {none_because}"))
    return [*facts, *asked_architecture()]


def _cpu_engine() -> str:
    if why_not := environment.cpu_problem():
        return f"not usable: {why_not}"
    return f"{_native.cpu_isa()} (QFLASH_CPU_ISA overrides)"


def asked_architecture() -> list[tuple[str, str]]:
    """The effect of QFLASH_CUDA_ARCH, if it is set."""
    try:
        wanted = arch.asked()
    except ValueError as error:
        return [("CUDA kernels", str(error))]
    if wanted is None:
        return []
    text = f"as for compute capability {wanted / 10}, compiled to PTX for the driver ({arch.VARIABLE})"
    return [("CUDA kernels", text)]


def compilers() -> list[tuple[str, str]]:
    """nvcc (CUDA kernels are compiled on first use), the C++ compiler, and the compile cache."""
    try:
        found = toolchain.find()
        nvcc = f"{found.version} ({found.nvcc}, found by {found.origin})"
        linked = _cuda_runtime(found)
    except ToolchainError as error:
        nvcc, linked = f"none. {error}", "that of the compiler that filled the compile cache"
    host = _compiler_version(("g++", "c++", "clang++"))
    why_not = environment.cache_problem()
    kept = f"not usable: {why_not}" if why_not else cuda.describe(Cache())
    return [("nvcc", nvcc), ("CUDA runtime", linked), ("C++ compiler", host), ("compile cache", kept)]


def _cuda_runtime(tools: toolchain.Toolchain) -> str:
    """Which CUDA runtime kernels from this compiler call."""
    shared = runtime.find(tools)
    if shared is not None:
        return f"one for all kernels, that of PyTorch or JAX where they have it loaded, else {shared.source}"
    return f"linked into every kernel, a megabyte each: this nvcc has no {runtime.name_of(tools)} beside its libraries"


def _compiler_version(names: tuple[str, ...]) -> str:
    path = next(filter(None, map(shutil.which, names)), None)
    if path is None:
        return f"none of {', '.join(names)} is on the PATH"
    done = subprocess.run([path, "--version"], capture_output=True, text=True)
    return f"{done.stdout.splitlines()[0]} ({path})" if done.stdout else f"{path} does not answer --version"


def frameworks() -> list[tuple[str, str]]:
    """Python and the relevant packages, from their metadata."""
    found = [("Python", f"{platform.python_version()} ({sys.executable})"), ("qflash", qflash.__version__)]
    found += [(name, machine.version(name) or "not installed") for name in FRAMEWORKS]
    handlers = (
        "built in" if hasattr(_native, "xla_targets") else "not built in: no jaxlib was found when qflash was installed"
    )
    return [*found, ("XLA handlers", handlers)]


def _section(title: str, rows: Sequence[tuple[str | Text, str | Text]]) -> Table:
    table = Table(title=title, title_justify="left", show_header=False, box=None, padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def kernels(judged: Iterable[Usable]) -> list[tuple[Text, Text]]:
    """A line for the usable kernels, and one for each reason why others are not, with all that share it."""
    groups: dict[tuple[str, ...], list[Usable]] = {}
    for entry in judged:
        groups.setdefault(entry.reasons or (entry.note,), []).append(entry)
    rows = []
    for reasons, entries in sorted(groups.items(), key=lambda group: bool(group[1][0].reasons)):
        verdict = Text("not usable", "yellow") if entries[0].reasons else Text("usable", "green")
        names = Text(", ".join(entry.kernel.name for entry in entries))
        about = "; ".join(filter(None, reasons))
        rows.append((verdict + f" ({len(entries)})", Text(f"{about}\n") + names if about else names))
    return rows


@click.command()
def doctor() -> None:
    """Show what this machine has, and which kernels it can run.

    The exit status is 1 if a QFLASH_* variable or the compile cache needs to be fixed. It is 0 if the machine only
    lacks a GPU or a compiler.
    """
    console = make_console()
    sections = {"Hardware": hardware(), "Compilers": compilers(), "Frameworks": frameworks()}
    for title, rows in sections.items():
        console.print(_section(title, rows), "")
    console.print(_section("Kernels", kernels(usable_kernels().values())))
    wrong = dict.fromkeys((*environment.problems(), *filter(None, [environment.cache_problem()])))
    if wrong:
        console.print("", _section("To be put right", [(str(number), text) for number, text in enumerate(wrong, 1)]))
        sys.exit(1)
