"""Shared by all commands: errors that the user can act on are printed as one line without a traceback."""

from __future__ import annotations

from typing import Any

import click

from qflash.cli import environment
from qflash.errors import CacheError, CompileError, ToolchainError


class Commands(click.Group):
    """The group of all commands. qflash errors that tell the user what to do need no traceback; any other is a bug.

    Help lists the commands in the order in which they were added: those that new users need come first.
    """

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except (CacheError, CompileError, ToolchainError) as error:
            raise click.ClickException(str(error)) from None


class KernelCommand(click.Command):
    """A command that compiles or runs kernels. It does not start if a QFLASH_* variable is invalid.

    Kernels would reject the variable at the first call or, worse, run differently than requested.
    """

    def invoke(self, ctx: click.Context) -> Any:
        if found := environment.problems():
            raise click.ClickException("\n".join((*found, "`qflash doctor` shows what qflash finds here.")))
        return super().invoke(ctx)


class Seconds(click.types.FloatParamType):
    """A time span. click.FloatRange would accept nan and inf."""

    name = "seconds"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        try:
            seconds = float(value)
        except ValueError:
            seconds = 0.0
        if not 0.0 < seconds < float("inf"):
            self.fail(f"{value!r} is no time span; allowed: a number of seconds greater than 0, and finite", param, ctx)
        return seconds


# The engine's own limit (kMaxThreads in csrc/cpu/threads.cc).
THREADS = click.IntRange(1, 1024)
