"""Every header of the device code is read alone: it includes what it uses, and depends on nothing that came before."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from qflash.testing import emulator

CSRC = Path(emulator.__file__).resolve().parent.parent / "csrc"
OTHERS = ("cpu", "bindings", "standalone")  # the host's own: CMake and nvcc compile them
SOURCES = {
    path.relative_to(CSRC).as_posix(): path
    for path in sorted(CSRC.rglob("*"))
    if path.suffix in (".h", ".cuh", ".cu") and path.relative_to(CSRC).parts[0] not in OTHERS
}
HEADERS = [name for name in SOURCES if not name.endswith(".cu")]
DEFINES = {"QF_DTYPE": 1, "QF_ARCH": 90, "QF_HEAD_DIM": 64, "QF_PRECISION": 1, "QF_KV_KIND": 0}  # of any kernel


@pytest.mark.parametrize("header", HEADERS)
def test_it_is_read_alone(shared_cache, header):
    words = [f"-I{folder}" for folder in emulator.INCLUDE_DIRS]
    words += [f"-D{name}={value}" for name, value in DEFINES.items()]
    if not header.startswith("emulate/"):  # which is what stands in for nvcc's own headers
        words += ["-include", str(emulator.prelude(shared_cache))]
    command = [emulator.compiler()[0], *emulator.FLAGS, "-fsyntax-only", *words, "-x", "c++", "-"]
    done = subprocess.run(command, input=f'#include "{header}"\n', capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_only_the_emulator_includes_the_emulator():
    """The library's own headers call it where QF_EMULATOR is defined, and only those of single instructions do."""
    outside = {name: path.read_text() for name, path in SOURCES.items() if not name.startswith("emulate/")}
    assert not [name for name, text in outside.items() if re.search(r'#\s*include\s*["<]emulate/', text)]
    calls = [name for name, text in outside.items() if "emulate::" in text or "QF_EMULATOR" in text]
    assert calls and all(name.startswith("ptx/") for name in calls)
