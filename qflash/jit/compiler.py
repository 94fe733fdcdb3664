"""One compilation unit to one shared library: the key it is cached under, the command, the words while it runs."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from qflash.errors import CompileError
from qflash.jit import toolchain
from qflash.jit.cache import Build, Cache
from qflash.jit.entry import FACTS

LIBRARY = "kernel.so"
LOG = "compiler.log"  # the compiler's own words, with ptxas's register and spill counts

_FLAGS = (
    "-O3", "-std=c++17", "-shared", "-cudart=static", "-lineinfo",
    "-Xcompiler=-fPIC,-fvisibility=hidden", "-Xptxas=-v",
)  # fmt: skip
_INCLUDE = re.compile(rb'^\s*#\s*include\s*"([^"]+)"', re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Unit:
    """What to compile. `target` is nvcc's name for the architecture: "80", "90a"."""

    name: str
    source: Path
    include_dirs: tuple[Path, ...]
    defines: tuple[tuple[str, str], ...]
    target: str
    label: str  # for people: "fa (head_dim 128, float32)"
    ptx: bool = False  # machine code is left to the driver

    @property
    def code(self) -> str:
        """nvcc's name for what comes out: sm_80 is machine code, compute_80 PTX."""
        return f"{'compute' if self.ptx else 'sm'}_{self.target}"


def compile_unit(unit: Unit, cache: Cache | None = None) -> Path:
    """The cache entry of `unit`, compiled if need be."""
    cache = cache or Cache()
    return cache.get(*recipe(unit, cache))


def recipe(unit: Unit, cache: Cache) -> tuple[str, Build]:
    """What `cache` keeps `unit` under, and the function that compiles it."""
    tools = toolchain.find()
    return key_of(unit, tools), lambda directory: _build(unit, tools, directory, cache)


def key_of(unit: Unit, tools: toolchain.Toolchain) -> str:
    """sha256 over every byte the result depends on: sources, flags, definitions, architecture, compiler."""
    digest = hashlib.sha256()
    digest.update(sources_digest(unit.source, unit.include_dirs))
    digest.update(repr((unit.name, unit.defines, unit.code, tools.version, _FLAGS)).encode())
    return f"{unit.name}-{unit.code}-{digest.hexdigest()[:24]}"


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


def command(unit: Unit, tools: toolchain.Toolchain, output: Path) -> list[str]:
    """The compiler's command line."""
    return [
        tools.nvcc,
        *_FLAGS,
        f"-gencode=arch=compute_{unit.target},code={unit.code}",
        *(f"-I{directory}" for directory in unit.include_dirs),
        *(f"-D{name}={value}" for name, value in unit.defines),
        *(f"-L{directory}" for directory in tools.library_dirs),
        "-o",
        str(output),
        str(unit.source),
    ]


def _build(unit: Unit, tools: toolchain.Toolchain, directory: Path, cache: Cache) -> dict[str, Any]:
    """Compile into `directory`; returns what facts.json is to say of it."""
    words = command(unit, tools, directory / LIBRARY)
    say(f"qflash: compiling {unit.label} for {unit.code} with nvcc {tools.release}, {_expected(unit, cache)}")
    start = time.monotonic()
    done = subprocess.run(words, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    seconds = time.monotonic() - start
    output = done.stdout + done.stderr
    if done.returncode != 0:
        raise CompileError(f"nvcc failed ({done.returncode}) on {unit.label}\n{' '.join(words)}\n{output}")
    (directory / LOG).write_text(output)
    say(f"qflash: compiled {unit.label} in {seconds:.1f} s")
    return {"label": unit.label, "seconds": round(seconds, 1)}


def _expected(unit: Unit, cache: Cache) -> str:
    """How long this usually takes, from what the cache remembers of the same kernel."""
    known = []
    for facts in cache.folder.glob(f"{unit.name}-*/{FACTS}"):
        try:
            known.append(float(json.loads(facts.read_text())["seconds"]))
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return f"usually about {sorted(known)[len(known) // 2]:.0f} s here" if known else "usually 5 to 30 s"


def say(text: str) -> None:
    """Tell the user what takes a while, unless QFLASH_QUIET=1."""
    if os.environ.get("QFLASH_QUIET") != "1":
        print(f"{text}\n", end="", file=sys.stderr, flush=True)  # in one piece: compilers run side by side
