"""CUDA kernels on the CPU: their launch.cu is compiled by g++ with csrc/emulate in place of CUDA, loaded and called.

A library is called like one for a GPU: through `_native.Call`, with a workspace of the caller. It has two more
functions, one that randomizes the schedule and one that returns what went wrong (csrc/emulate/control.h).
"""

from __future__ import annotations

import ctypes
import hashlib
import shutil
import struct
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from qflash import _native, dispatch
from qflash.backends import Entry, cuda
from qflash.backends.arch import asked
from qflash.call.op import Plan
from qflash.call.prepare import Prepared, bind
from qflash.dispatch import VARIANTS, Variant
from qflash.errors import CompileError, KernelError, ToolchainError
from qflash.jit.cache import Cache
from qflash.jit.compiler import LIBRARY, Unit, say, sources_digest
from qflash.jit.load import address

ARCH = 90  # Hopper, unless a test requests tiles of another
MULTIPROCESSORS = 3  # few, so that persistent blocks have several work tiles each, and their rings wrap around
MOST_MULTIPROCESSORS = 64  # csrc/emulate/control.h

CSRC = Path(cuda.__file__).resolve().parent.parent / "csrc"
_EMULATE = CSRC / "emulate"
INCLUDE_DIRS = (_EMULATE / "runtime", CSRC, CSRC / "include")  # CUDA's headers are found in the first
# -Og: kernels compile in two thirds of the time of -O1, and a library rarely runs longer than it was compiled. The
# emulator itself, where most of a run is spent, is compiled once, with full optimization. Nothing throws, so nothing
# unwinds. Hidden: libraries share only the process.
FLAGS = (
    "-std=c++17", "-Og", "-fno-exceptions", "-fno-asynchronous-unwind-tables", "-fPIC", "-fvisibility=hidden", "-w",
)  # fmt: skip
_one_at_a_time = threading.Lock()  # schedule and fibers are per library, but there is one of each


@lru_cache(maxsize=1)
def compiler() -> tuple[str, str]:
    """(g++, its version), or ToolchainError."""
    found = shutil.which("g++")
    if found is None:
        raise ToolchainError("the emulator compiles kernels with g++, which is not on the PATH: install it")
    told = subprocess.run([found, "-dumpfullversion", "-dumpversion"], capture_output=True, text=True)
    return found, told.stdout.strip()


def why_not() -> str:
    """Why nothing can be emulated here, or ""."""
    try:
        compiler()
    except ToolchainError as error:
        return str(error)
    return ""


class Library:
    """A kernel's library in the emulator."""

    def __init__(self, path: Path, name: str):
        self.path = path
        self.name = name
        self.handle = _open(path)
        self.failed = False  # whether a launch failed, which may have left counters in any state

    @property
    def entry(self) -> Entry:
        """Addresses of the kernel's C functions, in a fresh copy of the library after a failed launch."""
        if self.failed:
            with TemporaryDirectory() as folder:  # another file: an open one would not be loaded again
                self.handle = _open(Path(shutil.copy(self.path, folder)))
            self.failed = False
        symbols = (f"qf_{self.name}", "qf_status_text", f"qf_{self.name}_workspace")
        return Entry(*(address(self.handle, symbol) for symbol in symbols))

    def prepare(self, plan: Plan, kernel: Variant) -> Prepared:
        """What `qflash.call.prepare.prepare` returns for a GPU."""
        return bind(plan, kernel.kernel, self.entry)

    def launch(
        self,
        prepared: Prepared,
        arrays: Sequence[np.ndarray | None],
        seed: int = 0,
        multiprocessors: int = MULTIPROCESSORS,
        workspace: np.ndarray | None = None,
    ) -> None:
        """Call the kernel on operands and results in the order of the plan; None is a null pointer."""
        addresses = [0 if x is None else x.ctypes.data for x in arrays]
        self._run(prepared.call, addresses, prepared.workspace_bytes, seed, multiprocessors, workspace)

    def launch_struct(
        self, kind: str, fields: Mapping[str, Any], seed: int = 0, multiprocessors: int = MULTIPROCESSORS
    ) -> None:
        """Call the kernel with a C struct whose fields are all given, arrays for pointers. None is 0."""
        entry = self.entry
        call = _native.Call(kind, packed(kind, fields), [], entry.address, entry.status_text, entry.workspace)
        self._run(call, [], call.workspace_bytes, seed, multiprocessors, None)

    def schedule(self, seed: int = 0, multiprocessors: int = MULTIPROCESSORS) -> None:
        """Run subsequent launches in an order determined by `seed`, on this many SMs."""
        if self.handle.qf_emulate_schedule(seed, multiprocessors):
            raise ValueError(f"multiprocessors is {multiprocessors}; allowed: 1 to {MOST_MULTIPROCESSORS}")

    @property
    def complaint(self) -> str:
        """The emulator's report of what was wrong in the last launch: block, threads, barrier. "" if nothing was."""
        return self.handle.qf_emulate_complaint().decode()

    def _run(self, call, addresses, workspace_bytes, seed, multiprocessors, workspace) -> None:
        if workspace is None:
            workspace = poisoned(workspace_bytes)
        with _one_at_a_time:
            self.schedule(seed, multiprocessors)
            try:
                call(*addresses, workspace.ctypes.data if workspace_bytes else 0, 0, 0)
            except KernelError:
                if not self.complaint:
                    raise
                self.failed = True
                where = f"seed {seed}, {multiprocessors} multiprocessors"
                raise KernelError(f"{self.name} on the emulator ({where}): {self.complaint}") from None


def _open(path: Path) -> ctypes.CDLL:
    handle = ctypes.CDLL(str(path))
    handle.qf_emulate_complaint.restype = ctypes.c_char_p
    handle.qf_emulate_spans.restype = ctypes.c_char_p
    return handle


def poisoned(size: int) -> np.ndarray:
    """`size` bytes, aligned as by GPU allocators, that read as NaN in every floating-point format."""
    memory = np.full(size + 256, 0xFF, np.uint8)
    first = -memory.ctypes.data % 256
    return memory[first : first + size]


def packed(kind: str, fields: Mapping[str, Any]) -> bytes:
    """A C struct of csrc/include; arrays become their addresses, and None 0."""
    size, layout = _native.op_layouts[kind]
    params = bytearray(size)
    for name, value in {"struct_bytes": size, **fields}.items():
        offset, code = layout[name]
        struct.pack_into(code, params, offset, value.ctypes.data if isinstance(value, np.ndarray) else value or 0)
    return bytes(params)


def kernel_library(kernel: str, dtype: str, head_dim: int = 0, arch: int = ARCH, cache: Cache | None = None) -> Library:
    """The library that serves a variant of a kernel, compiled if needed."""
    return load(with_all_scores(cuda.unit_of(VARIANTS[kernel], dtype, head_dim, arch)), cache)


def with_all_scores(unit: Unit) -> Unit:
    """The unit as one library for all kinds of scores, where a GPU has a library for each."""
    return replace(unit, defines=tuple(define for define in unit.defines if define[0] != "QF_PLAIN_SCORES"))


def arch() -> int:
    """The architecture that kernels are selected and compiled for: QFLASH_CUDA_ARCH, or Hopper."""
    return asked() or ARCH


def launch(plan: Plan, arrays: Sequence[np.ndarray | None], seed: int = 0, of_arch: int | None = None) -> None:
    """Execute a plan in the emulator: select the kernel as for a GPU, compile it if needed, call it.

    arrays: operands and results in the order of the plan, as the kernel takes them. of_arch: of the GPU; None: arch().
    """
    spec = plan.spec(arch() if of_arch is None else of_arch)
    kernel = dispatch.choose(spec, plan.kernel)
    if plan.nothing_to_do:
        for result in arrays[len(plan.operands) :]:
            result[...] = 0
        return
    library = load(cuda.unit(kernel, spec))
    library.launch(bind(plan, kernel, library.entry), arrays, seed)


_loaded: dict[str, Library] = {}


def load(unit: Unit, cache: Cache | None = None) -> Library:
    """The unit's library in the emulator, compiled if needed."""
    key = _key_of(unit)
    if key not in _loaded:
        _loaded.setdefault(key, Library(compiled(unit, cache) / LIBRARY, unit.name))
    return _loaded[key]


def compiled(unit: Unit, cache: Cache | None = None) -> Path:
    """The folder that contains the unit's library."""
    cache = cache or Cache()
    return cache.get(_key_of(unit), lambda directory: _compile(unit, directory, cache))


def _key_of(unit: Unit) -> str:
    return _key(unit.name, sources_digest(unit.source, unit.include_dirs), repr(unit.defines).encode())


@lru_cache(maxsize=1)
def _emulator_digest() -> bytes:
    """A digest of every file of the emulator, and of its compiler."""
    digest = hashlib.sha256(repr((FLAGS, compiler()[1])).encode())
    for path in sorted((*_EMULATE.rglob("*.h"), *_EMULATE.rglob("*.cc"))):
        digest.update(path.relative_to(_EMULATE).as_posix().encode() + path.read_bytes())
    return digest.digest()


def _key(name: str, *parts: bytes) -> str:
    return f"{name}-emulated-{hashlib.sha256(b''.join((_emulator_digest(), *parts))).hexdigest()[:24]}"


def _compile(unit: Unit, directory: Path, cache: Cache) -> dict[str, Any]:
    gxx, version = compiler()
    header = prelude(cache)
    say(f"qflash: compiling {unit.label} for the emulator with g++ {version}, usually 2 to 10 s")
    start = time.monotonic()
    folders = (INCLUDE_DIRS[0], *unit.include_dirs, *INCLUDE_DIRS)  # the unit's own csrc, if it has one
    words = [f"-I{folder}" for folder in dict.fromkeys(folders)]
    words += [f"-D{name}={value}" for name, value in unit.defines]
    _run_compiler([gxx, *FLAGS, "-shared", *words, "-include", str(header), "-x", "c++", str(unit.source),
                   "-x", "none", str(header.with_name(_MACHINE)), "-o", str(directory / LIBRARY)],
                  unit.label)  # fmt: skip
    return {"label": f"{unit.label}, emulated", "seconds": round(time.monotonic() - start, 1)}


def prelude(cache: Cache) -> Path:
    """The precompiled prelude, read before any source, next to the emulator itself. It needs INCLUDE_DIRS and FLAGS."""
    return cache.get(_key("prelude"), _precompile) / "prelude.h"


_MACHINE = "emulator.o"  # all sources of the emulator, linked into every library


def _precompile(directory: Path) -> None:
    """Precompile the prelude for g++: otherwise the standard library's headers would dominate compile times."""
    header, source = directory / "prelude.h", directory / "emulator.cc"
    header.write_text('#include "emulate/simt.h"\n')
    parts = (path.relative_to(CSRC).as_posix() for path in sorted(_EMULATE.rglob("*.cc")))
    source.write_text("".join(f'#include "{name}"\n' for name in ("emulate/simt.h", *parts)))
    words = [compiler()[0], *FLAGS, *(f"-I{folder}" for folder in INCLUDE_DIRS)]
    _run_compiler([*words, "-x", "c++-header", str(header), "-o", f"{header}.gch"], "the emulator's prelude")
    _run_compiler([*words, "-O2", "-c", str(source), "-o", str(directory / _MACHINE)], "the emulator")


def _run_compiler(words: list[str], what: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode != 0:
        raise CompileError(f"g++ failed ({done.returncode}) on {what}\n{' '.join(words)}\n{done.stdout}{done.stderr}")
