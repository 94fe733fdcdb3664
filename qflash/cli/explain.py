"""`qflash explain`: which kernel would serve a problem of a given shape, and why the others would not.

Nothing is computed or allocated, and no framework is imported: arrays are described as front ends describe them.
"""

from __future__ import annotations

from collections.abc import Callable

import click
from rich.table import Table
from rich.text import Text

from qflash import machine
from qflash.backends.arch import ARCHES, arch_for
from qflash.call.array import Array
from qflash.call.spec import DTYPES, PRECISIONS
from qflash.cli.command import KernelCommand
from qflash.cli.console import make_console
from qflash.cli.cuda import parse_arches
from qflash.errors import NoKernelError
from qflash.explanation import explanation_of
from qflash.ops.attention import ATTENTION
from qflash.ops.backward_memory import get_backward_memory

_COLOURS = {"runs": "green", "no": "yellow"}


def numbers(count: int, meaning: str) -> Callable[..., tuple[int, ...] | None]:
    """The callback of an option that takes `count` comma-separated integers."""

    def read(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[int, ...] | None:
        if value is None:
            return None
        try:
            found = tuple(int(part) for part in value.split(","))
        except ValueError:
            found = ()
        if len(found) != count:
            raise click.BadParameter(f"{value!r} is no {meaning}; allowed: {count} whole numbers with commas")
        return found

    return read


shape = numbers(4, "shape [batch, tokens, heads, head_dim]")


@click.command(cls=KernelCommand)
@click.option("--q", "q_shape", callback=shape, required=True, metavar="B,T,H,D", help="Shape of q.")
@click.option("--kv", "kv_shape", callback=shape, metavar="B,T,H,D", help="Shape of k and v (default: that of q).")
@click.option("--dtype", type=click.Choice(DTYPES), default="bfloat16", show_default=True)
@click.option("--device", type=click.Choice(("cpu", "cuda")), help="Default: cuda where --arch or a GPU is, else cpu.")
@click.option("--arch", metavar="CC", help="Compute capability of the GPU, such as 80 or 9.0 (default: the GPU here).")
@click.option("--causal", is_flag=True, help="With a causal mask.")
@click.option("--window", callback=numbers(2, "window"), metavar="LEFT,RIGHT", help="Keys on each side; -1 is open.")
@click.option("--softcap", type=float, help="Bound of the scores, as softcap=.")
@click.option("--scale", type=float, help="Factor of q · k (default: 1 / sqrt(D)).")
@click.option("--padded", is_flag=True, help="With kv_lens, as for sequences of different lengths.")
@click.option("--rope", type=click.Choice(("half", "interleaved")), help="With rotary embedding of the whole head_dim.")
@click.option("--sinks", is_flag=True, help="With a sink for each head of q.")
@click.option("--precision", type=click.Choice(PRECISIONS[1:]), help="Default: the arrays' own type.")
@click.option("--kernel", metavar="NAME", help="With kernel=NAME.")
@click.option("--batch-invariant", is_flag=True, help="With batch_invariant=True.")
@click.option(
    "--backward-memory",
    type=click.IntRange(0, (1 << 63) - 1),
    metavar="BYTES",
    help="Limit of qflash.set_backward_memory (default: 1 GiB).",
)
def explain(
    q_shape: tuple[int, ...],
    kv_shape: tuple[int, ...] | None,
    dtype: str,
    device: str | None,
    arch: str | None,
    causal: bool,
    window: tuple[int, ...] | None,
    softcap: float | None,
    scale: float | None,
    padded: bool,
    rope: str | None,
    sinks: bool,
    precision: str | None,
    kernel: str | None,
    batch_invariant: bool,
    backward_memory: int | None,
) -> None:
    """Show which kernel serves a call, and why the others do not.

    For example: qflash explain --q 2,4096,32,128 --kv 2,4096,8,128 --causal --arch 90 --precision int8
    """
    device, number = where(device, arch)

    def array(shape: tuple[int, ...], kind: str = dtype) -> Array:
        return Array(shape, None, kind, device)

    limit = get_backward_memory() if backward_memory is None else backward_memory
    kv_shape = kv_shape or q_shape
    lens = array(kv_shape[:1], "int32") if padded else None
    table = array((max(q_shape[1], kv_shape[1]), q_shape[3] // 2), "float32") if rope else None
    of_heads = array(q_shape[2:3], "float32") if sinks else None
    arrays = (array(q_shape), array(kv_shape), array(kv_shape), lens, None, None, table, table, None, None, of_heads)
    words = (
        causal,
        window,
        softcap,
        scale,
        precision,
        kernel,
        batch_invariant,
        False,
        rope == "interleaved",
        None,
        None,
        limit,
    )
    try:
        told = explanation_of(ATTENTION.plan(*arrays, *words), number, backward_memory=limit)
    except (NoKernelError, ValueError, TypeError) as error:
        raise click.ClickException(str(error)) from None
    console = make_console()
    table_of_kernels = Table(title=told.title, title_justify="left")
    for name in ("kernel", "", "why"):
        table_of_kernels.add_column(name)
    for name, verdict, why in told.shown:
        table_of_kernels.add_row(name, Text(verdict, _COLOURS.get(verdict, "")), why)
    console.print(table_of_kernels)
    for line in told.lines:
        console.print(line, soft_wrap=True)


def where(device: str | None, arch: str | None) -> tuple[str, int]:
    """The requested (device, compute capability times ten); 0 for the CPU."""
    gpus, _ = machine.gpus()
    if device is None:
        device = "cuda" if arch or gpus else "cpu"
    if device == "cpu":
        if arch:
            raise click.UsageError(f"--arch is {arch} and --device is cpu; allowed: --arch with --device cuda")
        return device, 0
    if arch:
        number, *more = parse_arches(arch)
        if more:
            raise click.BadParameter(f"{arch!r} has several; allowed: one", param_hint="--arch")
        return device, number
    if not gpus:
        allowed = ", ".join(map(str, ARCHES))
        raise click.UsageError(f"--arch is missing, and there is no GPU here to ask; allowed: such as {allowed}")
    return device, arch_for(gpus[0].arch)
