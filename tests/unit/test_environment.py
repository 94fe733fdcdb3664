"""What tests/conftest.py sets before a framework reads it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NAME = "XLA_PYTHON_CLIENT_PREALLOCATE"


@pytest.mark.process
@pytest.mark.parametrize(("given", "wanted"), [(None, "false"), ("true", "true")])
def test_jax_does_not_take_all_memory_unless_told_to(given, wanted):
    """Workers share a GPU, so no run of the tests needs a variable; one that is set is kept."""
    environment = {name: value for name, value in os.environ.items() if name != NAME}
    environment |= {} if given is None else {NAME: given}
    code = f"import os, runpy, sys; runpy.run_path('conftest.py'); print(os.environ[{NAME!r}], 'jax' in sys.modules)"
    words = {"cwd": ROOT / "tests", "env": environment, "capture_output": True, "text": True}
    done = subprocess.run([sys.executable, "-c", code], **words)
    assert done.stdout.split() == [wanted, "False"], done.stderr
