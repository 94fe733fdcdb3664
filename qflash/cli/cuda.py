"""`qflash build` and `qflash cache`: CUDA kernels compiled ahead of time, and where they are kept."""

from __future__ import annotations

import re
import time

import click

from qflash.cli.console import bar, make_console
from qflash.dispatch import KERNELS
from qflash.errors import CompileError, ToolchainError
from qflash.jit.cache import Cache

CUDA_KERNELS = tuple(kernel.name for kernel in KERNELS if kernel.device == "cuda")


def parse_arches(text: str) -> list[int]:
    """Compute capabilities times ten from "80,90a"; the letter says nothing that the number does not."""
    found = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(?:sm_?)?(\d{2,3})[af]?\s*", part)
        if match is None:
            raise click.BadParameter(
                f"{part.strip()!r} is no architecture; allowed: compute capabilities such as 80 or 90a, with commas",
                param_hint="--arch",
            )
        found.append(int(match[1]))
    return found


@click.command()
@click.option("--arch", "arches", required=True, help="Compute capabilities, with commas: 80,90a")
@click.option("--kernel", "kernels", multiple=True, type=click.Choice(CUDA_KERNELS), help="Only this one (repeatable).")
def build(arches: str, kernels: tuple[str, ...]) -> None:
    """Compile CUDA kernels ahead of time into the cache they are loaded from. Needs nvcc, no GPU."""
    from qflash.backends import cuda

    console = make_console()
    units = cuda.specialisations(parse_arches(arches), kernels or None)
    if not units:
        raise click.ClickException(f"no kernel serves {arches}; `qflash doctor` lists what each one needs")
    started = time.perf_counter()
    try:
        with bar(console, "compiling", len(units)) as advance:
            cuda.build(parse_arches(arches), kernels or None, progress=lambda unit, done, total: advance())
    except (ToolchainError, CompileError) as error:
        raise click.ClickException(str(error)) from None
    console.print(f"{len(units)} libraries ready in {time.perf_counter() - started:.0f} s; {describe(Cache())}")


@click.command()
@click.option("--clear", is_flag=True, help="Remove everything in it.")
def cache(clear: bool) -> None:
    """Show (or clear) the cache of compiled CUDA kernels."""
    kept = Cache()
    if clear:
        click.echo(f"removed {kept.clear()} entries")
    click.echo(describe(kept))


def describe(kept: Cache) -> str:
    """Where the cache is and what it holds."""
    info = kept.info()
    return f"{info.root}: {info.entries} entries, {info.bytes / 2**20:.1f} MiB"
