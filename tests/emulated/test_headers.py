"""Every header of the device code is read alone: it includes what it uses, and depends on nothing that came before."""

from __future__ import annotations

import re
import subprocess
from functools import lru_cache
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


INCLUDED = {name.removeprefix("include/"): name for name in SOURCES}  # as they are written after #include
INCLUDE = re.compile(r'#\s*include "(.*)"')


def code_of(text: str) -> list[str]:
    """The lines that say something."""
    lines = (line.partition("//")[0].strip() for line in text.splitlines())
    return [line for line in lines if line and line != "#pragma once"]


def first_include(text: str) -> str | None:
    """What a file includes before it says anything else."""
    code = code_of(text)
    found = INCLUDE.fullmatch(code[0]) if code else None
    return found[1] if found else None


def begins_with_includes(text: str) -> bool:
    """And has none further below."""
    others = [not line.startswith("#include") for line in code_of(text)]
    return others == sorted(others)


@lru_cache(maxsize=1024)
def reached(name: str, always: bool = False) -> frozenset[str]:
    """The header, and what it includes, and so on. always: without what stands under an #if."""
    found, depth = {name}, 0
    for line in code_of(SOURCES[name].read_text()):
        depth += line.startswith("#if") - line.startswith("#endif")
        include = INCLUDE.fullmatch(line)
        if include and include[1] in INCLUDED and not (always and depth):
            found |= reached(INCLUDED[include[1]], always)
    return frozenset(found)


def runs_of(headers: list[str]) -> list[list[str]]:
    """Headers that a compiler reads one after another: what came before, each of them includes itself, in its first
    lines. So each is read as it would be alone, and half as many compilers start."""
    runs: list[list[str]] = []
    for header in sorted(headers, key=lambda name: len(reached(name, always=True))):
        fits = [run for run in runs if reached(run[-1]) <= reached(header, always=True)]
        if fits and begins_with_includes(SOURCES[header].read_text()):
            max(fits, key=lambda run: len(reached(run[-1]))).append(header)
        else:
            runs.append([header])
    return runs


# A header that comes first in another is read alone there: nothing has come before it.
FIRST_IN = {first: name for name in HEADERS if (first := first_include(SOURCES[name].read_text())) is not None}
ALONE = [name for name in HEADERS if name not in FIRST_IN]
IN_EMULATOR = [name for name in ALONE if name.startswith("emulate/")]  # which stands in for nvcc's own headers
RUNS = runs_of(IN_EMULATOR) + runs_of([name for name in ALONE if name not in IN_EMULATOR])
DEFINES = {
    "QF_DTYPE": 1,
    "QF_ARCH": 90,
    "QF_HEAD_DIM": 64,
    "QF_PRECISION": 1,
    "QF_KV_KIND": 0,
    "QF_BATCH_INVARIANT": 0,
    "QF_ACTIVATION": 1,
}  # of any kernel


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run[-1])
def test_they_are_read_alone(shared_cache, run):
    words = [f"-I{folder}" for folder in emulator.INCLUDE_DIRS]
    words += [f"-D{name}={value}" for name, value in DEFINES.items()]
    if run[0] not in IN_EMULATOR:
        words += ["-include", str(emulator.prelude(shared_cache))]
    command = [emulator.compiler()[0], *emulator.FLAGS, "-fsyntax-only", *words, "-x", "c++", "-"]
    source = "".join(f'#include "{header}"\n' for header in run)
    done = subprocess.run(command, input=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_every_header_is_in_one_run_and_includes_what_comes_before_it():
    assert sorted(header for run in RUNS for header in run) == sorted(ALONE)
    for run in RUNS:
        for i, header in enumerate(run):
            assert set(run[:i]) < reached(header), run
        assert all(begins_with_includes(SOURCES[header].read_text()) for header in run[1:]), run


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
    assert begins_with_includes('#include <cstdint>\n#include "b.cuh"\nint x;\n')
    assert not begins_with_includes('#include "b.cuh"\nint x;\n#include "c.cuh"\n')


def test_only_the_emulator_includes_the_emulator():
    """The library's own headers call it where QF_EMULATOR is defined, and only those of single instructions do."""
    outside = {name: path.read_text() for name, path in SOURCES.items() if not name.startswith("emulate/")}
    assert not [name for name, text in outside.items() if re.search(r'#\s*include\s*["<]emulate/', text)]
    calls = [name for name, text in outside.items() if "emulate::" in text or "QF_EMULATOR" in text]
    assert calls and all(name.startswith("ptx/") for name in calls)
