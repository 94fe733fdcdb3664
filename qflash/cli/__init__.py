"""The `qflash` command. One module per group of commands; frameworks are imported only by what runs on them."""

from __future__ import annotations

import click

import qflash
from qflash.cli import bench, cuda, doctor, explain, parallel, profile, trace, verify
from qflash.cli.command import Commands


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(qflash.__version__, prog_name="qflash")
def main() -> None:
    """Attention for NumPy, PyTorch and JAX on kernels written from scratch."""


for _command in (
    doctor.doctor,
    explain.explain,
    verify.verify,
    trace.trace,
    bench.run,
    bench.bench,
    bench.report,
    profile.profile,
    profile.roofline,
    cuda.build,
    cuda.cache,
    parallel.parallel,
):
    main.add_command(_command)
