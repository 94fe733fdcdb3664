"""Faults provoked in emulated kernels: one synchronization removed or changed, to check that it is reported.

A patched copy of csrc contains all faults of a kernel, each selected by its number, so one library serves them all. A
fault may make a kernel do anything, so it runs in a separate process.
"""

from __future__ import annotations

import ctypes
import shutil
import signal
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from qflash.backends import cuda
from qflash.dispatch import VARIANTS
from qflash.errors import KernelError
from qflash.jit.compiler import LIBRARY, Unit
from qflash.testing import compare, emulator, gemm_case
from qflash.testing.case import Case
from qflash.testing.emulated_attention import run_case
from qflash.testing.emulated_backward import NAMES, run_gradients
from qflash.testing.emulator import Library
from qflash.testing.gemm_case import GemmCase
from qflash.testing.oracle import integers_of

NONE = 0  # the number for no fault
SECONDS = 60  # time limit of a fault
_PATCHED = ("attn", "common", "gemm", "hopper", "include", "kernels", "ptx", "quant", "reduce", "smem")
_SWITCH = """#pragma once
extern "C" __attribute__((visibility("default"))) inline int qf_provoked = 0;  // which fault; 0: none
"""


@dataclass(frozen=True)
class Fault:
    """In `file` of csrc, `text` is replaced by `instead`, by default nothing.

    text: a statement, or an expression without a value. within: its context, if the text alone occurs elsewhere, too.
    The context must be in the file exactly once, so a fault whose code has moved is an error.
    """

    file: str
    text: str
    instead: str = ""
    within: str = ""

    def guarded(self, number: int, rest: str) -> str:
        """`rest`, unless this fault is provoked."""
        if self.text.endswith(";"):
            return f"if (qf_provoked == {number}) {{ {self.instead} }} else {rest}"
        return f"(qf_provoked == {number} ? (void)({self.instead or 0}) : (void)({rest}))"


@dataclass(frozen=True)
class Outcome:
    """How a fault was detected under the first seed that revealed it: its `kind`, and a description."""

    kind: str  # "complaint" of the emulator, "contract", "bits" that differ between seeds, "crash"; "": not detected
    text: str = ""
    seed: int = -1


def patched_unit(unit: Unit, faults: Sequence[Fault], folder: Path) -> Unit:
    """The unit with all of `faults`, numbered from 1, in a copy of csrc under `folder`."""
    csrc, copy = emulator.CSRC, folder / "csrc"
    for room in _PATCHED:
        shutil.copytree(csrc / room, copy / room, dirs_exist_ok=True)
    (copy / "provoked.h").write_text(_SWITCH)
    edits: dict[str, dict[int, tuple[str, str]]] = {}  # by file: position, old text, new text
    for number, fault in enumerate(faults, start=1):
        within = fault.within or fault.text
        source = (csrc / fault.file).read_text()
        if source.count(within) != 1 or within.count(fault.text) != 1:
            count = source.count(within)
            raise ValueError(
                f"{within!r} occurs {count} times in {fault.file}; allowed: once, and {fault.text!r} once in it"
            )
        of_file = edits.setdefault(fault.file, {})
        at = source.index(within) + within.index(fault.text)
        of_file[at] = (fault.text, fault.guarded(number, of_file.get(at, (fault.text, fault.text))[1]))
    for file, of_file in edits.items():
        source = (csrc / file).read_text()
        for at, (text, guarded) in sorted(of_file.items(), reverse=True):  # from the end: earlier positions stay valid
            source = source[:at] + guarded + source[at + len(text) :]
        (copy / file).write_text('#include "provoked.h"\n' + source)
    moved = tuple(copy / path.relative_to(csrc) for path in unit.include_dirs)
    return replace(unit, source=copy / unit.source.relative_to(csrc), include_dirs=moved)


def outcome(path: Path, name: str, variant: str, case: Case | GemmCase, number: int, seeds: Sequence[int]) -> Outcome:
    """Run a case with a fault under each seed in sequence until it is detected."""
    with TemporaryDirectory() as folder:  # a fresh copy, without the state of earlier faults
        library = Library(Path(shutil.copy(path, folder)), name)
    ctypes.c_int.in_dll(library.handle, "qf_provoked").value = number
    signal.alarm(SECONDS)  # ends the process
    try:
        return _first_shown(library, variant, case, seeds)
    finally:
        signal.alarm(0)


def _first_shown(library: Library, variant: str, case: Case | GemmCase, seeds: Sequence[int]) -> Outcome:
    first: Any = None
    for seed in seeds:
        kind = "contract"
        try:
            if isinstance(case, GemmCase):
                arrays = gemm_case.run(library, case, seed)
                case.check(arrays)
                kind = "bits"
                gemm_case.check_same_bits(case, first or arrays, arrays)
                first = first or arrays
                continue
            if VARIANTS[variant].kernel.op == "attention_backward":
                found, names = run_gradients(lambda *_: library, case, variant, seed=seed), NAMES
                compare.check_gradients(case, *found)
            else:
                found, names = run_case(lambda *_: library, case, variant, seed=seed), ("out", "lse")
                compare.check_contract(case, *found, VARIANTS[variant].contract, integers=integers_of(variant))
            kind = "bits"
            compare.check_same_bits(case, first or found, found, names=names)
        except KernelError as error:
            return Outcome("complaint", str(error), seed)
        except compare.ContractError as error:
            return Outcome(kind, str(error), seed)
        first = first or found
    return Outcome("")


class Faults:
    """The faults of one variant of a kernel, compiled once."""

    def __init__(self, variant: str, dtype: str, head_dim: int, faults: Mapping[str, Fault], folder: Path, cache):
        self.variant = variant
        self.names = list(faults)
        unit = cuda.unit_of(VARIANTS[variant], dtype, head_dim, emulator.ARCH)
        unit = patched_unit(emulator.with_all_scores(unit), list(faults.values()), folder)
        self.name = unit.name
        self.path = emulator.compiled(unit, cache) / LIBRARY
        self.process: ProcessPoolExecutor | None = None

    def provoke(self, name: str, case: Case | GemmCase, seeds: Sequence[int]) -> Outcome:
        """How the fault with this name is detected in a case; "" provokes none."""
        self.process = self.process or ProcessPoolExecutor(1, mp_context=get_context("spawn"))
        number = self.names.index(name) + 1 if name else NONE
        try:
            asked = self.process.submit(outcome, self.path, self.name, self.variant, case, number, list(seeds))
            return asked.result()
        except BrokenProcessPool:
            self.process = None
            return Outcome("crash", f"the process ended, or took more than {SECONDS} s")

    def close(self) -> None:
        """End the process in which the faults ran."""
        if self.process:
            self.process.shutdown()
