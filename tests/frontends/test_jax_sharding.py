"""JAX front end on several devices: shard_map, and jit on sharded arrays."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("jax")


def test_on_four_devices():
    """The number of devices is fixed when JAX starts, hence the process of its own."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4"
    paths = [Path(__file__).with_name(name) for name in ("jax_on_four_devices.py", "jax_linear_on_four_devices.py")]
    without = [word for plugin in ("cacheprovider", "xdist", "hypothesispytest") for word in ("-p", f"no:{plugin}")]
    command = [sys.executable, "-m", "pytest", "-q", *without, *map(str, paths)]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=paths[0].parent)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
