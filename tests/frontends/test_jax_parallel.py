"""qflash.parallel.jax: four and eight devices that XLA makes of this CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("jax")


def on_devices(*words: str, seconds: float) -> None:
    """The number of devices is fixed when JAX starts, hence the process of its own."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    path = Path(__file__).with_name("jax_parallel_on_four_devices.py")
    without = [word for plugin in ("cacheprovider", "xdist", "hypothesispytest") for word in ("-p", f"no:{plugin}")]
    command = [sys.executable, "-m", "pytest", "-q", *without, str(path), *words]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=path.parent, timeout=seconds)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr


def test_on_four_devices_and_eight():
    on_devices(seconds=500)


@pytest.mark.slow
def test_everywhere_on_eight_devices():
    on_devices("-m", "slow", seconds=1500)
