"""`qflash run`, `bench` and `report`: commands of a checkout, which contains benchmarks and their rows (bench/)."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import click
from rich.console import Console
from rich.table import Table

import qflash
from qflash import machine
from qflash.cli.ahead import compile_ahead
from qflash.cli.command import THREADS, KernelCommand, Seconds
from qflash.cli.console import make_console, steps
from qflash.cli.usable import usable_kernels
from qflash.cli.verify import show_failures, verify_kernels
from qflash.dispatch import VARIANTS, variants_of


def load(name: str) -> ModuleType:
    """Import a module of the checkout's bench/ folder."""
    root = Path(qflash.__file__).resolve().parent.parent
    if not (root / "bench" / "run.py").exists():
        raise click.ClickException(
            "this command needs the source checkout, and the qflash that runs is an installed copy; "
            "run `make build` in a clone of the repository and use its .venv/bin/qflash"
        )
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    return importlib.import_module(f"bench.{name}")


def devices() -> list[str]:
    """The devices on which kernels can run here: "cpu", and "cuda" if there are a GPU and a compiler."""
    entries = usable_kernels().values()
    return sorted({entry.kernel.device for entry in entries if not entry.why_not})


def table_of(rows: list[dict[str, Any]], title: str) -> Table:
    """Rows as the table shown to users: qflash in bold, a rule between problems."""
    table = Table(title=title)
    report = load("report")
    peers = report.peers_of(rows)
    for name in ("candidate", "problem", "dtype", "error", "time", "rate", *(f"vs {peer}" for peer in peers)):
        table.add_column(name, justify="left" if name in ("candidate", "problem", "dtype") else "right")
    previous = None
    for row in rows:
        problem = report.problem(row)
        if previous not in (None, problem):
            table.add_section()
        previous = problem
        ours = row["kernel"] is not None
        ratios = [report.ratio(row["speedup"].get(peer)) for peer in peers]
        cells = (row["candidate"], problem, row["dtype"], report.error(row), report.time(row), report.rate(row))
        table.add_row(*cells, *ratios, style="bold" if ours else "dim")
    return table


def measured(console: Console, presets: Sequence[Any], **options: Any) -> Iterator[tuple[Any, list[dict[str, Any]]]]:
    """Yield (preset, its rows) in sequence, under one progress bar."""
    work = ((VARIANTS[name], case) for preset in presets for name in preset.kernels for case in preset.cases)
    compile_ahead(console, work)
    with steps(console, sum(len(preset.cases) for preset in presets)) as progress:
        for preset in presets:
            progress.describe(f"timing {preset.title}")
            suite = load("attention").suite_of(preset)
            rows = []
            for part in load("run").measure(suite, on_skip=lambda text: console.print(f"left out: {text}"), **options):
                rows += part
                progress.advance()
            yield preset, rows


def write(console: Console, name: str, rows: list[dict[str, Any]]) -> None:
    """Write rows and their plots to bench/results/<machine>/."""
    store, plot = load("rows"), load("plot")
    path = store.save(name, rows)
    console.print(f"{len(rows)} rows in {path.relative_to(store.ROOT)}")
    if machine.version("matplotlib") is None:
        console.print("no plot: matplotlib is not installed (pip install 'qflash[bench]')")
    for picture in plot.draw_from(path):
        console.print(f"plot in {picture.relative_to(store.ROOT)}")


@click.command(cls=KernelCommand)
@click.option("--threads", type=THREADS, help="Threads for qflash and its peers (default: all cores).")
def run(threads: int | None) -> None:
    """Verify every kernel this machine can run, then time it.

    Prints one table of qflash and PyTorch, and writes its rows and a plot.
    """
    console = make_console()
    load("run").set_threads(threads)
    usable = usable_kernels()
    kernels = [variant for variant in variants_of("attention") if not usable[variant.kernel.name].why_not]
    tallies = verify_kernels(console, kernels, quick=True)
    for tally in tallies:
        console.print(tally.summary)
    failed = show_failures(console, tallies)
    presets = load("presets")
    chosen = [preset for device in devices() for preset in presets.for_device(device) if preset.name in presets.RUN]
    # jax.nn materializes the scores, like the naive version; `qflash bench` has time for both.
    options = {"budget": 0.5, "min_rounds": 3, "leave_out": ("jax.nn",)}
    rows = [row for _, part in measured(console, chosen, **options) for row in part]
    console.print(table_of(rows, "qflash and what you would use instead: interleaved in one process, medians"))
    write(console, "run", rows)
    sys.exit(int(failed))


class BenchCommand(KernelCommand):
    """Its help lists the presets, if there is a checkout."""

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        try:
            presets = load("presets").PRESETS
        except click.ClickException:
            return
        with formatter.section("Presets"):
            formatter.write_dl([(name, preset.title) for name, preset in presets.items()])


@click.command(cls=BenchCommand)
@click.argument("presets", nargs=-1)
@click.option("--threads", type=THREADS, help="Threads for qflash and its peers (default: all cores).")
@click.option("--budget", type=Seconds(), default=3.0, show_default=True, help="Seconds of timing per problem.")
@click.option("--dry-run", is_flag=True, help="Print the table and write nothing.")
def bench(presets: tuple[str, ...], threads: int | None, budget: float, dry_run: bool) -> None:
    """Measure PRESETS and write their rows.

    The default is every preset that this machine can run, which takes long; start with `--budget 0.3 --dry-run`.
    """
    console = make_console()
    available = load("presets").PRESETS
    for name in presets:
        if name not in available:
            raise click.BadParameter(f"{name!r} is no preset; allowed: {', '.join(available)}", param_hint="PRESETS")
    chosen = [available[name] for name in presets] or [p for p in available.values() if p.device in devices()]
    for preset in chosen:
        if preset.device not in devices():
            raise click.ClickException(f"preset {preset.name} needs {preset.device}; see `qflash doctor`")
    load("run").set_threads(threads)
    for preset, rows in measured(console, chosen, budget=budget, resume=not dry_run):
        console.print(table_of(rows, preset.title))
        for line in load("report").means_of(preset, rows):
            console.print(line)
        if not dry_run:
            write(console, preset.name, rows)
    if not dry_run:
        console.print(
            "`qflash report` puts these rows into the pages of docs/results; tests hold the pages to the rows"
        )


@click.command()
@click.option("--check", is_flag=True, help="Change nothing; fail if a page differs from the committed rows.")
def report(check: bool) -> None:
    """Rebuild tables and plots of the docs from committed rows."""
    module = load("report")
    stale = module.update(check_only=check)
    if check and stale:
        raise click.ClickException(f"out of date: {', '.join(stale)}; run `qflash report`")
    click.echo(f"rewrote {', '.join(stale)}" if stale else "all pages are up to date")
