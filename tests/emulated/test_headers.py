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


def first_include(text: str) -> str | None:
    """What a file includes before it says anything else."""
    for line in text.splitlines():
        code = line.partition("//")[0].strip()
        if code and code != "#pragma once":
            found = re.fullmatch(r'#include "(.*)"', code)
            return found[1] if found else None
    return None


# A header that comes first in another is read alone there: nothing has come before it.
FIRST_IN = {first: name for name in HEADERS if (first := first_include(SOURCES[name].read_text())) is not None}
ALONE = [name for name in HEADERS if name not in FIRST_IN]
DEFINES = {
    "QF_DTYPE": 1,
    "QF_ARCH": 90,
    "QF_HEAD_DIM": 64,
    "QF_PRECISION": 1,
    "QF_KV_KIND": 0,
    "QF_BATCH_INVARIANT": 0,
    "QF_ACTIVATION": 1,
}  # of any kernel


@pytest.mark.parametrize("header", ALONE)
def test_it_is_read_alone(shared_cache, header):
    words = [f"-I{folder}" for folder in emulator.INCLUDE_DIRS]
    words += [f"-D{name}={value}" for name, value in DEFINES.items()]
    if not header.startswith("emulate/"):  # which is what stands in for nvcc's own headers
        words += ["-include", str(emulator.prelude(shared_cache))]
    command = [emulator.compiler()[0], *emulator.FLAGS, "-fsyntax-only", *words, "-x", "c++", "-"]
    done = subprocess.run(command, input=f'#include "{header}"\n', capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_every_header_is_read_alone_or_comes_first_in_one_that_is():
    for header in HEADERS:
        seen = [header]
        while seen[-1] in FIRST_IN:
            seen.append(FIRST_IN[seen[-1]])
            assert len(set(seen)) == len(seen), f"they include each other: {' '.join(seen)}"
        assert seen[-1] in ALONE
        # The prelude stands in for nvcc's own headers, and those of the emulator are read without it.
        assert header.startswith("emulate/") == seen[-1].startswith("emulate/"), seen


def test_what_comes_before_an_include_is_noticed():
    assert first_include('// a.cuh\n#pragma once\n\n#include "b.cuh"  // why\n#include "c.cuh"\n') == "b.cuh"
    for text in ("#pragma once\n#include <cstdint>\n", '#ifdef X\n#include "b.cuh"\n', "int x;\n", ""):
        assert first_include(text) is None


def test_only_the_emulator_includes_the_emulator():
    """The library's own headers call it where QF_EMULATOR is defined, and only those of single instructions do."""
    outside = {name: path.read_text() for name, path in SOURCES.items() if not name.startswith("emulate/")}
    assert not [name for name, text in outside.items() if re.search(r'#\s*include\s*["<]emulate/', text)]
    calls = [name for name, text in outside.items() if "emulate::" in text or "QF_EMULATOR" in text]
    assert calls and all(name.startswith("ptx/") for name in calls)
