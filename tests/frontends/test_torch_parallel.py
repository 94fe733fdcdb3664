"""qflash.parallel.torch: four ranks of gloo on this CPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")


def test_on_four_ranks():
    """In a process of its own, so that ranks are started once, and not by every worker of pytest-xdist."""
    path = Path(__file__).with_name("torch_on_four_ranks.py")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=path.parent, timeout=500)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
