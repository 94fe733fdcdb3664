"""The CUDA runtime that compiled kernels share, with a fake nvcc and a fake libcudart.

A library of that SONAME stays in its process, so tests that load one do it in another.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from qflash.errors import CacheError, CompileError, ToolchainError
from qflash.jit import load, runtime, toolchain
from qflash.jit.cache import Cache
from qflash.jit.compiler import LIBRARY, LINE_INFO, LOG, commands, compile_unit, flags, key_of
from qflash.jit.entry import FACTS
from qflash.jit.lock import locked

pytestmark = pytest.mark.process

NAME = "libcudart.so.13"
SOURCE = """\
extern "C" int runtime_answer();
#ifdef FAKE_STATIC_RUNTIME
extern "C" __attribute__((visibility("hidden"))) int runtime_answer() { return 1; }
#endif
extern "C" int answer() { return runtime_answer(); }
"""


def make_runtime(directory: Path, function: str = "int runtime_answer() { return 13; }") -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    command = ["g++", "-shared", "-fPIC", f"-Wl,-soname,{NAME}", "-x", "c++", "-o", str(directory / NAME), "-"]
    subprocess.run(command, input=f'extern "C" {function}', text=True, check=True)
    return directory / NAME


@pytest.fixture
def toolkit(fake) -> Path:
    """The directory of the fake nvcc's libraries, with a runtime that answers 13; the one it links in answers 1."""
    fake.unit.source.write_text(SOURCE)
    make_runtime(fake.directory / "libraries")
    return fake.directory / "libraries"


def run(fake, before: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    """In another process: what the unit's library answers."""
    code = f"{before}\n{fake.script('print(load(unit).answer())')}"
    words = [sys.executable, "-c", code]
    return subprocess.run(words, capture_output=True, text=True, timeout=60, env={**os.environ, **environment})


def answer(fake, before: str = "", **environment: str) -> int:
    done = run(fake, before, **environment)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


@pytest.fixture
def no_runtime(monkeypatch):
    """As if no framework had loaded a runtime; a PyTorch for CUDA that other tests imported has."""
    monkeypatch.setattr(runtime, "is_loaded", lambda name: False)


def the_copy() -> Path:
    (found,) = Cache().folder.glob(f"cudart13-runtime-*/{NAME}")
    return found


def test_kernels_name_a_runtime_that_the_cache_keeps(fake, toolkit):
    entry = compile_unit(fake.unit)
    assert the_copy().read_bytes() == (toolkit / NAME).read_bytes()
    assert json.loads((entry / FACTS).read_text())["runtime"] == {"name": NAME, "key": the_copy().parent.name}
    (toolkit / NAME).rename(fake.directory / "gone")  # the toolkit is not there when the kernel is loaded
    code = f"import ctypes; ctypes.CDLL({str(the_copy())!r}); print(ctypes.CDLL({str(entry / LIBRARY)!r}).answer())"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "13\n"


def test_the_copy_is_opened_before_the_kernel(fake, toolkit):
    assert answer(fake) == 13 and answer(fake) == 13
    assert fake.runs() == 1 and Cache().info().entries == 2


def test_the_runtime_of_a_framework_is_used(fake, toolkit):
    compile_unit(fake.unit)
    theirs = make_runtime(fake.directory / "framework", "int runtime_answer() { return 26; }")
    assert answer(fake, f"import ctypes; ctypes.CDLL({str(theirs)!r})") == 26
    assert fake.runs() == 1


def test_a_process_has_one_runtime(fake, toolkit):
    compile_unit(fake.unit)
    theirs = make_runtime(fake.directory / "framework")
    then = """
        load(unit)
        mapped = {line.split()[-1] for line in open("/proc/self/maps") if "libcudart" in line}
        print(*mapped)
    """
    code = f"import ctypes; ctypes.CDLL({str(theirs)!r})\n{fake.script(then)}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == f"{theirs}\n", done.stderr


def test_a_framework_whose_runtime_is_too_old_gets_kernels_with_their_own(fake, toolkit):
    theirs = make_runtime(fake.directory / "framework", "int older_answer() { return 12; }")
    load_theirs = f"import ctypes; ctypes.CDLL({str(theirs)!r})"
    assert answer(fake, load_theirs) == 1
    assert answer(fake, load_theirs) == 1 and fake.runs() == 2  # both kinds are kept
    assert answer(fake) == 13 and fake.runs() == 2


def test_a_toolkit_without_a_runtime_to_share_links_its_own(fake, toolkit):
    (toolkit / NAME).unlink()
    assert answer(fake) == 1
    assert Cache().info().entries == 1
    assert "runtime" not in json.loads((compile_unit(fake.unit) / FACTS).read_text())


def test_kernels_with_and_without_a_runtime_have_different_keys(fake, toolkit):
    tools = toolchain.find()
    shared = runtime.find(tools)
    make_runtime(toolkit, "int runtime_answer() { return 14; }")
    runtime.find.cache_clear()
    assert len({key_of(fake.unit, tools, each) for each in (None, shared, runtime.find(tools))}) == 3


def test_a_damaged_copy_is_made_again(fake, toolkit):
    compile_unit(fake.unit)
    os.truncate(the_copy(), 1000)
    done = run(fake)
    assert done.stdout == "13\n" and f"{the_copy().parent} is damaged ({NAME} has 1000 bytes" in done.stderr
    assert fake.runs() == 1 and the_copy().read_bytes() == (toolkit / NAME).read_bytes()


def test_a_copy_that_others_may_write_is_refused(fake, toolkit, no_runtime):
    compile_unit(fake.unit)
    the_copy().chmod(0o777)
    with pytest.raises(CacheError, match=f"{NAME} has mode 0777, so others may put code there"):
        load.load(fake.unit)


def test_a_copy_of_someone_else_is_refused(fake, toolkit, no_runtime, give_away):
    compile_unit(fake.unit)
    give_away(the_copy())
    with pytest.raises(CacheError, match="belongs to user"):
        load.load(fake.unit)


def test_clear_leaves_a_runtime_to_kernels_that_are_being_built(fake, toolkit):
    compile_unit(fake.unit)
    building = "zzz-sm_90a-" + "0" * 24
    with locked(Cache().folder, building):
        assert Cache().clear() == 1 and the_copy().is_file()
    assert Cache().clear() == 1 and Cache().info().entries == 0


# Without a compiler --------------------------------------------------------------------------------------------------


def test_a_filled_cache_serves_a_machine_without_a_compiler(fake, toolkit):
    compile_unit(fake.unit)
    (toolkit / NAME).unlink()
    assert answer(fake, QFLASH_NVCC=str(fake.directory / "none")) == 13
    assert fake.runs() == 1


def test_the_newest_compilers_library_serves(fake, monkeypatch):
    entries = {}
    for version in ("13.0.88", "12.9.1", "13.10.1", "13.2.5"):  # in no order, neither of names nor of making
        monkeypatch.setenv("FAKE_VERSION", version)
        toolchain.find.cache_clear()
        entries[version] = compile_unit(fake.unit)
    monkeypatch.setenv("QFLASH_NVCC", str(fake.directory / "none"))
    toolchain.find.cache_clear()
    assert Path(load.load(fake.unit)._name).parent == entries["13.10.1"]


def test_an_empty_cache_asks_for_a_compiler(fake, monkeypatch):
    monkeypatch.setenv("QFLASH_NVCC", str(fake.directory / "none"))
    toolchain.find.cache_clear()
    with pytest.raises(ToolchainError, match=r"pip install 'qflash\[cuda\]'"):
        load.load(fake.unit)


def test_a_damaged_library_asks_for_a_compiler(fake, monkeypatch):
    os.truncate(compile_unit(fake.unit) / LIBRARY, 1000)
    monkeypatch.setenv("QFLASH_NVCC", str(fake.directory / "none"))
    toolchain.find.cache_clear()
    with pytest.raises(ToolchainError, match=r"pip install 'qflash\[cuda\]'"):
        load.load(fake.unit)


# Words for nvcc ------------------------------------------------------------------------------------------------------


def tools_of(version: str) -> toolchain.Toolchain:
    return toolchain.Toolchain("nvcc", "test", version)


def test_line_numbers_come_when_asked_for_and_have_their_own_entries(fake, monkeypatch):
    tools, before = tools_of("13.0.88"), key_of(fake.unit, tools_of("13.0.88"))
    assert "-lineinfo" not in flags(tools)
    monkeypatch.setenv(LINE_INFO, "1")
    assert "-lineinfo" in flags(tools) and key_of(fake.unit, tools) != before


@pytest.mark.parametrize("version, compression", [("13.0.88", "-compress-mode=size"), ("12.8.93", "-compress-all")])
def test_code_is_compressed_as_every_driver_of_the_release_can_read_it(version, compression):
    (word,) = [word for word in flags(tools_of(version)) if "compress" in word]
    assert word.endswith(compression)


def test_only_the_assembler_splits_its_work(fake):
    """What nvcc's own option makes of a kernel depends on the number of threads."""
    for version, expected in (("13.0.88", ["-Xptxas=-split-compile=3"]), ("12.4.131", [])):
        (command,) = commands(fake.unit, tools_of(version), (), Path("out.so"), Path("objects"), 3)
        assert [word for word in command if "split-compile" in word] == expected


# Parts ---------------------------------------------------------------------------------------------------------------

IN_PARTS = """\
int half();
#if QF_PART == 0
extern "C" int answer() { return 2 * half(); }
#elif QF_PART == 1
int half() { return 21; }
#endif
"""


@pytest.mark.parametrize("jobs", [None, 1])
def test_parts_are_compiled_one_by_one_and_linked(fake, jobs):
    fake.unit.source.write_text(IN_PARTS)
    unit = replace(fake.unit, parts=2)
    entry = compile_unit(unit, jobs=jobs)
    assert fake.runs() == 3  # two parts, and the linker
    assert (entry / LOG).read_text().count("registers") == 2
    assert sorted(path.name for path in entry.iterdir()) == [LOG, FACTS, LIBRARY]
    assert load.load(unit).answer() == 42 and fake.runs() == 3
    assert key_of(unit, toolchain.find()) != key_of(fake.unit, toolchain.find())


def test_a_part_that_fails_is_told(fake):
    fake.unit.source.write_text("BROKEN")
    with pytest.raises(CompileError, match="error: broken source"):
        compile_unit(replace(fake.unit, parts=2))
    assert Cache().info().entries == 0


# What people are told ------------------------------------------------------------------------------------------------


def test_doctor_tells_whose_runtime_kernels_call(fake, toolkit, invoke):
    said = " ".join(invoke("doctor").output.split())
    assert "CUDA runtime one for all kernels, that of PyTorch or JAX where they have it loaded" in said
    (toolkit / NAME).unlink()
    runtime.find.cache_clear()
    said = " ".join(invoke("doctor").output.split())
    assert f"CUDA runtime linked into every kernel, a megabyte each: this nvcc has no {NAME}" in said
