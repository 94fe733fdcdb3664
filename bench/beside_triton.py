"""CUDA and Triton kernels side by side: all measurements of the page cuda-vs-triton, in one command.

python -m bench.beside_triton [--tutorial FILE] [--budget SECONDS] [NAME ...]

writes bench/results/<machine>/NAME.jsonl for each of

    triton         attention, next to PyTorch eager and compiled, FlashAttention 2 and Triton's own tutorial
    triton-decode  one query on a long cache
    triton-linear  linear layers, next to PyTorch eager and compiled
    triton-rows    softmax and rope, likewise, and next to a copy
    triton-costs   of one problem each: a call, the first call, compilation, lines of source

An interrupted run continues where it stopped when the command is given again. `qflash report` makes the tables.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import click
import numpy as np

import qflash
from bench import attention, kernel_costs, linear, reductions, run, tables, tutorial
from bench.presets import PRESETS
from bench.run import Candidate, Row, Suite
from qflash import machine, reference
from qflash.cli.ahead import compile_ahead
from qflash.cli.command import Seconds
from qflash.cli.console import make_console
from qflash.dispatch import VARIANTS
from qflash.testing.timing import Call

ATTENTION, DECODE, LINEAR, ROWS = "triton", "triton-decode", "triton-linear", "triton-rows"
FA2 = "torch FA2"
LAYERS = (
    *(linear.Problem(size, size, size, "gelu_tanh") for size in (4096, 8192)),
    linear.Problem(4096, 14336, 4096, "swiglu"),
    linear.Problem(4096, 4096, 4096),
    linear.Problem(16, 4096, 4096),
)
LAYER_KERNELS = ("sm90_gemm", "gemm_mma", "int8_gemm_tc", "triton_linear")
HEADS, HEAD_DIM, TOKENS = 16, 128, 16384  # of rope
ROPE = tuple(reductions.Problem("rope", TOKENS, HEADS * HEAD_DIM, dtype) for dtype in ("bfloat16", "float32"))


class Linear(linear.Linear):
    """bench.linear's candidates on fewer layers: only the CUDA kernels that dispatch would select."""

    name = LINEAR

    def __init__(self, device: str = "cuda", cases: tuple[linear.Problem, ...] = LAYERS):
        super().__init__(device)
        self.cases = cases

    def candidates(self, arrays: linear.Arrays) -> list[linear.Layer]:
        everyone = super().candidates(arrays)
        return [one for one in everyone if one.kernel is None or one.kernel in LAYER_KERNELS]


class RopeArrays:
    """Tokens whose heads are all rotated, by qflash and by plain PyTorch; in place of bench.reductions' Arrays."""

    def __init__(self, problem: reductions.Problem, device: str):
        import torch

        self.problem, tokens = problem, problem.rows
        self.x = torch.randn(tokens, problem.columns, device=device).to(getattr(torch, problem.dtype))
        angles = qflash.Rope(*qflash.rope_tables(tokens, HEAD_DIM))
        self.rope = qflash.Rope(*(torch.from_numpy(table).to(device) for table in (angles.cos, angles.sin)))
        cos, sin = (table[:, None] for table in (self.rope.cos, self.rope.sin))

        def theirs(x: Any) -> Any:
            first, second = x.unflatten(1, (-1, HEAD_DIM)).float().chunk(2, dim=-1)
            rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
            return rotated.to(x.dtype).flatten(1)

        self.ours, self.theirs = self.by(None), theirs
        first = self.x[: reductions.CHECKED_ROWS].double().cpu().numpy()
        rotated = reference.apply_rope(first.reshape(len(first), -1, HEAD_DIM), np.arange(len(first)), angles)
        self.exact = rotated.reshape(first.shape)

    def by(self, kernel: str | None) -> Call:
        """The call of qflash on a kernel."""
        heads = self.x.view(1, self.problem.rows, -1, HEAD_DIM)
        return lambda: qflash.rope(heads, self.rope, kernel=kernel).view_as(self.x)


class Rows(reductions.Reductions):
    """bench.reductions' softmax, and rope likewise, including the Triton kernels."""

    def __init__(self, device: str = "cuda"):
        super().__init__(device)
        self.name = ROWS
        self.cases = (*(case for case in self.cases if case.operation == "softmax"), *ROPE)

    def arrays(self, case: reductions.Problem) -> Any:
        return RopeArrays(case, self.device) if case.operation == "rope" else super().arrays(case)

    def candidates(self, arrays: Any) -> tuple[Candidate, ...]:
        ours, *peers = super().candidates(arrays)
        name = f"triton_{arrays.problem.operation}"

        def make(arrays: Any) -> Call:
            if arrays.problem.operation == "rope":
                return arrays.by(name)
            return lambda: qflash.softmax(arrays.x, kernel=name)

        return ours, Candidate(f"qflash {name}", make, name), *peers


# Tables --------------------------------------------------------------------------------------------------------------


def attention_table(folder: str | None = None) -> str:
    """One table per machine with committed rows: a line per problem and candidate, and a summary."""

    def of(found: list[Row]) -> str:
        lines = []
        for row in found:
            what = f"{tables.problem(row)} {row['dtype']}"
            ratios = [tables.ratio(row["speedup"].get(peer)) for peer in (FA2, tutorial.NAME)]
            cells = (tables.candidate(row), tables.time(row), tables.rate(row), tables.error(row))
            lines.append([what, *cells, *ratios])
        header = ["problem", "candidate", "time", "rate", "error", f"× {FA2}", f"× {tutorial.NAME}"]
        means = [
            f"- {line}"
            for line in tables.geometric_means(found)
            if line.startswith("qflash triton") and not any(peer in line for peer in ("naive", "torch.compile"))
        ]
        parts = (tables.markdown(header, tables.unrepeated(lines)), "\n".join(means), tables.left_out(found))
        return "\n\n".join(filter(None, parts))

    return tables.by_machine(ATTENTION, of, "`python -m bench.beside_triton` makes them.", folder)


def rows_table(folder: str | None = None) -> str:
    """One table per machine with committed rows: a line per operation, shape and candidate."""

    def of(found: list[Row]) -> str:
        lines = [
            [
                f"`{row['kind']}` {row['rows']} × {row['columns']} {row['dtype']}",
                *(tables.candidate(row), tables.time(row)),
                *(f"{row['gbs'] / 1e3:.2f} TB/s", f"{row['copy_share']:.1%}"),
            ]
            for row in found
        ]
        header = ["rows × columns", "candidate", "time", "rate", "of copy's rate"]
        return tables.markdown(header, tables.unrepeated(lines))

    return tables.by_machine(ROWS, of, "`python -m bench.beside_triton` makes them.", folder)


TABLES: dict[str, Callable[..., str]] = {
    ATTENTION: attention_table,
    LINEAR: partial(linear.table, preset=LINEAR, module="beside_triton"),
    ROWS: rows_table,
    kernel_costs.NAME: kernel_costs.table,
}


# The command ---------------------------------------------------------------------------------------------------------

SUITES: dict[str, Callable[[], Suite]] = {
    **{name: partial(attention.suite_of, PRESETS[name]) for name in (ATTENTION, DECODE)},
    LINEAR: Linear,
    ROWS: Rows,
    kernel_costs.NAME: kernel_costs.Costs,
}


@click.command()
@click.argument("names", nargs=-1, type=click.Choice(list(SUITES)))
@click.option(
    "--tutorial",
    "file",
    type=click.Path(exists=True, dir_okay=False, resolve_path=True),
    help="06-fused-attention.py of Triton's sources, whose kernel then takes part.",
)
@click.option("--budget", type=Seconds(), default=1.0, show_default=True, help="Seconds of timing per problem.")
def main(names: tuple[str, ...], file: str | None, budget: float) -> None:
    """Measure NAMES (default: all), and write rows as they are measured."""
    gpus, why_not = machine.gpus()
    if not gpus:
        raise click.ClickException(f"Triton's kernels run on a GPU, and here is none: {why_not}")
    if file is not None:
        os.environ[tutorial.VARIABLE] = file
    chosen = names or tuple(SUITES)
    presets = [PRESETS[name] for name in chosen if name in PRESETS]
    work = ((VARIANTS[kernel], case) for preset in presets for kernel in preset.kernels for case in preset.cases)
    compile_ahead(make_console(), work)
    for name in chosen:
        run.main(SUITES[name](), budget=budget)


if __name__ == "__main__":
    main()
