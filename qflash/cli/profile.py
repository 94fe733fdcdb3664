"""`qflash profile` and `roofline`: Nsight Compute reports of each kernel, in profiles/ (in a checkout, on a GPU)."""

from __future__ import annotations

import shutil
from pathlib import Path

import click

from qflash import machine
from qflash.cli.bench import load
from qflash.cli.command import KernelCommand
from qflash.cli.console import make_console, steps
from qflash.dispatch import VARIANTS, arch_reasons

CUDA_KERNELS = tuple(variant.name for variant in VARIANTS.values() if variant.kernel.backend == "cuda")


@click.command(cls=KernelCommand)
@click.option("--kernel", "kernels", multiple=True, help="Only this one (repeatable; default: all the GPU runs).")
@click.option(
    "--out", type=click.Path(file_okay=False, path_type=Path), help="Where the files go (default: profiles/<gpu>)."
)
@click.option("--ncu", default="ncu", show_default=True, help="Nsight Compute's command.")
def profile(kernels: tuple[str, ...], out: Path | None, ncu: str) -> None:
    """Profile CUDA kernels with Nsight Compute.

    Each kernel gets a <kernel>.csv and a <kernel>.txt.
    """
    profiles = load("profiles")
    for name in kernels:
        if name not in CUDA_KERNELS:
            allowed = ", ".join(CUDA_KERNELS)
            raise click.BadParameter(f"{name!r} is no CUDA kernel; allowed: {allowed}", param_hint="--kernel")
    gpus, none_because = machine.gpus()
    if not gpus:
        raise click.ClickException(f"profiling needs an NVIDIA GPU: {none_because}")
    if shutil.which(ncu) is None:
        raise click.ClickException(f"--ncu is {ncu!r}, which is not on the PATH; it is part of the CUDA toolkit")
    folder = out or profiles.PROFILES / profiles.folder_of(gpus[0].name)
    console = make_console()
    chosen = kernels or tuple(name for name in CUDA_KERNELS if not arch_reasons(VARIANTS[name].kernel, gpus[0].arch))
    failed = []
    with steps(console, len(chosen)) as progress:
        for name in chosen:
            progress.describe(f"profiling {name}")
            try:
                found = profiles.collect(name, folder, ncu)
                time = found.total(profiles.DURATION) / 1e6
                console.print(f"{name}: {time:.3f} ms in {len(found.launches)} launches")
            except profiles.ProfileError as error:
                failed.append(name)
                console.print(f"{name}: {error}")
            progress.advance()
    if failed:
        raise click.ClickException(f"not profiled: {', '.join(failed)}")


@click.command()
@click.argument("gpu", default="h200")
@click.option(
    "--out", type=click.Path(dir_okay=False, path_type=Path), help="The SVG (default: profiles/GPU/roofline.svg)."
)
def roofline(gpu: str, out: Path | None) -> None:
    """Draw the roofline of a GPU from its profiles.

    GPU is a folder of profiles/. The rates come from the ladder's rows.
    """
    module, profiles = load("roofline"), load("profiles")
    if out is not None and not out.parent.is_dir():
        raise click.BadParameter(f"{out.parent} is no directory; allowed: a file in one", param_hint="--out")
    if machine.version("matplotlib") is None:
        raise click.ClickException("drawing needs matplotlib: pip install 'qflash[bench]'")
    try:
        path = module.draw(gpu, out or profiles.PROFILES / gpu / "roofline.svg")
    except ValueError as error:
        raise click.ClickException(str(error)) from None
    click.echo(f"{len(module.points(gpu))} kernels in {path}")
