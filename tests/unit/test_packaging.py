"""What an installed qflash tells type checkers is in the wheel and in the sdist."""

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.process

ROOT = Path(__file__).resolve().parents[2]
TYPES = {"qflash/py.typed", "qflash/_native.pyi", "qflash/typing.py"}


def build(kind: str, folder: Path, **settings: str) -> Path:
    """A distribution as a front end of PEP 517 makes it: called in the project's root, in a process of its own."""
    call = f"from scikit_build_core.build import build_{kind}; build_{kind}({str(folder)!r}, {settings!r})"
    subprocess.run([sys.executable, "-c", call], cwd=ROOT, check=True, capture_output=True, timeout=300)
    (made,) = folder.iterdir()
    return made


def test_sdist_has_the_types(tmp_path):
    pytest.importorskip("scikit_build_core")
    with tarfile.open(build("sdist", tmp_path)) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert names >= TYPES


def test_wheel_has_the_types(tmp_path):
    pytest.importorskip("scikit_build_core")
    # Without the native module, which would take minutes and is not what is asked here.
    wheel = build("wheel", tmp_path, **{"wheel.cmake": "false"})
    assert set(zipfile.ZipFile(wheel).namelist()) >= TYPES
