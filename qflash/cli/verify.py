"""`qflash verify`: runs every kernel that this machine supports on the case list, against the float64 oracle.

With --emulate, runs CUDA kernels on the CPU: their own source including launch code, thread by thread.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import product
from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from qflash.cli.ahead import compile_ahead
from qflash.cli.command import KernelCommand
from qflash.cli.console import make_console, steps
from qflash.cli.usable import usable_kernels
from qflash.dispatch import VARIANTS, Variant, arch_reasons, variants_of
from qflash.errors import KernelError, NoKernelError, ToolchainError

if TYPE_CHECKING:
    from qflash.testing import Case

BACKWARD = "attention_backward"


@dataclass
class Tally:
    """The result of verifying one kernel."""

    kernel: Variant
    framework: str  # of qflash.testing.check
    seed: int = 0  # of the emulator's schedule
    passed: int = 0
    refused: int = 0  # cases that the kernel does not support
    uncompiled: int = 0  # cases whose library is not in the compile cache of a machine without a compiler
    worst: dict[str, float] = field(default_factory=dict)  # dtype -> greatest relative L2 error
    failures: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def take(self, case: Case) -> None:
        """Run one case, forward or backward, and record the outcome."""
        from qflash.testing import ContractError, check, check_backward

        started = time.perf_counter()
        how = (self.kernel.name, self.framework, self.seed)
        try:
            errors = check_backward(case, *how) if self.kernel.kernel.op == BACKWARD else check(case, *how)
        except NoKernelError:
            self.refused += 1
        except ToolchainError:
            self.uncompiled += 1
        except (ContractError, KernelError) as error:
            self.failures.append(f"{case.name}: {error}" if isinstance(error, KernelError) else str(error))
        else:
            self.passed += 1
            if case.finite:
                self.worst[case.dtype] = max(self.worst.get(case.dtype, 0.0), errors.relative_l2)
        self.seconds += time.perf_counter() - started

    @property
    def verified_nothing(self) -> bool:
        """Whether no case ran because there is no compiler."""
        return bool(self.uncompiled) and not self.passed and not self.failures

    @property
    def worst_text(self) -> str:
        return ", ".join(f"{dtype} {error:.0e}" for dtype, error in self.worst.items())

    @property
    def summary(self) -> str:
        """A one-line summary of one kernel."""
        total = self.passed + len(self.failures)
        refused = f", {self.refused} not served" if self.refused else ""
        refused += f", {self.uncompiled} not compiled" if self.uncompiled else ""
        return (
            f"{self.kernel.name}: {self.passed} of {total} cases agree with the float64 oracle{refused}; "
            f"worst relative error {self.worst_text}"
        )


def verify_kernels(console: Console, kernels: list[Variant], quick: bool) -> list[Tally]:
    """Run the case list on each kernel, with progress."""
    from qflash.testing import cases

    chosen = cases("quick" if quick else "full")
    compile_ahead(console, product(kernels, chosen))
    tallies = [Tally(kernel, "native-cuda" if kernel.device == "cuda" else "native") for kernel in kernels]
    take_all(console, "verifying", tallies, lambda kernel: chosen)
    return tallies


def take_all(console: Console, verb: str, tallies: list[Tally], cases_of: Callable[[Variant], list[Case]]) -> None:
    """Run the cases of each tally's kernel, under one progress bar."""
    work = [(tally, cases_of(tally.kernel)) for tally in tallies]
    with steps(console, sum(len(cases) for _, cases in work)) as progress:
        for tally, cases in work:
            progress.describe(f"{verb} {tally.kernel.name}")
            for case in cases:
                tally.take(case)
                progress.advance()


def emulate_kernels(console: Console, kernels: list[Variant], seed: int) -> list[Tally]:
    """Run the short case list on the source of each CUDA kernel, in the emulator."""
    from qflash.testing import cases, emulator
    from qflash.testing.emulated_attention import with_few_keys
    from qflash.testing.runner import suited

    chosen = [with_few_keys(case) for case in cases("quick")]
    tallies = [Tally(kernel, "emulated", seed) for kernel in kernels]
    arch = emulator.arch()
    take_all(console, "emulating", tallies, lambda kernel: [suited(case, kernel.name, arch) for case in chosen])
    return tallies


def emulated_kernels() -> dict[str, str]:
    """The attention kernels, each with the reason why it cannot be emulated here, or ""."""
    from qflash.testing import emulator

    why_not = emulator.why_not()
    return {
        variant.name: why_not or "; ".join(arch_reasons(variant.kernel, emulator.arch(), "it is emulated for"))
        for variant in (*variants_of("attention", "cuda"), *variants_of(BACKWARD, "cuda"))
        if variant.kernel.backend == "cuda"
    }


def repeat_kernels(console: Console, tallies: list[Tally], times: int) -> None:
    """Run a few large problems `times` times on each kernel; a run that differs is a failure of its tally."""
    from qflash.testing import ContractError
    from qflash.testing.repeat import check_repeats

    with steps(console, len(tallies)) as progress:
        for tally in tallies:
            progress.describe(f"repeating {tally.kernel.name} {times} times")
            try:
                served = check_repeats(tally.kernel.name, times)
                console.print(f"{tally.kernel.name}: {served} large problems, {times} runs each, the same bits")
            except ContractError as error:
                tally.failures.append(str(error))
            progress.advance()


def show_failures(console: Console, tallies: list[Tally]) -> bool:
    """Print the failures. Returns True if there were any."""
    for tally in tallies:
        for failure in tally.failures:
            console.print(Text.assemble(("FAILED", "red"), f" {tally.kernel.name} {failure}"), soft_wrap=True)
    return any(tally.failures for tally in tallies)


@click.command(cls=KernelCommand)
@click.option("--kernel", "names", multiple=True, help="Verify only this kernel (may be repeated).")
@click.option("--quick", is_flag=True, help="Run a short case list.")
@click.option(
    "--repeat", type=click.IntRange(2), help="Also run a few large problems this often each and compare their bits."
)
@click.option(
    "--emulate", is_flag=True, help="Run CUDA kernels on the CPU, thread by thread: needs g++, no GPU. Short list."
)
@click.option(
    "--seed", type=click.IntRange(0, 2**31 - 2), help="With --emulate: seed of the order in which threads run."
)
def verify(names: tuple[str, ...], quick: bool, repeat: int | None, emulate: bool, seed: int | None) -> None:
    """Check the kernels of attention against a float64 oracle.

    Every kernel that this machine can run computes a list of cases, unless --kernel chooses some.
    """
    if emulate and repeat:
        raise click.UsageError("--repeat is of kernels at their full size; allowed: --emulate without it")
    if seed is not None and not emulate:
        raise click.UsageError("--seed is of the emulator's schedule; allowed: with --emulate")
    possible = emulated_kernels() if emulate else usable_variants()
    for name in names:
        if name not in possible:
            what = "CUDA kernel of attention" if emulate else "kernel of attention"
            raise click.BadParameter(f"{name!r} is no {what}; allowed: {', '.join(possible)}", param_hint="--kernel")
    wanted = {name: possible[name] for name in (names or possible)}
    console = make_console()
    runnable = [VARIANTS[name] for name, why_not in wanted.items() if not why_not]
    tallies = emulate_kernels(console, runnable, seed or 0) if emulate else verify_kernels(console, runnable, quick)
    if repeat:
        repeat_kernels(console, tallies, repeat)
    show_table(console, tallies)
    for why_not in dict.fromkeys(filter(None, wanted.values())):
        shared = ", ".join(name for name, why in wanted.items() if why == why_not)
        console.print(f"{shared} cannot run here: {why_not}", soft_wrap=True)
    missing = names and (len(runnable) < len(names) or any(tally.verified_nothing for tally in tallies))
    if show_failures(console, tallies) or missing:
        sys.exit(1)


def usable_variants() -> dict[str, str]:
    """The attention kernels, each with the reason why it cannot run here, or ""."""
    usable = usable_kernels()
    variants = (*variants_of("attention"), *variants_of(BACKWARD))
    return {variant.name: usable[variant.kernel.name].why_not for variant in variants}


def show_table(console: Console, tallies: list[Tally]) -> None:
    """One row per kernel."""
    table = Table(title="Against the float64 oracle")
    uncompiled = any(tally.uncompiled for tally in tallies)
    counted = ("passed", "failed", "not served", *(["not compiled"] if uncompiled else []))
    for column in ("kernel", *counted, "worst relative L2 error", "seconds"):
        table.add_column(column, justify="left" if column == "kernel" else "right")
    for tally in tallies:
        counts = (tally.passed, len(tally.failures), tally.refused, tally.uncompiled)[: len(counted)]
        table.add_row(tally.kernel.name, *map(str, counts), tally.worst_text, f"{tally.seconds:.1f}")
    console.print(table)
