"""`qflash parallel plan`: a model of the time of an attention layer on many GPUs. Nothing is run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from rich.table import Table
from rich.text import Text

import qflash
from qflash.call.spec import DTYPES, PRECISIONS
from qflash.cli.console import make_console
from qflash.parallel.model import (
    ASSUMPTIONS,
    FORWARD,
    KINDS,
    Estimate,
    FixedRate,
    Layer,
    Machine,
    MeasuredRates,
    Rates,
    estimates,
    hidden_from,
)

RESULTS = Path(qflash.__file__).resolve().parent.parent / "bench" / "results"
_UNITS = {"k": 2**10, "m": 2**20}
_GIGA = 1e9
# One way. The values are the vendors'; measured ones can be given as options.
LINK = (450.0, "NVLink 4, data sheet of the H200: 900 GB/s both ways together")
NETWORK = (50.0, "a 400 Gb/s network adapter for each GPU, its nominal rate")
MEMORY = (4270.0, "a copy on an H200, measured: bench/limits.py")


def _count(text: str) -> int:
    """An integer, with k or M for 1024 and 1024²."""
    digits, unit = (text[:-1], _UNITS[text[-1].lower()]) if text[-1:].lower() in _UNITS else (text, 1)
    if not digits.isdecimal() or int(digits) < 1:
        raise click.BadParameter(f"{text!r} is no count; allowed: a whole number, 1 or more, such as 65536, 128k or 1M")
    return int(digits) * unit


def count(ctx: click.Context, param: click.Parameter, value: str) -> int:
    """The callback of an option that takes a count."""
    return _count(value)


def counts(ctx: click.Context, param: click.Parameter, value: str) -> tuple[int, ...]:
    """The callback of an option that takes comma-separated counts."""
    return tuple(map(_count, value.split(",")))


class _Rate(click.FloatRange):
    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        rate = super().convert(value, param, ctx)
        if rate != rate:  # NaN, which passes every range check
            self.fail(f"{value!r} is not a number; allowed: more than {self.min:g}, up to {self.max:g}", param, ctx)
        return rate


RATE = _Rate(min=0, min_open=True, max=1e9)


@click.group()
def parallel() -> None:
    """Plan attention over several GPUs (`parallel plan`)."""


@parallel.command()
@click.option("--gpus", callback=counts, required=True, metavar="N[,N...]", help="How many GPUs share a sequence.")
@click.option(
    "--tokens",
    callback=count,
    required=True,
    metavar="N",
    help="Length of the sequence; 128k and 1M are 2^17 and 2^20.",
)
@click.option("--heads", type=click.IntRange(1, 4096), default=32, show_default=True, help="Heads of q.")
@click.option("--kv-heads", type=click.IntRange(1, 4096), default=8, show_default=True, help="Heads of k and v.")
@click.option("--head-dim", type=click.IntRange(1, 256), default=128, show_default=True)
@click.option("--batch", type=click.IntRange(1, 4096), default=1, show_default=True, help="Number of sequences.")
@click.option("--dtype", type=click.Choice(DTYPES), default="bfloat16", show_default=True)
@click.option("--full", is_flag=True, help="No mask (default: causal).")
@click.option("--precision", type=click.Choice(PRECISIONS[1:]), help="Forward only. A ring then sends 8 bits.")
@click.option("--machine", default="nvidia-h200", show_default=True, help="A folder of bench/results with rows to use.")
@click.option("--tflops", type=RATE, help="Rate of arithmetic, instead of that of the rows.")
@click.option(
    "--link", type=RATE, metavar="GB/s", help=f"Rate of a link in a node, one way (default {LINK[0]:g}: {LINK[1]})."
)
@click.option(
    "--network",
    type=RATE,
    metavar="GB/s",
    help=f"Rate of the network between nodes (default {NETWORK[0]:g}: {NETWORK[1]}).",
)
@click.option(
    "--memory", type=RATE, metavar="GB/s", help=f"Rate of a GPU's memory (default {MEMORY[0]:g}: {MEMORY[1]})."
)
@click.option("--node", type=click.IntRange(1, 1024), default=8, show_default=True, help="GPUs of a node.")
def plan(
    gpus: tuple[int, ...],
    tokens: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    batch: int,
    dtype: str,
    full: bool,
    precision: str | None,
    machine: str,
    tflops: float | None,
    link: float | None,
    network: float | None,
    memory: float | None,
    node: int,
) -> None:
    """Estimate the time of one layer for each strategy.

    This is a model, not a measurement; it prints its assumptions.

    For example: qflash parallel plan --gpus 8,64 --tokens 1M --heads 32 --kv-heads 8 --head-dim 128
    """
    if heads % kv_heads:
        raise click.BadParameter(f"{kv_heads} is no divisor of {heads} heads of q", param_hint="--kv-heads")
    number_bytes = 4 if dtype == "float32" else 2
    layer = Layer(tokens, heads, kv_heads, head_dim, not full, number_bytes, batch, precision)
    given = {"link": (link, LINK), "network": (network, NETWORK), "memory": (memory, MEMORY)}
    values = {name: _GIGA * (of_user or default) for name, (of_user, (default, _)) in given.items()}
    place = Machine(**values, node=node)
    rates, source = _rates(machine, tflops, head_dim, dtype, layer)
    found = [one for number in gpus for one in estimates(layer, number, place, rates)]
    console = make_console()
    words = f"{'no mask' if full else 'causal'}{f', {precision}' if precision else ''}"
    title = f"one layer, {batch} x {tokens} tokens, {heads} / {kv_heads} heads of {head_dim}, {dtype}, {words}"
    console.print(_table(title, found))
    for note in _notes(layer, place, rates, found):
        console.print(note, soft_wrap=True)
    console.print("Assumptions:")
    console.print(f"- {source}", soft_wrap=True)
    for name, (of_user, (default, why)) in given.items():
        told = f"{of_user:g} GB/s, as asked for" if of_user else f"{default:g} GB/s: {why}"
        console.print(f"- The rate of {_SPOKEN[name]} is {told}.", soft_wrap=True)
    for text in ASSUMPTIONS:
        console.print(f"- {text}", soft_wrap=True)


_SPOKEN = {"link": "a GPU's link within its node", "network": "the network between nodes", "memory": "memory"}


def _rates(machine: str, tflops: float | None, head_dim: int, dtype: str, layer: Layer) -> tuple[Rates, str]:
    """The rate of arithmetic, and its source."""
    if tflops is not None:
        return FixedRate(1e12 * tflops), f"Arithmetic runs at {tflops:g} TFLOP/s, as asked for, at every length."
    rates = MeasuredRates.of_rows(_rows(machine), head_dim, dtype, layer.precision)
    missing = [kind for kind in layer.kinds for causal in {False, layer.causal} if (kind, causal) not in rates.rates]
    if missing:
        of = f"head_dim {head_dim} and {dtype}" + (f" and precision {layer.precision}" if layer.precision else "")
        raise click.ClickException(
            f"bench/results/{machine} has no rows of {missing[0]} passes with {of}; allowed: what it has rows of, or "
            "--tflops"
        )
    lengths = sorted({length for of in rates.rates.values() for length, _ in of})
    return rates, (
        f"Arithmetic runs as fast as the kernels that were measured in bench/results/{machine}, at the nearest of "
        f"{', '.join(map(str, lengths))} tokens; longer calls as the longest of these."
    )


def _rows(machine: str) -> list[dict[str, Any]]:
    folder = RESULTS / machine
    files = sorted(folder.glob("*.jsonl")) if RESULTS in folder.parents else []
    if not files:
        known = sorted(path.name for path in RESULTS.glob("*/")) if RESULTS.exists() else []
        allowed = ", ".join(known) or "none here, because this qflash has no checkout around it; use --tflops"
        raise click.BadParameter(f"{machine!r} has no rows; allowed: {allowed}", param_hint="--machine")
    return [json.loads(line) for path in files for line in path.read_text().splitlines() if line.strip()]


def _table(title: str, found: Sequence[Estimate]) -> Table:
    """A line for each pass of each strategy; the strategy with the lowest total time is bold."""
    table = Table(title=title, title_justify="left")
    for name in ("GPUs", "strategy", "pass", "computes", "sends", "waits", "copies", "in all", "k, v held"):
        table.add_column(name, justify="left" if name in ("strategy", "pass") else "right")
    for gpus in dict.fromkeys(one.gpus for one in found):
        possible = [one for one in found if one.gpus == gpus and not one.why_not]
        best = min(possible, key=lambda one: one.seconds, default=None)
        for one in possible:
            for kind, part in one.passes.items():
                first = kind == KINDS[0]
                times = (part.computing, part.waiting, part.copying, part.seconds)
                computes, waits, copies, in_all = map(_time, times)
                strategy = Text(one.strategy, "bold" if one is best else "")
                head = (str(gpus), strategy, kind) if first else ("", "", kind)
                held = _bytes(one.keys_bytes) if first else ""
                table.add_row(*head, computes, _bytes(part.moved_bytes), waits, copies, in_all, held)
        table.add_section()
    return table


def _notes(layer: Layer, place: Machine, rates: Rates, found: Sequence[Estimate]) -> list[str]:
    """Which strategies do not apply, and from how many tokens on a ring hides its transfers."""
    notes = [f"{one.gpus} GPUs: no {one.strategy}, because {one.why_not}." for one in found if one.why_not]
    for gpus in sorted({one.gpus for one in found if one.gpus > 1 and one.strategy == "ring" and not one.why_not}):
        part = max(layer.tokens // gpus, 1)
        least = hidden_from(layer, place, gpus, rates.operations(FORWARD, part, False))
        verdict = "hides" if part >= least else "does not hide"
        notes.append(
            f"{gpus} GPUs: a ring {verdict} its transfers, forward; it does from {least:.0f} tokens for each GPU on, "
            f"and there are {part}."
        )
    return notes


def _time(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} µs"


def _bytes(count: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count / 1e3:.3g} kB"
