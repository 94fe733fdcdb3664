"""`qflash build` and `qflash cache`: CUDA kernels compiled ahead of time, and the cache that stores them."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from pathlib import Path

import click

from qflash.cli.command import KernelCommand
from qflash.cli.console import make_console, steps
from qflash.dispatch import BY_NAME, KERNELS, arch_reasons
from qflash.jit.cache import Cache
from qflash.jit.compiler import is_compiled
from qflash.jit.contents import Info

CUDA_KERNELS = tuple(kernel.name for kernel in KERNELS if kernel.backend == "cuda")


def parse_arches(text: str) -> list[int]:
    """Compute capabilities times ten from "80,90a"; the letter adds nothing to the number."""
    found = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(?:sm_?)?(\d{1,2})\.?(\d)[af]?\s*", part)
        if match is None:
            raise click.BadParameter(
                f"{part.strip()!r} is no architecture; allowed: compute capabilities such as 80, 9.0 or sm_90a, with "
                "commas",
                param_hint="--arch",
            )
        found.append(int(match[1] + match[2]))
    return found


@click.command(cls=KernelCommand)
@click.option("--arch", "arches", required=True, metavar="CC[,CC...]", help="Compute capabilities: 80,90")
@click.option(
    "--kernel",
    "kernels",
    multiple=True,
    type=click.Choice(CUDA_KERNELS),
    metavar="NAME",
    help="Compile only this kernel (repeatable).",
)
@click.option("--dry-run", is_flag=True, help="Say how many there are and how many the cache has; compile nothing.")
def build(arches: str, kernels: tuple[str, ...], dry_run: bool) -> None:
    """Compile CUDA kernels ahead of time, into the compile cache.

    This needs nvcc, but no GPU.
    """
    from qflash.backends import cuda

    console = make_console()
    wanted = parse_arches(arches)
    for arch in wanted:
        why_not = {name: arch_reasons(BY_NAME[name], arch, "--arch is") for name in kernels or CUDA_KERNELS}
        if all(why_not.values()):
            name, (why,) = min(why_not.items(), key=lambda item: BY_NAME[item[0]].min_arch)
            raise click.BadParameter(f"no kernel runs on it: {name} {why}", param_hint="--arch")
    units = cuda.specialisations(wanted, kernels or None)
    if dry_run:
        kept = Cache()
        there = sum(is_compiled(unit, kept) for unit in units)
        console.print(f"{there} of {len(units)} libraries are there; {describe(kept)}", soft_wrap=True)
        return
    Cache().require_writable()  # kernels compiled on first use may be stored elsewhere; those built ahead may not
    started = time.perf_counter()
    with steps(console, len(units)) as progress:
        progress.describe("compiling")
        cuda.build(wanted, kernels or None, progress=lambda unit, done, total: progress.advance())
    console.print(f"{len(units)} libraries ready in {time.perf_counter() - started:.0f} s; {describe(Cache())}")


@click.command()
@click.option("--clear", is_flag=True, help="Remove the compiled kernels in it, and nothing else.")
def cache(clear: bool) -> None:
    """Show (or clear) the cache of compiled CUDA kernels."""
    kept = Cache()
    if clear:
        before = kept.info()
        click.echo(f"removing {amount(before)} from {before.folder}")
        removed = kept.clear()
        after = kept.info()
        click.echo(f"removed {removed} entries, {mebibytes(before.bytes - after.bytes)}")
        if after.entries:
            click.echo(f"{after.entries} entries stay: they are being built, or this user may not remove them")
    click.echo(describe(kept))
    if strays := kept.info().strays:
        click.echo(f"not the cache's, and left alone: {listed(strays)}")


def describe(kept: Cache) -> str:
    """Where the cache is and what it contains."""
    info = kept.info()
    return f"{info.root}: {amount(info)}"


def amount(info: Info) -> str:
    return f"{info.entries} entries, {mebibytes(info.bytes)}"


def mebibytes(size: int) -> str:
    return f"{size / 2**20:.1f} MiB"


def listed(paths: Sequence[Path], most: int = 8) -> str:
    """The first of many paths."""
    more = f" and {len(paths) - most} more" if len(paths) > most else ""
    return ", ".join(map(str, paths[:most])) + more
