"""`qflash trace`: a trace of an emulated run of one small problem, in a model of time."""

from __future__ import annotations

import json
from pathlib import Path

import click

from qflash.cli.command import KernelCommand
from qflash.cli.console import make_console
from qflash.cli.verify import emulated_kernels
from qflash.errors import NoKernelError

LENGTH = click.IntRange(1, 8192)


@click.command(cls=KernelCommand)
@click.option("--kernel", required=True, help="A CUDA kernel of attention.")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="A Chrome trace, for ui.perfetto.dev.")
@click.option("--svg", type=click.Path(dir_okay=False, path_type=Path), help="A picture of about three tiles of keys.")
@click.option("--q-len", type=LENGTH, default=256, show_default=True, help="Number of queries.")
@click.option("--k-len", type=LENGTH, default=1024, show_default=True, help="Number of keys.")
@click.option("--heads", type=click.IntRange(1, 64), default=1, show_default=True, help="Heads of q; K and V have one.")
@click.option("--head-dim", type=click.IntRange(8, 256), default=128, show_default=True)
@click.option("--causal", is_flag=True, help="With a causal mask.")
@click.option(
    "--seed", type=click.IntRange(0, 2**31 - 2), default=0, show_default=True, help="Seed of the random q, k and v."
)
def trace(
    kernel: str,
    out: Path | None,
    svg: Path | None,
    q_len: int,
    k_len: int,
    heads: int,
    head_dim: int,
    causal: bool,
    seed: int,
) -> None:
    """Draw which warp of a CUDA kernel waits for which.

    The kernel runs on the CPU, emulated, in a model of time: this needs no GPU, and measures nothing.
    """
    from qflash.testing import Case, emulator
    from qflash.testing import trace as traces
    from qflash.testing.runner import suited
    from qflash.testing.trace_picture import picture

    possible = emulated_kernels()
    if kernel not in possible:
        allowed = ", ".join(possible)
        raise click.BadParameter(
            f"{kernel!r} is no CUDA kernel of attention; allowed: {allowed}", param_hint="--kernel"
        )
    if possible[kernel]:
        raise click.ClickException(f"{kernel} cannot run here: {possible[kernel]}")
    if out is None and svg is None:
        raise click.UsageError("there is nowhere to write to; allowed: --out file.json, --svg file.svg, or both")
    case = Case("trace", q_len, k_len, heads, 1, head_dim, dtype="bfloat16", causal=causal, seed=seed)
    served = suited(case, kernel, emulator.arch()).head_dim
    if served != head_dim:
        raise click.BadParameter(
            f"{head_dim} is no head_dim that {kernel} serves; allowed: {served}, the next that it does",
            param_hint="--head-dim",
        )
    try:
        spans = traces.trace(kernel, case)
    except NoKernelError as error:
        raise click.ClickException(str(error)) from None
    mask = ", causal" if causal else ""
    title = f"{kernel}: {q_len} x {k_len}, {heads} head{'s' if heads > 1 else ''}, head_dim {head_dim}{mask}"
    console = make_console()
    if out:
        _write(out, json.dumps(traces.chrome(spans, title), indent=1) + "\n")
        console.print(f"{out}: {len(spans)} spans and arrivals; https://ui.perfetto.dev opens it", soft_wrap=True)
    if svg:
        _write(svg, picture(spans, title))
        console.print(f"{svg}: about three tiles of keys", soft_wrap=True)
    console.print(f"Time is {traces.NOTE}.", soft_wrap=True)


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text)
    except OSError as error:
        raise click.FileError(str(path), f"{error.strerror}; allowed: a file in a folder that may be written") from None
