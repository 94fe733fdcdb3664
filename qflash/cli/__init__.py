"""The `qflash` command. One module per group of commands; each imports frameworks only when it runs on them."""

from __future__ import annotations

import click

import qflash
from qflash.cli import bench, cuda, doctor, explain, parallel, profile, trace, verify
from qflash.cli.command import Commands


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(qflash.__version__, prog_name="qflash")
def main() -> None:
    """Attention for NumPy, PyTorch and JAX on kernels written from scratch.

    `run`, `bench`, `report`, `profile` and `roofline` need the source checkout; the others work wherever qflash is
    installed.
    """


for _command in (
    doctor.doctor,
    explain.explain,
    verify.verify,
    bench.run,
    bench.bench,
    cuda.build,
    cuda.cache,
    trace.trace,
    profile.profile,
    profile.roofline,
    bench.report,
    parallel.parallel,
):
    main.add_command(_command)
