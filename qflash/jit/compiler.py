"""Compiles one unit to one shared library: its cache key, the command, progress messages."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from itertools import count, repeat
from pathlib import Path
from typing import Any

from qflash.errors import CompileError
from qflash.jit import runtime, toolchain
from qflash.jit.cache import Build, Cache
from qflash.jit.entry import FACTS

LIBRARY = "kernel.so"
LOG = "compiler.log"  # the compiler's output, with ptxas's register and spill counts
# Keys of an entry's facts: the runtime that its library refers to, if any; what was compiled, with any compiler
RUNTIME, UNIT = "runtime", "unit"

LINE_INFO = "QFLASH_LINEINFO"  # "1": line information in machine code, for profilers; it triples a library's size

_FLAGS = ("-O3", "-std=c++17", "-Xcompiler=-fPIC,-fvisibility=hidden", "-Xptxas=-v")
_INCLUDE = re.compile(rb'^\s*#\s*include\s*"([^"]+)"', re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Unit:
    """What to compile. `target` is nvcc's name for the architecture: "80", "90a"."""

    name: str
    source: Path
    include_dirs: tuple[Path, ...]
    defines: tuple[tuple[str, str], ...]
    target: str
    label: str  # for display: "fa (head_dim 128, float32)"
    ptx: bool = False  # the driver generates the machine code
    # Number of objects that the source is compiled into in parallel, with -DQF_PART=0, 1, ..; 1: one, without it.
    parts: int = 1

    @property
    def code(self) -> str:
        """nvcc's name for the output: sm_80 is machine code, compute_80 PTX."""
        return f"{'compute' if self.ptx else 'sm'}_{self.target}"


Which = Callable[[], str]  # text before a unit's name when it is compiled: "2 of 3, "


def compile_unit(unit: Unit, cache: Cache | None = None, jobs: int | None = None, which: Which = lambda: "") -> Path:
    """The cache entry of `unit`, compiled if necessary. `jobs`: threads that may be used; None: one per core."""
    cache = cache or Cache()
    tools = toolchain.find()
    return cache.get(*recipe(unit, cache, tools, runtime.find(tools), jobs, which))


def is_compiled(unit: Unit, cache: Cache) -> bool:
    """Whether there is an entry of `unit`. Whether it is sound is checked when it is opened."""
    tools = toolchain.find()
    return (cache.folder / key_of(unit, tools, runtime.find(tools))).is_dir()


def recipe(
    unit: Unit,
    cache: Cache,
    tools: toolchain.Toolchain,
    shared: runtime.Runtime | None,
    jobs: int | None = None,
    which: Which = lambda: "",
) -> tuple[str, Build]:
    """The cache key of `unit`, and the function that compiles it. `shared`: None links a static runtime."""

    def build(directory: Path) -> dict[str, Any]:
        if shared is None:
            return _build(unit, tools, (), directory, cache, jobs, which)
        with cache.opened(shared.key, shared.build) as beside:
            linked = (f"-L{beside.path}", f"-l:{shared.name}")
            facts = _build(unit, tools, linked, directory, cache, jobs, which)
        return {**facts, RUNTIME: {"name": shared.name, "key": shared.key}}

    return key_of(unit, tools, shared), build


def key_of(unit: Unit, tools: toolchain.Toolchain, shared: runtime.Runtime | None = None) -> str:
    """sha256 over every byte the result depends on: sources, flags, definitions, architecture, compiler, runtime."""
    made_by = (tools.version, flags(tools), shared.key if shared else None)
    digest = hashlib.sha256(f"{digest_of(unit)} {made_by!r}".encode())
    return f"{unit.name}-{unit.code}-{digest.hexdigest()[:24]}"


def digest_of(unit: Unit) -> str:
    """sha256 over what is compiled, independent of the compiler."""
    digest = hashlib.sha256(sources_digest(unit.source, unit.include_dirs))
    digest.update(repr((unit.name, unit.defines, unit.code, unit.parts)).encode())
    return digest.hexdigest()


def flags(tools: toolchain.Toolchain) -> tuple[str, ...]:
    """The flags for every object."""
    # Drivers before 550 cannot read the smallest form; a GPU that runs CUDA 13 has a later driver.
    compress = "-compress-mode=size" if tools.at_least(13, 0) else "-Xfatbin=-compress-all"
    return (*_FLAGS, compress, *(["-lineinfo"] if os.environ.get(LINE_INFO) == "1" else []))


@lru_cache(maxsize=256)
def sources_digest(source: Path, include_dirs: tuple[Path, ...]) -> bytes:
    """Digest of a source and every file it includes by a quoted name that is found in `include_dirs`."""
    digest = hashlib.sha256()
    seen: set[Path] = set()
    waiting = [source]
    while waiting:
        path = waiting.pop()
        if path in seen:
            continue
        seen.add(path)
        text = path.read_bytes()
        digest.update(hashlib.sha256(text).digest())
        for name in _INCLUDE.findall(text):
            places = (directory / name.decode() for directory in (path.parent, *include_dirs))
            waiting += [place.resolve() for place in places if place.is_file()][:1]
    return digest.digest()


def commands(
    unit: Unit,
    tools: toolchain.Toolchain,
    linked: tuple[str, ...],
    output: Path,
    objects: Path,
    jobs: int | None = None,
) -> list[list[str]]:
    """nvcc's command lines: one for each part of the unit, then one that links them. `linked`: flags for the shared
    runtime; (): a static one is linked in."""
    compiler = [
        tools.nvcc,
        *flags(tools),
        f"-gencode=arch=compute_{unit.target},code={unit.code}",
        *(f"-I{directory}" for directory in unit.include_dirs),
        *(f"-D{name}={value}" for name, value in unit.defines),
    ]
    # Compiles kernels of one object in parallel, with the same machine code as in sequence. nvcc's own option of that
    # name also splits the work of the optimiser, and then the code differs.
    if tools.at_least(12, 8):
        compiler.append(f"-Xptxas=-split-compile={jobs or 0}")
    libraries = ["-cudart=none", *linked] if linked else ["-cudart=static"]
    linker = [*(f"-L{directory}" for directory in tools.library_dirs), *libraries, "-shared"]
    if unit.parts == 1:
        return [[*compiler, *linker, "-o", str(output), str(unit.source)]]
    made = [str(objects / f"{part}.o") for part in range(unit.parts)]
    each = [[*compiler, f"-DQF_PART={part}", "-c", "-o", name, str(unit.source)] for part, name in enumerate(made)]
    return [*each, [tools.nvcc, *linker, "-o", str(output), *made]]


def _build(
    unit: Unit,
    tools: toolchain.Toolchain,
    linked: tuple[str, ...],
    directory: Path,
    cache: Cache,
    jobs: int | None,
    which: Which,
) -> dict[str, Any]:
    """Compile into `directory`; returns the facts for facts.json."""
    expected = _expected(unit, cache)
    say(f"qflash: compiling {which()}{unit.label} for {unit.code} with nvcc {tools.release}, {expected}")
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="qflash-objects-") as objects:
        *parts, last = commands(unit, tools, linked, directory / LIBRARY, Path(objects), jobs)
        with ThreadPoolExecutor(max_workers=jobs or os.cpu_count() or 1) as pool:
            said = list(pool.map(_run, parts, repeat(unit), repeat(_Parts(unit))))
        said.append(_run(last, unit))
    seconds = time.monotonic() - start
    (directory / LOG).write_text("".join(said))
    say(f"qflash: compiled {unit.label} in {seconds:.1f} s")
    return {"label": unit.label, "seconds": round(seconds, 1), "nvcc": tools.version, UNIT: digest_of(unit)}


class _Parts:
    """Reports how many parts of a unit are compiled, except for the last."""

    def __init__(self, unit: Unit):
        self._unit, self._done = unit, count(1)

    def __call__(self) -> None:
        done = next(self._done)
        if done < self._unit.parts:
            say(f"qflash: compiled {done} of {self._unit.parts} parts of {self._unit.label}")


def _run(words: list[str], unit: Unit, finished: Callable[[], None] = lambda: None) -> str:
    done = subprocess.run(words, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode != 0:
        said = done.stdout + done.stderr
        raise CompileError(f"nvcc failed ({done.returncode}) on {unit.label}\n{' '.join(words)}\n{said}")
    finished()
    return done.stdout + done.stderr


def _expected(unit: Unit, cache: Cache) -> str:
    """How long this usually takes, from the cache's entries of the same kernel."""
    known = []
    for facts in cache.folder.glob(f"{unit.name}-*/{FACTS}"):
        try:
            known.append(float(json.loads(facts.read_text())["seconds"]))
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return f"usually about {sorted(known)[len(known) // 2]:.0f} s here" if known else "usually 5 to 30 s"


def say(text: str) -> None:
    """Print a message for the user about something that takes a while, unless QFLASH_QUIET=1."""
    if os.environ.get("QFLASH_QUIET") != "1":
        print(f"{text}\n", end="", file=sys.stderr, flush=True)  # in one write: compilers run in parallel
